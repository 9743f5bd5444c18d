"""What nvidia-smi says of the GPUs, and where that differs from what we publish."""

import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dra_driver.model.gpus import Gpu

# What a person can set: reading GPUs and giving them to containers leaves all of it alone.
SETTINGS = (
    "persistence_mode",
    "mig_mode/current_mig",
    "mig_mode/pending_mig",
    "accounting_mode",
    "compute_mode",
    "ecc_mode/current_ecc",
    "ecc_mode/pending_ecc",
    "gpu_power_readings/requested_power_limit",
    "applications_clocks/graphics_clock",
    "applications_clocks/mem_clock",
)
# nvidia-smi's words for brands, where they are not those that are published.
_BRANDS = {
    "NVIDIA RTX Virtual Workstation": "NvidiaVWS",
    "NVIDIA Virtual Applications": "NvidiaVApps",
    "NVIDIA Virtual PC": "NvidiaVPC",
    "NVIDIA Virtual Compute Server": "NvidiaVCS",
    "NVIDIA Cloud Gaming": "NvidiaCloudGaming",
}


@dataclass(frozen=True)
class SmiGpu:
    """One GPU of ``nvidia-smi -q -x``, as it is written there."""

    uuid: str
    minor: str
    bus_id: str  # "00000000:1B:00.0"
    product: str
    brand: str
    architecture: str
    addressing_mode: str  # "HMM", "ATS", "None", "N/A"
    memory: str  # "143771 MiB"
    mig: str  # "Enabled", "Disabled", "N/A"
    settings: Mapping[str, str]


@dataclass(frozen=True)
class Smi:
    """A document of ``nvidia-smi -q -x``."""

    driver_version: str
    cuda_version: str
    gpus: tuple[SmiGpu, ...]


def parse(text: str) -> Smi:
    """Fields that a driver does not write are empty."""
    root = ET.fromstring(text)
    return Smi(
        driver_version=_text(root, "driver_version"),
        cuda_version=_text(root, "cuda_version"),
        gpus=tuple(_gpu(gpu) for gpu in root.findall("gpu")),
    )


def parse_compute_caps(text: str) -> dict[str, str]:
    """By UUID, from ``--query-gpu=uuid,compute_cap --format=csv,noheader``."""
    pairs = (line.split(", ") for line in text.splitlines() if line.strip())
    return {uuid: capability for uuid, capability in pairs}


def differences(gpu: Gpu, smi: Smi, compute_cap: str, numa_node: int | None) -> list[str]:
    """Every field of *gpu* that is not as *smi* has it for that UUID; *numa_node*: of sysfs."""
    theirs = next((listed for listed in smi.gpus if listed.uuid == gpu.uuid), None)
    if theirs is None:
        return [f"uuid: {gpu.uuid} is not among {[listed.uuid for listed in smi.gpus]}"]
    return [
        f"{field}: ours {ours!r}, nvidia-smi {expected!r}"
        for field, ours, expected in _pairs(gpu, theirs, smi)
        if ours != expected
    ] + [
        f"{field}: ours {ours!r}, expected {expected!r}"
        for field, ours, expected in (
            ("compute capability", _two(str(gpu.compute_capability)), compute_cap),
            ("NUMA node", gpu.topology.numa_node, numa_node),
        )
        if ours != expected
    ]


def _pairs(gpu: Gpu, theirs: SmiGpu, smi: Smi) -> Iterator[tuple[str, object, object]]:
    yield "minor number", str(gpu.minor), theirs.minor
    yield "bus id", gpu.pci_bus_id, _short_bus_id(theirs.bus_id)
    yield "product", gpu.product_name, theirs.product
    yield "brand", _plain(gpu.brand), _plain(_BRANDS.get(theirs.brand, theirs.brand))
    yield "architecture", gpu.architecture, theirs.architecture
    yield "addressing mode", gpu.addressing_mode or "N/A", theirs.addressing_mode or "N/A"
    memory = None if gpu.memory_bytes is None else f"{gpu.memory_bytes // 1024**2} MiB"
    yield "memory", memory, None if theirs.memory == "N/A" else theirs.memory
    yield "driver version", str(gpu.driver_version), semver(smi.driver_version)
    yield "CUDA version", _two(str(gpu.cuda_driver_version)), smi.cuda_version


def semver(version: str) -> str:
    """A driver's version as semver has to have it: 580.95.05 is 580.95.5, 565.77 is 565.77.0."""
    parts = [*version.split("."), "0"][:3]
    return ".".join(str(int(part)) for part in parts)


def _gpu(gpu: ET.Element) -> SmiGpu:
    return SmiGpu(
        uuid=_text(gpu, "uuid"),
        minor=_text(gpu, "minor_number"),
        bus_id=_text(gpu, "pci/pci_bus_id"),
        product=_text(gpu, "product_name"),
        brand=_text(gpu, "product_brand"),
        architecture=_text(gpu, "product_architecture"),
        addressing_mode=_text(gpu, "addressing_mode"),
        memory=_text(gpu, "fb_memory_usage/total"),
        mig=_text(gpu, "mig_mode/current_mig"),
        settings={path: _text(gpu, path) for path in SETTINGS},
    )


def _text(element: ET.Element, path: str) -> str:
    return (element.findtext(path) or "").strip()


def _short_bus_id(text: str) -> str:
    domain, _, address = text.partition(":")
    return f"{int(domain, 16):04x}:{address}".lower()


def _plain(brand: str) -> str:
    return brand.replace(" ", "").casefold()


def _two(version: str) -> str:
    return ".".join(version.split(".")[:2])
