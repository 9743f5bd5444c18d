"""GPUs with MIG, in memory; they refuse what hardware refuses."""

from collections.abc import Collection
from dataclasses import replace

from dra_driver.base.errors import MigInstanceNotFound, NodeError, PlacementTaken
from dra_driver.model.gpus import (
    Engines,
    Gpu,
    GpuUuid,
    Inventory,
    MigInfo,
    MigInstance,
    MigProfile,
    Partition,
    PartitionKey,
    Placement,
)
from dra_driver.model.offer import Device, Fractional, Offer, Shape
from tests.builders import MIB, SLICEABLE, gpu

GIB = 1024 * MIB


def profile(name: str, id_: int, number: int, slices: int, size: int, *starts: int) -> MigProfile:
    gigabytes = int(name.split(".")[1].split("gb")[0])
    engines = Engines(multiprocessors=16 * slices, copy=slices)
    placements = tuple(Placement(start, size) for start in starts)
    return MigProfile(name, id_, number, slices, len(starts), gigabytes * GIB, engines, placements)


ONE = profile("1g.10gb", 19, 0, 1, 1, 0, 1, 2, 3, 4, 5, 6)
TWO = profile("2g.20gb", 14, 1, 2, 2, 0, 2, 4)
THREE = profile("3g.40gb", 9, 2, 3, 4, 0, 4)
FOUR = profile("4g.40gb", 5, 3, 4, 4, 0)
SEVEN = profile("7g.80gb", 0, 4, 7, 8, 0)
H100 = (ONE, TWO, THREE, FOUR, SEVEN)


def mig_gpu(minor: int = 0, *, on: bool = False, switches: bool = True, **fields) -> Gpu:
    """An H100 with MIG; with *switches* false it behaves as an A100 does."""
    return gpu(minor, mig=MigInfo(on, on, switches, H100), **fields)


def partition(of: MigProfile = ONE, start: int = 0) -> Partition:
    return Partition(of, next(place for place in of.placements if place.start == start))


def instance(of: MigProfile = ONE, start: int = 0, gi: int = 1, name: str = "") -> MigInstance:
    key = partition(of, start).key
    return MigInstance(key, gi, 0, GpuUuid(f"MIG-{name or f'{key.profile_id}-{start}'}"))


def sliceable(of: MigProfile) -> Fractional:
    return replace(SLICEABLE, memory_default=of.memory_bytes)


def partition_device(
    of: MigProfile = ONE,
    start: int = 0,
    on: Gpu | None = None,
    shape: Shape | None = None,
    **fields,
) -> Device:
    """A partition that is created when a claim needs it."""
    offered = tuple(profile.name for profile in H100)
    device = Device(
        on or mig_gpu(), shape or sliceable(of), partition=partition(of, start), offered=offered
    )
    return replace(device, **fields)


def mig_offer(*gpus: Gpu) -> Offer:
    """Each GPU as a whole, and every partition of it."""
    boards = gpus or (mig_gpu(),)
    offered = tuple(profile.name for profile in H100)
    whole = [Device(gpu, SLICEABLE, offered=offered) for gpu in boards]
    parts = [
        partition_device(of, place.start, gpu)
        for gpu in boards
        for of in H100
        for place in of.placements
    ]
    return Offer((*whole, *parts))


def name_of(uuid: GpuUuid, key: PartitionKey) -> GpuUuid:
    """The same for the same place of the same GPU, as the driver has it."""
    return GpuUuid(f"MIG-{uuid}-{key.profile_id}-{key.start}")


class FakeMig:
    """The partitions of the GPUs of a node, and their MIG modes."""

    def __init__(self, inventory: Inventory) -> None:
        self.modes = {gpu.uuid: gpu.mig.on for gpu in inventory.gpus if gpu.mig}
        self.instances: dict[tuple[GpuUuid, PartitionKey], MigInstance] = {}

    def set_mode(self, uuid: GpuUuid, on: bool, *, quietly: bool = False) -> None:
        if uuid not in self.modes:
            raise NodeError(f"{uuid} has no MIG mode")
        if not on and self.on(uuid):
            if quietly:
                return
            raise NodeError(f"{uuid}: MIG mode stays on: it has instances")
        self.modes[uuid] = on

    def on(self, uuid: GpuUuid) -> tuple[PartitionKey, ...]:
        return tuple(sorted(key for gpu, key in self.instances if gpu == uuid))

    def create(self, uuid: GpuUuid, key: PartitionKey, new: bool = False) -> None:
        if (uuid, key) in self.instances:
            if new:
                raise PlacementTaken(f"{uuid}: {key} was created by somebody else meanwhile")
            return
        if not self.modes.get(uuid):
            raise NodeError(f"{uuid}: MIG mode is off")
        if any(key.placement.overlaps(other.placement) for other in self.on(uuid)):
            raise PlacementTaken(f"{uuid}: {key} overlaps an instance that is there")
        self.add(uuid, key)

    def add(self, uuid: GpuUuid, key: PartitionKey) -> MigInstance:
        """An instance that somebody makes."""
        instance = MigInstance(key, 20 * key.size + key.start, 0, name_of(uuid, key))
        self.instances[uuid, key] = instance
        return instance

    def remove(
        self,
        uuid: GpuUuid,
        key: PartitionKey,
        instance: GpuUuid | None = None,
        unless: Collection[GpuUuid] = (),
    ) -> None:
        existing = self.instances.get((uuid, key))
        if existing is None or existing.uuid in unless:
            return
        if instance in (None, existing.uuid):
            del self.instances[uuid, key]

    def find(self, uuid: GpuUuid, key: PartitionKey) -> MigInstance:
        if (uuid, key) not in self.instances:
            raise MigInstanceNotFound(f"{uuid}: there is no instance with {key}")
        return self.instances[uuid, key]
