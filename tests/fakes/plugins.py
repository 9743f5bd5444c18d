"""The kubelet's plugin watcher and its table of DRA plugins (pkg/kubelet/pluginmanager)."""

import math
import re
import stat
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from api.kubelet import dra_v1_pb2, dra_v1beta1_pb2
from api.kubelet import registration_v1_pb2 as registration
from dra_driver.k8s.claims import ClaimRef

_MESSAGES = {"v1.DRAPlugin": dra_v1_pb2, "v1beta1.DRAPlugin": dra_v1beta1_pb2}
_DRIVER_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


class KubeletError(Exception):
    """What the kubelet would report: the pod cannot start (or end) now."""


@dataclass(eq=False)
class Instance:
    """One registered plugin process and the connection to it, which stays open."""

    driver: str
    endpoint: str
    version: str
    versions: tuple[str, ...]
    channel: grpc.Channel
    connected: bool = False

    def look(self) -> bool:
        """See whether the connection stands, or try to make it; whether that changed."""
        # The public way (Channel.subscribe) polls every 200 ms, and close() waits for that.
        inner: Any = self.channel
        state = inner._channel.check_connectivity_state(True)
        before, self.connected = self.connected, state == grpc.ChannelConnectivity.READY.value[0]
        return before != self.connected

    def call(self, verb: str, refs: Sequence[ClaimRef], timeout: float) -> Any:
        """NodePrepareResources or NodeUnprepareResources over the one connection."""
        messages = _MESSAGES[self.version]
        service = messages.DESCRIPTOR.services_by_name["DRAPlugin"].full_name
        method: grpc.UnaryUnaryMultiCallable[Any, Any] = self.channel.unary_unary(
            f"/{service}/Node{verb}Resources",
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=getattr(messages, f"Node{verb}ResourcesResponse").FromString,
        )
        claims = [messages.Claim(namespace=r.namespace, name=r.name, uid=r.uid) for r in refs]
        request = getattr(messages, f"Node{verb}ResourcesRequest")(claims=claims)
        return method(request, timeout=timeout)


@dataclass(frozen=True)
class _SocketId:
    """A socket in the registry; made anew, it is another one."""

    inode: int
    made_ns: int


