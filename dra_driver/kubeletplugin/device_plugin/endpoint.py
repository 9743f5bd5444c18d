"""One resource in front of the kubelet: served first, then registered, again after every break.

The kubelet's rules (kubernetes/pkg/kubelet/cm/devicemanager): it dials the socket while it answers
Register, never dials again, and closes its *newest* connection for a resource when *any* stream of
that resource ends. So a second Register on a live stream breaks what works, and so does a process
that leaves after the next one came: one process at a time has the resource's ``owner`` socket.
"""

import logging
import time
from concurrent.futures import Future
from threading import Event
from typing import Final

from dra_driver.base.backoff import Backoff
from dra_driver.base.deadlines import Deadline
from dra_driver.base.errors import DriverError
from dra_driver.base.frozen import frozen
from dra_driver.base.threads import StandingThreads
from dra_driver.kubeletplugin.device_plugin.device_list import LEAVING_SECONDS
from dra_driver.kubeletplugin.device_plugin.registration import (
    REGISTER_SECONDS,
    KubeletSocket,
    KubeletSocketId,
)
from dra_driver.kubeletplugin.device_plugin.resources import Resource
from dra_driver.kubeletplugin.device_plugin.service import DevicePluginService
from dra_driver.kubeletplugin.device_plugin.sockets import ResourceSockets, remove_dead_sockets
from dra_driver.kubeletplugin.serve.plugin_server import PluginServer
from dra_driver.kubeletplugin.serve.sockets import answers

log = logging.getLogger(__name__)

IDLE_SECONDS: Final = 30.0  # between two looks where whatever changes wakes us
SETTLE_SECONDS: Final = 0.25  # for the kubelet to close its connection after a stream has ended
BEGIN_SECONDS: Final = 1.0  # after Register until it asks for the list, where we have to go
_DRAIN_SECONDS: Final = 5.0  # for a moment without calls
_STABLE_SECONDS: Final = 10.0  # a stream that lasted so long ended for a new reason
_OTHER_SECONDS: Final = 1.0  # between two looks whether another process has ended: nothing tells
_GRACE_SECONDS: Final = 4.0  # for calls over a socket that somebody deleted
_MODE: Final = 0o750


@frozen
class DevicePluginTimeouts:
    """How long a device plugin waits for what."""

    register_seconds: float = REGISTER_SECONDS  # for the kubelet's answer to Register
    stream_seconds: float = 10.0  # after Register until the kubelet asks for the list
    leaving_seconds: float = LEAVING_SECONDS  # until a device that is not offered leaves the list


