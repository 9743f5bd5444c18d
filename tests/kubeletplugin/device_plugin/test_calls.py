"""The kubelet's calls for devices: each is answered, each by itself, whatever others do."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.kubelet import device_plugin_v1beta1_pb2 as messages
from dra_driver.base.errors import ClaimError, NodeError
from dra_driver.kubeletplugin.device_plugin.resources import (
    ContainerResponse,
    DeviceId,
    HostDevice,
    HostMount,
)
from dra_driver.kubeletplugin.device_plugin.service import MAX_PRE_STARTS, is_answer
from tests.fakes.device_manager import AdmissionError, FakeDeviceManager
from tests.fakes.device_plugins import GPU, DeviceGate, FakeHandler, resource, serving
from tests.waiting import eventually

ANSWER = ContainerResponse(
    cdi_names=("example.com/gpu=a",),
    env=(("GPU", "a"),),
    mounts=(HostMount("/host/lib", "/lib", read_only=False),),
    devices=(HostDevice("/dev/nvidia0", "/dev/gpu0", "rwm"),),
)
ENCODED = messages.ContainerAllocateResponse(
    envs={"GPU": "a"},
    mounts=[messages.Mount(host_path="/host/lib", container_path="/lib", read_only=False)],
    devices=[
        messages.DeviceSpec(host_path="/dev/nvidia0", container_path="/dev/gpu0", permissions="rwm")
    ],
    cdi_devices=[messages.CDIDevice(name="example.com/gpu=a")],
)


def raising(error: Exception) -> FakeHandler:
    def fail(ids: Sequence[DeviceId]) -> None:
        raise error

    return FakeHandler(on_allocate=fail, on_pre_start=fail)


@pytest.mark.point(136)
def test_a_container_gets_all_that_is_answered(short: Path, kubelet: FakeDeviceManager) -> None:
    handler = FakeHandler(response=lambda ids: ANSWER)
    with serving(short, resource("a", "b"), handler=handler):
        kubelet.wait_for_allocatable(GPU, 2)
        begun = time.monotonic()
        container = kubelet.allocate(GPU, 2)
        assert time.monotonic() - begun < 1.0
        kubelet.pre_start(container)
        kubelet.pre_start(container)

    assert container.answer == ENCODED
    assert [call for call, *_ in handler.calls] == ["allocate", "pre_start", "pre_start"]
    assert {(name, ids) for _, name, ids in handler.calls} == {(GPU, frozenset({"a", "b"}))}


@pytest.mark.point(140)
def test_each_container_of_a_request_gets_its_own_answer(
    short: Path, kubelet: FakeDeviceManager
) -> None:
    with serving(short, resource("a", "b", "c")):
        kubelet.wait_for_allocatable(GPU, 3)
        with grpc.insecure_channel(f"unix:{short / kubelet.registrations[0].endpoint}") as channel:
            call: grpc.UnaryUnaryMultiCallable[bytes, messages.AllocateResponse] = (
                channel.unary_unary(
                    "/v1beta1.DevicePlugin/Allocate",
                    request_serializer=bytes,
                    response_deserializer=messages.AllocateResponse.FromString,
                )
            )
            request = messages.AllocateRequest(
                container_requests=[
                    messages.ContainerAllocateRequest(devices_ids=["b", "a"]),
                    messages.ContainerAllocateRequest(devices_ids=["c"]),
                ]
            )
            response = call(request.SerializeToString(), timeout=30)

    assert [
        [device.name for device in each.cdi_devices] for each in response.container_responses
    ] == [["example.com/gpu=a", "example.com/gpu=b"], ["example.com/gpu=c"]]


@pytest.mark.parametrize(
    ("error", "code"), [(ClaimError, "FailedPrecondition"), (NodeError, "FailedPrecondition")]
)
def test_the_pod_shows_the_text_for_the_public_of_what_was_refused(
    short: Path, kubelet: FakeDeviceManager, error: type[ClaimError], code: str
) -> None:
    handler = raising(error("node details", public="GPU a is sick: wait, or ask for another"))
    with serving(short, resource("a"), handler=handler):
        kubelet.wait_for_allocatable(GPU, 1)
        with pytest.raises(AdmissionError) as refused:
            kubelet.allocate(GPU, 1)

    assert str(refused.value) == (
        f"Allocate failed due to rpc error: code = {code} desc = "
        "GPU a is sick: wait, or ask for another, which is unexpected"
    )


def test_an_error_of_ours_is_told_and_the_next_pod_is_served(
    short: Path, kubelet: FakeDeviceManager, caplog: pytest.LogCaptureFixture
) -> None:
    handler = raising(ZeroDivisionError())
    with serving(short, resource("a"), handler=handler):
        kubelet.wait_for_allocatable(GPU, 1)
        with pytest.raises(AdmissionError, match="internal error: ZeroDivisionError"):
            kubelet.allocate(GPU, 1)
        handler.on_allocate = lambda ids: None
        container = kubelet.allocate(GPU, 1)
        with pytest.raises(AdmissionError, match="internal error: ZeroDivisionError"):
            kubelet.pre_start(container)

    assert "a call for devices crashed us" in caplog.messages


def test_a_long_text_is_cut(short: Path, kubelet: FakeDeviceManager) -> None:
    with serving(short, resource("a"), handler=raising(NodeError("é" * 100_000))):
        kubelet.wait_for_allocatable(GPU, 1)
        with pytest.raises(AdmissionError, match="é" * 500):
            kubelet.allocate(GPU, 1)


@pytest.mark.point(141)
def test_containers_are_served_side_by_side(short: Path, kubelet: FakeDeviceManager) -> None:
    together = threading.Barrier(8, timeout=60)

    def meet(ids: Sequence[DeviceId]) -> None:
        together.wait()

    handler = FakeHandler(on_allocate=meet)
    ids = [f"gpu-{number}" for number in range(8)]
    with serving(short, resource(*ids), handler=handler), ThreadPoolExecutor(8) as pods:
        kubelet.wait_for_allocatable(GPU, 8)
        containers = list(pods.map(lambda _: kubelet.allocate(GPU, 1), range(8)))

    assert sorted(id for each in containers for id in each.ids) == ids
    for each in containers:
        assert [device.name for device in each.answer.cdi_devices] == [
            f"example.com/gpu={each.ids[0]}"
        ]


@pytest.mark.point(136)
def test_neither_streams_nor_containers_that_start_keep_allocate_waiting(
    short: Path, kubelet: FakeDeviceManager
) -> None:
    gate = DeviceGate()
    ids = [f"gpu-{number:03}" for number in range(120)]
    handler = FakeHandler(on_pre_start=gate)
    with (
        serving(short, resource(*ids), handler=handler) as server,
        ThreadPoolExecutor(110) as pods,
    ):
        kubelet.wait_for_allocatable(GPU, 120)
        containers = [kubelet.allocate(GPU, 1) for _ in range(110)]
        starts = [pods.submit(kubelet.pre_start, each, 60.0) for each in containers]
        eventually(lambda: [name for name, *_ in handler.calls].count("pre_start") == 110)
        begun = time.monotonic()
        kubelet.allocate(GPU, 1)
        assert time.monotonic() - begun < 1.0
        server.offer([resource(*ids, sick=ids[:1])])
        kubelet.wait_for_allocatable(GPU, 119)
        gate.go.set()
        for start in starts:
            start.result(60)


def test_more_containers_than_can_start_at_once_are_refused_and_asked_for_again(
    short: Path, kubelet: FakeDeviceManager
) -> None:
    gate = DeviceGate()
    with (
        serving(short, resource("a"), handler=FakeHandler(on_pre_start=gate)),
        ThreadPoolExecutor(MAX_PRE_STARTS + 1) as pods,
    ):
        kubelet.wait_for_allocatable(GPU, 1)
        container = kubelet.allocate(GPU, 1)
        starts = [
            pods.submit(kubelet.pre_start, container, 90.0) for _ in range(MAX_PRE_STARTS + 1)
        ]
        (refused,) = eventually(lambda: [each for each in starts if each.done()])
        assert "other containers are about to start" in str(refused.exception())
        gate.go.set()
        assert [each.exception(90) for each in starts if each is not refused] == (
            [None] * MAX_PRE_STARTS
        )


@pytest.mark.point(133, 134)
@pytest.mark.parametrize(
    ("preferred", "chosen"),
    [
        pytest.param(["d", "b"], ("d", "b"), id="what the handler prefers"),
        pytest.param(["b"], ("b", "a"), id="too few"),
        pytest.param(["b", "c", "d"], ("b", "a"), id="too many"),
        pytest.param(["b", "z"], ("b", "a"), id="one that is not available"),
        pytest.param(["c", "d"], ("b", "a"), id="not what has to be"),
        pytest.param(["b", "b"], ("b", "a"), id="one twice"),
    ],
)
def test_a_choice_of_devices_is_one_whatever_the_handler_says(
    short: Path, kubelet: FakeDeviceManager, preferred: list[str], chosen: tuple[str, ...]
) -> None:
    handler = FakeHandler(prefers=lambda *_: [DeviceId(id) for id in preferred])
    with serving(short, resource("a", "b", "c", "d"), handler=handler):
        kubelet.wait_for_allocatable(GPU, 4)

        assert kubelet.allocate(GPU, 2, must_include=["b"]).ids == chosen


@pytest.mark.point(134)
@pytest.mark.parametrize("error", [NodeError("sick"), ZeroDivisionError()])
def test_an_error_while_choosing_is_logged_and_fails_no_pod(
    short: Path, kubelet: FakeDeviceManager, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def prefers(*_: object) -> Sequence[DeviceId]:
        raise error

    with serving(short, resource("a", "b", "c"), handler=FakeHandler(prefers=prefers)):
        kubelet.wait_for_allocatable(GPU, 3)

        assert kubelet.allocate(GPU, 2, must_include=["c"]).ids == ("c", "a")
    assert "cannot choose devices" in caplog.messages


@pytest.mark.point(135)
def test_a_choice_among_a_thousand_devices_takes_less_than_100_ms(
    short: Path, kubelet: FakeDeviceManager
) -> None:
    ids = [f"{number:046}" for number in range(1000)]
    with serving(short, resource(*ids)):
        kubelet.wait_for_allocatable(GPU, 1000)
        with grpc.insecure_channel(f"unix:{short / kubelet.registrations[0].endpoint}") as channel:
            call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
                "/v1beta1.DevicePlugin/GetPreferredAllocation",
                request_serializer=bytes,
                response_deserializer=bytes,
            )
            request = messages.PreferredAllocationRequest(
                container_requests=[
                    messages.ContainerPreferredAllocationRequest(
                        available_deviceIDs=ids, allocation_size=500
                    )
                ]
            ).SerializeToString()

            def seconds() -> float:
                begun = time.monotonic()
                call(request, timeout=30)
                return time.monotonic() - begun

            assert min(seconds() for _ in range(5)) < 0.1


@given(
    ids=st.lists(st.sampled_from("abcd").map(DeviceId)),
    available=st.sets(st.sampled_from("abcd").map(DeviceId)),
    size=st.integers(0, 4),
)
def test_an_answer_to_the_kubelet_is_a_choice_of_what_it_offers(
    ids: list[DeviceId], available: set[DeviceId], size: int
) -> None:
    expected = len(set(ids)) == len(ids) == size and all(id in available for id in ids)

    assert is_answer(ids, tuple(available), (), size) == expected
