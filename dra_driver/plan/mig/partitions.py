"""Which partitions a GPU offers: those that exist, and those that are cut for claims.

In which order partitions are tried: the scheduler takes the first that fits.

What is to last is room for the largest partitions that are not the whole board. They have few
places; call one a block. So small ones first go where no block is, then into the block that holds
the most of them, front to back, before they touch the next; and the largest ones take the block
first that the small ones fill last. A kind of few compute slices for its memory goes first where
no kind of more slices fits. A claim that any partition can serve gets a small one.

With first fit this leaves as much room as the best of all orders, to within a hundredth, on every
board (``tests/plan/mig/test_order.py``).
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

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
from dra_driver.model.records import HoldingsByDevice
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
    found = list(partitions)
    places = {one.placement for one in found}
    size = _block_size(places)
    room = {
        block: sum(block.contains(place) for place in places if place.size < size)
        for block in sorted(places)
        if block.size == size
    }
    most: dict[Placement, int] = {}  # compute slices that a partition in this place can have
    for one in found:
        most[one.placement] = max(most.get(one.placement, 0), one.profile.slices)
    return sorted(
        found,
        key=lambda one: (
            one.placement.size,
            one.profile.slices,
            one.profile.id,
            most[one.placement] > one.profile.slices,
            _packing_key(one.placement, room),
        ),
    )


def _block_size(places: Collection[Placement]) -> int:
    """Of the largest placements that do not have all of the board."""
    end = max((place.end for place in places), default=0)
    return max((place.size for place in places if place.size < end), default=0)


def _packing_key(placement: Placement, room: dict[Placement, int]) -> tuple[int, int, int]:
    """*room*: how many smaller places each block has."""
    around = next((one for one in room if one != placement and one.contains(placement)), None)
    if around is not None:
        return 1, -room[around], placement.start
    return 0, room.get(placement, 0), -placement.start


CreatedPartitions = frozenset[tuple[GpuUuid, PartitionKey]]
"""Partitions that were cut for claims."""


@dataclass(frozen=True, slots=True)
class UnmanagedInstances:
    """What is on a GPU that was not cut for claims, and is nobody's to remove."""

    instances: tuple[MigInstance, ...] = ()
    unusable: tuple[
        UnusableGpuInstance, ...
    ] = ()  # also instances of profiles that the board does not list

    @property
    def keys(self) -> tuple[PartitionKey, ...]:
        return (*(instance.key for instance in self.instances), *(one.key for one in self.unusable))


@dataclass(frozen=True, slots=True)
class HeldShape:
    """What some claim holds of a GPU, whoever it is."""

    shape: Shape
    partition: PartitionKey | None = None  # None: of the GPU as a whole
    cut: bool = False  # for claims
    offered: tuple[str, ...] = ()  # the profiles of which the GPU offered partitions then


@dataclass(frozen=True, slots=True)
class OfferedPartition:
    """A partition as it is offered."""

    partition: Partition
    instance: MigInstance | None = None  # None: it is cut for claims
    takes: CounterAmounts = ()  # of the counters of its GPU


@dataclass(frozen=True, slots=True)
class OfferedPartitions:
    """The partitions of one GPU, and what keeps its devices apart."""

    places: tuple[OfferedPartition, ...] = ()  # as they are tried
    counters: CounterAmounts = ()  # how much there is of each
    of_whole: CounterAmounts = ()  # what the GPU as a whole takes


def dynamic_profiles(mig: MigInfo, rules: MigRules) -> tuple[MigProfile, ...]:
    """The profiles of the board of which partitions are to be cut for claims, by number."""
    placed = [profile for profile in mig.profiles if profile.placements]
    if rules.profiles:
        return tuple(one for one in placed if _matches(one, rules.profiles))
    plain = [profile for profile in placed if profile.is_plain]
    least = {one.slices: one for one in sorted(plain, key=_by_memory, reverse=True)}
    return tuple(one for one in plain if least[one.slices] is one)


def unmatched_patterns(gpus: Iterable[Gpu], rules: MigRules) -> Iterator[tuple[str, str, str]]:
    """Each pattern that matches no profile of any of *gpus*: its field, the pattern, and a line."""
    boards = {gpu.product_name: gpu.mig for gpu in gpus if gpu.mig is not None}
    if not boards:
        return
    names = dict.fromkeys(profile.name for mig in boards.values() for profile in mig.profiles)
    wanted = {"profiles": rules.profiles, "replicas": [name for name, _ in rules.replicas]}
    for field, patterns in wanted.items():
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                there = f"{', '.join(sorted(boards))}; there are: {', '.join(names)}"
                yield f"mig.{field}", pattern, f"{pattern!r} matches no profile of {there}"


