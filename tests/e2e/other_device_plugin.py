"""Another device plugin on the node, which does as NVIDIA's does where both have one resource."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from api.kubelet import device_plugin_v1beta1_pb2 as messages
from api.kubelet import device_plugin_v1beta1_pb2_grpc as services

_SECONDS = 10.0


class OtherDevicePlugin(services.DevicePluginServicer):
    """Serves *socket* and registers *resource* with the kubelet while it is entered. A container
    finds its devices in ``OTHER_DEVICES``."""

    def __init__(
        self, directory: Path, resource: str, ids: Sequence[str], socket: str = "nvidia-gpu.sock"
    ) -> None:
        self._directory = directory
        self._resource = resource
        self._ids = ids
        self._socket = directory / socket
        self._ending = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(4))

    def __enter__(self) -> "OtherDevicePlugin":
        services.add_DevicePluginServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self._socket}")
        self._server.start()
        with grpc.insecure_channel(f"unix:{self._directory / 'kubelet.sock'}") as channel:
            services.RegistrationStub(channel).Register(
                messages.RegisterRequest(
                    version="v1beta1", endpoint=self._socket.name, resource_name=self._resource
                ),
                timeout=_SECONDS,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._server.stop(1).wait()
        self._socket.unlink(missing_ok=True)

    def GetDevicePluginOptions(  # noqa: N802 - gRPC's name
        self, request: messages.Empty, context: grpc.ServicerContext
    ) -> messages.DevicePluginOptions:
        return messages.DevicePluginOptions()

    def ListAndWatch(  # noqa: N802
        self, request: messages.Empty, context: grpc.ServicerContext
    ) -> Iterator[messages.ListAndWatchResponse]:
        devices = [messages.Device(ID=each, health="Healthy") for each in self._ids]
        yield messages.ListAndWatchResponse(devices=devices)
        self._ending.wait()

    def Allocate(  # noqa: N802
        self, request: messages.AllocateRequest, context: grpc.ServicerContext
    ) -> messages.AllocateResponse:
        responses = [
            messages.ContainerAllocateResponse(envs={"OTHER_DEVICES": ",".join(each.devices_ids)})
            for each in request.container_requests
        ]
        return messages.AllocateResponse(container_responses=responses)
