"""What a simulated board can be cut into: ``geometry.yaml`` as values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Final

import yaml

from dra_driver.model.mig import Engines, MigProfile, Placement

COLUMNS: Final = (
    "number", "id", "slices", "most", "size", "starts", "memory_mib",
    "multiprocessors", "copy", "decoders", "encoders", "jpeg", "ofa",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Geometry:
    """How one kind of board can be cut."""

    units: int  # of memory
    slices: int  # of compute
    profiles: tuple[MigProfile, ...]  # by number

    @property
    def engines(self) -> Engines:
        """What the whole board has for its instances."""
        every = [profile.engines for profile in self.profiles]
        return Engines(*(max(getattr(one, name) for one in every) for name in Engines.__slots__))

    def named(self, name: str) -> MigProfile | None:
        """The profile of this name."""
        return next((one for one in self.profiles if one.name == name), None)

    def numbered(self, number: int) -> MigProfile | None:
        """The profile with this number of NVML's."""
        return next((one for one in self.profiles if one.number == number), None)

    def profile(self, profile_id: int) -> MigProfile | None:
        """The profile that this id creates."""
        return next((one for one in self.profiles if one.id == profile_id), None)


def geometry(product: str) -> Geometry | None:
    """Of a product of ``boards.yaml``; None: it cannot be cut."""
    return _by_product().get(product)


@cache
def documents() -> Mapping[str, Any]:
    """The table as it is written."""
    text = resources.files(__package__).joinpath("geometry.yaml").read_text()
    return dict(yaml.safe_load(text))


@cache
def _by_product() -> Mapping[str, Geometry]:
    return {
        product: _geometry(entry) for entry in documents().values() for product in entry["products"]
    }


def _geometry(entry: Mapping[str, Any]) -> Geometry:
    profiles = [_profile(name, row) for name, row in entry["profiles"].items()]
    by_number = sorted(profiles, key=lambda profile: profile.number)
    return Geometry(entry["units"], entry["slices"], tuple(by_number))


def _profile(name: str, row: Sequence[Any]) -> MigProfile:
    said = dict(zip(COLUMNS, row, strict=True))
    return MigProfile(
        name=name,
        id=said["id"],
        number=said["number"],
        slices=said["slices"],
        most=said["most"],
        memory_bytes=said["memory_mib"] << 20,
        engines=Engines(
            said["multiprocessors"],
            said["copy"],
            said["decoders"],
            said["encoders"],
            said["jpeg"],
            said["ofa"],
        ),
        placements=tuple(Placement(start, said["size"]) for start in said["starts"]),
    )
