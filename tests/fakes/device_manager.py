"""The kubelet's device manager: real gRPC over real unix sockets, and its rules about plugins.

As pkg/kubelet/cm/devicemanager has them, with what is unkind in them: it dials a plugin while it
answers Register and never again; it closes its newest connection for a resource when any stream of
that resource ends; and from 1.34 on it crashes when a device that it gives out is not in the newest
list. Here that is an entry in ``panics``, and the test fails when the fake ends::

    with FakeDeviceManager(directory, minor=36) as kubelet:
        kubelet.wait_for_allocatable("nvidia.com/gpu", 2)
        container = kubelet.allocate("nvidia.com/gpu", 1)      # AdmissionError: what a pod shows
        kubelet.pre_start(container)
        kubelet.restart()
"""

import base64
import itertools
import json
import os
import re
import stat
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc

from api.kubelet import device_plugin_v1beta1_pb2 as messages
from tests.waiting import eventually

CHECKPOINT = "kubelet_internal_checkpoint"
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
_LOCAL = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 200),
)
_NAME = re.compile(r"[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?")
_PLUGIN = "/v1beta1.DevicePlugin"


class AdmissionError(Exception):
    """The message of a pod that the kubelet rejects."""


@dataclass(frozen=True)
class Device:
    """*numa_nodes*: None where the plugin says nothing of it."""

    health: str
    numa_nodes: tuple[int, ...] | None = None

    @property
    def healthy(self) -> bool:
        return self.health == "Healthy"


@dataclass(frozen=True)
class Registration:
    """One Register that arrived. *streams*: how many streams of the resource there were then."""

    resource: str
    endpoint: str
    version: str
    streams: int
    at: float
    error: str = ""


@dataclass(frozen=True)
class ListMessage:
    resource: str
    endpoint: str
    ids: tuple[str, ...]  # as they came
    devices: dict[str, Device]
    at: float


@dataclass(frozen=True)
class Container:
    """Who holds which devices, and with what answer."""

    resource: str
    ids: tuple[str, ...]
    answer: Any
    pod: str  # its UID
    name: str


class _Client:
    """The connection to one plugin."""

    def __init__(self, resource: str, path: Path) -> None:
        self.resource, self.endpoint = resource, path.name
        self._channel = grpc.insecure_channel(f"unix:{path}", _LOCAL)

    def call(self, method: str, request: Any, response: Any, seconds: float | None) -> Any:
        """One call; the connection is waited for, as a blocking dial does."""
        call: grpc.UnaryUnaryMultiCallable[Any, Any] = self._channel.unary_unary(
            f"{_PLUGIN}/{method}",
            request_serializer=lambda each: each.SerializeToString(),
            response_deserializer=response.FromString,
        )
        return call(request, timeout=seconds, wait_for_ready=method == "GetDevicePluginOptions")

    def lists(self) -> Any:
        call: grpc.UnaryStreamMultiCallable[Any, Any] = self._channel.unary_stream(
            f"{_PLUGIN}/ListAndWatch",
            request_serializer=lambda each: each.SerializeToString(),
            response_deserializer=messages.ListAndWatchResponse.FromString,
        )
        return call(messages.Empty())

    def close(self) -> None:
        self._channel.close()


@dataclass
class _Endpoint:
    client: _Client
    options: Any
    stopped: bool = False


@dataclass
class _Books:
    """What one run of the kubelet knows; a restart begins with new ones."""

    clients: dict[str, _Client] = field(default_factory=dict)  # the newest of each resource
    endpoints: dict[str, _Endpoint] = field(default_factory=dict)
    devices: dict[str, dict[str, Device]] = field(default_factory=dict)
    streams: dict[str, int] = field(default_factory=dict)
    everybody: list[_Client] = field(default_factory=list)
    dead: bool = False


