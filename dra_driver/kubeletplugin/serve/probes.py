"""Probes of plugins: whether the kubelet could reach this one, and which others serve the node.

Nothing is changed. Every socket in the kubelet's registry is asked who answers there.
"""

import stat
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from api.kubelet import dra_v1_pb2, registration_v1_pb2
from api.kubelet import registration_v1_pb2 as messages
from dra_driver.base.deadlines import Deadline
from dra_driver.base.errors import NodeError, SettingsError
from dra_driver.base.files import disk_errors
from dra_driver.base.frozen import frozen
from dra_driver.kubeletplugin.serve.rolling_update import PluginProcess, plugin_processes
from dra_driver.kubeletplugin.serve.services import DRA_SERVICE_VERSIONS, REGISTRATION_SERVICE
from dra_driver.kubeletplugin.serve.sockets import SocketPaths, socket_paths

if TYPE_CHECKING:
    _Pending = grpc.Future[messages.PluginInfo]  # generic in the type stubs alone

# A channel must not share the connection of an earlier check: the path may lead nowhere by now.
_CHANNEL_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)


@frozen
class RegisteredPlugin:
    """A socket in the registry, and who answers behind it: empty where nobody does."""

    socket: Path
    name: str = ""  # as GetInfo says: "gpu.nvidia.com"
    endpoint: str = ""
    error: str = ""  # why there is no answer


def registered_plugins(registry: Path, timeout_seconds: float) -> tuple[RegisteredPlugin, ...]:
    """Everybody in *registry*, all asked at once. NodeError: the directory cannot be read."""
    with disk_errors(f"read {registry}"):
        paths = sorted(path for path in registry.iterdir() if _is_shown_socket(path))
    channels = [grpc.insecure_channel(f"unix:{path}", options=_CHANNEL_OPTIONS) for path in paths]
    try:
        calls = [_ask_plugin(channel, timeout_seconds) for channel in channels]
        return tuple(_answer(path, call) for path, call in zip(paths, calls, strict=True))
    finally:
        for channel in channels:
            channel.close()


def other_plugins(
    registry: Path, plugin_dir: Path, driver: str, timeout_seconds: float
) -> tuple[RegisteredPlugin, ...]:
    """Everybody in *registry* but our own live processes, which have *plugin_dir*. NodeError: a
    directory cannot be read."""
    # Before and afterwards: a process that ended or started meanwhile is ours, too.
    own = _own_registrations(registry, plugin_dir, driver)
    plugins = registered_plugins(registry, timeout_seconds) if registry.is_dir() else ()
    own |= _own_registrations(registry, plugin_dir, driver)
    return tuple(plugin for plugin in plugins if plugin.socket not in own)


def _own_registrations(registry: Path, plugin_dir: Path, driver: str) -> set[Path]:
    sockets = own_sockets(registry, plugin_dir, driver).values()
    return {paths.registration for paths in sockets if paths}


def own_sockets(
    registry: Path, plugin_dir: Path, driver: str
) -> dict[PluginProcess, SocketPaths | None]:
    """Our live processes with their sockets. None: no socket of it fits into the directories."""
    sockets: dict[PluginProcess, SocketPaths | None] = {}
    for process in plugin_processes(plugin_dir / "instances"):
        try:
            sockets[process] = socket_paths(driver, plugin_dir, registry, process.pod_uid)
        except SettingsError:
            sockets[process] = None
    return sockets


def _is_shown_socket(path: Path) -> bool:
    """The kubelet ignores names that begin with a dot, and what is no socket."""
    try:
        return not path.name.startswith(".") and stat.S_ISSOCK(path.stat().st_mode)
    except FileNotFoundError:
        return False


def _ask_plugin(channel: grpc.Channel, timeout_seconds: float) -> "_Pending":
    method: grpc.UnaryUnaryMultiCallable[messages.InfoRequest, messages.PluginInfo] = (
        channel.unary_unary(
            f"/{REGISTRATION_SERVICE}/GetInfo",
            request_serializer=messages.InfoRequest.SerializeToString,
            response_deserializer=messages.PluginInfo.FromString,
        )
    )
    return method.future(messages.InfoRequest(), timeout=timeout_seconds)


def _answer(path: Path, call: "_Pending") -> RegisteredPlugin:
    try:
        info = call.result()
    except grpc.RpcError as error:
        details = error.details() if isinstance(error, grpc.Call) else error
        return RegisteredPlugin(path, error=str(details))
    return RegisteredPlugin(path, info.name, info.endpoint)


def check_plugin_sockets(paths: SocketPaths, timeout_seconds: float) -> None:
    """Ask as the kubelet does, over both sockets. NodeError: what does not answer as it should."""
    deadline = Deadline(timeout_seconds, "asking our own sockets")
    info = registration_v1_pb2.PluginInfo.FromString(
        _ask(paths.registration, f"/{REGISTRATION_SERVICE}/GetInfo", deadline)
    )
    if (info.name, info.endpoint) != (paths.driver, str(paths.service)):
        raise NodeError(
            f"{paths.registration} speaks for {info.name} at {info.endpoint}, not for "
            f"{paths.driver} at {paths.service}: another plugin took our place"
        )
    method = f"/{DRA_SERVICE_VERSIONS[0].service}/NodePrepareResources"
    answer = dra_v1_pb2.NodePrepareResourcesResponse.FromString(
        _ask(paths.service, method, deadline)
    )
    if answer.claims:
        raise NodeError(f"{paths.service} answered for claims that nobody asked about")


def _ask(path: Path, method: str, deadline: Deadline) -> bytes:
    with grpc.insecure_channel(f"unix:{path}", options=_CHANNEL_OPTIONS) as channel:
        try:
            call = channel.unary_unary(
                method, request_serializer=bytes, response_deserializer=bytes
            )
            return call(b"", timeout=deadline.check())
        except grpc.RpcError as error:
            raise NodeError(f"{method} over {path} failed: {error.details()}") from error
