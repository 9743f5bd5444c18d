"""MIG: how a GPU can be cut into partitions, and which instances it has now.

A *partition* is a profile at a placement, whether it was cut or not; an *instance* is one that was:
a GPU instance with one compute instance that fills it (NVIDIA's MIG user guide).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from dra_driver.model.uuids import GpuUuid


@dataclass(frozen=True, slots=True, order=True)
class Placement:
    """Which memory units of the board: *size* of them from *start* on
    (``nvmlGpuInstancePlacement_t``)."""

    start: int
    size: int

    @property
    def end(self) -> int:
        return self.start + self.size

    def overlaps(self, other: "Placement") -> bool:
        return self.start < other.end and other.start < self.end

    def contains(self, other: "Placement") -> bool:
        return self.start <= other.start and other.end <= self.end


@dataclass(frozen=True, slots=True)
class Engines:
    """What an instance has of the board (``nvmlGpuInstanceProfileInfo_t``)."""

    multiprocessors: int = 0
    copy: int = 0
    decoders: int = 0
    encoders: int = 0
    jpeg: int = 0
    ofa: int = 0


@dataclass(frozen=True, slots=True)
class MigProfile:
    """A kind of partition, as the board's driver describes it."""

    name: str  # "1g.10gb+me": as nvidia-smi prints it, without "MIG "
    id: int  # what creates it: nvmlGpuInstanceProfileInfo_t.id, nvidia-smi mig -cgi
    number: int  # NVML_GPU_INSTANCE_PROFILE_*: what it is asked about with
    slices: int  # compute slices
    most: int  # instances of it on one board (instanceCount)
    memory_bytes: int
    engines: Engines
    placements: tuple[Placement, ...]  # by start

    @property
    def size(self) -> int:
        """Memory units of one instance."""
        return self.placements[0].size

    @property
    def is_plain(self) -> bool:
        """Without a suffix: not ``+me``, ``+gfx``, ``-me``, …"""
        return "+" not in self.name and "-" not in self.name


@dataclass(frozen=True, slots=True, order=True)
class PartitionKey:
    """Which partition of a GPU: all that has to be remembered of one."""

    profile_id: int
    start: int
    size: int
    slices: int

    @property
    def placement(self) -> Placement:
        return Placement(self.start, self.size)

    def __str__(self) -> str:
        return f"profile {self.profile_id} at {self.start}"


@dataclass(frozen=True, slots=True)
class Partition:
    """A profile at one of its placements."""

    profile: MigProfile
    placement: Placement

    @property
    def key(self) -> PartitionKey:
        profile, placement = self.profile, self.placement
        return PartitionKey(profile.id, placement.start, placement.size, profile.slices)


@dataclass(frozen=True, slots=True)
class Instance:
    """A partition that was cut and can be used."""

    key: PartitionKey
    gi: int  # GPU instance id
    ci: int  # compute instance id
    uuid: GpuUuid  # "MIG-…"; empty: it is not there yet, and is shown as if it were


@dataclass(frozen=True, slots=True)
class OddInstance:
    """A GPU instance that is no partition: without a compute instance, with several, or with one
    that does not fill it, or whose name NVML does not say. Nobody is given it; it is in the way all
    the same."""

    key: PartitionKey
    gi: int
    cis: int  # how many compute instances


class Fixed(Enum):
    """What nobody inside a virtual machine can change of a GPU that it has."""

    NOTHING = 0
    MODE = 1  # it takes a reset, which the hypervisor lets nobody make
    ALL = 2  # a vGPU: how it is cut, and whether, its host says


@dataclass(frozen=True, slots=True)
class Mig:
    """What a GPU that can be cut says of it at one look."""

    on: bool  # MIG mode now
    pending: bool  # MIG mode after the next reset
    switches: bool  # the mode changes without a reset while nothing uses the GPU (since Hopper)
    profiles: tuple[MigProfile, ...] = ()  # by number; the geometry
    instances: tuple[Instance, ...] = ()  # by key
    odd: tuple[OddInstance, ...] = ()  # by key
    fixed: Fixed = Fixed.NOTHING

    @property
    def units(self) -> int:
        """Memory units of the board."""
        ends = (place.end for profile in self.profiles for place in profile.placements)
        return max(ends, default=0)

    def profile(self, profile_id: int) -> MigProfile | None:
        """The profile of this id."""
        return next((one for one in self.profiles if one.id == profile_id), None)

    def partition(self, key: PartitionKey) -> Partition | None:
        """The partition of this key; None: the board has no such profile."""
        profile = self.profile(key.profile_id)
        return Partition(profile, key.placement) if profile else None

    @property
    def taken(self) -> tuple[PartitionKey, ...]:
        """Where something was cut."""
        cut = [one.key for one in self.instances]
        return tuple(sorted([*cut, *(one.key for one in self.odd)]))


def uncut(gpu: GpuUuid, key: PartitionKey) -> GpuUuid:
    """A word that stands for the instance of a partition before it is cut."""
    return GpuUuid(f"{gpu}/{key.profile_id}/{key.start}")


def free_of(placement: Placement, keys: Iterable[PartitionKey]) -> bool:
    """Whether none of *keys* overlaps *placement*."""
    return not any(placement.overlaps(key.placement) for key in keys)
