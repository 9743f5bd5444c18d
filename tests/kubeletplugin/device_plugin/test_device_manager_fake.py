"""The fake device manager does to plugins what the kubelet does to them."""

import json
import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from api.kubelet import device_plugin_v1beta1_pb2 as messages
from tests.fakes.device_manager import CHECKPOINT, AdmissionError, FakeDeviceManager

GPU = "nvidia.com/gpu"


class Plugin:
    """A plugin that does what a test says, and nothing by itself."""

    def __init__(self, directory: Path, endpoint: str = "a.sock", preferred: bool = False) -> None:
        self.allocated: Callable[[Any], Any] = lambda _: [messages.ContainerAllocateResponse()]
        self.prefers: Callable[[Any], Sequence[str]] = lambda _: ()
        self._endpoint = endpoint
        self._kubelet = directory / "kubelet.sock"
        self._lists: queue.Queue[messages.ListAndWatchResponse | None] = queue.Queue()
        self._options = messages.DevicePluginOptions(
            pre_start_required=True, get_preferred_allocation_available=preferred
        )
        self._server = grpc.server(ThreadPoolExecutor(8))
        self._server.add_generic_rpc_handlers((self._handler(),))
        self._server.add_insecure_port(f"unix:{directory / endpoint}")
        self._server.start()

    def __enter__(self) -> "Plugin":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._server.stop(0).wait(10)

    def register(self, resource: str = GPU, version: str = "v1beta1", endpoint: str = "") -> str:
        """The kubelet's error."""
        request = messages.RegisterRequest(
            version=version, endpoint=endpoint or self._endpoint, resource_name=resource
        )
        with grpc.insecure_channel(f"unix:{self._kubelet}") as channel:
            call = channel.unary_unary(
                "/v1beta1.Registration/Register",
                request_serializer=messages.RegisterRequest.SerializeToString,
                response_deserializer=messages.Empty.FromString,
            )
            try:
                call(request, timeout=30)
            except grpc.RpcError as error:
                return str(error.details())
        return ""

    def send(self, *ids: str, health: str = "Healthy", numa: int | None = None) -> None:
        response = messages.ListAndWatchResponse()
        for id in ids:
            device = response.devices.add(ID=id, health=health)
            if numa is not None:
                device.topology.nodes.add(ID=numa)
        self._lists.put(response)

    def end(self) -> None:
        """End the oldest stream that waits for a list."""
        self._lists.put(None)

    def _watch(self, _request: Any, _context: Any) -> Iterator[Any]:
        while (response := self._lists.get()) is not None:
            yield response

    def _allocate(self, request: Any, _context: Any) -> Any:
        return messages.AllocateResponse(container_responses=self.allocated(request))

    def _preferred(self, request: Any, _context: Any) -> Any:
        response = messages.PreferredAllocationResponse()
        for each in request.container_requests:
            response.container_responses.add(deviceIDs=self.prefers(each))
        return response

    def _handler(self) -> grpc.GenericRpcHandler:
        def unary(call: Callable[[Any, Any], Any], request: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(
                call,
                request_deserializer=request.FromString,
                response_serializer=lambda each: each.SerializeToString(),
            )

        return grpc.method_handlers_generic_handler(
            "v1beta1.DevicePlugin",
            {
                "GetDevicePluginOptions": unary(lambda *_: self._options, messages.Empty),
                "Allocate": unary(self._allocate, messages.AllocateRequest),
                "GetPreferredAllocation": unary(
                    self._preferred, messages.PreferredAllocationRequest
                ),
                "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                    self._watch,
                    request_deserializer=messages.Empty.FromString,
                    response_serializer=lambda each: each.SerializeToString(),
                ),
            },
        )


@pytest.fixture
def plugin(short: Path, kubelet: FakeDeviceManager) -> Iterator[Plugin]:
    with Plugin(short) as plugin:
        yield plugin


