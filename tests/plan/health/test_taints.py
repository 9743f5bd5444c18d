"""Which devices get which taints for what is wrong with their GPU."""

import pytest

from dra_driver.model.health import DeviceTaint, Effect, Fault, HealthRules, Problem
from dra_driver.model.offer import EXCLUSIVE, AdminAccess, Device, Replica
from dra_driver.model.profiles import Rules
from dra_driver.plan.health.taints import concerns, device_taints
from tests.builders import SLICEABLE, gpu, gpu_uuid
from tests.fakes.mig import FOUR, ONE, THREE, mig_gpu, partition, partition_device

REPLICA = Replica(place=1, of=4, memory_bytes=None)


def fault(problem: Problem = Problem.XID, value: str = "", minor: int = 0, **fields) -> Fault:
    return Fault(gpu_uuid(minor), problem, value, **{"since": 100.0, **fields})


def keys(device: Device, *faults: Fault) -> list[str]:
    return [taint.key for taint in device_taints(device, faults)]


@pytest.mark.parametrize("shape", [EXCLUSIVE, SLICEABLE, REPLICA])
def test_a_fault_of_a_gpu_taints_it_in_every_shape(shape):
    assert keys(Device(gpu(), shape), fault(value="79")) == ["gpu.nvidia.com/xid"]


def test_a_fault_of_a_gpu_taints_its_partitions():
    assert keys(partition_device(ONE, 3), fault(value="79")) == ["gpu.nvidia.com/xid"]


def test_no_other_gpu_is_tainted():
    assert keys(Device(gpu(1)), fault(value="79")) == []


def test_a_device_for_admin_access_looks_at_sick_gpus():
    assert keys(Device(gpu(), AdminAccess()), fault(value="79")) == []


@pytest.mark.parametrize(
    ("device", "is_concerned"),
    [
        (Device(mig_gpu()), True),
        (Device(mig_gpu(), SLICEABLE), True),
        (partition_device(ONE, 2), True),
        (partition_device(ONE, 3), False),
        (partition_device(FOUR, 0), True),
        (partition_device(THREE, 4), False),
    ],
)
def test_a_fault_of_a_partition_taints_what_overlaps_it(device, is_concerned):
    of_one = fault(value="95", partition=partition(ONE, 2).key)

    assert concerns(of_one, device) is is_concerned
    assert keys(device, of_one) == ["gpu.nvidia.com/xid"] * is_concerned


def test_a_problem_without_an_effect_taints_nothing():
    assert keys(Device(gpu()), fault(Problem.THERMAL), fault(Problem.XID, "31")) == []


def test_the_profile_of_the_gpu_decides():
    health = HealthRules(
        effects=((Problem.THERMAL, Effect.NO_EXECUTE), (Problem.REMAP_FAILED, Effect.NONE))
    )
    device = Device(gpu(), rules=Rules(health=health))
    [taint] = device_taints(device, (fault(Problem.THERMAL), fault(Problem.REMAP_FAILED)))

    assert (taint.key, taint.effect) == ("gpu.nvidia.com/thermal-slowdown", Effect.NO_EXECUTE)


def test_several_xids_are_one_taint_since_the_first_with_the_value_of_the_latest():
    health = HealthRules(xids=((48, Effect.NO_EXECUTE),))
    faults = (fault(value="48", since=100.0), fault(value="79", since=200.0))
    [taint] = device_taints(Device(gpu(), rules=Rules(health=health)), faults)

    assert taint == DeviceTaint(
        "gpu.nvidia.com/xid", Effect.NO_EXECUTE, "79", since=100.0, reason=taint.reason
    )
    assert taint.reason.index("Xid 79") < taint.reason.index("Xid 48")


def test_taints_are_in_the_order_of_their_keys():
    faults = (fault(value="79"), fault(Problem.LOST), fault(Problem.REMAP_FAILED))

    assert keys(Device(gpu()), *faults) == [
        "gpu.nvidia.com/gpu-lost",
        "gpu.nvidia.com/row-remap-failed",
        "gpu.nvidia.com/xid",
    ]
