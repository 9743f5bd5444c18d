"""The gRPC service that tells the kubelet the health of devices; pods have it in their status.

Whoever watches gets the full list at once, after every change, and again before the kubelet takes
it for outdated (KEP-4680). One implementation serves v1alpha1 (Kubernetes 1.34 and newer) and v1
(1.37 and newer). Each stream keeps a thread while it lasts; the oldest ends where there are too
many.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from types import ModuleType
from typing import Any

import grpc

from api.kubelet import dra_health_v1_pb2, dra_health_v1alpha1_pb2
from dra_driver.base.errors import DriverError
from dra_driver.base.frozen import frozen

log = logging.getLogger(__name__)

MAX_STREAMS = 4  # the kubelet has one for each process of a plugin, and opens it anew
_REPEAT_SECONDS = 10.0
_TIMEOUT_SECONDS = 30  # until the kubelet takes a device's health for unknown
_RETRY_SECONDS = 1.0  # while there is nothing to tell yet
_LEAST_SECONDS = 0.2  # between two lists: changes in between are told together
_MAX_MESSAGE = 1024  # characters; the kubelet cuts what is longer


class HealthStatus(IntEnum):
    """The numbers are those of the kubelet's API."""

    UNKNOWN = 0
    HEALTHY = 1
    UNHEALTHY = 2


@frozen
class DeviceHealth:
    """How a device is, whatever share of it a claim has."""

    pool: str
    device: str
    status: HealthStatus = HealthStatus.HEALTHY
    message: str = ""


@frozen
class HealthServiceVersion:
    """One version of the kubelet's service. Their messages are the same on the wire."""

    name: str  # as GetInfo lists it, and on the wire
    messages: ModuleType


HEALTH_SERVICE_VERSIONS = tuple(
    HealthServiceVersion(
        str(module.DESCRIPTOR.services_by_name["DRAResourceHealth"].full_name), module
    )
    for module in (dra_health_v1_pb2, dra_health_v1alpha1_pb2)  # newest first
)


class _Stream:
    """One call of the kubelet."""

    def __init__(self) -> None:
        self.wake = threading.Event()
        self.ended = False

    def end(self) -> None:
        self.ended = True
        self.wake.set()


class HealthService:
    """Streams what *devices* returns: all of the driver's devices that a pod may have.

    *devices* is called by many threads. While it raises a DriverError nothing is sent, and the
    kubelet takes the health of the devices for unknown after 30 s.
    """

    def __init__(
        self,
        devices: Callable[[], Sequence[DeviceHealth]],
        repeat_seconds: float = _REPEAT_SECONDS,
        max_streams: int = MAX_STREAMS,
    ) -> None:
        self._devices = devices
        self._repeat_seconds = repeat_seconds
        self._max_streams = max_streams
        self._lock = threading.Lock()
        self._streams: dict[_Stream, None] = {}  # oldest first
        self._stopped = False
        self._error = ""  # the last one that was logged

    def handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        """The gRPC services, one per version."""
        return tuple(
            grpc.method_handlers_generic_handler(
                version.name,
                {
                    "NodeWatchResources": grpc.unary_stream_rpc_method_handler(
                        self._watch,
                        request_deserializer=version.messages.NodeWatchResourcesRequest.FromString,
                    )
                },
            )
            for version in HEALTH_SERVICE_VERSIONS
        )

    @property
    def streams(self) -> int:
        """How many are watching."""
        return len(self._streams)

    def changed(self) -> None:
        """The health of a device may be another one: have it told now. Never waits."""
        with self._lock:
            streams = tuple(self._streams)
        for stream in streams:
            stream.wake.set()

    def stop(self) -> None:
        """End all streams, and those to come: a server waits for its calls before it stops."""
        self._stopped = True
        with self._lock:
            streams = tuple(self._streams)
        for stream in streams:
            stream.end()

    def _watch(self, _request: Any, context: grpc.ServicerContext) -> Iterator[bytes]:
        stream = _Stream()
        with self._lock:
            self._streams[stream] = None
            surplus = tuple(self._streams)[: -self._max_streams]
        for older in surplus:
            older.end()
        if self._stopped or not context.add_callback(stream.end):
            stream.end()
        try:
            yield from self._lists(stream)
        finally:
            with self._lock:
                self._streams.pop(stream, None)

    def _lists(self, stream: _Stream) -> Iterator[bytes]:
        sent: Sequence[DeviceHealth] | None = None
        again_at = 0.0
        while not stream.ended:
            stream.wake.clear()
            if stream.ended:  # between the two lines before
                return
            devices = self._known()
            if devices is not None and (devices != sent or time.monotonic() >= again_at):
                yield _encode(devices)
                sent, again_at = devices, time.monotonic() + self._repeat_seconds
            wait = again_at - time.monotonic() if devices is not None else _RETRY_SECONDS
            if stream.wake.wait(max(0.0, wait)) and not stream.ended:
                time.sleep(_LEAST_SECONDS)

    def _known(self) -> Sequence[DeviceHealth] | None:
        try:
            devices = self._devices()
        except DriverError as e:
            if str(e) != self._error:
                log.warning("cannot tell the health of devices yet", extra={"error": str(e)})
            self._error = str(e)
            return None
        self._error = ""
        return devices


def _encode(devices: Sequence[DeviceHealth]) -> bytes:
    """The list as any version has it, determined now."""
    messages = dra_health_v1_pb2
    now = int(time.time())
    response = messages.NodeWatchResourcesResponse(
        devices=[
            messages.DeviceHealth(
                device=messages.DeviceIdentifier(pool_name=each.pool, device_name=each.device),
                health=messages.HealthStatus.ValueType(each.status),
                last_updated_time=now,
                health_check_timeout_seconds=_TIMEOUT_SECONDS,
                message=each.message[:_MAX_MESSAGE],
            )
            for each in devices
        ]
    )
    return response.SerializeToString()