class ResourceEndpoint:
    """Serves and registers one resource. One thread looks after it, woken by the service's
    ``on_change``; ``offer`` and ``problem`` are for any."""

    def __init__(
        self,
        service: DevicePluginService,
        sockets: ResourceSockets,
        kubelet: KubeletSocket,
        threads: StandingThreads,
        times: DevicePluginTimeouts,
    ) -> None:
        self.problem = f"{service.resource} is not served yet"  # empty: the kubelet has the list
        self._service = service
        self._streams = service.streams
        self._sockets = sockets
        self._kubelet = kubelet
        self._threads = threads
        self._times = times
        self._is_left_out = False
        self._server: PluginServer | None = None
        self._former: PluginServer | None = None  # has the stream, but no sockets any longer
        self._registering: Future[None] | None = None
        self._kubelet_id: KubeletSocketId | None = None  # of the kubelet that was seen last
        self._established_at: float | None = None
        self._backoff = Backoff(0.2, IDLE_SECONDS)
        self._again_at = 0.0
        self._reason_to_wait = ""

    def offer(self, resource: Resource | None) -> None:
        """From now on list these devices. None: the resource is not offered any longer."""
        self._is_left_out = resource is None
        self._service.devices.offer(resource.devices if resource else ())
        self._streams.changed()

    def freeze(self, frozen: bool) -> None:
        """As ``DeviceList.freeze``."""
        self._service.devices.freeze(frozen)
        self._streams.changed()  # what left meanwhile may go now

    @property
    def is_over(self) -> bool:
        """Whether it is not offered any longer, and the kubelet knows."""
        if not self._is_left_out or self._registering is not None:
            return False
        if self._kubelet.identity() is None:
            return True
        if self._streams.has_other_options:
            return False
        return not self._streams.established or self._is_known_to_be_empty()

    def _is_known_to_be_empty(self) -> bool:
        """Whether the kubelet has read that there are no devices, and asks for none."""
        is_empty = not self._service.devices.encoded()
        return is_empty and self._streams.up_to_date and self._service.drain(0)

    def look(self) -> float:
        """Do what is due. In how many seconds to look again, where nothing wakes us before."""
        try:
            seconds, problem = self._look()
        except DriverError as error:
            seconds, problem = self._backoff.next_seconds(), str(error)
        if problem != self.problem:
            facts = {"resource": self._service.resource, "problem": problem}
            if problem:
                log.info("the kubelet does not have the devices of a resource", extra=facts)
            else:
                log.info("the kubelet has the devices of a resource", extra=facts)
        self.problem = problem
        return seconds

    def quiesce(self, deadline: Deadline) -> None:
        """Begin no Register; wait for one that runs, and for calls: ending a stream cuts them off.

        A Register that fails since we are gone would drop the registration of the next process.
        """
        if self._registering is not None and self._conclude(deadline.remaining):
            self._streams.wait_for_stream(min(BEGIN_SECONDS, deadline.remaining))
        self._service.drain(min(_DRAIN_SECONDS, deadline.remaining))

    def end_streams(self) -> bool:
        """Have the kubelet close its connection; whether it had one."""
        return self._streams.end(closing=True)

    def hide(self) -> None:
        """Remove our sockets: another process may register now."""
        if self._server is not None:
            self._server.hide(self._sockets.endpoint)
            self._server.hide(self._sockets.owner)

    def close(self, grace_seconds: float) -> list[Event]:
        """Take no more calls. The events are set when those that run have ended."""
        servers = (self._server, self._former)
        self._server = self._former = None
        return [server.close(grace_seconds) for server in servers if server is not None]

    def _look(self) -> tuple[float, str]:
        """In how many seconds to look again, and why the kubelet does not have the list."""
        if other := self._serve():
            return _OTHER_SECONDS, other
        if self._registering is not None:
            if not self._registering.done():
                return IDLE_SECONDS, f"{self._service.resource}: the kubelet has not answered yet"
            self._conclude(0)
        self._note_kubelet()
        if self._streams.has_other_options and self._may_register_anew():
            self._streams.end()
            self._established_at = None
            self._wait(SETTLE_SECONDS, "")
        if self._streams.broken:
            self._note_break()
        if self._streams.established:
            return self._established()
        return self._register_when_due()

    def _serve(self) -> str:
        """Be at our sockets, also after somebody deleted them. Why not: another process is."""
        if self._server is not None and not self._has_lost_sockets(self._server):
            return ""
        if answers(self._sockets.owner):
            self._streams.end()
            return (
                f"another process of this driver serves {self._service.resource} at "
                f"{self._sockets.owner}: it has to end first"
            )
        server = PluginServer(self._service.handlers(), self._threads)
        server.open({self._sockets.owner: _MODE, self._sockets.endpoint: _MODE}, 0)
        self._server = server
        remove_dead_sockets(self._sockets.endpoint.parent)
        return ""

    def _has_lost_sockets(self, server: PluginServer) -> bool:
        """Then it does not serve any longer, but for the calls over connections that there are."""
        if not (lost := server.lost()):
            return False
        log.warning("somebody deleted our socket: serving anew", extra={"path": str(lost[0])})
        self.hide()
        self._server = None
        if self._former is None:
            self._former = server
        else:  # the kubelet has not dialled this one, for nothing was registered since
            server.close(_GRACE_SECONDS)
        return True

    def _note_kubelet(self) -> None:
        """After a start of the kubelet, streams of the one before count no longer."""
        kubelet_id = self._kubelet.identity()
        if kubelet_id in (None, self._kubelet_id):
            return
        if self._kubelet_id is not None:
            self._streams.forget_options()
        self._kubelet_id = kubelet_id
        self._backoff.reset()
        self._wait(SETTLE_SECONDS if self._streams.end() else 0.0, "")

    def _may_register_anew(self) -> bool:
        """Whether nothing is lost when the kubelet closes its connection."""
        if self._streams.broken:
            return True
        return self._streams.established and self._is_known_to_be_empty()

    def _note_break(self) -> None:
        """End the other streams, so that none of them can break the next registration."""
        self._streams.end()
        begun, self._established_at = self._established_at, None
        if begun is not None and time.monotonic() - begun > _STABLE_SECONDS:
            self._backoff.reset()
            self._wait(0.0, "")
        else:
            self._wait(self._backoff.next_seconds(), "the kubelet closed its connection")

    def _established(self) -> tuple[float, str]:
        if self._established_at is None:
            self._established_at = time.monotonic()
        if self._is_left_out:
            return _OTHER_SECONDS, ""
        if problem := self._service.devices.problem:
            return IDLE_SECONDS, problem
        if not self._streams.has_sent:
            return IDLE_SECONDS, f"{self._service.resource}: the list is on its way"
        return IDLE_SECONDS, ""

    def _register_when_due(self) -> tuple[float, str]:
        resource = self._service.resource
        if self._kubelet.identity() is None:
            return (
                IDLE_SECONDS,
                f"{resource} waits for the kubelet: there is no {self._kubelet.path}",
            )
        if (seconds := self._again_at - time.monotonic()) > 0:
            return seconds, f"{resource}: {self._reason_to_wait or 'not registered yet'}"
        if self._service.devices.problem and not self._service.devices.encoded():
            return IDLE_SECONDS, self._service.devices.problem
        self._register()
        return IDLE_SECONDS, f"{resource} is being registered"

    def _register(self) -> None:
        if self._former is not None:
            self._former.close(_GRACE_SECONDS)
            self._former = None
        self._registering = self._threads.submit(
            self._kubelet.register,
            self._service.resource,
            self._sockets.endpoint.name,
            self._streams.options,
            self._times.register_seconds,
        )
        self._registering.add_done_callback(lambda _: self._service.on_change())

    def _conclude(self, timeout_seconds: float) -> bool:
        """Whether Register succeeded."""
        assert self._registering is not None
        try:
            self._registering.result(timeout_seconds)
        except DriverError as error:
            if str(error) != self._reason_to_wait:
                log.warning("will try again", extra={"error": str(error)})
            self._wait(self._backoff.next_seconds(), str(error))
        except TimeoutError:
            return False
        else:
            self._wait(
                self._times.stream_seconds, "registered, but the kubelet has not asked for the list"
            )
            return True
        finally:
            if self._registering.done():
                self._registering = None
        return False

    def _wait(self, seconds: float, reason: str) -> None:
        self._again_at, self._reason_to_wait = time.monotonic() + seconds, reason