class FakeDeviceManager:
    """The device manager of Kubernetes 1.*minor* with its files in *directory* (a short path)."""

    def __init__(self, directory: Path, minor: int = 36, dial_seconds: float = 10.0) -> None:
        self.directory = directory
        self.minor = minor
        self.registrations: list[Registration] = []  # oldest first
        self.lists: list[ListMessage] = []  # all that were received, oldest first
        self.panics: list[str] = []  # why the kubelet would have crashed
        self.refusals: list[str] = []  # the next Registers are refused with these texts
        self.containers: list[Container] = []  # of pods that have not ended
        self.before_register: Callable[[], None] = lambda: None  # may wait
        self.deaf = False  # does not ask for the lists of those that register
        self._dial_seconds = dial_seconds
        self._guard = threading.RLock()
        self._books = _Books(dead=True)
        self._in_use: dict[str, set[str]] = {}
        self._server: grpc.Server | None = None
        self._numbers = itertools.count()

    def __enter__(self) -> "FakeDeviceManager":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        assert not self.panics, "\n".join(("the kubelet would have crashed:", *self.panics))

    @property
    def socket(self) -> Path:
        return self.directory / "kubelet.sock"

    def start(self) -> None:
        """Empty the directory, and take registrations."""
        self.directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        self._books = _Books()
        for path in sorted(self.directory.iterdir()):
            if self._is_emptied_of(path):
                path.unlink(missing_ok=True)
        self._server = grpc.server(ThreadPoolExecutor(16))
        self._server.add_generic_rpc_handlers((self._registration(),))
        # gRPC removes what it has bound when it stops; of a killed kubelet the socket stays.
        bound = self.directory / f".k{next(self._numbers)}"
        self._server.add_insecure_port(f"unix:{bound}")
        self._server.start()
        os.rename(bound, self.socket)

    def _is_emptied_of(self, path: Path) -> bool:
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:  # its process has removed it meanwhile
            return False
        is_other_file = not stat.S_ISDIR(mode) and path.name != CHECKPOINT
        return stat.S_ISSOCK(mode) or (self.minor <= 32 and is_other_file)

    def kill(self) -> None:
        """As kill -9 does: all connections end, kubelet.sock stays and nobody answers."""
        with self._guard:
            books, self._books = self._books, _Books(dead=True)
            books.dead = True
        if self._server is not None:
            self._server.stop(0).wait(10)
        for client in books.everybody:
            client.close()

    def restart(self) -> None:
        """What pods hold is known from the checkpoint, plugins are not."""
        self.kill()
        self.start()

    def disconnect(self, resource: str) -> None:
        """The newest connection breaks."""
        self._books.clients[resource].close()

    def connect_again(self, resource: str) -> "_Client":
        """A second connection and stream to the plugin of *resource*, as if it had registered
        twice."""
        client = _Client(resource, self.directory / self._books.endpoints[resource].client.endpoint)
        with self._guard:
            self._books.clients[resource] = client
            self._books.everybody.append(client)
        self._begin(self._books, client)
        return client

    def capacity(self, resource: str) -> int | None:
        """What the Node says next; None: it has no such key."""
        devices = self._books.devices.get(resource)
        return None if devices is None else len(devices)

    def allocatable(self, resource: str) -> int | None:
        devices = self._books.devices.get(resource)
        return None if devices is None else sum(each.healthy for each in devices.values())

    def devices(self, resource: str) -> dict[str, Device]:
        return dict(self._books.devices.get(resource, {}))

    def streams(self, resource: str) -> int:
        """How many ListAndWatch calls are open."""
        return self._books.streams.get(resource, 0)

    def endpoint(self, resource: str) -> str | None:
        """The socket that calls go to; None: none, or one whose stream has ended."""
        endpoint = self._books.endpoints.get(resource)
        return None if endpoint is None or endpoint.stopped else endpoint.client.endpoint

    def registrations_of(self, resource: str) -> list[Registration]:
        return [each for each in self.registrations if each.resource == resource]

    def wait_for_allocatable(self, resource: str, count: int | None, seconds: float = 60.0) -> None:
        eventually(
            lambda: self.allocatable(resource) == count, f"{count} {resource}", seconds=seconds
        )

    def wait_until(self, ready: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
        eventually(ready, what, seconds=seconds)

    def allocate(
        self,
        resource: str,
        count: int,
        must_include: Sequence[str] = (),
        between: Callable[[], None] = lambda: None,
        pod: str = "",
        container: str = "main",
    ) -> Container:
        """Admit a container that asks for *count*. *between*: happens after the devices are chosen,
        before the plugin is asked for them. *pod*: its UID; empty: a new one."""
        endpoint = self._usable(resource)
        with self._guard:
            used = self._in_use.setdefault(resource, set())
            healthy = {id for id, each in self.devices(resource).items() if each.healthy}
            if not healthy:
                raise AdmissionError(f"no healthy devices present; cannot allocate {resource}")
            available = sorted(healthy - used)
            if len(available) < count:
                raise AdmissionError(
                    f"requested number of devices unavailable for {resource}. Requested: {count}, "
                    f"Available: {len(available)}"
                )
            ids = self._chosen(endpoint, available, must_include, count)
            used |= set(ids)
        try:
            between()
            answer = self._answer(endpoint, resource, ids)
        except AdmissionError:
            with self._guard:
                used -= set(ids)
            raise
        with self._guard:
            admitted = Container(resource, ids, answer, pod or str(uuid.uuid4()), container)
            self.containers.append(admitted)
            self._write_checkpoint()
        return admitted

    def pre_start(self, container: Container, seconds: float = 30.0) -> None:
        """Create a container of the pod; also after its first one ended."""
        endpoint = self._usable(container.resource)
        if endpoint.options.pre_start_required:
            request = messages.PreStartContainerRequest(devices_ids=container.ids)
            try:
                endpoint.client.call(
                    "PreStartContainer", request, messages.PreStartContainerResponse, seconds
                )
            except grpc.RpcError as error:
                raise AdmissionError(f"PreStartContainer: {error.details()}") from error

    def start_by_dra(self, resource: str) -> None:
        """Create a container that asks for *resource* and has got it by DRA."""
        endpoint = self._books.endpoints.get(resource)
        if endpoint is not None and endpoint.options.pre_start_required:
            raise AdmissionError(f"no devices found allocated in local cache for {resource}")

    def free(self, container: Container) -> None:
        """The pod has ended: its devices may go to others. Plugins are told nothing."""
        with self._guard:
            self._in_use[container.resource] -= set(container.ids)
            self.containers.remove(container)
            self._write_checkpoint()

    def _usable(self, resource: str) -> _Endpoint:
        endpoint = self._books.endpoints.get(resource)
        if endpoint is None:
            raise AdmissionError(
                f"endpoint not found in cache for a registered resource: {resource}"
            )
        if endpoint.stopped:
            raise AdmissionError(f"endpoint {endpoint.client.endpoint} has been stopped")
        return endpoint

    def _chosen(
        self, endpoint: _Endpoint, available: Sequence[str], must_include: Sequence[str], count: int
    ) -> tuple[str, ...]:
        """What the plugin prefers, filled up with others; its error fails the pod."""
        if not endpoint.options.get_preferred_allocation_available:
            return tuple(available[:count])
        response = self._ask(
            endpoint,
            "GetPreferredAllocation",
            messages.PreferredAllocationRequest(
                container_requests=[
                    messages.ContainerPreferredAllocationRequest(
                        available_deviceIDs=available,
                        must_include_deviceIDs=must_include,
                        allocation_size=count,
                    )
                ]
            ),
            messages.PreferredAllocationResponse,
        )
        preferred = list(response.container_responses[0].deviceIDs)
        usable = [id for id in dict.fromkeys(preferred) if id in available]
        return tuple((usable + [id for id in available if id not in usable])[:count])

    def _answer(self, endpoint: _Endpoint, resource: str, ids: tuple[str, ...]) -> Any:
        request = messages.AllocateRequest(
            container_requests=[messages.ContainerAllocateRequest(devices_ids=ids)]
        )
        answer = self._ask(endpoint, "Allocate", request, messages.AllocateResponse)
        if not answer.container_responses:
            raise AdmissionError(f"no containers return in allocation response for {resource}")
        gone = sorted(set(ids) - self.devices(resource).keys())
        if gone and self.minor >= 34 and not self._books.dead:
            self.panics.append(f"{resource}: {gone} left the list while they were allocated")
        return answer.container_responses[0]

    def _ask(self, endpoint: _Endpoint, method: str, request: Any, response: Any) -> Any:
        try:
            return endpoint.client.call(method, request, response, None)
        except grpc.RpcError as error:
            code = error.code().name.title().replace("_", "")
            raise AdmissionError(
                f"{method} failed due to rpc error: code = {code} desc = {error.details()}, "
                "which is unexpected"
            ) from error

    def _registration(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            "v1beta1.Registration",
            {
                "Register": grpc.unary_unary_rpc_method_handler(
                    self._register,
                    request_deserializer=messages.RegisterRequest.FromString,
                    response_serializer=messages.Empty.SerializeToString,
                )
            },
        )

    def _register(self, request: Any, context: grpc.ServicerContext) -> messages.Empty:
        books, name = self._books, request.resource_name
        self.before_register()
        error = self._refusal(request)
        with self._guard:
            streams = books.streams.get(name, 0)
        if not error:
            error = self._connect(books, name, self.directory / request.endpoint)
        seen = Registration(
            name, request.endpoint, request.version, streams, time.monotonic(), error
        )
        self.registrations.append(seen)
        if error:
            context.abort(grpc.StatusCode.UNKNOWN, error)
        return messages.Empty()

    def _refusal(self, request: Any) -> str:
        if self.refusals:
            return self.refusals.pop(0)
        if request.version != "v1beta1":
            return f'requested API version "{request.version}" is not supported by kubelet'
        domain, slash, name = request.resource_name.partition("/")
        if not slash or "kubernetes.io" in domain or not _NAME.fullmatch(name):
            return f'the ResourceName "{request.resource_name}" is invalid'
        return ""

    def _connect(self, books: _Books, name: str, path: Path) -> str:
        """Dial the plugin and ask for its options; the error. A failure forgets who was there."""
        client = _Client(name, path)
        with self._guard:
            books.clients[name] = client
            books.everybody.append(client)
        try:
            options = client.call(
                "GetDevicePluginOptions",
                messages.Empty(),
                messages.DevicePluginOptions,
                self._dial_seconds,
            )
        except grpc.RpcError as error:
            client.close()
            with self._guard:
                books.clients.pop(name, None)
            return f"failed to dial device plugin with socketPath {path}: {error.details()}"
        with self._guard:
            books.endpoints[name] = _Endpoint(client, options)
        if not self.deaf:
            self._begin(books, client)
        return ""

    def _begin(self, books: _Books, client: _Client) -> None:
        with self._guard:
            books.streams[client.resource] = books.streams.get(client.resource, 0) + 1
        threading.Thread(target=self._run, args=(books, client), daemon=True).start()

    def _run(self, books: _Books, client: _Client) -> None:
        name = client.resource
        try:
            for message in client.lists():
                self._received(books, client, message)
        except (grpc.RpcError, ValueError):  # ValueError: the channel was closed before it began
            pass
        with self._guard:
            books.streams[name] -= 1
            newest = books.clients.pop(name, None)
            if newest is None:
                return
            books.endpoints[name].stopped = True
            devices = books.devices.get(name, {})
            books.devices[name] = {
                id: replace(each, health="Unhealthy") for id, each in devices.items()
            }
        newest.close()

    def _received(self, books: _Books, client: _Client, message: Any) -> None:
        devices = {each.ID: _device(each) for each in message.devices}
        ids = tuple(each.ID for each in message.devices)
        with self._guard:
            if books.dead:
                return
            books.devices[client.resource] = devices
            self.lists.append(
                ListMessage(client.resource, client.endpoint, ids, devices, time.monotonic())
            )
            self._write_checkpoint()

    def _write_checkpoint(self) -> None:
        """As after each list and each Allocate; read by whoever wants to know who holds what."""
        document = {
            "Data": {
                "PodDeviceEntries": [_entry(each) for each in self.containers],
                "RegisteredDevices": {
                    name: sorted(id for id, each in devices.items() if each.healthy)
                    for name, devices in self._books.devices.items()
                },
            },
            "Checksum": 0,
        }
        new = self.directory / f".{CHECKPOINT}.new"
        new.write_text(json.dumps(document))
        os.rename(new, self.directory / CHECKPOINT)


def _entry(container: Container) -> dict[str, Any]:
    return {
        "PodUID": container.pod,
        "ContainerName": container.name,
        "ResourceName": container.resource,
        "DeviceIDs": {"-1": list(container.ids)},
        "AllocResp": base64.b64encode(container.answer.SerializeToString()).decode(),
    }


def _device(device: Any) -> Device:
    is_told = device.HasField("topology")
    return Device(device.health, tuple(n.ID for n in device.topology.nodes) if is_told else None)
