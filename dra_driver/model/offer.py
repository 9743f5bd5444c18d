"""What a node offers: its GPUs as devices that can be allocated, each in some shape."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import assert_never

from dra_driver.model.devices import DeviceName, Gpu, Withheld
from dra_driver.model.profiles import DEFAULT_RULES, Rules


@dataclass(frozen=True, slots=True)
class Exclusive:
    """One claim at a time takes all of it: the device that NVIDIA's driver publishes."""


@dataclass(frozen=True, slots=True)
class Sliceable:
    """Many claims at once, each with as much as it asks for (KEP-5075). Memory in bytes."""

    memory_default: int  # of a claim that names none; also the most that one claim can have
    memory_least: int
    memory_step: int
    shares: int  # the most claims at once
    cores: bool = True  # percent of the SMs can be reserved (MPS is allowed)
    replicas: int = 1  # above 1: memory_default is one N-th
    renamed: bool = False  # its type is "gpu-shared"
    cores_default: int = 0  # percent, of a claim that names none: replicas that share by MPS


@dataclass(frozen=True, slots=True)
class Replica:
    """One of N equal devices of a GPU, where the API server keeps no consumable capacity."""

    place: int  # 0 … of - 1
    of: int
    memory_bytes: int | None
    renamed: bool = False  # its type is "gpu-shared"
    cores: int = 0  # percent that are reserved: replicas that share by MPS


@dataclass(frozen=True, slots=True)
class Monitor:
    """For claims with admin access, whatever else holds the GPU."""


EXCLUSIVE = Exclusive()
Shape = Exclusive | Sliceable | Replica | Monitor
"""A union: partitions join it as further cases, and the type checker then lists every place that
has to say something about them."""


@dataclass(frozen=True, slots=True)
class Device:
    """What can be allocated, and by which rules it is prepared."""

    gpu: Gpu
    shape: Shape = EXCLUSIVE
    rules: Rules = DEFAULT_RULES

    @property
    def name(self) -> DeviceName:
        match self.shape:
            case Exclusive() | Sliceable():
                return self.gpu.name
            case Replica(place=place):
                return DeviceName(f"{self.gpu.name}-{place}")
            case Monitor():
                return DeviceName(f"{self.gpu.name}-mon")
            case _:
                assert_never(self.shape)


def board(device: str) -> str:
    """Of which GPU a device is: the part of its name that all devices of one GPU share.

    >>> board("gpu-0-mon"), board("gpu-12")
    ('gpu-0', 'gpu-12')
    """
    return "-".join(device.split("-", 2)[:2])


@dataclass(frozen=True, slots=True)
class Keeps:
    """What the API server keeps of the slices that it is sent."""

    capacity: bool = True  # many claims on one device, each with a part of it (KEP-5075)
    taints: bool = True  # KEP-5055


@dataclass(frozen=True, slots=True)
class Pending:
    """A device that is not offered as its profile says.

    Without a *reason* a claim holds it: it is *change* once none does. With one it is offered as
    *change* now, because what the profile says cannot be published.
    """

    device: DeviceName
    change: str  # "exclusive", "4 replicas", …
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Offer:
    """What the node publishes and prepares. Devices are in publishing order: the scheduler takes
    the first that fits."""

    devices: tuple[Device, ...] = ()
    withheld: tuple[Withheld, ...] = ()
    pending: tuple[Pending, ...] = ()
    notes: tuple[str, ...] = ()  # what of the profile has no effect here
    by_name: Mapping[DeviceName, Device] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {device.name: device for device in self.devices})
