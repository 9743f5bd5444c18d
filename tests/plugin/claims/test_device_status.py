"""What claims say of their devices after they were prepared, and when it is written."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dra_driver.base.threads import UNTIL_WOKEN
from dra_driver.k8s.access import load_kubeconfig
from dra_driver.k8s.claims import ClaimRef, ClaimUid, ShareId
from dra_driver.k8s.client import ApiClient
from dra_driver.k8s.resource_api import ResourceApi
from dra_driver.kubeletplugin.serve.health import DeviceHealth, HealthStatus
from dra_driver.model.gpus import MigInstance, PartitionKey
from dra_driver.model.mps import MpsNamespace, MpsNamespaceName
from dra_driver.model.records import ClaimRecord
from dra_driver.model.steps import ServeMpsNamespace
from dra_driver.plugin.claims.device_status import DeviceStatusWriter, StatusSources
from tests.builders import (
    POOL,
    SLICEABLE,
    allocation,
    claim,
    claim_document,
    gpu_uuid,
    holding,
    record,
    ref,
)
from tests.fakes.api_server import ApiServer

DRIVER = "gpu.nvidia.com"
OTHERS = {"driver": "nic.example.com", "pool": "p", "device": "nic-0"}
GIB = 1 << 30


class World:
    """A node with prepared claims, and the API server that has them."""

    def __init__(self, server: ApiServer, directory: Path, node: str = POOL) -> None:
        self.server = server
        self.node = node
        self.client = ApiClient(load_kubeconfig(server.kubeconfig(directory / "kubeconfig")))
        self.resources = ResourceApi(self.client)
        self.prepared: dict[ClaimUid, ClaimRecord] = {}
        self.sick: dict[str, tuple[HealthStatus, str]] = {}
        self.failures: dict[ClaimUid, str] = {}
        self.newest = True
        self.now = 1000.0
        self.writer = self.begin()

    def begin(self) -> DeviceStatusWriter:
        """What a new process has."""
        sources = StatusSources(
            DRIVER, self.node, self, self.health, lambda: self.failures, lambda: self.newest
        )
        return DeviceStatusWriter(self.resources, sources, lambda: self.now, 0.0)

    def records(self) -> tuple[ClaimRecord, ...]:
        return tuple(self.prepared.values())

    def known(self, uid: ClaimUid) -> ClaimRecord | None:
        return self.prepared.get(uid)

    def health(self, record: ClaimRecord) -> Iterator[DeviceHealth]:
        for each in record.holdings:
            status, message = self.sick.get(each.device, (HealthStatus.HEALTHY, ""))
            yield DeviceHealth(self.node, each.device, status, message)

    def create(self, *devices: str, name: str = "a", **fields: Any) -> ClaimRef:
        """An allocated claim of the API server."""
        made = claim(*devices, name=name)
        if fields:
            made = replace(made, allocations=tuple(allocation(d, **fields) for d in devices))
        self.server.put(claim_document(made))
        return made.ref

    def prepare(self, *devices: str, name: str = "a") -> ClaimRecord:
        made = record(self.create(*devices, name=name), *devices)
        self.add(made)
        return made

    def add(self, made: ClaimRecord) -> None:
        self.prepared[made.claim.uid] = made
        self.writer.claim_changed(made)

    def unprepare(self, made: ClaimRecord) -> None:
        del self.prepared[made.claim.uid]
        self.writer.claim_changed(made)

    def go_on(self, seconds: float = 20.0) -> None:
        """Until nothing is due any more, or the time is over."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + self.writer.step())

    def devices(self, name: str = "a") -> list[dict[str, Any]]:
        document = self.resources.claim("default", name)
        return document["status"].get("devices") or []

    def ready(self, name: str = "a") -> list[tuple[str, str, str]]:
        conditions = [each["conditions"][0] for each in self.devices(name)]
        assert {condition["type"] for condition in conditions} <= {"Ready"}
        return [(c["status"], c["reason"], c["message"]) for c in conditions]

    @property
    def writes(self) -> int:
        return self.server.count("PATCH", "resourceclaims")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with ApiServer() as server:
        world = World(server, tmp_path)
        world.go_on()  # it looked for claims of earlier processes
        yield world
        world.client.close()


PREPARED = ("True", "Prepared", "")
LONG_AGO = "2020-01-02T03:04:05Z"


# What is said


