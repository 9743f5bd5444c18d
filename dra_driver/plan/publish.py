"""What a node offers as the scheduler sees it, in the v1 shape of ResourceSlices."""

from typing import Any, assert_never

from api import names
from dra_driver.model.devices import Gpu, Version
from dra_driver.model.mps import ALL_CORES
from dra_driver.model.offer import Device, Exclusive, Monitor, Offer, Replica, Sliceable
from dra_driver.model.profiles import Strategy

_MIB = 1024 * 1024
_LONGEST_STRING = 64  # bytes: DeviceAttributeMaxValueLength of resource.k8s.io


def published(offer: Offer) -> tuple[dict[str, Any], ...]:
    """The devices in the order in which the scheduler should prefer them."""
    return tuple(_document(device) for device in offer.devices)


def attributes_of(device: Device) -> dict[str, dict[str, Any]]:
    """What CEL and the workload can know of *device*."""
    gpu = device.gpu
    topology = gpu.topology
    strategies = device.rules.strategies
    values: dict[str, str | int | Version | None] = {
        names.TYPE: type_of(device),
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
        names.TIME_SLICING: Strategy.TIME_SLICING in strategies,
        names.MPS: Strategy.MPS in strategies,
    }
    return {name: _attribute(values[name]) for name in sorted(values) if values[name] is not None}


def type_of(device: Device) -> str:
    """The attribute "type", on which DeviceClasses select."""
    match device.shape:
        case Exclusive():
            return names.TYPE_GPU
        case Sliceable(renamed=renamed) | Replica(renamed=renamed):
            return names.TYPE_GPU_SHARED if renamed else names.TYPE_GPU
        case Monitor():
            return names.TYPE_GPU_MONITOR
        case _:
            assert_never(device.shape)


def _document(device: Device) -> dict[str, Any]:
    document: dict[str, Any] = {
        "name": device.name,
        "attributes": attributes_of(device),
        "capacity": _capacity(device),
    }
    match device.shape:
        case Sliceable():
            document["allowMultipleAllocations"] = True
        case Monitor():
            document["taints"] = [{"key": names.MONITOR_TAINT, "effect": "NoSchedule"}]
        case Exclusive() | Replica():
            pass
        case _:
            assert_never(device.shape)
    return document


def _capacity(device: Device) -> dict[str, dict[str, Any]]:
    gpu = device.gpu
    match device.shape:
        case Sliceable() as shape:
            return _policies(gpu, shape)
        case Replica(memory_bytes=memory, cores=cores):
            reserved = {names.CORES: {"value": str(cores)}} if cores else {}
            part = {} if memory is None else {names.MEMORY: {"value": quantity(memory)}}
            return reserved | part
        case Monitor():
            # Every name that its GPU may have: a selector on a missing one aborts the scheduling.
            everything = {names.CORES: {"value": str(ALL_CORES)}, names.SHARES: {"value": "1"}}
            return everything | _memory(gpu)
        case Exclusive():
            return _memory(gpu)
        case _:
            assert_never(device.shape)


def _memory(gpu: Gpu) -> dict[str, dict[str, Any]]:
    if gpu.memory_bytes is None:
        return {}
    return {names.MEMORY: {"value": quantity(gpu.memory_bytes)}}


def _policies(gpu: Gpu, shape: Sliceable) -> dict[str, dict[str, Any]]:
    """Each with a default, since a capacity without one goes to the first claim as a whole."""
    capacity = {
        names.MEMORY: {
            "value": quantity(gpu.memory_bytes or shape.memory_default),
            "requestPolicy": {
                "default": quantity(shape.memory_default),
                "validRange": {
                    "min": quantity(shape.memory_least),
                    "max": quantity(shape.memory_default),
                    "step": quantity(shape.memory_step),
                },
            },
        },
        names.SHARES: _counted(shape.shares, default=1, least=1),
    }
    if shape.cores:
        capacity[names.CORES] = _counted(ALL_CORES, default=shape.cores_default, least=0)
    return dict(sorted(capacity.items()))


def _counted(most: int, default: int, least: int) -> dict[str, Any]:
    if most == least:
        # A range needs room for one step (validateRequestPolicy): this one is a list of one.
        return {
            "value": str(most),
            "requestPolicy": {"default": str(default), "validValues": [str(most)]},
        }
    ranged = {"min": str(least), "max": str(most), "step": "1"}
    return {
        "value": str(most),
        "requestPolicy": {"default": str(default), "validRange": ranged},
    }


def _attribute(value: str | int | Version | None) -> dict[str, Any]:
    if isinstance(value, Version):
        return {"version": str(value)}
    if isinstance(value, bool):
        return {"bool": value}
    if isinstance(value, int):
        return {"int": value}
    return {"string": _cut(str(value))}


def _cut(text: str) -> str:
    """At most 64 bytes, without a broken character at the end."""
    return text.encode()[:_LONGEST_STRING].decode(errors="ignore")


def quantity(size: int) -> str:
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
