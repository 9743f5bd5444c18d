"""What a node offers: its GPUs as devices that can be allocated, each in some shape."""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, assert_never

from dra_driver.base.codec import OneOf
from dra_driver.base.frozen import frozen
from dra_driver.model.gpus import (
    DeviceName,
    Gpu,
    GpuUuid,
    MigInstance,
    Partition,
    PartitionKey,
    UnavailableGpu,
    placeholder_uuid,
)
from dra_driver.model.health import DeviceTaint
from dra_driver.model.profiles import DEFAULT_RULES, Rules


@frozen
class Exclusive:
    """One claim at a time takes all of it: the device that NVIDIA's driver publishes."""


@frozen
class Fractional:
    """Many claims at once, each with as much as it asks for (KEP-5075). Memory in bytes."""

    memory_default: int  # of a claim that names none; also the most that one claim can have
    memory_least: int
    memory_step: int
    shares: int  # the most claims at once
    cores: bool = True  # percent of the SMs can be reserved (MPS is allowed)
    replicas: int = 1  # above 1: memory_default is one N-th
    renamed: bool = False  # its type is "gpu-shared"
    cores_default: int = 0  # percent, of a claim that names none: replicas that share by MPS


@frozen
class Replica:
    """One of N equal devices of a GPU or of a partition that exists, where parts of a device cannot
    be given out: the API server keeps no consumable capacity, or it is the device-plugin API."""

    place: int  # 0 … of - 1
    of: int
    memory_bytes: int | None
    renamed: bool = False  # its type is "gpu-shared"
    cores: int = 0  # percent that are reserved: replicas that share by MPS


@frozen
class AdminAccess:
    """For claims with admin access, whatever else holds the GPU."""


EXCLUSIVE = Exclusive()
Shape = Annotated[Exclusive | Fractional | Replica | AdminAccess, OneOf()]
"""A union: a new case makes the type checker list every place that has to deal with it."""


@frozen
class Device:
    """What can be allocated, and by which rules it is prepared."""

    gpu: Gpu
    shape: Shape = EXCLUSIVE
    rules: Rules = DEFAULT_RULES
    partition: Partition | None = None  # None: the GPU as a whole
    instance: MigInstance | None = None  # of a partition that exists, and is not ours to remove
    as_gpu: bool = False  # an instance that claims for a GPU can get (MigRules.single)
    takes: tuple[tuple[str, int], ...] = ()  # of the counters of its GPU: (name, how much)
    offered: tuple[str, ...] = ()  # the profiles whose partitions its GPU creates for claims
    taints: tuple[DeviceTaint, ...] = ()  # by key: why the scheduler is to avoid it

    @property
    def memory_bytes(self) -> int | None:
        """What there is of memory to be shared; None: NVML does not tell."""
        return self.partition.profile.memory_bytes if self.partition else self.gpu.memory_bytes

    @property
    def uuid(self) -> GpuUuid:
        """What programs compute on: the GPU, or the instance; before a partition is created, a
        word that stands for the instance."""
        if self.partition is None:
            return self.gpu.uuid
        if self.instance is not None:
            return self.instance.uuid
        return placeholder_uuid(self.gpu.uuid, self.partition.key)

    @property
    def key(self) -> PartitionKey | None:
        """Which partition of its GPU it is; None: the GPU as a whole."""
        return self.partition.key if self.partition else None

    @property
    def unit(self) -> DeviceName:
        """The name of what amounts of it are of: a partition or a GPU, with all its replicas."""
        return partition_name(self.gpu, self.partition) if self.partition else self.gpu.name

    @property
    def created_for_claims(self) -> bool:
        """Whether it exists only while claims hold it."""
        return self.partition is not None and self.instance is None

    @property
    def name(self) -> DeviceName:
        match self.shape:
            case Exclusive() | Fractional():
                return self.unit
            case Replica(place=place):
                return DeviceName(f"{self.unit}-{place}")
            case AdminAccess():
                return DeviceName(f"{self.unit}-mon")
            case _:
                assert_never(self.shape)


def partition_name(gpu: Gpu, partition: Partition) -> DeviceName:
    """As NVIDIA's driver calls it: ``gpu-0-mig-1g5gb-19-0`` (profile, its id, first unit)."""
    profile = partition.profile
    plain = profile.name.lower().replace(".", "")
    word = "".join(c if c.isalnum() else "-" for c in plain)
    return DeviceName(f"{gpu.name}-mig-{word}-{profile.id}-{partition.placement.start}")


def counter_set_name(gpu: Gpu) -> str:
    """As NVIDIA's driver calls it."""
    return f"{gpu.name}-counter-set"


def gpu_name_of(device: str) -> DeviceName:
    """The part of a device's name that all devices of one GPU share.

    For names that come from the API server or are shown to people: elsewhere a GPU is its UUID.

    >>> gpu_name_of("gpu-0-mon"), gpu_name_of("gpu-12")
    ('gpu-0', 'gpu-12')
    """
    return DeviceName("-".join(device.split("-", 2)[:2]))


@frozen
class ApiFeatures:
    """What the API server keeps of the slices that it is sent; or that there are none."""

    capacity: bool = True  # many claims on one device, each with a part of it (KEP-5075)
    device_taints: bool = True  # KEP-5055; without it a taint is dropped silently
    counters: bool = True  # devices that take of counters in another slice (KEP-4815, since 1.35)
    device_plugin: bool = False  # no slices: the kubelet has a list of devices
    gpus: int = 1  # whose devices are together in that list


DEVICE_PLUGIN_FEATURES = ApiFeatures(capacity=False, counters=False, device_plugin=True)
"""What the device-plugin API can say of devices: that they are unhealthy, and nothing more."""


@frozen
class PendingChange:
    """A device that is not offered as its profile says.

    Without a *reason* a claim holds it: it is *change* once none does. With one it is offered as
    *change* now, because what the profile says cannot be published.
    """

    device: DeviceName
    change: str  # "exclusive", "4 replicas", …
    reason: str = ""


@frozen
class CounterSet:
    """What keeps the partitions of one GPU apart from each other and from the whole of it."""

    name: str  # "gpu-0-counter-set"
    counters: tuple[tuple[str, int], ...]  # (name, how much there is), by name


@frozen
class Offer:
    """What the node publishes and prepares. Devices are in publishing order: the scheduler takes
    the first that fits."""

    devices: tuple[Device, ...] = ()
    unavailable: tuple[UnavailableGpu, ...] = ()
    pending: tuple[PendingChange, ...] = ()
    warnings: tuple[str, ...] = ()  # what of the profile has no effect here
    counter_sets: tuple[CounterSet, ...] = ()  # of the GPUs whose devices take of counters
    by_name: Mapping[DeviceName, Device] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {device.name: device for device in self.devices})
