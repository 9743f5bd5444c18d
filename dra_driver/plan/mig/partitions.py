"""Which partitions a GPU offers: those that exist, and those that are created for claims.

The scheduler takes the first device that fits, so partitions are published in the order in which
they are to be tried. The order saves room for the largest partitions that are not the whole board.
These have few placements, called blocks here. Small partitions go where no block is, then into the
block that holds the most of them, from its start, before they touch the next block. The largest
partitions take the block first that small ones fill last. A profile with few compute slices for its
memory goes first where no profile with more slices fits. A claim that any partition can serve gets
a small one.

With first fit this leaves as much room as the best of all orders, to within a hundredth, on every
board (``tests/plan/mig/test_order.py``).
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from dra_driver.base.frozen import frozen
from dra_driver.model.gpus import (
    Gpu,
    GpuUuid,
    MigInfo,
    MigInstance,
    MigProfile,
    Partition,
    PartitionKey,
    Placement,
    UnusableGpuInstance,
    is_free,
)
from dra_driver.model.offer import Shape
from dra_driver.model.profiles import MigRules
from dra_driver.model.records import HoldingsByGpu
from dra_driver.plan.mig.counters import (
    CounterAmounts,
    can_be_added,
    engine_amounts,
    engine_supplies,
    partition_counters,
    scarce_engines,
    whole_board,
)


def packing_order(partitions: Iterable[Partition]) -> list[Partition]:
    """Those first that leave the most room for larger ones."""
    unordered = list(partitions)
    placements = {partition.placement for partition in unordered}
    size = _block_size(placements)
    smaller_placements = {
        block: sum(block.contains(place) for place in placements if place.size < size)
        for block in sorted(placements)
        if block.size == size
    }
    max_slices: dict[Placement, int] = {}  # compute slices of the partitions with this placement
    for partition in sorted(unordered, key=lambda partition: partition.profile.slices):
        max_slices[partition.placement] = partition.profile.slices
    return sorted(
        unordered,
        key=lambda partition: (
            partition.placement.size,
            partition.profile.slices,
            partition.profile.id,
            max_slices[partition.placement] > partition.profile.slices,
            _packing_key(partition.placement, smaller_placements),
        ),
    )


def _block_size(placements: Collection[Placement]) -> int:
    """The size of the largest placements that are not the whole board."""
    end = max((placement.end for placement in placements), default=0)
    return max((placement.size for placement in placements if placement.size < end), default=0)


def _packing_key(
    placement: Placement, smaller_placements: dict[Placement, int]
) -> tuple[int, int, int]:
    """*smaller_placements*: how many smaller placements each block has."""
    for block, count in smaller_placements.items():
        if block != placement and block.contains(placement):
            return 1, -count, placement.start
    return 0, smaller_placements.get(placement, 0), -placement.start


CreatedPartitions = frozenset[tuple[GpuUuid, PartitionKey]]
"""Partitions that were created for claims."""


@frozen
class UnmanagedInstances:
    """The instances of a GPU that were not created for claims: nobody removes them."""

    instances: tuple[MigInstance, ...] = ()
    # Also instances of profiles that the board does not list.
    unusable: tuple[UnusableGpuInstance, ...] = ()

    @property
    def keys(self) -> tuple[PartitionKey, ...]:
        return (
            *(instance.key for instance in self.instances),
            *(instance.key for instance in self.unusable),
        )


@frozen
class HeldShape:
    """What some claim holds of a GPU."""

    shape: Shape
    partition: PartitionKey | None = None  # None: of the GPU as a whole
    created_for_claims: bool = False
    offered: tuple[str, ...] = ()  # the profiles of which the GPU offered partitions then


@frozen
class OfferedPartition:
    """A partition as it is offered."""

    partition: Partition
    instance: MigInstance | None = None  # None: it is created for claims
    takes: CounterAmounts = ()  # of the counters of its GPU


@frozen
class OfferedPartitions:
    """The partitions of one GPU, and what keeps its devices apart."""

    places: tuple[OfferedPartition, ...] = ()  # in the order in which they are tried
    counters: CounterAmounts = ()  # the amount of each
    of_whole: CounterAmounts = ()  # what the GPU as a whole takes


def dynamic_profiles(mig: MigInfo, rules: MigRules) -> tuple[MigProfile, ...]:
    """The profiles of the board of which partitions are to be created for claims, by number."""
    placed = [profile for profile in mig.profiles if profile.placements]
    if rules.profiles:
        return tuple(
            profile
            for profile in placed
            if any(fnmatchcase(profile.name, pattern) for pattern in rules.profiles)
        )
    plain = [profile for profile in placed if profile.is_plain]
    plain.sort(key=lambda profile: (profile.memory_bytes, profile.number), reverse=True)
    least_memory = {profile.slices: profile for profile in plain}
    return tuple(sorted(least_memory.values(), key=lambda profile: profile.number))


def unmatched_patterns(gpus: Iterable[Gpu], rules: MigRules) -> Iterator[tuple[str, str, str]]:
    """Each pattern that matches no profile of any of *gpus*: its field, the pattern, a message."""
    boards = {gpu.product_name: gpu.mig for gpu in gpus if gpu.mig is not None}
    if not boards:
        return
    names = dict.fromkeys(profile.name for mig in boards.values() for profile in mig.profiles)
    patterns_by_field = {
        "profiles": rules.profiles,
        "replicas": [name for name, _ in rules.replicas],
    }
    for field, patterns in patterns_by_field.items():
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                description = f"{', '.join(sorted(boards))}; there are: {', '.join(names)}"
                yield f"mig.{field}", pattern, f"{pattern!r} matches no profile of {description}"


def created_partitions(held: HoldingsByGpu) -> CreatedPartitions:
    """The partitions that were, or are being, created for the claims that hold them."""
    return frozenset(
        (holding.gpu, holding.partition)
        for holdings in held.values()
        for holding in holdings
        if holding.created_for_claims and holding.partition is not None
    )


def unmanaged_instances(gpu: Gpu, created: CreatedPartitions) -> UnmanagedInstances:
    """The instances of *gpu* that are none of *created*."""
    if gpu.mig is None:
        return UnmanagedInstances()
    unusable = [
        instance for instance in gpu.mig.unusable if (gpu.uuid, instance.key) not in created
    ]
    usable: list[MigInstance] = []
    for instance in gpu.mig.instances:
        if (gpu.uuid, instance.key) in created:
            continue
        if gpu.mig.profile(instance.key.profile_id):
            usable.append(instance)
        else:
            unusable.append(UnusableGpuInstance(instance.key, instance.gi, 1))
    return UnmanagedInstances(tuple(usable), tuple(unusable))


def held_partitions(mig: MigInfo, held_shapes: Iterable[HeldShape]) -> tuple[Partition, ...]:
    """The partitions of *held_shapes* that were created for claims."""
    keys = sorted(
        {
            held_shape.partition
            for held_shape in held_shapes
            if held_shape.created_for_claims and held_shape.partition is not None
        }
    )
    return tuple(partition for key in keys if (partition := mig.partition(key)) is not None)


def existing_partitions(
    mig: MigInfo, unmanaged: UnmanagedInstances, held: Iterable[Partition] = ()
) -> OfferedPartitions:
    """The instances of a GPU on which nothing is created for claims. They need no counters."""
    instances = _instances(mig, unmanaged)
    order = packing_order({**instances, **dict.fromkeys(held)})
    return OfferedPartitions(
        tuple(OfferedPartition(partition, instances.get(partition)) for partition in order)
    )


def dynamic_partitions(
    mig: MigInfo,
    profiles: Collection[MigProfile],
    unmanaged: UnmanagedInstances,
    *,
    whole: bool,
    held: Sequence[Partition] = (),
) -> OfferedPartitions:
    """Every placement of *profiles* that is free of *unmanaged* instances, and these instances.

    *whole*: the GPU as a whole is a device beside them. *held*: partitions that claims hold are
    offered, also where they would not be offered anew.
    """
    instances = _instances(mig, unmanaged)
    supplies = engine_supplies(mig, unmanaged.keys)
    free = [
        partition
        for partition in _free(mig, profiles, unmanaged)
        if can_be_added(partition, supplies)
    ]
    dynamic = [
        partition for partition in dict.fromkeys([*free, *held]) if partition not in instances
    ]
    board = whole_board(mig)
    # Instances that others create and remove change no counter, so that only the slice of these
    # devices is written anew (``kubeletplugin.slices.reconcile``).
    possible = dict.fromkeys([*_free(mig, profiles, UnmanagedInstances()), *held])
    placements = [partition.placement for partition in possible]
    with_board = whole or (mig.switches and bool(unmanaged.keys))
    shared = partition_counters([*placements, *([board] if with_board else [])], board)
    scarce = scarce_engines(mig, dynamic, supplies)
    engines = {partition: engine_amounts(partition, scarce, board) for partition in dynamic}
    places = (
        OfferedPartition(
            partition,
            instances.get(partition),
            tuple(sorted((*shared.of(partition.placement), *engines.get(partition, ())))),
        )
        for partition in packing_order([*instances, *dynamic])
    )
    supplied = ((supply.name, supply.available) for supply in scarce)
    return OfferedPartitions(
        tuple(places),
        tuple(sorted((*shared.amounts, *supplied))),
        shared.of(board) if whole else (),
    )


def _instances(mig: MigInfo, unmanaged: UnmanagedInstances) -> dict[Partition, MigInstance]:
    pairs = ((mig.partition(instance.key), instance) for instance in unmanaged.instances)
    return {partition: instance for partition, instance in pairs if partition is not None}


def _free(
    mig: MigInfo, profiles: Iterable[MigProfile], unmanaged: UnmanagedInstances
) -> Iterator[Partition]:
    for profile in profiles:
        for placement in profile.placements:
            if is_free(placement, unmanaged.keys):
                yield Partition(profile, placement)
