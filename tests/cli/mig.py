"""GPUs with MIG of a few profiles, and claims for partitions of them."""

from typing import Any

from dra_driver.model.gpus import (
    Gpu,
    GpuUuid,
    MigInfo,
    MigInstance,
    Partition,
    PartitionKey,
    Placement,
    UnusableGpuInstance,
)
from dra_driver.model.offer import CounterSet, Device, Offer, counter_set_name, partition_name
from dra_driver.model.records import Holding
from tests.builders import MIB, gpu, ref
from tests.plan.mig.boards import boards

PROFILES = {
    profile.name: profile
    for profile in boards()["a100-40"]
    if profile.name in ("1g.5gb", "2g.10gb", "3g.20gb", "7g.40gb")
}


def partition(name: str, start: int) -> Partition:
    profile = PROFILES[name]
    return Partition(profile, Placement(start, profile.size))


def key(name: str, start: int) -> PartitionKey:
    return partition(name, start).key


def instance(name: str, start: int, number: int = 1) -> MigInstance:
    uuid = GpuUuid(f"MIG-00000000-0000-0000-0000-{number:012}")
    return MigInstance(key(name, start), number, 0, uuid)


def unusable(name: str, start: int, cis: int = 0, number: int = 9) -> UnusableGpuInstance:
    return UnusableGpuInstance(key(name, start), number, cis)


def a100(minor: int = 0, *instances: MigInstance, **fields: Any) -> Gpu:
    """An A100 in MIG mode, unless *fields* of ``MigInfo`` say otherwise."""
    values: dict[str, Any] = {"on": True, "pending": True, "switches": False}
    mig = MigInfo(**values | fields, profiles=tuple(PROFILES.values()), instances=instances)
    return gpu(minor, product_name="NVIDIA A100-SXM4-40GB", memory_bytes=40960 * MIB, mig=mig)


def holding(claim: str, name: str = "", start: int = 0, minor: int = 0, **fields: Any) -> Holding:
    """What *claim* of namespace team-a has: a partition that was created for it, or a whole GPU."""
    board = a100(minor)
    values: dict[str, Any] = {"device": board.name, "gpu": board.uuid}
    if name:
        device = partition_name(board, partition(name, start))
        values |= {"device": device, "partition": key(name, start), "created_for_claims": True}
    return Holding(ref(claim, namespace="team-a"), **values | fields)


def offered(*gpus: Gpu, whole: bool = False) -> Offer:
    """Every partition of *gpus*, kept apart slice by slice; *whole*: the GPUs as a whole, too."""
    devices: list[Device] = []
    sets = []
    for board in gpus:
        assert board.mig is not None
        slices = [f"memory-slice-{unit}" for unit in range(board.mig.units)]
        sets.append(CounterSet(counter_set_name(board), tuple((name, 1) for name in slices)))
        if whole:
            devices.append(Device(board, takes=tuple((name, 1) for name in slices)))
        for profile in board.mig.profiles:
            for place in profile.placements:
                takes = tuple((f"memory-slice-{unit}", 1) for unit in range(place.start, place.end))
                devices.append(Device(board, partition=Partition(profile, place), takes=takes))
    return Offer(tuple(devices), counter_sets=tuple(sets))
