"""The socket at which the kubelet takes registrations of device plugins."""

import stat
from pathlib import Path
from typing import Final

import grpc

from api.kubelet import device_plugin_v1beta1_pb2 as messages
from dra_driver.base.errors import NodeError
from dra_driver.kubeletplugin.device_plugin.resources import ResourceName

# The kubelet dials us for up to 10 s before it answers.
REGISTER_SECONDS: Final = 15.0
_VERSION: Final = "v1beta1"
_METHOD: Final = "/v1beta1.Registration/Register"
_CHANNEL_OPTIONS: Final = (("grpc.use_local_subchannel_pool", 1),)

KubeletSocketId = tuple[int, int, int]
"""Another one after each start of the kubelet: file system, inode, time of its making."""


class KubeletSocket:
    """``kubelet.sock`` in *directory*."""

    def __init__(self, directory: Path) -> None:
        self.path: Final = directory / "kubelet.sock"

    def identity(self) -> KubeletSocketId | None:
        """Which kubelet has made it; None: it is not there."""
        try:
            status = self.path.lstat()
        except OSError:
            return None
        if not stat.S_ISSOCK(status.st_mode):
            return None
        return status.st_dev, status.st_ino, status.st_mtime_ns

    def register(
        self,
        resource: ResourceName,
        endpoint: str,
        options: messages.DevicePluginOptions,
        timeout_seconds: float,
    ) -> None:
        """Say that *resource* is served at the socket *endpoint* beside it. The kubelet calls us
        before it answers. NodeError: it refused, or did not answer."""
        request = messages.RegisterRequest(
            version=_VERSION, endpoint=endpoint, resource_name=resource, options=options
        )
        with grpc.insecure_channel(f"unix:{self.path}", options=_CHANNEL_OPTIONS) as channel:
            call = channel.unary_unary(
                _METHOD,
                request_serializer=messages.RegisterRequest.SerializeToString,
                response_deserializer=messages.Empty.FromString,
            )
            try:
                call(request, timeout=timeout_seconds)
            except grpc.RpcError as error:
                raise NodeError(
                    f"the kubelet did not register {resource} at {self.path}: {error.details()}"
                ) from error
