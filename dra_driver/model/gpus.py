"""The GPUs of a node: the hardware, however it is offered (``model.offer``).

MIG: a *partition* is a profile at a placement, whether it exists or not; an *instance* is one that
exists: a GPU instance with one compute instance that fills it (NVIDIA's MIG user guide).
"""

from collections.abc import Iterable
from enum import Enum
from typing import NewType

from dra_driver.base.frozen import frozen, ordered

GpuUuid = NewType("GpuUuid", str)  # as NVML prints it: "GPU-…", of a MIG instance "MIG-…"


def is_mig_uuid(uuid: GpuUuid) -> bool:
    """Whether it is a MIG instance.

    >>> is_mig_uuid(GpuUuid("MIG-5c1b")), is_mig_uuid(GpuUuid("GPU-5c1b"))
    (True, False)
    """
    return uuid.startswith("MIG-")


@ordered
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


@frozen
class Engines:
    """What an instance has of the board (``nvmlGpuInstanceProfileInfo_t``)."""

    multiprocessors: int = 0
    copy: int = 0
    decoders: int = 0
    encoders: int = 0
    jpeg: int = 0
    ofa: int = 0


@frozen
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


@ordered
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


@frozen
class Partition:
    """A profile at one of its placements."""

    profile: MigProfile
    placement: Placement

    @property
    def key(self) -> PartitionKey:
        profile, placement = self.profile, self.placement
        return PartitionKey(profile.id, placement.start, placement.size, profile.slices)


@frozen
class MigInstance:
    """A partition that exists and can be used."""

    key: PartitionKey
    gi: int  # GPU instance id
    ci: int  # compute instance id
    uuid: GpuUuid  # "MIG-…"; empty: it is not there yet, and is shown as if it were


@frozen
class UnusableGpuInstance:
    """A GPU instance that is no partition: without a compute instance, with several, or with one
    that does not fill it, or whose name NVML does not say. Nobody is given it; it is in the way all
    the same."""

    key: PartitionKey
    gi: int
    cis: int  # how many compute instances


class GuestRestriction(Enum):
    """What nobody inside a virtual machine can change of a GPU that it has."""

    NOTHING = 0
    MODE = 1  # it takes a reset, which the hypervisor lets nobody make
    ALL = 2  # a vGPU: its host decides about partitions


@frozen
class MigInfo:
    """What a GPU with MIG says of it at one look."""

    on: bool  # MIG mode now
    pending: bool  # MIG mode after the next reset
    switches: bool  # the mode changes without a reset while nothing uses the GPU (since Hopper)
    profiles: tuple[MigProfile, ...] = ()  # by number; the geometry
    instances: tuple[MigInstance, ...] = ()  # by key
    unusable: tuple[UnusableGpuInstance, ...] = ()  # by key
    fixed: GuestRestriction = GuestRestriction.NOTHING

    @property
    def units(self) -> int:
        """Memory units of the board."""
        ends = (place.end for profile in self.profiles for place in profile.placements)
        return max(ends, default=0)

    def profile(self, profile_id: int) -> MigProfile | None:
        """The profile of this id."""
        return next((profile for profile in self.profiles if profile.id == profile_id), None)

    def partition(self, key: PartitionKey) -> Partition | None:
        """The partition of this key; None: the board has no such profile."""
        profile = self.profile(key.profile_id)
        return Partition(profile, key.placement) if profile else None

    @property
    def keys(self) -> tuple[PartitionKey, ...]:
        """Where instances are, also unusable ones."""
        keys = [instance.key for instance in self.instances]
        return tuple(sorted([*keys, *(instance.key for instance in self.unusable)]))


def placeholder_uuid(gpu: GpuUuid, key: PartitionKey) -> GpuUuid:
    """A word that stands for the instance of a partition before it is created."""
    return GpuUuid(f"{gpu}/{key.profile_id}/{key.start}")


def is_free(placement: Placement, keys: Iterable[PartitionKey]) -> bool:
    """Whether none of *keys* overlaps *placement*."""
    return not any(placement.overlaps(key.placement) for key in keys)


