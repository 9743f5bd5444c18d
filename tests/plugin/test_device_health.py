"""How devices are, in the words of the kubelet: published ones and held ones."""

from dataclasses import replace

import pytest

from dra_driver.kubeletplugin.serve.health import DeviceHealth, HealthStatus
from dra_driver.model.gpus import Inventory, UnavailableGpu
from dra_driver.model.health import DeviceTaint, Effect, Fault, Problem
from dra_driver.model.offer import Device, Offer
from dra_driver.model.records import ClaimRecord
from dra_driver.plan.health.problems import taint_key
from dra_driver.plugin.device_health import NodeDevices
from tests.builders import POOL, gpu, gpu_uuid, holding, record
from tests.fakes.mig import ONE, TWO, partition

WELL = DeviceHealth(POOL, "gpu-0")


class Node:
    """Two GPUs, of which some are offered."""

    def __init__(self) -> None:
        self.offer = Offer((Device(gpu(0)), Device(gpu(1))))
        self.inventory = Inventory((gpu(0), gpu(1)))
        self.records: tuple[ClaimRecord, ...] = ()
        self.faults: tuple[Fault, ...] = ()
        self.devices = NodeDevices(
            POOL,
            lambda: self.offer,
            lambda: self.inventory,
            lambda: self.records,
            lambda: self.faults,
        )

    def taint(self, *problems: Problem, effect: Effect = Effect.NO_SCHEDULE) -> None:
        """GPU 1."""
        taints = tuple(DeviceTaint(taint_key(p), effect, reason=f"it has {p}") for p in problems)
        first, second = self.offer.devices
        self.offer = Offer((first, replace(second, taints=taints)))

    @property
    def second(self) -> tuple[HealthStatus, str]:
        health = self.devices.health()[1]
        assert health.device == "gpu-1"
        return health.status, health.message


def test_a_device_without_taints_is_healthy() -> None:
    assert Node().devices.health() == (WELL, DeviceHealth(POOL, "gpu-1"))


@pytest.mark.parametrize("effect", [Effect.NO_SCHEDULE, Effect.NO_EXECUTE])
def test_a_tainted_device_is_unhealthy_and_says_why(effect: Effect) -> None:
    node = Node()
    node.taint(Problem.XID, Problem.REMAP_FAILED, effect=effect)

    assert node.devices.health()[0] == WELL
    assert node.second == (HealthStatus.UNHEALTHY, "it has xid; it has row-remap-failed")


def test_of_a_gpu_that_is_released_nothing_is_known() -> None:
    node = Node()
    node.taint(Problem.RELEASED)
    assert node.second[0] is HealthStatus.UNKNOWN

    node.taint(Problem.RELEASED, Problem.XID)
    assert node.second[0] is HealthStatus.UNHEALTHY


def test_a_held_device_that_is_withdrawn_for_its_health_is_unhealthy() -> None:
    node = Node()
    node.records = (record("a", holding("a", "gpu-1")),)
    node.offer = Offer(node.offer.devices[:1])
    assert node.second == (HealthStatus.HEALTHY, "")  # it is offered in another shape

    node.faults = (Fault(gpu_uuid(1), Problem.XID, "79"),)
    status, message = node.second
    assert status is HealthStatus.UNHEALTHY
    assert message.startswith("Xid 79: ")

    node.faults = (Fault(gpu_uuid(1), Problem.THERMAL), Fault(gpu_uuid(0), Problem.XID, "79"))
    assert node.second == (HealthStatus.HEALTHY, "")


def test_a_fault_of_a_partition_is_none_of_a_held_one_beside_it() -> None:
    node = Node()
    held = holding("a", "gpu-1", partition=partition(ONE, 0).key)
    node.records = (record("a", held),)
    node.offer = Offer(node.offer.devices[:1])
    node.faults = (Fault(gpu_uuid(1), Problem.XID, "95", partition(TWO, 2).key),)
    assert node.second == (HealthStatus.HEALTHY, "")

    node.faults = (Fault(gpu_uuid(1), Problem.XID, "95", partition(ONE, 0).key),)
    assert node.second[0] is HealthStatus.UNHEALTHY


@pytest.mark.parametrize("what", ["gpu-1", f"GPU 0000:02:00.0 ({gpu_uuid(1)})"])
def test_a_held_device_that_is_withdrawn_by_its_profile_says_why(what: str) -> None:
    node = Node()
    node.records = (record("a", holding("a", "gpu-1")),)
    node.offer = Offer(node.offer.devices[:1], (UnavailableGpu(what, "it is too hot"),))
    assert node.second == (HealthStatus.UNHEALTHY, "it is too hot")

    left_out = UnavailableGpu(what, "the profile leaves it out", by_profile=True)
    node.offer = Offer(node.offer.devices[:1], (left_out,))
    assert node.second == (HealthStatus.HEALTHY, "")


def test_a_held_device_whose_gpu_is_gone_is_unhealthy() -> None:
    node = Node()
    node.records = (record("a", holding("a", "gpu-1")),)
    node.offer, node.inventory = Offer(node.offer.devices[:1]), Inventory((gpu(0),))

    assert node.second == (HealthStatus.UNHEALTHY, "the node does not see gpu-1 any more")


def test_the_devices_of_a_claim_come_in_its_order() -> None:
    node = Node()
    node.taint(Problem.XID)
    holdings = [holding("a", f"gpu-{n}") for n in (1, 0)]
    found = tuple(node.devices.of_claim(record("a", *holdings)))

    assert [each.device for each in found] == ["gpu-1", "gpu-0"]
    assert [each.status for each in found] == [HealthStatus.UNHEALTHY, HealthStatus.HEALTHY]
