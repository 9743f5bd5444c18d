"""What each product is, as NVML and the PCI bus say it: ``boards.yaml`` as values."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import pynvml
import yaml


@dataclass(frozen=True, slots=True)
class Board:
    """One product of NVIDIA. Numbers of NVML where NVML has numbers."""

    name: str
    pci_device: str  # "0x2330"
    pci_subsystem: str
    memory_bytes: int
    multiprocessors: int
    compute_capability: tuple[int, int]
    architecture: int
    brand: int
    addressing_mode: int
    nvlinks: int
    mig: bool


@cache
def boards() -> Mapping[str, Board]:
    """Every product that a node file can name."""
    text = resources.files(__package__).joinpath("boards.yaml").read_text()
    return {product: _board(entry) for product, entry in yaml.safe_load(text).items()}


def _board(entry: Mapping[str, Any]) -> Board:
    return Board(
        name=entry["name"],
        pci_device=entry["pci_device"],
        pci_subsystem=entry["pci_subsystem"],
        memory_bytes=entry["memory_mib"] << 20,
        multiprocessors=entry["multiprocessors"],
        compute_capability=tuple(entry["compute_capability"]),
        architecture=getattr(pynvml, f"NVML_DEVICE_ARCH_{entry['architecture']}"),
        brand=getattr(pynvml, f"NVML_BRAND_{entry['brand']}"),
        addressing_mode=getattr(
            pynvml, f"NVML_DEVICE_ADDRESSING_MODE_{entry['addressing_mode'].upper()}"
        ),
        nvlinks=entry["nvlinks"],
        mig=entry["mig"],
    )