def reset_instructions(gpu: str) -> str:
    """How a GPU is reset; *gpu* as ``nvidia-smi -i`` takes it.

    A reset is refused while anything has the GPU open: every client of NVML does, this driver's
    plugin too, and so does persistence mode, with its daemon or without.
    """
    return (
        "drain the node and reboot it; or end all that has the GPU open, which are pods with "
        "claims, this driver's plugin (keep its pod off the node until then), monitoring agents, "
        f"nvidia-persistenced and persistence mode (nvidia-smi -i {gpu} -pm 0), and run "
        f"nvidia-smi -i {gpu} --gpu-reset"
    )


def guest_mode_problem(fixed: GuestRestriction, gpu: str, on: bool) -> str:
    """Why MIG mode is not changed inside a virtual machine, and who changes it."""
    if fixed is GuestRestriction.ALL:
        return "it is a vGPU: its partitions are chosen where the vGPU is made"
    return (
        "it takes a reset, which this virtual machine cannot make; have it done on the host before "
        f"the machine starts, or drain the node, run nvidia-smi -i {gpu} -mig {int(on)} and reboot "
        "it"
    )


DeviceName = NewType("DeviceName", str)  # as published and allocated: "gpu-0"


@frozen
class Version:
    """A version of three numbers at most, published as strict semver (``580.95.05`` becomes
    ``580.95.5``)."""

    major: int
    minor: int = 0
    patch: int = 0

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"


@frozen
class Topology:
    """Where a GPU sits: facts of PCI sysfs and of NVLink, each absent where the node does not
    tell."""

    pcie_root: str | None = None  # "pci0000:64"
    pcie_switch: str | None = (
        None  # bus id of the nearest upstream port that it shares with another device
    )
    numa_node: int | None = None
    nvlink_clique: str | None = None
    nvlink_peers: int = 0


@frozen
class Gpu:
    """A GPU that this node can offer."""

    minor: int  # N of /dev/nvidiaN
    uuid: GpuUuid
    pci_bus_id: str  # four-digit domain, lower case: "0000:65:00.0"
    product_name: str
    brand: str
    architecture: str
    compute_capability: Version
    driver_version: Version
    cuda_driver_version: Version
    memory_bytes: int | None  # None where NVML does not report it
    addressing_mode: str | None = None
    topology: Topology = Topology()
    pci_id: str = ""  # "0x20B010DE": device and vendor, as nvmlPciInfo_t.pciDeviceId
    mig: MigInfo | None = None  # None: it has no MIG
    mig_problem: str = ""  # why not, where the board may well be made for it

    def __hash__(self) -> int:
        return hash(self.uuid)  # of all that it says of MIG a hash takes longer than what it is for

    @property
    def name(self) -> DeviceName:
        """As the device is called that is all of it."""
        return DeviceName(f"gpu-{self.minor}")

    @property
    def uuids(self) -> tuple[GpuUuid, ...]:
        """Its own, and those of its MIG instances."""
        return (self.uuid, *(each.uuid for each in (self.mig.instances if self.mig else ())))


ALL_GPUS = "all GPUs"


@frozen
class UnavailableGpu:
    """A GPU (or all of them) that is there but not offered, and why, in words that say what to
    do."""

    what: str  # "GPU 0000:65:00.0 (GPU-…)", or "all GPUs"
    reason: str
    by_profile: bool = False  # the profile says so: nothing is wrong


@frozen
class Inventory:
    """One look at the node; GPUs by minor number. What becomes of them is an ``Offer``."""

    gpus: tuple[Gpu, ...] = ()
    unavailable: tuple[UnavailableGpu, ...] = ()
    stale: frozenset[GpuUuid] = frozenset()
    """Those of *gpus* that this look could not read, since a GPU was being changed or was late:
    they are what an earlier look found."""
    lost: tuple[tuple[GpuUuid, str], ...] = ()
    """Those of *gpus* that do not answer, and why, in words that say what to do: they are what was
    known of them when they last answered."""

    @property
    def answering(self) -> tuple[Gpu, ...]:
        """Those of *gpus* that can be changed: they are not lost."""
        if not self.lost:
            return self.gpus
        lost = {uuid for uuid, _ in self.lost}
        return tuple(gpu for gpu in self.gpus if gpu.uuid not in lost)