@pytest.mark.point(86)
def test_a_prepared_claim_says_which_gpu_it_was_given(world: World) -> None:
    world.prepare("gpu-1")
    world.go_on()

    (device,) = world.devices()
    (condition,) = device.pop("conditions")
    assert device == {
        "driver": DRIVER,
        "pool": POOL,
        "device": "gpu-1",
        "data": {"uuid": gpu_uuid(1)},
    }
    assert condition.pop("lastTransitionTime").endswith("Z")
    assert condition == {"type": "Ready", "status": "True", "reason": "Prepared", "message": ""}


def test_a_share_says_how_much_it_is_and_by_what_means(world: World) -> None:
    share = ShareId("8ad7e96b-1f5c-4f4d-8f6c-000000000001")
    claim = world.create("gpu-0", share=share)
    consumed = (("cores", "30"), ("memory", "10Gi"), ("shares", "1"))
    part = holding(claim, share=share, consumed=consumed, shape=SLICEABLE)
    world.add(record(claim, part))
    world.go_on()

    (device,) = world.devices()
    assert device["shareID"] == share
    assert device["data"] == {
        "uuid": gpu_uuid(),
        "memory": "10Gi",
        "cores": 30,
        "strategy": "TimeSlicing",
    }

    namespace = MpsNamespace(MpsNamespaceName("c"), claim.uid, (gpu_uuid(),))
    world.add(record(claim, part, steps=(ServeMpsNamespace(namespace),)))
    world.go_on()
    assert world.devices()[0]["data"]["strategy"] == "MPS"


def test_a_partition_says_its_own_uuid_and_that_of_its_gpu(world: World) -> None:
    key = PartitionKey(19, 0, 1, 1)
    name = "gpu-0-mig-1g5gb-19-0"
    instance = MigInstance(key, 7, 0, gpu_uuid(5))
    claim = world.create(name)
    world.add(record(claim, holding(claim, name, gpu=gpu_uuid(), partition=key, instance=instance)))
    world.go_on()

    assert world.devices()[0]["data"] == {"uuid": gpu_uuid(5), "parentUUID": gpu_uuid()}


def test_admin_access_says_so(world: World) -> None:
    claim = world.create("gpu-0-mon", admin=True)
    world.add(record(claim, holding(claim, "gpu-0-mon", admin=True)))
    world.go_on()

    assert world.devices()[0]["data"] == {"uuid": gpu_uuid(), "adminAccess": True}


def test_health_is_said_when_it_changes(world: World) -> None:
    world.prepare("gpu-0", "gpu-1")
    world.go_on()
    world.sick["gpu-1"] = (HealthStatus.UNHEALTHY, "Xid 79: it fell off the bus")
    world.writer.health_changed()
    world.go_on()
    assert world.ready() == [PREPARED, ("False", "Unhealthy", "Xid 79: it fell off the bus")]

    world.sick["gpu-1"] = (HealthStatus.UNKNOWN, "released")
    world.writer.health_changed()
    world.go_on()
    assert world.ready() == [PREPARED, ("False", "Released", "released")]

    world.sick.clear()
    world.writer.health_changed()
    world.go_on()
    assert world.ready() == [PREPARED, PREPARED]


def test_since_when_a_device_is_not_ready_stays_when_only_the_reason_changes(world: World) -> None:
    world.sick["gpu-0"] = (HealthStatus.UNHEALTHY, "Xid 79")
    world.prepare("gpu-0")
    world.go_on()
    (document,) = world.server.objects("resourceclaims")
    document["status"]["devices"][0]["conditions"][0]["lastTransitionTime"] = LONG_AGO
    world.server.put(document)
    world.writer = world.begin()

    world.sick["gpu-0"] = (HealthStatus.UNKNOWN, "released")
    world.go_on()
    assert world.ready() == [("False", "Released", "released")]
    assert world.devices()[0]["conditions"][0]["lastTransitionTime"] == LONG_AGO

    world.sick.clear()
    world.writer.health_changed()
    world.go_on()
    assert world.devices()[0]["conditions"][0]["lastTransitionTime"] > LONG_AGO


