"""Boards with MIG, as values: all that are known, and GPUs with one of them."""

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from dra_driver.model.gpus import (
    Engines,
    Gpu,
    GpuUuid,
    MigInfo,
    MigInstance,
    MigProfile,
    Partition,
    PartitionKey,
    Placement,
    UnusableGpuInstance,
    Version,
)
from dra_driver.model.profiles import GpuSelector, MigRules, Profile, ProfileEntry, Rules
from tests.builders import gpu

MIB = 1024 * 1024
_FILE = Path(__file__).parents[2] / "data/mig-boards.yaml"
_RESET = ("a30", "a100")  # boards that change their mode with a reset only


@functools.cache
def boards() -> Mapping[str, tuple[MigProfile, ...]]:
    """The profiles of every board, by its name."""
    documents = yaml.load(_FILE.read_text(), yaml.CSafeLoader)
    return {
        board: tuple(sorted((_profile(*row) for row in rows.items()), key=lambda p: p.number))
        for board, rows in documents.items()
    }


def _profile(name: str, row: list[Any]) -> MigProfile:
    number, id_, slices, most, starts, size, mib, *engines = row
    placements = tuple(Placement(start, size) for start in starts)
    return MigProfile(name, id_, number, slices, most, mib * MIB, Engines(*engines), placements)


def mig(board: str = "a100-40", **fields: Any) -> MigInfo:
    """What this board says of MIG; no change of its mode is pending unless *fields* say so."""
    on = fields.get("on", False)
    usual: dict[str, Any] = {"on": on, "pending": on, "switches": not board.startswith(_RESET)}
    return MigInfo(**usual | {"profiles": boards()[board]} | fields)


def mig_gpu(board: str = "a100-40", minor: int = 0, **fields: Any) -> Gpu:
    """A GPU with this board; *fields* of its MIG."""
    ampere = {"architecture": "Ampere", "compute_capability": Version(8, 0)}
    more = ampere if board.startswith(_RESET) else {}
    return gpu(minor, product_name=f"NVIDIA {board}", mig=mig(board, **fields), **more)


def partition(mig_info: MigInfo, name: str, start: int) -> Partition:
    """One of the board's partitions."""
    profile = next(listed for listed in mig_info.profiles if listed.name == name)
    place = next(placement for placement in profile.placements if placement.start == start)
    return Partition(profile, place)


def instance(mig_info: MigInfo, name: str, start: int, gi: int = 1) -> MigInstance:
    key = partition(mig_info, name, start).key
    return MigInstance(key, gi, 0, GpuUuid(f"MIG-{key.profile_id}-{start}"))


def unusable(
    mig_info: MigInfo, name: str, start: int, gi: int = 9, cis: int = 0
) -> UnusableGpuInstance:
    return UnusableGpuInstance(partition(mig_info, name, start).key, gi, cis)


def key(mig_info: MigInfo, name: str, start: int) -> PartitionKey:
    return partition(mig_info, name, start).key


def profile(**fields: Any) -> Profile:
    """A node profile with these rules for every GPU."""
    return Profile("p", (ProfileEntry(GpuSelector(), Rules(**fields), "spec.gpus[0]"),))


def dynamic(*profiles: str, **fields: Any) -> Profile:
    """A node profile that has partitions created for claims; *fields* of its rules."""
    of_mig = {key: fields.pop(key) for key in ("single", "replicas") if key in fields}
    return profile(mig=MigRules(dynamic=True, profiles=profiles, **of_mig), **fields)


def legal(mig_info: MigInfo, partitions: Iterable[Partition]) -> bool:
    """Whether a board takes these *partitions* at once: written from NVIDIA's guide, and by no
    counters."""
    chosen = list(partitions)
    units = [
        unit
        for partition in chosen
        for unit in range(partition.placement.start, partition.placement.end)
    ]
    if len(set(units)) != len(units):
        return False
    ids = [partition.profile.id for partition in chosen]
    if any(ids.count(partition.profile.id) > partition.profile.most for partition in chosen):
        return False
    board = max(mig_info.profiles, key=lambda profile: (profile.size, profile.memory_bytes))
    return all(
        sum(getattr(partition.profile.engines, kind) for partition in chosen)
        <= getattr(board.engines, kind)
        for kind in Engines.__dataclass_fields__
    )
