"""The gRPC service that the kubelet calls for one resource.

The text of an error is what people read at their pod: "Allocate failed due to ...".
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import grpc

from api.kubelet import device_plugin_v1beta1_pb2 as messages
from dra_driver.base.errors import DriverError, NodeError
from dra_driver.kubeletplugin.device_plugin.device_list import DeviceList
from dra_driver.kubeletplugin.device_plugin.list_streams import ListStreams
from dra_driver.kubeletplugin.device_plugin.resources import (
    ContainerResponse,
    DeviceId,
    DevicePluginHandler,
)

log = logging.getLogger(__name__)

MAX_PRE_STARTS: Final = 256  # at once, each up to 30 s; far above the pods that a node has
_SERVICE: Final = str(messages.DESCRIPTOR.services_by_name["DevicePlugin"].full_name)
_MAX_ERROR: Final = 1024  # characters; the text becomes a header of the answer, and a pod's status

_Answer = TypeVar("_Answer")


class DevicePluginService:
    """Serves the resource of *devices* with *handler*. *on_change* is that of ``ListStreams``."""

    def __init__(
        self, devices: DeviceList, handler: DevicePluginHandler, on_change: Callable[[], None]
    ) -> None:
        self.resource = devices.resource
        self.devices = devices
        self.on_change = on_change
        self.streams = ListStreams(devices, on_change)
        self._handler = handler
        self._calls = 0
        self._idle = threading.Condition()
        self._pre_starts = threading.Semaphore(MAX_PRE_STARTS)

    def handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        """The gRPC service."""
        return (
            grpc.method_handlers_generic_handler(
                _SERVICE,
                {
                    "GetDevicePluginOptions": _unary(
                        lambda *_: self.streams.tell_options(), messages.Empty
                    ),
                    "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                        lambda _, context: self.streams.serve(context),
                        request_deserializer=messages.Empty.FromString,
                    ),
                    "GetPreferredAllocation": _unary(
                        self._preferred, messages.PreferredAllocationRequest
                    ),
                    "Allocate": _unary(self._allocate, messages.AllocateRequest),
                    "PreStartContainer": _unary(self._pre_start, messages.PreStartContainerRequest),
                },
            ),
        )

    def drain(self, seconds: float) -> bool:
        """Wait for a moment without Allocate and PreStartContainer: the kubelet gives up the calls
        over a connection when it closes that. False: there was none in time."""
        with self._idle:
            return self._idle.wait_for(lambda: self._calls == 0, seconds)

    def _allocate(
        self, request: messages.AllocateRequest, context: grpc.ServicerContext
    ) -> messages.AllocateResponse:
        self._begin_call(context)
        return messages.AllocateResponse(
            container_responses=[
                _encode(self._allocate_container(_ids(each.devices_ids), context))
                for each in request.container_requests
            ]
        )

    def _allocate_container(
        self, ids: tuple[DeviceId, ...], context: grpc.ServicerContext
    ) -> ContainerResponse:
        with self.devices.allocating(ids):
            return self._answer(
                "Allocate", ids, context, lambda: self._handler.allocate(self.resource, ids)
            )

    def _pre_start(
        self, request: messages.PreStartContainerRequest, context: grpc.ServicerContext
    ) -> messages.PreStartContainerResponse:
        self._begin_call(context)
        ids = _ids(request.devices_ids)
        self._answer("PreStartContainer", ids, context, lambda: self._limited_pre_start(ids))
        return messages.PreStartContainerResponse()

    def _limited_pre_start(self, ids: tuple[DeviceId, ...]) -> None:
        if not self._pre_starts.acquire(blocking=False):
            raise NodeError(
                f"{MAX_PRE_STARTS} other containers are about to start; the kubelet will ask again"
            )
        try:
            self._handler.pre_start(self.resource, ids)
        finally:
            self._pre_starts.release()

    def _preferred(
        self, request: messages.PreferredAllocationRequest, _context: grpc.ServicerContext
    ) -> messages.PreferredAllocationResponse:
        response = messages.PreferredAllocationResponse()
        for each in request.container_requests:
            available, required = _ids(each.available_deviceIDs), _ids(each.must_include_deviceIDs)
            ids = self._preferred_ids(available, required, each.allocation_size)
            response.container_responses.add(deviceIDs=ids)
        return response

    def _preferred_ids(
        self, available: tuple[DeviceId, ...], required: tuple[DeviceId, ...], size: int
    ) -> Sequence[DeviceId]:
        """Never an error, for the pod would fail: the first ones, if need be."""
        try:
            ids = tuple(self._handler.preferred(self.resource, available, required, size))
        except Exception:  # whatever it is, any of the available devices will do
            log.exception("cannot choose devices", extra={"resource": self.resource, "size": size})
        else:
            if is_answer(ids, available, required, size):
                return ids
            facts = {"resource": self.resource, "size": size, "ids": list(ids)}
            log.error("a choice of devices is none", extra=facts)
        return tuple(dict.fromkeys((*required, *available)))[:size]

    def _answer(
        self,
        method: str,
        ids: tuple[DeviceId, ...],
        context: grpc.ServicerContext,
        act: Callable[[], _Answer],
    ) -> _Answer:
        begun = time.monotonic()
        facts = {"method": method, "resource": self.resource, "ids": sorted(ids)}
        try:
            answer = act()
        except DriverError as error:
            code, text = grpc.StatusCode.FAILED_PRECONDITION, error.public
            log.warning("devices not given: %s", error, extra=facts)
        except Exception as error:  # one container's trouble must stay with that container
            code, text = grpc.StatusCode.INTERNAL, f"internal error: {type(error).__name__}"
            log.exception("a call for devices crashed us", extra=facts)
        else:
            seconds = round(time.monotonic() - begun, 6)
            log.info("devices given", extra=facts | {"seconds": seconds})
            return answer
        context.abort(code, text[:_MAX_ERROR])

    def _begin_call(self, context: grpc.ServicerContext) -> None:
        """Count the call until its answer has left."""
        with self._idle:
            self._calls += 1
        if not context.add_callback(self._end_call):
            self._end_call()

    def _end_call(self) -> None:
        with self._idle:
            self._calls -= 1
            self._idle.notify_all()


def is_answer(
    ids: Sequence[DeviceId],
    available: Sequence[DeviceId],
    required: Sequence[DeviceId],
    size: int,
) -> bool:
    """Whether *ids* is what the kubelet asked for. It has random ones in place of what is not."""
    chosen = set(ids)
    return len(ids) == len(chosen) == size and set(required) <= chosen <= set(available)


def _ids(ids: Sequence[str]) -> tuple[DeviceId, ...]:
    return tuple(DeviceId(id) for id in ids)


def _unary(call: Callable[[Any, grpc.ServicerContext], Any], request: Any) -> Any:
    return grpc.unary_unary_rpc_method_handler(
        call,
        request_deserializer=request.FromString,
        response_serializer=lambda response: response.SerializeToString(),
    )


def _encode(response: ContainerResponse) -> messages.ContainerAllocateResponse:
    return messages.ContainerAllocateResponse(
        envs=dict(response.env),
        mounts=[
            messages.Mount(
                container_path=mount.container_path,
                host_path=mount.host_path,
                read_only=mount.read_only,
            )
            for mount in response.mounts
        ],
        devices=[
            messages.DeviceSpec(
                container_path=device.container_path,
                host_path=device.host_path,
                permissions=device.permissions,
            )
            for device in response.devices
        ],
        cdi_devices=[messages.CDIDevice(name=name) for name in response.cdi_names],
    )