def test_a_failed_mps_server_is_said_of_what_is_under_mps(world: World) -> None:
    claim = world.create("gpu-0", "gpu-1")
    namespace = MpsNamespace(MpsNamespaceName("c"), claim.uid, (gpu_uuid(1),))
    world.add(record(claim, "gpu-0", "gpu-1", steps=(ServeMpsNamespace(namespace),)))
    world.failures[claim.uid] = "the MPS server of gpu-1 does not work"
    world.go_on()

    failed = ("False", "MPSNotServed", "the MPS server of gpu-1 does not work")
    assert world.ready() == [PREPARED, failed]


@pytest.mark.point(86)
def test_what_other_drivers_say_stays(world: World) -> None:
    claim = world.create("gpu-0")
    document = next(iter(world.server.objects("resourceclaims")))
    document["status"]["devices"] = [OTHERS]
    world.server.put(document)
    made = record(claim)
    world.add(made)
    world.go_on()
    assert [each["driver"] for each in world.devices()] == ["nic.example.com", DRIVER]

    world.unprepare(made)
    world.go_on()
    assert world.devices() == [OTHERS]


def test_what_the_next_node_says_of_a_claim_outlives_what_this_one_takes_back(
    world: World, tmp_path: Path
) -> None:
    made = world.prepare("gpu-0")
    world.go_on()
    world.unprepare(made)
    other = World(world.server, tmp_path, "node-2")
    other.add(record(other.create("gpu-0", pool="node-2")))
    other.go_on()
    assert [each["pool"] for each in other.devices()] == ["node-2"]

    world.go_on()

    assert [each["pool"] for each in other.devices()] == ["node-2"]
    other.client.close()


# When it is written


def test_nothing_is_written_before_a_second_is_over(world: World) -> None:
    world.prepare("gpu-0")
    world.go_on(0.9)
    assert world.writes == 0

    world.go_on(2.0)
    assert world.writes == 1


def test_claims_that_come_one_by_one_are_looked_at_together(world: World) -> None:
    for number in range(50):
        world.prepare(f"gpu-{number % 2}", name=f"c{number}")
        world.now += 0.01
    steps = 0
    while (seconds := world.writer.step()) != UNTIL_WOKEN:
        world.now += seconds
        steps += 1
    assert (world.writes, steps < 6) == (50, True)


def test_a_claim_that_is_gone_by_then_costs_nothing(world: World) -> None:
    world.server.forget_requests()
    for number in range(5):
        world.unprepare(world.prepare("gpu-0", name=f"c{number}"))
    world.go_on()

    assert world.server.requests == ()


def test_a_claim_that_is_prepared_again_is_written_once(world: World) -> None:
    made = world.prepare("gpu-0")
    world.go_on()
    for _ in range(3):
        world.add(made)
        world.writer.claim_changed(None)
        world.go_on()

    assert world.writes == 1


def test_nothing_is_done_while_nothing_happens(world: World) -> None:
    world.prepare("gpu-0")
    world.go_on()

    assert world.writer.step() == UNTIL_WOKEN


def test_the_status_goes_with_the_preparation(world: World) -> None:
    made = world.prepare("gpu-0")
    world.go_on()
    world.unprepare(made)
    world.go_on()

    assert world.devices() == []


def test_the_status_goes_although_the_api_server_was_away(world: World) -> None:
    made = world.prepare("gpu-0")
    world.go_on()
    world.server.fail(500, "PATCH", "resourceclaims", times=3)
    world.unprepare(made)
    world.go_on(120.0)

    assert world.devices() == []


def test_a_claim_that_is_allocated_anew_says_it_again(world: World) -> None:
    made = world.prepare("gpu-0")
    world.go_on()
    world.unprepare(made)
    world.server.put(claim_document(claim("gpu-0")) | {})  # without status.devices
    world.prepare("gpu-0")
    world.go_on()

    assert world.ready() == [PREPARED]


def test_a_new_process_writes_only_what_is_not_there(world: World) -> None:
    world.prepare("gpu-0")
    world.go_on()
    since = world.devices()[0]["conditions"][0]["lastTransitionTime"]
    world.prepared[ref("b").uid] = record(world.create("gpu-1", name="b"), "gpu-1")
    world.writer = world.begin()
    world.go_on()

    assert world.writes == 2
    assert world.devices("b")
    assert world.devices()[0]["conditions"][0]["lastTransitionTime"] == since


def test_a_process_that_is_not_the_newest_writes_nothing(world: World) -> None:
    world.newest = False
    world.prepare("gpu-0")
    world.go_on()

    assert world.writes == 0


# What fails


