"""Whether the kubelet could reach us: GetInfo and an empty NodePrepareResources to ourselves."""

from pathlib import Path

import grpc
import grpc.aio

from api.kubelet import dra_v1_pb2, registration_v1_pb2
from dra_driver.errors import NodeError
from dra_driver.kubeletplugin.registration import SERVICE
from dra_driver.kubeletplugin.service import VERSIONS
from dra_driver.kubeletplugin.sockets import SocketPaths

# A channel must not share the connection of an earlier check: the path may lead nowhere by now.
_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)


async def check(paths: SocketPaths, timeout_seconds: float) -> None:
    """Ask as the kubelet does, over both sockets. NodeError: what does not answer as it should."""
    info = registration_v1_pb2.PluginInfo.FromString(
        await _ask(paths.registration, f"/{SERVICE}/GetInfo", timeout_seconds)
    )
    if (info.name, info.endpoint) != (paths.driver, str(paths.service)):
        raise NodeError(
            f"{paths.registration} speaks for {info.name} at {info.endpoint}, not for "
            f"{paths.driver} at {paths.service}: another plugin took our place"
        )
    method = f"/{VERSIONS[0].service}/NodePrepareResources"
    answer = dra_v1_pb2.NodePrepareResourcesResponse.FromString(
        await _ask(paths.service, method, timeout_seconds)
    )
    if answer.claims:
        raise NodeError(f"{paths.service} answered for claims that nobody asked about")


async def _ask(path: Path, method: str, timeout_seconds: float) -> bytes:
    async with grpc.aio.insecure_channel(f"unix:{path}", options=_OPTIONS) as channel:
        try:
            call = channel.unary_unary(
                method, request_serializer=bytes, response_deserializer=bytes
            )
            return await call(b"", timeout=timeout_seconds)
        except grpc.RpcError as error:
            raise NodeError(f"{method} over {path} failed: {error.details()}") from error
