"""Which partitions a GPU offers: those that exist, and those that are cut for claims."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from dra_driver.model.devices import Gpu, GpuUuid
from dra_driver.model.holdings import Held
from dra_driver.model.mig import (
    Instance,
    Mig,
    MigProfile,
    OddInstance,
    Partition,
    PartitionKey,
    free_of,
)
from dra_driver.model.offer import Shape
from dra_driver.model.profiles import MigRules
from dra_driver.plan.mig.blocks import Amounts, blocks
from dra_driver.plan.mig.engines import board_of, can_be_added, scarce, supplies, takes
from dra_driver.plan.mig.order import packed

Ours = frozenset[tuple[GpuUuid, PartitionKey]]
"""Partitions that were cut for claims."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """What is on a GPU that was not cut for claims, and is nobody's to remove."""

    instances: tuple[Instance, ...] = ()
    odd: tuple[OddInstance, ...] = ()  # also instances of profiles that the board does not list

    @property
    def keys(self) -> tuple[PartitionKey, ...]:
        return (*(one.key for one in self.instances), *(one.key for one in self.odd))


@dataclass(frozen=True, slots=True)
class Hold:
    """What some claim holds of a GPU, whoever it is."""

    shape: Shape
    partition: PartitionKey | None = None  # None: of the GPU as a whole
    cut: bool = False  # for claims
    offered: tuple[str, ...] = ()  # the profiles of which the GPU offered partitions then


@dataclass(frozen=True, slots=True)
class Place:
    """A partition as it is offered."""

    partition: Partition
    instance: Instance | None = None  # None: it is cut for claims
    takes: Amounts = ()  # of the counters of its GPU


@dataclass(frozen=True, slots=True)
class Offered:
    """The partitions of one GPU, and what keeps its devices apart."""

    places: tuple[Place, ...] = ()  # as they are tried
    counters: Amounts = ()  # how much there is of each
    of_whole: Amounts = ()  # what the GPU as a whole takes


def allowed(mig: Mig, rules: MigRules) -> tuple[MigProfile, ...]:
    """The profiles of the board of which partitions are to be cut for claims, by number."""
    placed = [profile for profile in mig.profiles if profile.placements]
    if rules.profiles:
        return tuple(one for one in placed if _matches(one, rules.profiles))
    plain = [profile for profile in placed if profile.is_plain]
    least = {one.slices: one for one in sorted(plain, key=_by_memory, reverse=True)}
    return tuple(one for one in plain if least[one.slices] is one)


def unmatched(gpus: Iterable[Gpu], rules: MigRules) -> Iterator[tuple[str, str, str]]:
    """Each pattern that matches no profile of any of *gpus*: its field, the pattern, and a line."""
    boards = {gpu.product_name: gpu.mig for gpu in gpus if gpu.mig is not None}
    if not boards:
        return
    names = dict.fromkeys(one.name for mig in boards.values() for one in mig.profiles)
    wanted = {"profiles": rules.profiles, "replicas": [name for name, _ in rules.replicas]}
    for field, patterns in wanted.items():
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                there = f"{', '.join(sorted(boards))}; there are: {', '.join(names)}"
                yield f"mig.{field}", pattern, f"{pattern!r} matches no profile of {there}"


def made(held: Held) -> Ours:
    """What was, or is being, cut for the claims that hold it."""
    return frozenset(
        (one.gpu, one.partition)
        for holdings in held.values()
        for one in holdings
        if one.cut and one.gpu is not None and one.partition is not None
    )


def foreign(gpu: Gpu, ours: Ours) -> Foreign:
    """What is there on *gpu* and none of *ours*."""
    if gpu.mig is None:
        return Foreign()
    known = [one for one in gpu.mig.instances if (gpu.uuid, one.key) not in ours]
    return Foreign(
        tuple(one for one in known if gpu.mig.profile(one.key.profile_id)),
        (
            *(one for one in gpu.mig.odd if (gpu.uuid, one.key) not in ours),
            *(OddInstance(o.key, o.gi, 1) for o in known if not gpu.mig.profile(o.key.profile_id)),
        ),
    )


def held_partitions(mig: Mig, holds: Iterable[Hold]) -> tuple[Partition, ...]:
    """The partitions of *holds* that were cut for claims."""
    keys = sorted({one.partition for one in holds if one.cut and one.partition is not None})
    return tuple(found for key in keys if (found := mig.partition(key)) is not None)


def existing(mig: Mig, there: Foreign, held: Iterable[Partition] = ()) -> Offered:
    """Where nothing is cut for claims: what exists, also for those that hold it, which nothing has
    to keep apart."""
    instances = _instances(mig, there)
    return Offered(_in_order(Place(one, instances.get(one)) for one in {**instances, **_all(held)}))


def offered(
    mig: Mig,
    profiles: Collection[MigProfile],
    there: Foreign,
    *,
    whole: bool,
    held: Sequence[Partition] = (),
) -> Offered:
    """Every placement of *profiles* that is free of what is *there*, which is offered too.

    *whole*: the GPU as a whole is a device beside them. *held*: those that claims hold stay, also
    where they would not be offered anew.
    """
    instances = _instances(mig, there)
    found = supplies(mig, there.keys)
    free = [one for one in _free(mig, profiles, there) if can_be_added(one, found)]
    dynamic = [one for one in _all([*free, *held]) if one not in instances]
    partitions = [*instances, *dynamic]
    board = board_of(mig)
    # As if nothing were there: what others make and remove changes no counter, so that only the
    # slice of these devices is written anew (``kubeletplugin.slices``).
    usual = [one.placement for one in _all([*_free(mig, profiles, Foreign()), *held])]
    with_board = whole or (mig.switches and bool(there.keys))
    shared = blocks([*usual, *([board] if with_board else [])], board)
    few = scarce(mig, dynamic, found)
    engines = {one: takes(one, few, board) for one in dynamic}
    return Offered(
        _in_order(
            Place(
                one,
                instances.get(one),
                tuple(sorted((*shared.of(one.placement), *engines.get(one, ())))),
            )
            for one in partitions
        ),
        tuple(sorted((*shared.there, *((one.name, one.left) for one in few)))),
        shared.of(board) if whole else (),
    )


def _instances(mig: Mig, there: Foreign) -> dict[Partition, Instance]:
    found = ((mig.partition(one.key), one) for one in there.instances)
    return {partition: instance for partition, instance in found if partition is not None}


def _all(partitions: Iterable[Partition]) -> dict[Partition, None]:
    """Each once."""
    return dict.fromkeys(partitions)


def _free(mig: Mig, profiles: Iterable[MigProfile], there: Foreign) -> Iterator[Partition]:
    for profile in profiles:
        for placement in profile.placements:
            if free_of(placement, there.keys):
                yield Partition(profile, placement)


def _in_order(places: Iterable[Place]) -> tuple[Place, ...]:
    found = {one.partition: one for one in places}
    return tuple(found[partition] for partition in packed(found))


def _matches(profile: MigProfile, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(profile.name, pattern) for pattern in patterns)


def _by_memory(profile: MigProfile) -> tuple[int, int]:
    return profile.memory_bytes, profile.number
