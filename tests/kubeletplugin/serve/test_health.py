"""What the kubelet is told of the health of devices: all of it at once, and what changes."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from api.kubelet import dra_health_v1_pb2, dra_health_v1alpha1_pb2, registration_v1_pb2
from dra_driver.base.errors import NodeError
from dra_driver.kubeletplugin.serve.health import DeviceHealth, HealthService, HealthStatus
from dra_driver.kubeletplugin.serve.services import DraService
from tests.fakes.claimdriver import Counted, Desk, Running
from tests.waiting import eventually

WELL = DeviceHealth("node-a", "gpu-0")
SICK = DeviceHealth("node-a", "gpu-1", HealthStatus.UNHEALTHY, "XID 79: reset the GPU")
MESSAGES = {"v1": dra_health_v1_pb2, "v1alpha1": dra_health_v1alpha1_pb2}


class Devices:
    """A driver's devices, which may change or not be known."""

    def __init__(self, *devices: DeviceHealth) -> None:
        self.devices: Sequence[DeviceHealth] = devices
        self.error: NodeError | None = None

    def __call__(self) -> Sequence[DeviceHealth]:
        if self.error:
            raise self.error
        return self.devices


class Watcher:
    """The kubelet's side of one stream."""

    def __init__(self, run: Running, version: str = "v1alpha1", timeout: float = 30.0) -> None:
        self._channel = grpc.insecure_channel(
            f"unix:{run.paths.service}", (("grpc.use_local_subchannel_pool", 1),)
        )
        method: Any = self._channel.unary_stream(
            f"/{version}.DRAResourceHealth/NodeWatchResources",
            request_serializer=MESSAGES[version].NodeWatchResourcesRequest.SerializeToString,
            response_deserializer=MESSAGES[version].NodeWatchResourcesResponse.FromString,
        )
        self.stream = method(MESSAGES[version].NodeWatchResourcesRequest(), timeout=timeout)

    def __enter__(self) -> "Watcher":
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def next(self) -> list[DeviceHealth]:
        return [
            DeviceHealth(
                each.device.pool_name,
                each.device.device_name,
                HealthStatus(each.health),
                each.message,
            )
            for each in next(self.stream).devices
        ]

    def rest(self) -> int:
        """How many lists came until it ended."""
        lists = 0
        with contextlib.suppress(grpc.RpcError):
            for _ in self.stream:
                lists += 1
        return lists

    def code(self) -> grpc.StatusCode:
        """How it ended, after all lists that came."""
        self.rest()
        code: grpc.StatusCode = self.stream.code()
        return code


@contextlib.contextmanager
def serving(short: Path, health: HealthService) -> Iterator[Running]:
    run = Running(short, DraService(Desk(), Counted()))
    run.plugin.serve_health(health)
    with run:
        yield run


@pytest.mark.point(88)
@pytest.mark.parametrize("version", ["v1", "v1alpha1"])
def test_who_watches_gets_all_devices_at_once(short: Path, version: str) -> None:
    health = HealthService(Devices(WELL, SICK))
    with serving(short, health) as run, Watcher(run, version) as watcher:
        first = next(watcher.stream)
    assert [(each.device.device_name, each.health, each.message) for each in first.devices] == [
        ("gpu-0", 1, ""),
        ("gpu-1", 2, "XID 79: reset the GPU"),
    ]
    assert {each.device.pool_name for each in first.devices} == {"node-a"}
    assert {each.health_check_timeout_seconds for each in first.devices} == {30}
    assert all(abs(each.last_updated_time - time.time()) < 60 for each in first.devices)


def test_the_kubelet_is_told_of_the_service_after_those_for_claims(short: Path) -> None:
    with (
        serving(short, HealthService(Devices())) as run,
        grpc.insecure_channel(f"unix:{run.paths.registration}") as channel,
    ):
        info = channel.unary_unary(
            "/pluginregistration.Registration/GetInfo",
            request_serializer=registration_v1_pb2.InfoRequest.SerializeToString,
            response_deserializer=registration_v1_pb2.PluginInfo.FromString,
        )(registration_v1_pb2.InfoRequest(), timeout=5)
    assert list(info.supported_versions) == [
        "v1.DRAPlugin",
        "v1beta1.DRAPlugin",
        "v1.DRAResourceHealth",
        "v1alpha1.DRAResourceHealth",
    ]