def test_a_registered_plugin_gives_devices_to_containers(
    kubelet: FakeDeviceManager, plugin: Plugin
) -> None:
    assert kubelet.allocatable(GPU) is None

    assert plugin.register() == ""
    plugin.send("a", "b")
    kubelet.wait_for_allocatable(GPU, 2)
    container = kubelet.allocate(GPU, 1)
    with pytest.raises(AdmissionError, match=r"Requested: 2, Available: 1"):
        kubelet.allocate(GPU, 2)
    kubelet.free(container)

    assert len(kubelet.allocate(GPU, 2).ids) == 2


def test_its_checkpoint_says_who_holds_what(
    short: Path, kubelet: FakeDeviceManager, plugin: Plugin
) -> None:
    plugin.register()
    plugin.send("a", "b")
    kubelet.wait_for_allocatable(GPU, 2)
    container = kubelet.allocate(GPU, 1, pod="pod-1", container="main")

    def data() -> Any:
        return json.loads((short / CHECKPOINT).read_text())["Data"]

    assert data()["RegisteredDevices"] == {GPU: ["a", "b"]}
    assert data()["PodDeviceEntries"] == [
        {
            "PodUID": "pod-1",
            "ContainerName": "main",
            "ResourceName": GPU,
            "DeviceIDs": {"-1": list(container.ids)},
            "AllocResp": "",
        }
    ]

    kubelet.free(container)
    assert data()["PodDeviceEntries"] == []


def test_each_list_replaces_the_one_before(kubelet: FakeDeviceManager, plugin: Plugin) -> None:
    plugin.register()
    plugin.send("a", "b", numa=1)
    kubelet.wait_for_allocatable(GPU, 2)
    plugin.send("b", "b", health="healthy")
    kubelet.wait_for_allocatable(GPU, 0)

    assert kubelet.capacity(GPU) == 1
    assert [each.ids for each in kubelet.lists] == [("a", "b"), ("b", "b")]
    assert [each.devices["b"].numa_nodes for each in kubelet.lists] == [(1,), None]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"version": "v1"}, 'API version "v1" is not supported'),
        ({"resource": "gpu"}, '"gpu" is invalid'),
        ({"resource": "kubernetes.io/gpu"}, "is invalid"),
        ({"resource": f"nvidia.com/{'g' * 64}"}, "is invalid"),
        ({"endpoint": "nobody.sock"}, "failed to dial device plugin"),
    ],
)
def test_a_registration_that_the_kubelet_refuses_is_refused(
    kubelet: FakeDeviceManager, plugin: Plugin, arguments: dict[str, str], error: str
) -> None:
    assert error in plugin.register(**arguments)
    assert error in kubelet.registrations[0].error


def test_a_refusal_can_be_asked_for(kubelet: FakeDeviceManager, plugin: Plugin) -> None:
    kubelet.refusals = ["not now"]

    assert plugin.register() == "not now"
    assert plugin.register() == ""


def test_when_a_stream_ends_its_devices_are_unhealthy(
    kubelet: FakeDeviceManager, plugin: Plugin
) -> None:
    plugin.register()
    plugin.send("a")
    kubelet.wait_for_allocatable(GPU, 1)
    plugin.end()
    kubelet.wait_for_allocatable(GPU, 0)

    assert (kubelet.capacity(GPU), kubelet.streams(GPU), kubelet.endpoint(GPU)) == (1, 0, None)
    with pytest.raises(AdmissionError, match="has been stopped"):
        kubelet.allocate(GPU, 1)


def test_the_end_of_an_older_stream_closes_the_newest_client(
    short: Path, kubelet: FakeDeviceManager, plugin: Plugin
) -> None:
    plugin.register()
    plugin.send("a")
    kubelet.wait_for_allocatable(GPU, 1)
    with Plugin(short, "b.sock") as newer:
        newer.register()
        newer.send("a", "b")
        kubelet.wait_for_allocatable(GPU, 2)
        assert (kubelet.endpoint(GPU), kubelet.streams(GPU)) == ("b.sock", 2)

        plugin.end()
        kubelet.wait_for_allocatable(GPU, 0)

        kubelet.wait_until(lambda: kubelet.streams(GPU) == 0, "the newer plugin's stream to end")
    assert [each.streams for each in kubelet.registrations] == [0, 1]


