"""What fits beside what on a board, and in an instance: what hardware refuses is refused here."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from dra_driver.model.mig import Engines, MigProfile, Partition, Placement
from dra_driver.node.sim.mig.geometry import Geometry

# Slices of the compute instances that a GPU instance of so many slices can be cut into. A 4g has
# no three, as nvidia-smi mig -lcip lists them.
COMPUTE_SLICES: Final[Mapping[int, tuple[int, ...]]] = {
    1: (1,),
    2: (1, 2),
    3: (1, 2, 3),
    4: (1, 2, 4),
    7: (1, 2, 3, 4, 7),
}


_COMPUTE_NUMBERS: Final = {1: 0, 2: 1, 3: 2, 4: 3, 7: 4}
ONE_SLICE_REV1: Final = 7  # NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE_REV1


def fits(board: Geometry, there: Collection[Partition], wanted: Partition) -> bool:
    """Whether *wanted* can be cut beside what is there."""
    of_its_kind = sum(one.profile.id == wanted.profile.id for one in there)
    overlaps = any(one.placement.overlaps(wanted.placement) for one in there)
    if overlaps or of_its_kind >= wanted.profile.most:
        return False
    profiles = [one.profile for one in (*there, wanted)]
    return _within(board, profiles)


def _within(board: Geometry, profiles: Collection[MigProfile]) -> bool:
    """Whether the board has compute slices and engines for all of them."""
    total = board.engines
    return sum(one.slices for one in profiles) <= board.slices and all(
        sum(getattr(one.engines, name) for one in profiles) <= getattr(total, name)
        for name in Engines.__slots__
    )


def room(board: Geometry, there: Collection[Partition], profile: MigProfile) -> int:
    """How many more of *profile* can be cut, one after the other from the first place on."""
    cut = list(there)
    for placement in profile.placements:
        wanted = Partition(profile, placement)
        if fits(board, cut, wanted):
            cut.append(wanted)
    return len(cut) - len(there)


def instance_id(board: Geometry, profile: MigProfile, used: Collection[int]) -> int:
    """The number of a new GPU instance: the lowest that is free of those for its size.

    As on real boards: the whole is 0, halves are 1 and 2, quarters 3 to 6, eighths 7 to 14.
    """
    parts = board.units // profile.size
    return next(number for number in range(parts - 1, 2 * parts) if number not in used)


@dataclass(frozen=True, slots=True)
class ComputeKind:
    """A kind of compute instance."""

    number: int  # NVML_COMPUTE_INSTANCE_PROFILE_*, and the id as well
    slices: int
    multiprocessors: int


def compute_kinds(board: Geometry, whole: MigProfile) -> tuple[ComputeKind, ...]:
    """The compute instances that a GPU instance of *whole* can have; the last is all of it.

    One slice with the memory of two can have more multiprocessors than one slice: then there are
    two kinds of one slice (seen on an H100), and the second has them all.
    """
    total = whole.engines.multiprocessors
    kinds = [
        ComputeKind(_COMPUTE_NUMBERS[slices], slices, total * slices // whole.slices)
        for slices in COMPUTE_SLICES.get(whole.slices, ())
    ]
    plain = board.numbered(0)
    least = plain.engines.multiprocessors if plain else total
    if whole.slices == 1 and least < total:
        return ComputeKind(0, 1, least), ComputeKind(ONE_SLICE_REV1, 1, total)
    return tuple(kinds)


def compute_placements(slices: int, wanted: int) -> tuple[Placement, ...]:
    """Where compute instances of *wanted* slices can begin in a GPU instance of *slices*; none: it
    has no such compute instances."""
    if wanted not in COMPUTE_SLICES.get(slices, ()):
        return ()
    return tuple(Placement(start, wanted) for start in range(0, slices - wanted + 1, wanted))


def compute_instances_fit(slices: int, wanted: Collection[int]) -> bool:
    """Whether a GPU instance of *slices* can have compute instances of these many slices."""
    return sum(wanted) <= slices and set(wanted) <= set(COMPUTE_SLICES.get(slices, ()))
