"""What the kubelet is sent of devices that get sick, heal, come and go."""

import time
from pathlib import Path

import pytest

from tests.fakes.device_manager import FakeDeviceManager
from tests.fakes.device_plugins import GPU, SHARED, DeviceGate, FakeHandler, resource, serving
from tests.waiting import eventually


@pytest.mark.point(123, 124, 128)
def test_the_first_list_comes_at_once_and_each_has_every_device(
    short: Path, kubelet: FakeDeviceManager
) -> None:
    with serving(short, resource("a", "b", "c")) as server:
        kubelet.wait_for_allocatable(GPU, 3)
        server.offer([resource("a", "b", "c", sick=["b"])])
        kubelet.wait_for_allocatable(GPU, 2)
        server.offer([resource("a", "b", "c")])
        kubelet.wait_for_allocatable(GPU, 3)

    assert [each.ids for each in kubelet.lists] == [("a", "b", "c")] * 3
    assert kubelet.lists[0].at - kubelet.registrations[0].at < 1.0


def test_the_same_offer_is_not_sent_again(short: Path, kubelet: FakeDeviceManager) -> None:
    with serving(short, resource("a", "b")) as server:
        kubelet.wait_for_allocatable(GPU, 2)
        for _ in range(100):
            server.offer([resource("a", "b")])
        server.offer([resource("b", "a")])
        time.sleep(1.0)

        assert len(kubelet.lists) == 1


@pytest.mark.point(125)
def test_of_health_that_flaps_the_first_change_is_told_at_once_and_few_others(
    short: Path, kubelet: FakeDeviceManager
) -> None:
    with serving(short, resource("a", "b")) as server:
        kubelet.wait_for_allocatable(GPU, 2)
        time.sleep(1.0)
        begun = time.monotonic()
        for number in range(200):
            server.offer([resource("a", "b", sick=["a"] if number % 2 == 0 else [])])
            time.sleep(0.01)
        server.offer([resource("a", "b", sick=["a", "b"])])
        kubelet.wait_for_allocatable(GPU, 0)
        seconds = time.monotonic() - begun

    changes = [each.at - begun for each in kubelet.lists[1:]]
    assert changes[0] < 0.4, "at once, give or take a busy machine"
    assert len(changes) <= 2 + seconds / 0.5


def test_a_change_is_no_problem_while_it_is_on_its_way(
    short: Path, kubelet: FakeDeviceManager, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with serving(short, resource("a", "b")) as server:
        kubelet.wait_for_allocatable(GPU, 2)
        eventually(lambda: server.problem() is None)
        caplog.clear()
        for number in range(100):
            server.offer([resource("a", "b", sick=["a"] if number % 2 == 0 else [])])
            time.sleep(0.01)
            assert server.problem() is None

    assert "the kubelet does not have the devices of a resource" not in caplog.messages


def test_resources_are_told_apart(short: Path, kubelet: FakeDeviceManager) -> None:
    with serving(short, resource("a"), resource("s", name=SHARED)) as server:
        kubelet.wait_for_allocatable(GPU, 1)
        kubelet.wait_for_allocatable(SHARED, 1)
        server.offer([resource("a", sick=["a"]), resource("s", name=SHARED)])
        kubelet.wait_for_allocatable(GPU, 0)

        assert kubelet.allocatable(SHARED) == 1
        assert [each.resource for each in kubelet.lists].count(SHARED) == 1


@pytest.mark.point(130)
def test_the_kubelet_reads_numa_nodes(short: Path, kubelet: FakeDeviceManager) -> None:
    with serving(short, resource("a", numa=0), resource("s", name=SHARED)):
        kubelet.wait_for_allocatable(GPU, 1)
        kubelet.wait_for_allocatable(SHARED, 1)

        assert kubelet.devices(GPU)["a"].numa_nodes == (0,)
        assert kubelet.devices(SHARED)["s"].numa_nodes is None


@pytest.mark.point(129)
def test_a_device_stays_in_the_list_while_its_allocate_runs(
    short: Path, kubelet: FakeDeviceManager
) -> None:
    """The fake crashes as kubelets of 1.34 and newer do where it does not, and the test fails."""
    gate = DeviceGate()
    handler = FakeHandler(on_allocate=gate)
    with serving(short, resource("a"), handler=handler, leaving_seconds=4.0) as server:
        kubelet.wait_for_allocatable(GPU, 1)

        def left_out() -> None:
            server.offer([resource("b")])
            kubelet.wait_until(lambda: "b" in kubelet.devices(GPU), "the list without it")
            gate.go.set()

        kubelet.allocate(GPU, 1, between=left_out)

        assert not kubelet.devices(GPU)["a"].healthy
        kubelet.wait_until(lambda: "a" not in kubelet.devices(GPU), "its end")


@pytest.mark.point(131)
def test_a_resource_with_too_many_devices_is_told_and_others_are_served(
    short: Path, kubelet: FakeDeviceManager
) -> None:
    ids = [f"{number:046}" for number in range(75_000)]
    with serving(short, resource(*ids), resource("s", name=SHARED)) as server:
        kubelet.wait_for_allocatable(SHARED, 1)
        eventually(lambda: "fewer replicas" in (server.problem() or ""))
        assert kubelet.allocatable(GPU) is None

        server.offer([resource("a"), resource("s", name=SHARED)])
        kubelet.wait_for_allocatable(GPU, 1)
        eventually(lambda: server.problem() is None)

        server.offer([resource("a", *ids, sick=["a"]), resource("s", name=SHARED)])
        kubelet.wait_for_allocatable(GPU, 0)
        assert kubelet.capacity(GPU) == 1
        eventually(lambda: "fewer replicas" in (server.problem() or ""))
        assert len(kubelet.registrations) == 2


@pytest.mark.point(131)
def test_the_largest_list_arrives(short: Path, kubelet: FakeDeviceManager) -> None:
    ids = [f"{number:046}" for number in range(50_000)]
    with serving(short, resource(*ids, sick=ids)):
        kubelet.wait_until(lambda: kubelet.capacity(GPU) == 50_000, "the list")


def test_a_device_that_was_leaving_when_another_plugin_registered_takes_nothing_away_from_it(
    short: Path, kubelet: FakeDeviceManager
) -> None:
    with serving(short, resource("a", "b"), leaving_seconds=1.0) as server:
        kubelet.wait_for_allocatable(GPU, 2)
        server.offer([resource("a")])
        kubelet.wait_for_allocatable(GPU, 1)
        server.freeze(True)
        count = len(kubelet.lists)
        time.sleep(1.5)
        assert len(kubelet.lists) == count

        server.freeze(False)
        eventually(lambda: kubelet.lists[-1].ids == ("a",), "the list goes on")