class Plugins:
    """The registered plugins of one node: watches *registry* until closed."""

    def __init__(self, registry: Path, minor: int, poll_seconds: float) -> None:
        self.refusals: list[str] = []  # why a registration failed, oldest first
        self._registry = registry
        self._minor = minor
        self.poll_seconds = poll_seconds
        self._changed = threading.Condition()
        self._instances: dict[Path, Instance] = {}  # by registration socket, oldest first
        self._socket_ids: dict[Path, _SocketId] = {}
        self._again_at: dict[Path, tuple[float, float]] = {}  # when, and the pause after that
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._reconcile, name="fake kubelet", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(15)
        for path in list(self._instances):
            self._deregister(path)

    def instances(self, driver: str) -> tuple[Instance, ...]:
        """The registered processes of *driver*, oldest first."""
        with self._changed:
            return tuple(i for i in self._instances.values() if i.driver == driver)

    def wait_until(self, ready: Callable[[], bool], condition: str, seconds: float = 60.0) -> None:
        """Wait for something that comes by itself."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while not ready():
                if time.monotonic() > deadline:
                    raise KubeletError(
                        f"waited {seconds:g} s for {condition}; refused: {self.refusals}"
                    )
                self._changed.wait(self.poll_seconds)

    def usable(self, driver: str | None) -> Instance:
        """Whom a call goes to: of those connected the one that registered last."""
        with self._changed:
            instances = [i for i in self._instances.values() if driver in (None, i.driver)]
        if driver is None and len({i.driver for i in instances}) > 1:
            raise KubeletError("several drivers are registered: say which")
        if not instances:
            raise KubeletError(f"DRA driver {driver or '(any)'} is not registered")
        connected = [i for i in instances if i.connected]
        return (connected or instances)[-1]

    def _reconcile(self) -> None:
        while not self._stop.wait(self.poll_seconds):
            self._look_at_connections()
            sockets = dict(_sockets(self._registry))
            for path in [p for p in self._socket_ids if self._socket_ids[p] != sockets.get(p)]:
                self._deregister(path)
                del self._socket_ids[path]
                self._again_at.pop(path, None)
            for path, socket_id in sockets.items():
                due, pause = self._again_at.get(path, (0.0, 0.1))
                if path in self._instances or time.monotonic() < due:
                    continue
                self._socket_ids[path] = socket_id
                try:
                    self._register(path)
                except (grpc.RpcError, KubeletError) as error:
                    self._again_at[path] = (time.monotonic() + pause, pause * 2)
                    with self._changed:
                        self.refusals.append(f"{path.name}: {error}")
                        self._changed.notify_all()

    def _register(self, path: Path) -> None:
        with grpc.insecure_channel(f"unix:{path}", _LOCAL) as channel:
            info = channel.unary_unary(
                "/pluginregistration.Registration/GetInfo",
                request_serializer=registration.InfoRequest.SerializeToString,
                response_deserializer=registration.PluginInfo.FromString,
            )(registration.InfoRequest(), timeout=1)
            try:
                instance = self._accepted(info, path)
            except KubeletError as error:
                _notify(channel, registration.RegistrationStatus(error=str(error)))
                raise
            with self._changed:
                if self._minor < 33:  # one instance per driver: the newest takes the place
                    for older in [p for p, i in self._instances.items() if i.driver == info.name]:
                        self._instances.pop(older).channel.close()
                        self._again_at[older] = (math.inf, 0.0)  # until its socket is new
                self._instances[path] = instance
            try:
                _notify(channel, registration.RegistrationStatus(plugin_registered=True))
            except grpc.RpcError:
                self._deregister(path)
                raise
        self._look_at_connections()

    def _accepted(self, info: registration.PluginInfo, path: Path) -> Instance:
        if info.type != "DRAPlugin":
            raise KubeletError(f"no handler registered for plugin type: {info.type} at {path}")
        if len(info.name) > 63 or not _DRIVER_NAME.fullmatch(info.name):
            raise KubeletError(f"{info.name!r} is not a driver name")
        endpoint = info.endpoint or str(path)
        if any(i.endpoint == endpoint for i in self.instances(info.name)):
            raise KubeletError(f"endpoint {endpoint} already registered for {info.name}")
        version = self._version(info.name, tuple(info.supported_versions))
        channel = grpc.insecure_channel(f"unix:{endpoint}", _LOCAL)
        return Instance(info.name, endpoint, version, tuple(info.supported_versions), channel)

    def _version(self, driver: str, offered: tuple[str, ...]) -> str:
        known = (
            ("v1.DRAPlugin", "v1beta1.DRAPlugin") if self._minor >= 34 else ("v1beta1.DRAPlugin",)
        )
        for version in offered:
            if version in known:
                return version
        raise KubeletError(f"{driver} supports {offered}, this kubelet {known}: none in common")

    def _deregister(self, path: Path) -> None:
        with self._changed:
            instance = self._instances.pop(path, None)
            self._changed.notify_all()
        if instance is not None:
            instance.channel.close()

    def _look_at_connections(self) -> None:
        with self._changed:
            for instance in self._instances.values():
                if instance.look():
                    self._changed.notify_all()


# Every instance gets a connection of its own, also where paths repeat.
_LOCAL = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 200))


def _notify(channel: grpc.Channel, status: registration.RegistrationStatus) -> None:
    channel.unary_unary(
        "/pluginregistration.Registration/NotifyRegistrationStatus",
        request_serializer=registration.RegistrationStatus.SerializeToString,
        response_deserializer=registration.RegistrationStatusResponse.FromString,
    )(status, timeout=5)


def _sockets(directory: Path) -> list[tuple[Path, _SocketId]]:
    """The sockets below *directory*, hidden names left out (pluginwatcher)."""
    sockets = []
    for path in sorted(directory.rglob("*")):
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        if stat.S_ISSOCK(status.st_mode) and not path.name.startswith("."):
            sockets.append((path, _SocketId(status.st_ino, status.st_mtime_ns)))
    return sockets
