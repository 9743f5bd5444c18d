"""A driver's presence on its node: both sockets served, watched and removed in the right order.

The kubelet's rules (registration and rolling update, kubernetes/pkg/kubelet/pluginmanager): the DRA
service answers before the registration socket appears, and the registration socket goes first.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from dra_driver.base import inotify
from dra_driver.base.errors import DriverError, NodeError
from dra_driver.base.frozen import frozen
from dra_driver.base.inotify import DirectoryChanges
from dra_driver.base.threads import StandingThreads
from dra_driver.kubeletplugin.serve import probes
from dra_driver.kubeletplugin.serve.health import (
    HEALTH_SERVICE_VERSIONS,
    MAX_STREAMS,
    HealthService,
)
from dra_driver.kubeletplugin.serve.plugin_server import PluginServer
from dra_driver.kubeletplugin.serve.services import (
    DRA_SERVICE_VERSIONS,
    MAX_CALLS,
    DraService,
    RegistrationService,
)
from dra_driver.kubeletplugin.serve.sockets import SocketPaths

log = logging.getLogger(__name__)


@frozen
class PluginTimeouts:
    """How long a plugin waits for what."""

    grace_seconds: float = 4.0  # for calls in flight: we have to be gone 5 s after SIGTERM
    watch_seconds: float = 5.0  # between two looks at the sockets, at least
    idle_seconds: float = 30.0  # at most, where the kernel tells of changes and there were none
    patience_seconds: float = 6.0  # for a process before us that is in its grace
    check_seconds: float = 30.0  # for which an answer over our own sockets counts


class KubeletPlugin:
    """Serves *service* at *paths* to the kubelet.

    *on_fatal* is called once when serving is over for a reason that a new process may mend;
    *on_round* after every look at the sockets, for what else needs one (it must not block). It
    answers whether another look is needed although nothing changes.
    """

    def __init__(
        self,
        paths: SocketPaths,
        service: DraService,
        on_fatal: Callable[[DriverError], None],
        on_round: Callable[[], bool] = lambda: False,
        times: PluginTimeouts = PluginTimeouts(),
    ) -> None:
        self._times = times
        self._paths = paths
        self._on_fatal = on_fatal
        self._on_round = on_round
        self._health: HealthService | None = None
        versions = tuple(version.name for version in DRA_SERVICE_VERSIONS)
        self._registration = RegistrationService(paths.driver, str(paths.service), versions)
        self._handlers = (*service.handlers(), *self._registration.handlers())
        self._threads = StandingThreads("call", MAX_CALLS + MAX_STREAMS)
        self._sockets = {paths.service: 0o750, paths.registration: 0o755}
        self._servers: list[PluginServer] = []
        self._answered_at = float("-inf")  # when we began to ask ourselves, and all was well
        self._changed_at = float("-inf")  # when we served one last; inf: one is lost
        self._stop = threading.Event()
        self._changes = DirectoryChanges(inotify.NAMES)
        self._watch = threading.Thread(target=self._run, name="kubelet", daemon=True)

    @property
    def registered(self) -> bool:
        """Whether the kubelet accepted us the last time it said something."""
        return self._registration.registered

    def serve_health(self, health: HealthService) -> None:
        """Have *health* tell the kubelet how the devices are. To be called before ``start``."""
        self._health = health
        self._handlers += health.handlers()
        self._registration.add_versions(version.name for version in HEALTH_SERVICE_VERSIONS)

    def start(self) -> None:
        """Serve. When this returns, the kubelet can find us. DriverError: what is in the way."""
        self._serve(self._sockets)
        self._watch.start()

    def stop(self) -> None:
        """Be gone for the kubelet: registration socket, calls in flight (bounded), DRA socket."""
        if self._watch.is_alive():
            self._stop.set()
            self._changes.set()
            self._watch.join(self._times.grace_seconds + 1.0)

    def check(self, timeout_seconds: float = 5.0) -> None:
        """Liveness: ask ourselves as the kubelet does. NodeError: it could not reach us.

        An answer counts for a while, as long as the sockets are where they were: for each question
        gRPC opens two connections, and its threads, up to sixteen, look for more work ten times a
        second for some seconds. The kubelet probes us every two.
        """
        if not self._watch.is_alive():
            raise NodeError(
                f"{self._paths.driver} is not served to the kubelet: not started, or stopped"
            )
        began = time.monotonic()
        are_in_place = all(server.in_place for server in tuple(self._servers))
        is_of_these = self._answered_at > self._changed_at
        if are_in_place and is_of_these and began < self._answered_at + self._times.check_seconds:
            return
        probes.check_plugin_sockets(self._paths, timeout_seconds)
        self._answered_at = began

    def _serve(self, sockets: Mapping[Path, int]) -> None:
        server = PluginServer(self._handlers, self._threads)
        server.open(sockets, self._times.patience_seconds)
        self._servers.append(server)
        self._changed_at = time.monotonic()

    def _run(self) -> None:
        try:
            try:
                self._look_after_sockets()
            finally:
                self._changes.close()
                self._close()
        except Exception as error:  # a thread's exception would be lost; who wired us must hear it
            log.exception("serving the kubelet ended")
            fatal = error if isinstance(error, DriverError) else NodeError(f"gRPC: {error}")
            self._on_fatal(fatal)

    def _look_after_sockets(self) -> None:
        """Look after something happened in their directories, else seldom."""
        directories = {path.parent for path in self._sockets}
        while not self._stop.is_set():
            is_watched = self._changes.watch(directories)  # before looking: no change is missed
            self._changes.clear()
            again = self._heal() or self._finish_round() or not is_watched
            if not self._stop.wait(self._times.watch_seconds) and not again:
                self._changes.wait(self._times.idle_seconds)

    def _finish_round(self) -> bool:
        """Whether another look is needed although nothing changes."""
        try:
            return self._on_round()
        except Exception:  # the next round may go better, and the sockets must go on
            log.exception("a regular check failed")
            return True

    def _heal(self) -> bool:
        """Serve anew what somebody deleted; calls over a lost socket get our grace to end. Whether
        anything was: a directory may be another one now."""
        healed = False
        for server in tuple(self._servers):
            if lost := server.lost():
                self._changed_at = float("inf")  # until they are served again
            for path in lost:
                log.warning("somebody deleted our socket: serving anew", extra={"path": str(path)})
            if self._paths.registration in lost:
                self._registration.socket_lost()
            if lost:
                self._serve({path: self._sockets[path] for path in lost})
                healed = True
            if not server.is_reachable:
                self._servers.remove(server)
                server.close(self._times.grace_seconds)
        return healed

    def _close(self) -> None:
        for server in self._servers:
            server.hide(self._paths.registration)
        if self._health is not None:
            self._health.stop()
        ended = [server.close(self._times.grace_seconds) for server in self._servers]
        for server, event in zip(self._servers, ended, strict=True):
            event.wait(self._times.grace_seconds + 0.5)
            server.hide(self._paths.service)
