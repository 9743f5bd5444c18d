"""What NVML says, as values and in the published words: versions, brands, NVLinks."""

import re
from collections.abc import Mapping
from typing import Final

from dra_driver.base.errors import NodeError
from dra_driver.base.frozen import frozen
from dra_driver.model.gpus import (
    GpuUuid,
    GuestRestriction,
    MigInstance,
    MigProfile,
    UnusableGpuInstance,
    Version,
)


@frozen
class NvLinks:
    """Where the active NVLinks of one GPU lead."""

    switch: bool = False  # to an NVSwitch
    peers: frozenset[str] = frozenset()  # straight to GPUs: their bus ids


def nvlink_neighbours(links: Mapping[str, NvLinks]) -> Mapping[str, frozenset[str]]:
    """For each GPU, by bus id, the others of *links* that it reaches in one hop or through
    switches.

    NVSwitches of one node form one fabric, so all GPUs on a switch reach each other.
    """
    switched = {gpu for gpu, nvlinks in links.items() if nvlinks.switch}
    reached = {gpu: set(switched) if gpu in switched else set() for gpu in links}
    for gpu, nvlinks in links.items():
        for peer in nvlinks.peers & links.keys():
            reached[gpu].add(peer)
            reached[peer].add(gpu)
    return {gpu: frozenset(neighbours - {gpu}) for gpu, neighbours in reached.items()}


def nvlink_clique(gpu: str, reached: Mapping[str, frozenset[str]]) -> frozenset[str] | None:
    """The GPUs that all reach each other and that *gpu* is one of; None where there is no such set.

    A ring or a hybrid cube mesh (DGX-1) has neighbours without being a clique.
    """
    members = reached[gpu] | {gpu}
    if len(members) > 1 and all(reached[member] | {member} == members for member in members):
        return members
    return None


_DRIVER = re.compile(r"(\d+)(?:\.(\d+))?(?:\.(\d+))?(?!\d)")


def driver_version(text: str) -> Version:
    """``580.95.05`` is 580.95.5 and ``565.77`` is 565.77.0: semver knows neither leading zeros nor
    two parts.

    What follows a third number (``-beta``) is left out: NVIDIA's releases never differ in it alone.
    """
    match = _DRIVER.match(text)
    if match is None:
        raise NodeError(f"NVML calls the driver's version {text!r}, which is none")
    return Version(*(int(part or 0) for part in match.groups()))


def cuda_version(number: int) -> Version:
    """``13000`` is 13.0 and ``12080`` is 12.8 (nvml.h, NVML_CUDA_DRIVER_VERSION_MAJOR)."""
    return Version(number // 1000, number % 1000 // 10)


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


@frozen
class NvmlSystem:
    """What NVML says of the driver, and which session of NVML says it."""

    session: int  # another number: NVML was started again, and indices may mean other GPUs
    driver_version: Version
    cuda_driver_version: Version
    gpus: int


@frozen
class DynamicState:
    """What can change about a GPU from one scan to the next."""

    uuid: GpuUuid
    mig_on: bool | None = None  # MIG mode; None: it has none
    mig_pending: bool = False  # what the mode will be after the next reset
    instances: tuple[MigInstance, ...] = ()
    unusable: tuple[UnusableGpuInstance, ...] = ()
    mig_hidden: bool = False  # NVML lists instances for root alone, and this is not


@frozen
class StaticInfo:
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
    mig_fixed: GuestRestriction = GuestRestriction.NOTHING
    mig_problem: str = ""  # why its profiles are not known


@frozen
class GpuReading:
    """All that NVML says of one GPU."""

    dynamic: DynamicState
    static: StaticInfo
