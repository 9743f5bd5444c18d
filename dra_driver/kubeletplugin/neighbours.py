"""Which plugins serve this node, seen from outside; nothing is changed.

Every socket in the kubelet's registry is asked who answers there, and the lock files of
``instances`` say which processes of our own are alive.
"""

import fcntl
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from api.kubelet import registration_v1_pb2 as messages
from dra_driver.kubeletplugin.file_locks import closing, disk_errors, try_flock
from dra_driver.kubeletplugin.registration import SERVICE

if TYPE_CHECKING:
    _Pending = grpc.Future[messages.PluginInfo]  # generic in the type stubs alone

_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A socket in the registry, and who answers behind it: empty where nobody does."""

    socket: Path
    name: str = ""  # as GetInfo says: "gpu.nvidia.com"
    endpoint: str = ""
    error: str = ""  # why there is no answer


@dataclass(frozen=True, slots=True)
class Process:
    """A live plugin process of ours."""

    number: int  # a higher one is newer
    owner: str  # its pod's UID, or its process ID where it was given none

    @property
    def pod_uid(self) -> str | None:
        """What its sockets are named by."""
        return None if self.owner.isdecimal() else self.owner


def neighbours(registry: Path, timeout_seconds: float) -> tuple[Neighbour, ...]:
    """Everybody in *registry*, all asked at once. NodeError: the directory cannot be read."""
    with disk_errors(f"read {registry}"):
        paths = sorted(path for path in registry.iterdir() if _is_shown_socket(path))
    channels = [grpc.insecure_channel(f"unix:{path}", options=_OPTIONS) for path in paths]
    try:
        calls = [_ask(channel, timeout_seconds) for channel in channels]
        return tuple(_answer(path, call) for path, call in zip(paths, calls, strict=True))
    finally:
        for channel in channels:
            channel.close()


def processes(directory: Path) -> tuple[Process, ...]:
    """The live ones of those that are noted in *directory* (see ``instances``), oldest first."""
    with disk_errors(f"read {directory}"):
        names = sorted(os.listdir(directory)) if directory.is_dir() else []
        found = []
        for name in names:
            number, _, owner = name.partition("-")
            if number.isdecimal() and _is_locked(directory / name):
                found.append(Process(int(number), owner))
        return tuple(sorted(found, key=lambda process: process.number))


def _is_shown_socket(path: Path) -> bool:
    """The kubelet ignores names that begin with a dot, and what is no socket."""
    try:
        return not path.name.startswith(".") and stat.S_ISSOCK(path.stat().st_mode)
    except FileNotFoundError:
        return False


def _is_locked(path: Path) -> bool:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    with closing(file):
        return not try_flock(file, fcntl.LOCK_SH)


def _ask(channel: grpc.Channel, timeout_seconds: float) -> "_Pending":
    method: grpc.UnaryUnaryMultiCallable[messages.InfoRequest, messages.PluginInfo] = (
        channel.unary_unary(
            f"/{SERVICE}/GetInfo",
            request_serializer=messages.InfoRequest.SerializeToString,
            response_deserializer=messages.PluginInfo.FromString,
        )
    )
    return method.future(messages.InfoRequest(), timeout=timeout_seconds)


def _answer(path: Path, call: "_Pending") -> Neighbour:
    try:
        info = call.result()
    except grpc.RpcError as error:
        said = error.details() if isinstance(error, grpc.Call) else error
        return Neighbour(path, error=str(said))
    return Neighbour(path, info.name, info.endpoint)
