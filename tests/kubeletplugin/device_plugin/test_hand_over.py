"""Two processes on one node: one of them is registered, whoever comes, goes or dies."""

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dra_driver.kubeletplugin.device_plugin.server import DevicePluginServer
from tests.fakes.device_manager import FakeDeviceManager
from tests.fakes.device_plugins import GPU, DeviceGate, FakeHandler, fail, resource, serving
from tests.kubeletplugin.device_plugin.steps import names, quiet, registered, started
from tests.waiting import eventually

OLD = "dra-nvidia.com_gpu-old.sock"
NEW = "dra-nvidia.com_gpu-new.sock"


def waits(server: DevicePluginServer) -> None:
    eventually(lambda: "another process" in (server.problem() or ""), "it to wait")


def test_a_newer_process_waits_until_the_older_one_has_withdrawn(
    short: Path, kubelet: FakeDeviceManager
) -> None:
    with serving(short, resource("a"), instance="old") as older:
        registered(kubelet, older)
        with serving(short, resource("a", "b"), instance="new") as newer:
            waits(newer)
            quiet(kubelet, 1.5)
            assert (kubelet.endpoint(GPU), kubelet.allocatable(GPU)) == (OLD, 1)

            older.withdraw()
            begun = time.monotonic()
            registered(kubelet, newer, 2)
            assert time.monotonic() - begun < 2.0
            assert older.problem() is None
            older.stop()
            quiet(kubelet)

            assert (kubelet.endpoint(GPU), kubelet.allocatable(GPU)) == (NEW, 2)
            assert [each.streams for each in kubelet.registrations] == [0, 0]
    assert names(short) == ["kubelet.sock"]


def test_an_older_process_that_ends_in_good_order_leaves_the_newer_one_whole(
    short: Path, kubelet: FakeDeviceManager
) -> None:
    with serving(short, resource("a"), instance="new") as newer:
        registered(kubelet, newer)
        newer.withdraw()
        with serving(short, resource("a"), instance="old") as older:
            registered(kubelet, older)
            newer.offer([resource("a", "b")])
            waits(newer)
        registered(kubelet, newer, 2)
        quiet(kubelet)

        assert kubelet.streams(GPU) == 1


def test_a_newer_process_takes_over_from_one_that_was_killed(
    short: Path, kubelet: FakeDeviceManager
) -> None:
    with started(short, "old") as older:
        kubelet.wait_for_allocatable(GPU, 1)
        with serving(short, resource("a", "b"), instance="new") as newer:
            waits(newer)
            older.kill()
            older.wait(30)
            registered(kubelet, newer, 2)
            quiet(kubelet)

            assert names(short) == [NEW, "dra-nvidia.com_gpu.sock", "kubelet.sock"]


def test_an_older_process_goes_on_where_the_newer_one_is_killed(
    short: Path, kubelet: FakeDeviceManager
) -> None:
    with serving(short, resource("a", "b"), instance="old") as older:
        registered(kubelet, older, 2)
        older.withdraw()
        with started(short, "new") as newer:
            kubelet.wait_for_allocatable(GPU, 1)
            newer.kill()
            newer.wait(30)
        older.offer([resource("a", "b")])
        registered(kubelet, older, 2)


def test_withdrawing_waits_for_an_allocate_that_runs(
    short: Path, kubelet: FakeDeviceManager
) -> None:
    gate = DeviceGate()
    with (
        serving(short, resource("a"), handler=FakeHandler(on_allocate=gate)) as server,
        ThreadPoolExecutor(2) as threads,
    ):
        registered(kubelet, server)
        pod = threads.submit(kubelet.allocate, GPU, 1)
        assert gate.begun.wait(60)
        withdrawing = threads.submit(server.withdraw)
        time.sleep(0.5)
        assert kubelet.streams(GPU) == 1, "its end would cut the Allocate off"
        gate.go.set()
        withdrawing.result(60)

        assert pod.result(60).ids == ("a",)
        assert kubelet.streams(GPU) == 0
        assert names(short) == ["kubelet.sock"]