@pytest.mark.point(86)
@pytest.mark.parametrize("status", [403, 500])
def test_what_is_refused_is_tried_again_and_logged_once(
    world: World, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    world.server.fail(status, "PATCH", "resourceclaims", times=3)
    world.prepare("gpu-0")
    world.go_on(60.0)
    if status == 500:
        world.server.heal()
    world.go_on(60.0)

    assert world.ready() == [PREPARED]
    assert caplog.messages == ["the status of a claim cannot be written"]


@pytest.mark.point(86)
@pytest.mark.parametrize("status", [404, 409, 422])
def test_a_claim_that_is_not_as_it_was_prepared_is_left_alone(
    world: World, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    world.server.fail(status, "PATCH", "resourceclaims", times=100)
    world.prepare("gpu-0")
    world.go_on(1200.0)

    assert world.writes <= 2  # a 404 may come of another version of the API
    assert caplog.messages == []


@pytest.mark.parametrize("path", ["resourceclaims/a/", "resourceclaims"])
def test_a_claim_that_cannot_be_written_for_long_keeps_no_later_one_waiting(
    world: World, path: str
) -> None:
    """It is tried less and less often: alone, or since the API server does not answer."""
    world.server.fail(500, "PATCH", path, times=100)
    world.prepare("gpu-0")
    world.go_on(600.0)
    world.go_on(world.writer.step())  # until the next try
    assert world.writer.step() > 60
    if path == "resourceclaims":
        world.server.heal()
    woken: list[float] = []
    world.writer.loop.soon = lambda: woken.append(world.now)  # type: ignore[method-assign]

    world.prepare("gpu-1", name="b")
    world.prepare("gpu-2", name="c")
    assert len(woken) == 1, "the other one is written then, too"
    world.go_on(5.0)

    assert world.ready("b") == world.ready("c") == [PREPARED]


def test_a_right_that_is_missing_is_logged_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Kubernetes 1.36 does not answer 403 then."""
    world.server.fail(
        422,
        "PATCH",
        "resourceclaims",
        times=100,
        message='status.devices: Forbidden: requires resource="resourceclaims/driver"',
    )
    world.prepare("gpu-0")
    world.prepare("gpu-1", name="b")
    world.go_on(1200.0)

    assert caplog.messages == ["the status of a claim cannot be written"]
    assert 2 < world.writes < 30


def test_one_claim_that_is_refused_keeps_no_other_from_being_written(world: World) -> None:
    world.server.fail(403, "PATCH", "resourceclaims/a/", times=100)
    world.prepare("gpu-0")
    world.prepare("gpu-1", name="b")
    world.go_on()

    assert world.ready("b") == [PREPARED]


def test_many_claims_that_fail_at_once_are_tried_again_soon(world: World) -> None:
    """As of a plugin that starts while the API server is away."""
    names = [f"claim-{n}" for n in range(12)]
    for name in names:
        world.prepare("gpu-0", name=name)
    world.server.fail(403, "PATCH", "resourceclaims", times=2 * len(names))
    world.go_on(1.5)
    assert world.writes >= len(names)

    world.go_on(20.0)

    assert [world.ready(name) for name in names] == [[PREPARED]] * len(names)


def test_changes_while_the_api_server_is_away_make_the_wait_no_longer(world: World) -> None:
    world.server.fail(500, "PATCH", "resourceclaims", times=100)
    for name in ("a", "b", "c"):
        world.prepare("gpu-0", name=name)
    world.go_on(2.0)
    for n in range(20):
        world.sick = {"gpu-0": (HealthStatus.UNHEALTHY, f"Xid {n}")}
        world.writer.health_changed()
        world.writer.step()
    world.server.heal()
    world.go_on(20.0)

    told = [("False", "Unhealthy", "Xid 19")]
    assert [world.ready(name) for name in ("a", "b", "c")] == [told] * 3


def test_a_change_of_health_does_not_wait_for_what_failed_before(world: World) -> None:
    world.server.fail(403, "PATCH", "resourceclaims", times=100)
    for name in ("a", "b"):
        world.prepare("gpu-0", name=name)
    world.go_on(1200.0)
    world.server.heal()
    world.sick = {"gpu-0": (HealthStatus.UNHEALTHY, "Xid 79")}
    world.writer.health_changed()
    world.go_on(5.0)

    told = [("False", "Unhealthy", "Xid 79")]
    assert [world.ready(name) for name in ("a", "b")] == [told] * 2
