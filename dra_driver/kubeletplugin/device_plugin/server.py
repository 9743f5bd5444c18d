"""All resources of a node in front of the kubelet: offered, registered, withdrawn in good order."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Final

from dra_driver.base import inotify
from dra_driver.base.deadlines import Deadline
from dra_driver.base.errors import DriverError, NodeError, join_problems
from dra_driver.base.inotify import DirectoryChanges
from dra_driver.base.threads import StandingThreads
from dra_driver.kubeletplugin.device_plugin.device_list import DeviceList
from dra_driver.kubeletplugin.device_plugin.endpoint import (
    BEGIN_SECONDS,
    IDLE_SECONDS,
    SETTLE_SECONDS,
    DevicePluginTimeouts,
    ResourceEndpoint,
)
from dra_driver.kubeletplugin.device_plugin.registration import KubeletSocket
from dra_driver.kubeletplugin.device_plugin.resources import (
    DevicePluginHandler,
    Resource,
    ResourceName,
)
from dra_driver.kubeletplugin.device_plugin.service import MAX_PRE_STARTS, DevicePluginService
from dra_driver.kubeletplugin.device_plugin.sockets import resource_sockets
from dra_driver.kubeletplugin.serve.sockets import make_directory

log = logging.getLogger(__name__)

_THREADS: Final = MAX_PRE_STARTS + 256  # for the other calls, for streams and for Register
_LOOK_SECONDS: Final = 5.0  # where the kernel does not tell of changes in the directory
_LEAST_SECONDS: Final = 0.1  # between two looks: the kubelet writes its checkpoint there, too
_TIMES: Final = DevicePluginTimeouts()
_STOP_SECONDS: Final = 2.0  # for calls: we have to be gone 5 s after SIGTERM


class DevicePluginServer:
    """Serves what is offered to the kubelet by the device-plugin API.

    *directory*: the kubelet's, usually /var/lib/kubelet/device-plugins. *instance*: another one
    for each process, for the names of sockets. *on_fatal* is called once when serving is over for
    a reason that a new process may mend.
    """

    def __init__(
        self,
        directory: Path,
        instance: str,
        handler: DevicePluginHandler,
        on_fatal: Callable[[DriverError], None],
        times: DevicePluginTimeouts = _TIMES,
    ) -> None:
        self._directory = directory
        self._instance = instance
        self._handler = handler
        self._on_fatal = on_fatal
        self._times = times
        self._withdraw_seconds = times.register_seconds + BEGIN_SECONDS
        self._kubelet = KubeletSocket(directory)
        self._threads = StandingThreads("device-plugin", _THREADS)
        self._changes = DirectoryChanges(inotify.NAMES)
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._offered: dict[ResourceName, Resource] = {}
        self._leftovers: set[ResourceName] = set()
        self._withdrawing = False
        self._endpoints: dict[ResourceName, ResourceEndpoint] = {}
        self._problem = ""
        self._thread = threading.Thread(target=self._run, name="device-plugin", daemon=True)

    def start(self) -> None:
        """Serve what is offered, from the first ``offer`` on, and wait for the kubelet."""
        self._thread.start()

    def offer(self, resources: Sequence[Resource]) -> None:
        """List these from now on, each with all its devices. Cheap where nothing changes.

        The devices of a resource that is left out are unhealthy for some seconds; then its list is
        empty, and it is served no longer.
        """
        offered = {resource.name: resource for resource in resources}
        with self._changed:
            if offered == self._offered and not self._withdrawing:
                return
            self._offered, self._withdrawing = offered, False
            for name, endpoint in self._endpoints.items():
                endpoint.offer(offered.get(name))
        self._changes.set()

    def freeze(self, frozen: bool) -> None:
        """While *frozen*, no device leaves a list by itself: the kubelet would take the list that
        comes last for that of another device plugin, which has our resource now."""
        with self._changed:
            for endpoint in self._endpoints.values():
                endpoint.freeze(frozen)

    def end(self, leftovers: Collection[ResourceName]) -> None:
        """Offer nothing any more. The kubelet learns that also of *leftovers*, which an earlier
        process listed."""
        with self._changed:
            self._leftovers = set(leftovers)
        self.offer(())
        self._changes.set()

    @property
    def has_ended(self) -> bool:
        """Whether the kubelet knows that nothing is offered."""
        with self._changed:
            return not (self._offered or self._endpoints or self._leftovers)

    def withdraw(self) -> None:
        """Offer nothing, so that a newer process of ours can register, or none. Ends when the
        kubelet knows. To be called before that process may register."""
        with self._changed:
            self._offered, self._withdrawing = {}, True
            self._changes.set()
            over = self._changed.wait_for(
                lambda: not (self._withdrawing and self._endpoints and self._thread.is_alive()),
                self._withdraw_seconds + 5.0,
            )
        if not over:
            log.error("resources were not withdrawn in time")

    def stop(self) -> None:
        """Be gone for the kubelet: calls that run (bounded), streams, sockets."""
        self._stop.set()
        self._changes.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS + 2.0)

    def problem(self) -> str | None:
        """Why the kubelet does not have our list now; None: it has, or nothing is offered."""
        with self._changed:
            problems = [self._problem]
            problems += [endpoint.problem for endpoint in self._endpoints.values()]
            missing = sorted(self._offered.keys() - self._endpoints.keys())
        problems += [f"{name} is not served yet" for name in missing]
        return join_problems("", filter(None, problems)) or None

    def _run(self) -> None:
        try:
            try:
                self._look_after_resources()
            finally:
                self._close(tuple(self._endpoints), _STOP_SECONDS)
                self._changes.close()
        except Exception as error:  # a thread's exception would be lost; who wired us must hear it
            log.exception("serving device plugins ended")
            fatal = error if isinstance(error, DriverError) else NodeError(f"gRPC: {error}")
            self._on_fatal(fatal)

    def _look_after_resources(self) -> None:
        """Look after something happened in the directory or to a stream, else seldom."""
        while not self._stop.is_set():
            self._changes.clear()  # before watching and looking: no change is missed
            is_watched = self._watch()
            seconds = self._look()
            if not self._stop.wait(_LEAST_SECONDS):
                self._changes.wait(seconds if is_watched else min(seconds, _LOOK_SECONDS))

    def _watch(self) -> bool:
        self._problem = ""
        if not (self._offered or self._leftovers):
            return True  # who offers something wakes us
        try:
            make_directory(self._directory, 0o750)
        except NodeError as error:
            self._problem = str(error)
            return False
        return self._changes.watch([self._directory])

    def _look(self) -> float:
        """In how many seconds to look again."""
        with self._changed:
            if self._withdrawing:
                over = tuple(self._endpoints)
            else:
                self._add_endpoints()
                over = tuple(name for name, each in self._endpoints.items() if each.is_over)
        if over:
            self._close(over, self._withdraw_seconds)
        return min((each.look() for each in self._endpoints.values()), default=IDLE_SECONDS)

    def _add_endpoints(self) -> None:
        for name in (self._offered.keys() | self._leftovers) - self._endpoints.keys():
            try:
                sockets = resource_sockets(self._directory, name, self._instance)
            except DriverError as error:
                self._problem = str(error)
                continue
            devices = DeviceList(name, self._times.leaving_seconds)
            service = DevicePluginService(devices, self._handler, self._changes.set)
            endpoint = ResourceEndpoint(service, sockets, self._kubelet, self._threads, self._times)
            endpoint.offer(self._offered.get(name))
            self._endpoints[name] = endpoint

    def _close(self, names: Iterable[ResourceName], seconds: float) -> None:
        """In an order that leaves a newer process's registration whole: its Register comes after
        the kubelet has seen the end of our streams."""
        endpoints = [self._endpoints[name] for name in names]
        deadline = Deadline(seconds)
        for endpoint in endpoints:
            endpoint.quiesce(deadline)
        if any([endpoint.end_streams() for endpoint in endpoints]):
            time.sleep(SETTLE_SECONDS)
        for endpoint in endpoints:
            endpoint.hide()
        for event in [event for each in endpoints for event in each.close(0.5)]:
            event.wait(1.0)
        with self._changed:
            for name in tuple(names):
                del self._endpoints[name]
            self._leftovers.difference_update(names)
            self._changed.notify_all()