def created_partitions(held: HoldingsByDevice) -> CreatedPartitions:
    """What was, or is being, cut for the claims that hold it."""
    return frozenset(
        (holding.gpu, holding.partition)
        for holdings in held.values()
        for holding in holdings
        if holding.cut and holding.partition is not None
    )


def unmanaged_instances(gpu: Gpu, ours: CreatedPartitions) -> UnmanagedInstances:
    """What is there on *gpu* and none of *ours*."""
    if gpu.mig is None:
        return UnmanagedInstances()
    known = [instance for instance in gpu.mig.instances if (gpu.uuid, instance.key) not in ours]
    return UnmanagedInstances(
        tuple(one for one in known if gpu.mig.profile(one.key.profile_id)),
        (
            *(one for one in gpu.mig.unusable if (gpu.uuid, one.key) not in ours),
            *(
                UnusableGpuInstance(o.key, o.gi, 1)
                for o in known
                if not gpu.mig.profile(o.key.profile_id)
            ),
        ),
    )


def held_partitions(mig: MigInfo, holds: Iterable[HeldShape]) -> tuple[Partition, ...]:
    """The partitions of *holds* that were cut for claims."""
    keys = sorted({hold.partition for hold in holds if hold.cut and hold.partition is not None})
    return tuple(found for key in keys if (found := mig.partition(key)) is not None)


def existing_partitions(
    mig: MigInfo, there: UnmanagedInstances, held: Iterable[Partition] = ()
) -> OfferedPartitions:
    """Where nothing is cut for claims: what exists, also for those that hold it, which nothing has
    to keep apart."""
    instances = _instances(mig, there)
    return OfferedPartitions(
        _in_order(OfferedPartition(one, instances.get(one)) for one in {**instances, **_all(held)})
    )


def dynamic_partitions(
    mig: MigInfo,
    profiles: Collection[MigProfile],
    there: UnmanagedInstances,
    *,
    whole: bool,
    held: Sequence[Partition] = (),
) -> OfferedPartitions:
    """Every placement of *profiles* that is free of what is *there*, which is offered too.

    *whole*: the GPU as a whole is a device beside them. *held*: those that claims hold stay, also
    where they would not be offered anew.
    """
    instances = _instances(mig, there)
    found = engine_supplies(mig, there.keys)
    free = [one for one in _free(mig, profiles, there) if can_be_added(one, found)]
    dynamic = [one for one in _all([*free, *held]) if one not in instances]
    partitions = [*instances, *dynamic]
    board = whole_board(mig)
    # As if nothing were there: what others make and remove changes no counter, so that only the
    # slice of these devices is written anew (``kubeletplugin.slices.reconcile``).
    usual = [one.placement for one in _all([*_free(mig, profiles, UnmanagedInstances()), *held])]
    with_board = whole or (mig.switches and bool(there.keys))
    shared = partition_counters([*usual, *([board] if with_board else [])], board)
    few = scarce_engines(mig, dynamic, found)
    engines = {one: engine_amounts(one, few, board) for one in dynamic}
    return OfferedPartitions(
        _in_order(
            OfferedPartition(
                partition,
                instances.get(partition),
                tuple(sorted((*shared.of(partition.placement), *engines.get(partition, ())))),
            )
            for partition in partitions
        ),
        tuple(sorted((*shared.there, *((one.name, one.left) for one in few)))),
        shared.of(board) if whole else (),
    )


def _instances(mig: MigInfo, there: UnmanagedInstances) -> dict[Partition, MigInstance]:
    found = ((mig.partition(instance.key), instance) for instance in there.instances)
    return {partition: instance for partition, instance in found if partition is not None}


def _all(partitions: Iterable[Partition]) -> dict[Partition, None]:
    """Each once."""
    return dict.fromkeys(partitions)


def _free(
    mig: MigInfo, profiles: Iterable[MigProfile], there: UnmanagedInstances
) -> Iterator[Partition]:
    for profile in profiles:
        for placement in profile.placements:
            if is_free(placement, there.keys):
                yield Partition(profile, placement)


def _in_order(places: Iterable[OfferedPartition]) -> tuple[OfferedPartition, ...]:
    found = {place.partition: place for place in places}
    return tuple(found[partition] for partition in packing_order(found))


def _matches(profile: MigProfile, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(profile.name, pattern) for pattern in patterns)


def _by_memory(profile: MigProfile) -> tuple[int, int]:
    return profile.memory_bytes, profile.number
