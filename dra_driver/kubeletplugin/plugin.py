"""A driver's presence on its node: both sockets served, watched and taken away in the right order.

The kubelet's rules (registration and rolling update, kubernetes/pkg/kubelet/pluginmanager): the DRA
service answers before the registration socket appears, and the registration socket goes first.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from dra_driver.errors import DriverError, NodeError, TimedOut
from dra_driver.kubeletplugin import liveness
from dra_driver.kubeletplugin.listener import Listener
from dra_driver.kubeletplugin.registration import Registration
from dra_driver.kubeletplugin.service import VERSIONS, Service
from dra_driver.kubeletplugin.sockets import SocketPaths

log = logging.getLogger(__name__)

_START_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Times:
    """How long a plugin waits for what."""

    grace_seconds: float = 4.0  # for calls in flight: we have to be gone 5 s after SIGTERM
    watch_seconds: float = 5.0  # between two looks at the sockets
    patience_seconds: float = 6.0  # for a process before us that is in its grace


class Plugin:
    """Serves *service* at *paths* to the kubelet, from a thread of its own.

    *on_fatal* is called once when serving is over for a reason that a new process may mend;
    *on_round* after every look at the sockets, for what else needs one (it must not block).
    """

    def __init__(
        self,
        paths: SocketPaths,
        service: Service,
        on_fatal: Callable[[DriverError], None],
        on_round: Callable[[], None] = lambda: None,
        times: Times = Times(),
    ) -> None:
        self._times = times
        self._paths = paths
        self._on_fatal = on_fatal
        self._on_round = on_round
        versions = tuple(version.name for version in VERSIONS)
        self._registration = Registration(paths.driver, str(paths.service), versions)
        self._listeners = (
            Listener(paths.service, 0o750, service.handlers(), times.patience_seconds),
            Listener(
                paths.registration, 0o755, self._registration.handlers(), times.patience_seconds
            ),
        )
        self._started: concurrent.futures.Future[asyncio.AbstractEventLoop]
        self._started = concurrent.futures.Future()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="kubelet", daemon=True)

    @property
    def registered(self) -> bool:
        """Whether the kubelet accepted us the last time it said something."""
        return self._registration.registered

    def start(self) -> None:
        """Serve. When this returns, the kubelet can find us. DriverError: what is in the way."""
        self._thread.start()
        try:
            self._started.result(_START_SECONDS)
        except TimeoutError as error:
            raise TimedOut(f"gRPC did not serve {self._paths.service} within 20 s") from error

    def stop(self) -> None:
        """Be gone for the kubelet: registration socket, calls in flight (bounded), DRA socket."""
        if not self._started.done() or self._started.exception():
            return
        try:
            self._started.result().call_soon_threadsafe(self._stop.set)
        except RuntimeError:
            return  # it has ended by itself
        self._thread.join(self._times.grace_seconds + 1.0)

    def check(self, timeout_seconds: float = 5.0) -> None:
        """Liveness: ask ourselves as the kubelet does. NodeError: it could not reach us."""
        if not self._started.done() or not self._thread.is_alive():
            raise NodeError(
                f"{self._paths.driver} is not served to the kubelet: not started, or stopped"
            )
        asked = asyncio.run_coroutine_threadsafe(
            liveness.check(self._paths, timeout_seconds), self._started.result()
        )
        try:
            asked.result(timeout_seconds)
        except TimeoutError as error:
            asked.cancel()
            raise TimedOut(f"our own sockets did not answer in {timeout_seconds:g} s") from error

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:  # a thread's exception would be lost; who wired us must hear it
            log.exception("serving the kubelet ended")
            if self._started.done():
                fatal = error if isinstance(error, DriverError) else NodeError(f"gRPC: {error}")
                self._on_fatal(fatal)
            else:
                self._started.set_exception(error)

    async def _serve(self) -> None:
        service, registration = self._listeners
        try:
            await service.open()
            await registration.open()
            self._started.set_result(asyncio.get_running_loop())
            await self._watch()
        finally:
            registration.hide()
            await service.close(self._times.grace_seconds)
            await registration.close(0)

    async def _watch(self) -> None:
        while not self._stop.is_set():
            for listener in self._listeners:
                if not listener.in_place():
                    await listener.heal(self._times.grace_seconds)
            try:
                self._on_round()
            except Exception:  # the next round may go better, and the sockets must go on
                log.exception("the regular look failed")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), self._times.watch_seconds)