def test_a_failed_registration_drops_the_record_of_the_live_plugin(
    kubelet: FakeDeviceManager, plugin: Plugin
) -> None:
    plugin.register()
    plugin.send("a")
    kubelet.wait_for_allocatable(GPU, 1)
    plugin.register(endpoint="nobody.sock")

    plugin.end()
    kubelet.wait_until(lambda: kubelet.streams(GPU) == 0, "the stream to end")

    assert kubelet.allocatable(GPU) == 1


def test_a_restarted_kubelet_knows_no_plugin_and_has_emptied_the_directory(
    short: Path, kubelet: FakeDeviceManager, plugin: Plugin
) -> None:
    plugin.register()
    plugin.send("a")
    kubelet.wait_for_allocatable(GPU, 1)
    (short / "plain-file").touch()
    kubelet.restart()

    assert kubelet.allocatable(GPU) is None
    assert sorted(path.name for path in short.iterdir()) == [
        "kubelet.sock",
        CHECKPOINT,
        "plain-file",
    ]


def test_before_1_33_it_removes_every_file_but_its_checkpoint(short: Path) -> None:
    for name in (CHECKPOINT, "plain-file"):
        (short / name).touch()
    (short / "directory").mkdir()
    with FakeDeviceManager(short, minor=32):
        names = sorted(path.name for path in short.iterdir())

    assert names == ["directory", "kubelet.sock", CHECKPOINT]


def test_a_killed_kubelet_leaves_its_socket_and_nobody_answers(
    kubelet: FakeDeviceManager, plugin: Plugin
) -> None:
    kubelet.kill()

    assert kubelet.socket.is_socket()
    assert "failed to connect" in plugin.register()


def test_an_answer_for_no_container_rejects_the_pod(
    kubelet: FakeDeviceManager, plugin: Plugin
) -> None:
    plugin.allocated = lambda _: []
    plugin.register()
    plugin.send("a")
    kubelet.wait_for_allocatable(GPU, 1)

    with pytest.raises(AdmissionError, match="no containers return"):
        kubelet.allocate(GPU, 1)


def test_of_what_a_plugin_prefers_the_available_counts(
    short: Path, kubelet: FakeDeviceManager
) -> None:
    with Plugin(short, preferred=True) as plugin:
        plugin.prefers = lambda request: ["z", "c"]
        plugin.register()
        plugin.send("a", "b", "c")
        kubelet.wait_for_allocatable(GPU, 3)

        assert kubelet.allocate(GPU, 2).ids == ("c", "a")


@pytest.mark.parametrize(("minor", "crashes"), [(33, False), (34, True)])
def test_a_device_that_leaves_the_list_while_it_is_allocated_crashes_new_kubelets(
    short: Path, minor: int, crashes: bool
) -> None:
    with FakeDeviceManager(short, minor) as kubelet, Plugin(short) as plugin:
        plugin.register()
        plugin.send("a")
        kubelet.wait_for_allocatable(GPU, 1)

        def leave() -> None:
            plugin.send("b")
            kubelet.wait_until(lambda: "a" not in kubelet.devices(GPU), "the list without it")

        kubelet.allocate(GPU, 1, between=leave)
        panics, kubelet.panics = kubelet.panics, []
    assert bool(panics) == crashes


def test_a_list_above_4_mib_ends_the_stream(kubelet: FakeDeviceManager, plugin: Plugin) -> None:
    plugin.register()
    plugin.send(*(f"{number:046}" for number in range(75_000)))

    kubelet.wait_until(lambda: kubelet.streams(GPU) == 0, "the stream to end")
    assert kubelet.lists == []
