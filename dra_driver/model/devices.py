"""The GPUs of a node; the hardware, however it is offered (``model.offer``)."""

from dataclasses import dataclass
from typing import NewType

from dra_driver.model.mig import Mig
from dra_driver.model.uuids import GpuUuid as GpuUuid

DeviceName = NewType("DeviceName", str)  # as published and allocated: "gpu-0"


@dataclass(frozen=True, slots=True)
class Version:
    """A version of three numbers at most, published as strict semver (``580.95.05`` becomes
    ``580.95.5``)."""

    major: int
    minor: int = 0
    patch: int = 0

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
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
    mig: Mig | None = None  # None: it cannot be cut
    mig_problem: str = ""  # why not, where the board may well be made for it

    @property
    def name(self) -> DeviceName:
        """As the device is called that is all of it."""
        return DeviceName(f"gpu-{self.minor}")


ALL_GPUS = "all GPUs"


@dataclass(frozen=True, slots=True)
class Withheld:
    """A GPU (or all of them) that is there but not offered, and why, in words that say what to
    do."""

    what: str  # "GPU 0000:65:00.0 (GPU-…)", or "all GPUs"
    reason: str
