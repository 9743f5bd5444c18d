"""An inventory as the scheduler sees it, in the v1 shape of ResourceSlices."""

from typing import Any

from api import names
from dra_driver.model.devices import Device, Version
from dra_driver.model.inventory import Inventory

_MIB = 1024 * 1024
_LONGEST_STRING = 64  # bytes: DeviceAttributeMaxValueLength of resource.k8s.io


def published(inventory: Inventory) -> tuple[dict[str, Any], ...]:
    """The devices in the order in which the scheduler should prefer them."""
    return tuple(
        {"name": device.name, "attributes": _attributes(device), "capacity": _capacity(device)}
        for device in inventory.devices
    )


def _attributes(gpu: Device) -> dict[str, dict[str, Any]]:
    topology = gpu.topology
    values: dict[str, str | int | Version | None] = {
        names.TYPE: names.TYPE_GPU,
        names.UUID: gpu.uuid,
        names.PRODUCT_NAME: gpu.product_name,
        names.BRAND: gpu.brand,
        names.ARCHITECTURE: gpu.architecture,
        names.CUDA_COMPUTE_CAPABILITY: gpu.compute_capability,
        names.DRIVER_VERSION: gpu.driver_version,
        names.CUDA_DRIVER_VERSION: gpu.cuda_driver_version,
        names.ADDRESSING_MODE: gpu.addressing_mode,
        names.PCI_BUS_ID: gpu.pci_bus_id,
        names.PCIE_ROOT: topology.pcie_root,
        names.NUMA_NODE: topology.numa_node,
        names.PCIE_SWITCH: topology.pcie_switch,
        names.NVLINK_CLIQUE: topology.nvlink_clique,
        names.NVLINK_PEERS: topology.nvlink_peers,
    }
    return {name: _attribute(values[name]) for name in sorted(values) if values[name] is not None}


def _attribute(value: str | int | Version | None) -> dict[str, Any]:
    if isinstance(value, Version):
        return {"version": str(value)}
    if isinstance(value, int):
        return {"int": value}
    return {"string": _cut(str(value))}


def _cut(text: str) -> str:
    """At most 64 bytes, without a broken character at the end."""
    return text.encode()[:_LONGEST_STRING].decode(errors="ignore")


def _capacity(gpu: Device) -> dict[str, dict[str, str]]:
    if gpu.memory_bytes is None:
        return {}
    return {names.MEMORY: {"value": _quantity(gpu.memory_bytes)}}


def _quantity(size: int) -> str:
    """In the canonical form of the API server for whole MiB, which NVML's totals are; else plain
    bytes."""
    for unit, factor in (
        ("Ti", _MIB * 1024 * 1024),
        ("Gi", _MIB * 1024),
        ("Mi", _MIB),
        ("Ki", 1024),
    ):
        if size >= factor and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)