def test_withdrawing_waits_for_a_register_that_runs(
    short: Path, kubelet: FakeDeviceManager
) -> None:
    """One that failed since its process is gone would drop the record of the newer one."""
    begun, go = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert go.wait(60)

    kubelet.before_register = wait
    with (
        serving(short, resource("a"), instance="old") as older,
        ThreadPoolExecutor(1) as threads,
    ):
        assert begun.wait(60)
        with serving(short, resource("a", "b"), instance="new") as newer:
            withdrawing = threads.submit(older.withdraw)
            time.sleep(0.5)
            assert not withdrawing.done()
            go.set()
            withdrawing.result(60)
            registered(kubelet, newer, 2)
            quiet(kubelet)

            assert kubelet.streams(GPU) == 1
        assert [each.error for each in kubelet.registrations] == ["", ""]
        assert [each.streams for each in kubelet.registrations] == [0, 0]


def test_of_two_processes_one_is_registered_with_a_restarted_kubelet(
    short: Path, kubelet: FakeDeviceManager
) -> None:
    with (
        serving(short, resource("a"), instance="old") as older,
        serving(short, resource("a"), instance="new") as newer,
    ):
        for _ in range(3):
            kubelet.wait_for_allocatable(GPU, 1)
            quiet(kubelet, 0.5)
            assert kubelet.streams(GPU) == 1
            kubelet.restart()
        older.withdraw()
        registered(kubelet, newer)


def test_processes_that_were_made_to_overlap_end_with_one_registered(
    short: Path, kubelet: FakeDeviceManager
) -> None:
    """The newer one takes the place, the older one's stream ends, and the kubelet closes the newer
    one's connection: it registers again."""
    with serving(short, resource("a"), instance="old") as older:
        registered(kubelet, older)
        with serving(short, resource("a", "b"), instance="new") as newer:
            waits(newer)
            for _ in range(2):
                (short / "dra-nvidia.com_gpu.sock").unlink()
                time.sleep(0.3)
            eventually(
                lambda: (newer.problem() is None) != (older.problem() is None), "one to have it"
            )
            quiet(kubelet)

            assert (kubelet.allocatable(GPU), kubelet.streams(GPU)) == (
                (2, 1) if newer.problem() is None else (1, 1)
            )


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_in_whatever_order_one_process_is_registered_in_the_end(
    short: Path, kubelet: FakeDeviceManager, seed: int
) -> None:
    chance = random.Random(seed)
    offered = [resource("a")]
    servers = [
        DevicePluginServer(short, instance, FakeHandler(), fail) for instance in ("old", "new")
    ]

    def delete_a_socket() -> None:
        (short / chance.choice(names(short) or ["none"])).unlink(missing_ok=True)

    def disconnect() -> None:
        if kubelet.streams(GPU):
            kubelet.disconnect(GPU)

    events: list[Callable[[], object]] = [
        kubelet.restart,
        disconnect,
        delete_a_socket,
        lambda: chance.choice(servers).offer(offered),
        lambda: chance.choice(servers).offer([]),
        lambda: chance.choice(servers).withdraw(),
    ]
    for server in servers:
        server.start()
    for _ in range(25):
        chance.choice(events)()
        time.sleep(chance.choice([0.0, 0.05, 0.3]))
    kubelet.restart()  # its own socket may have been deleted
    for server in servers:
        server.offer(offered)
    kubelet.wait_for_allocatable(GPU, 1)
    eventually(lambda: [each.problem() for each in servers].count(None) == 1, "one to have it")
    quiet(kubelet)
    assert kubelet.streams(GPU) == 1
    servers[0].stop()
    kubelet.wait_until(lambda: kubelet.endpoint(GPU) == NEW, "the newer one")
    registered(kubelet, servers[1])
    servers[1].stop()
    assert names(short) == ["kubelet.sock"]