@pytest.mark.point(88)
def test_a_change_is_told_within_two_seconds(short: Path) -> None:
    devices = Devices(WELL)
    health = HealthService(devices)
    with serving(short, health) as run, Watcher(run) as watcher:
        assert watcher.next() == [WELL]
        devices.devices = (WELL, SICK)
        begun = time.monotonic()
        health.changed()
        assert watcher.next() == [WELL, SICK]
        assert time.monotonic() - begun < 2


def test_many_changes_at_once_are_told_in_few_lists(short: Path) -> None:
    devices = Devices(WELL)
    health = HealthService(devices)
    with serving(short, health) as run, Watcher(run) as watcher:
        watcher.next()
        for number in range(1000):
            devices.devices = (DeviceHealth("node-a", f"gpu-{number}"),)
            health.changed()
        lists = 1
        while watcher.next()[0].device != "gpu-999":
            lists += 1
    assert lists < 50


def test_what_did_not_change_is_not_told_again_before_its_time(short: Path) -> None:
    devices = Devices(WELL)
    health = HealthService(devices)
    with serving(short, health) as run, Watcher(run) as watcher:
        watcher.next()
        health.changed()
        time.sleep(0.5)
        devices.devices = (SICK,)
        health.changed()
        assert watcher.next() == [SICK]


@pytest.mark.point(88)
def test_the_list_is_told_again_although_nothing_changes(short: Path) -> None:
    health = HealthService(Devices(WELL), repeat_seconds=0.05)
    with serving(short, health) as run, Watcher(run) as watcher:
        assert [watcher.next() for _ in range(3)] == [[WELL]] * 3


@pytest.mark.point(88)
def test_several_watch_at_once(short: Path) -> None:
    devices = Devices(WELL)
    health = HealthService(devices)
    with (
        serving(short, health) as run,
        Watcher(run) as one,
        Watcher(run, "v1") as two,
        Watcher(run) as three,
    ):
        assert [each.next() for each in (one, two, three)] == [[WELL]] * 3
        devices.devices = (SICK,)
        health.changed()
        assert [each.next() for each in (one, two, three)] == [[SICK]] * 3


def test_the_oldest_stream_ends_where_there_are_too_many(short: Path) -> None:
    health = HealthService(Devices(WELL), max_streams=1)
    with serving(short, health) as run, Watcher(run) as old:
        old.next()
        with Watcher(run) as new:
            assert new.next() == [WELL]
            assert old.code() is grpc.StatusCode.OK
            health.changed()
            assert new.stream.is_active()


@pytest.mark.point(88)
def test_a_stream_that_is_cancelled_leaves_its_place(short: Path) -> None:
    health = HealthService(Devices(WELL), max_streams=2)
    with serving(short, health) as run, Watcher(run) as staying:
        staying.next()
        for _ in range(5):
            with Watcher(run) as leaving:
                leaving.next()
                leaving.stream.cancel()
            eventually(lambda: health.streams == 1)
        assert staying.stream.is_active()


@pytest.mark.point(88)
def test_streams_end_at_once_when_the_plugin_stops(short: Path) -> None:
    health = HealthService(Devices(WELL))
    with serving(short, health) as run, Watcher(run) as watcher:
        watcher.next()
        begun = time.monotonic()
        run.plugin.stop()
        assert watcher.code() is grpc.StatusCode.OK
    assert time.monotonic() - begun < 2  # calls in flight have 4 s


def test_nothing_is_told_until_something_is_known(
    short: Path, caplog: pytest.LogCaptureFixture
) -> None:
    devices = Devices(WELL)
    devices.error = NodeError("no profile yet")
    health = HealthService(devices)
    with serving(short, health) as run, Watcher(run) as watcher:
        eventually(lambda: caplog.messages.count("cannot tell the health of devices yet") == 1)
        devices.error = None
        health.changed()
        assert watcher.next() == [WELL]
    assert caplog.messages.count("cannot tell the health of devices yet") == 1


def test_what_is_not_known_any_more_is_not_told_again(short: Path) -> None:
    """So that the kubelet takes it for unknown."""
    devices = Devices(WELL)
    health = HealthService(devices, repeat_seconds=0.01)
    with serving(short, health) as run, Watcher(run, timeout=1.0) as watcher:
        watcher.next()
        devices.error = NodeError("gone")
        assert watcher.rest() < 30  # those under way
        assert watcher.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_message_is_cut_where_the_kubelet_would(short: Path) -> None:
    long = DeviceHealth("node-a", "gpu-0", HealthStatus.UNHEALTHY, "ä" * 2000)
    with serving(short, HealthService(Devices(long))) as run, Watcher(run) as watcher:
        assert watcher.next()[0].message == "ä" * 1024
