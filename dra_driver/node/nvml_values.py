"""What NVML tells, as values and in the words that are published."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from dra_driver.model.devices import GpuUuid, Version
from dra_driver.model.mig import Fixed, Instance, MigProfile, OddInstance

# Numbers of nvml.h (NVML_BRAND_*, NVML_DEVICE_ARCH_*, NVML_DEVICE_ADDRESSING_MODE_*): a driver may
# know more of them than the pynvml it is read with. The words are those of NVIDIA's driver (go-
# nvlib).
_BRANDS: Final[Mapping[int, str]] = {
    1: "Quadro",
    2: "Tesla",
    3: "NVS",
    4: "Grid",
    5: "GeForce",
    6: "Titan",
    7: "NvidiaVApps",
    8: "NvidiaVPC",
    9: "NvidiaVCS",
    10: "NvidiaVWS",
    11: "NvidiaCloudGaming",
    12: "QuadroRTX",
    13: "NvidiaRTX",
    14: "Nvidia",
    15: "GeForceRTX",
    16: "TitanRTX",
}
_ARCHITECTURES: Final[Mapping[int, str]] = {
    2: "Kepler",
    3: "Maxwell",
    4: "Pascal",
    5: "Volta",
    6: "Turing",
    7: "Ampere",
    8: "Ada Lovelace",
    9: "Hopper",
    10: "Blackwell",
    13: "Rubin",
}
ADDRESSING_MODES: Final[Mapping[int, str]] = {0: "None", 1: "HMM", 2: "ATS"}
_UNKNOWN: Final = "Unknown"


def brand(number: int) -> str:
    """``NVML_BRAND_*`` as published; one we do not know is "Unknown", NVML's own word."""
    return _BRANDS.get(number, _UNKNOWN)


def architecture(number: int) -> str:
    """``NVML_DEVICE_ARCH_*`` as published; one we do not know is "Unknown", NVML's own word."""
    return _ARCHITECTURES.get(number, _UNKNOWN)


@dataclass(frozen=True, slots=True)
class System:
    """What NVML says of the driver, and which session of NVML says it."""

    session: int  # another number: NVML was started again, and indices may mean other GPUs
    driver_version: Version
    cuda_driver_version: Version
    gpus: int


@dataclass(frozen=True, slots=True)
class Glance:
    """What can change about a GPU from one look to the next."""

    uuid: GpuUuid
    mig_on: bool | None = None  # MIG mode; None: it has none
    mig_pending: bool = False  # what the mode will be after the next reset
    instances: tuple[Instance, ...] = ()
    odd: tuple[OddInstance, ...] = ()
    mig_hidden: bool = False  # what is cut is told to root alone, and this is not


@dataclass(frozen=True, slots=True)
class Facts:
    """What stays the same about a GPU as long as its driver and its MIG mode do: a change of the
    mode can change its minor number too (nvml.h, nvmlDeviceSetMigMode)."""

    minor: int
    pci_bus_id: str
    pci_id: str
    product_name: str
    brand: str
    architecture: str
    compute_capability: Version
    memory_bytes: int | None
    addressing_mode: str | None
    mig_profiles: tuple[MigProfile, ...] = ()
    mig_on: bool | None = None  # in which mode it was all of that
    mig_fixed: Fixed = Fixed.NOTHING
    mig_problem: str = ""  # why it is not known how it can be cut


@dataclass(frozen=True, slots=True)
class Seen:
    """What NVML told about one GPU, all of it."""

    glance: Glance
    facts: Facts
