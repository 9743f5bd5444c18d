"""What fits beside what on a board, and in an instance: what hardware refuses is refused here.

The profiles of each product are in ``geometry.yaml``.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from functools import cache
from importlib import resources
from typing import Any, Final

import yaml

from dra_driver.base.frozen import frozen
from dra_driver.model.gpus import Engines, MigProfile, Partition, Placement

COLUMNS: Final = (
    "number", "id", "slices", "most", "size", "starts", "memory_mib",
    "multiprocessors", "copy", "decoders", "encoders", "jpeg", "ofa",
)  # fmt: skip
ENGINES: Final = tuple(field.name for field in fields(Engines))


@frozen
class BoardGeometry:
    """How one kind of board can be partitioned."""

    units: int  # of memory
    slices: int  # of compute
    profiles: tuple[MigProfile, ...]  # by number

    @property
    def engines(self) -> Engines:
        """What the whole board has for its instances."""
        every = [profile.engines for profile in self.profiles]
        return Engines(*(max(getattr(engines, name) for engines in every) for name in ENGINES))

    def named(self, name: str) -> MigProfile | None:
        """The profile of this name."""
        return next((profile for profile in self.profiles if profile.name == name), None)

    def numbered(self, number: int) -> MigProfile | None:
        """The profile with this number of NVML's."""
        return next((profile for profile in self.profiles if profile.number == number), None)

    def profile(self, profile_id: int) -> MigProfile | None:
        """The profile that this id creates."""
        return next((profile for profile in self.profiles if profile.id == profile_id), None)


def board_geometry(product: str) -> BoardGeometry | None:
    """Of a product of ``boards.yaml``; None: it cannot be partitioned."""
    return _by_product().get(product)


@cache
def geometry_documents() -> Mapping[str, Any]:
    """The table as it is written."""
    text = resources.files(__package__).joinpath("geometry.yaml").read_text()
    return dict(yaml.load(text, yaml.CSafeLoader))


@cache
def _by_product() -> Mapping[str, BoardGeometry]:
    return {
        product: _geometry(entry)
        for entry in geometry_documents().values()
        for product in entry["products"]
    }


def _geometry(entry: Mapping[str, Any]) -> BoardGeometry:
    profiles = [_profile_of(name, row) for name, row in entry["profiles"].items()]
    by_number = sorted(profiles, key=lambda profile: profile.number)
    return BoardGeometry(entry["units"], entry["slices"], tuple(by_number))


def _profile_of(name: str, row: Sequence[Any]) -> MigProfile:
    columns = dict(zip(COLUMNS, row, strict=True))
    return MigProfile(
        name=name,
        id=columns["id"],
        number=columns["number"],
        slices=columns["slices"],
        most=columns["most"],
        memory_bytes=columns["memory_mib"] << 20,
        engines=Engines(
            columns["multiprocessors"],
            columns["copy"],
            columns["decoders"],
            columns["encoders"],
            columns["jpeg"],
            columns["ofa"],
        ),
        placements=tuple(Placement(start, columns["size"]) for start in columns["starts"]),
    )


# Slices of the compute instances that a GPU instance of so many slices can have. A 4g has
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


def fits_on_board(board: BoardGeometry, existing: Collection[Partition], new: Partition) -> bool:
    """Whether *new* fits beside *existing*."""
    of_its_kind = sum(partition.profile.id == new.profile.id for partition in existing)
    overlaps = any(partition.placement.overlaps(new.placement) for partition in existing)
    if overlaps or of_its_kind >= new.profile.most:
        return False
    profiles = [partition.profile for partition in (*existing, new)]
    return _within(board, profiles)


def _within(board: BoardGeometry, profiles: Collection[MigProfile]) -> bool:
    """Whether the board has compute slices and engines for all of them."""
    total = board.engines
    return sum(profile.slices for profile in profiles) <= board.slices and all(
        sum(getattr(profile.engines, name) for profile in profiles) <= getattr(total, name)
        for name in ENGINES
    )


def remaining_instances(
    board: BoardGeometry, existing: Collection[Partition], profile: MigProfile
) -> int:
    """How many more of *profile* can be created, one after the other from the first place on."""
    partitions = list(existing)
    for placement in profile.placements:
        partition = Partition(profile, placement)
        if fits_on_board(board, partitions, partition):
            partitions.append(partition)
    return len(partitions) - len(existing)


def instance_id(board: BoardGeometry, profile: MigProfile, used: Collection[int]) -> int:
    """The number of a new GPU instance: the lowest that is free of those for its size.

    As on real boards: the whole is 0, halves are 1 and 2, quarters 3 to 6, eighths 7 to 14.
    """
    parts = board.units // profile.size
    return next(number for number in range(parts - 1, 2 * parts) if number not in used)


@frozen
class ComputeInstanceKind:
    """A kind of compute instance."""

    number: int  # NVML_COMPUTE_INSTANCE_PROFILE_*, and the id as well
    slices: int
    multiprocessors: int


def compute_instance_kinds(
    board: BoardGeometry, whole: MigProfile
) -> tuple[ComputeInstanceKind, ...]:
    """The compute instances that a GPU instance of *whole* can have; the last is all of it.

    One slice with the memory of two can have more multiprocessors than one slice: then there are
    two kinds of one slice (seen on an H100), and the second has them all.
    """
    total = whole.engines.multiprocessors
    kinds = [
        ComputeInstanceKind(_COMPUTE_NUMBERS[slices], slices, total * slices // whole.slices)
        for slices in COMPUTE_SLICES.get(whole.slices, ())
    ]
    plain = board.numbered(0)
    least = plain.engines.multiprocessors if plain else total
    if whole.slices == 1 and least < total:
        return ComputeInstanceKind(0, 1, least), ComputeInstanceKind(ONE_SLICE_REV1, 1, total)
    return tuple(kinds)


def compute_instance_placements(slices: int, size: int) -> tuple[Placement, ...]:
    """Where compute instances of *size* slices can begin in a GPU instance of *slices*; none: it
    has no such compute instances."""
    if size not in COMPUTE_SLICES.get(slices, ()):
        return ()
    return tuple(Placement(start, size) for start in range(0, slices - size + 1, size))


def compute_instances_fit(slices: int, sizes: Collection[int]) -> bool:
    """Whether a GPU instance of *slices* can have compute instances of these many slices."""
    return sum(sizes) <= slices and set(sizes) <= set(COMPUTE_SLICES.get(slices, ()))
