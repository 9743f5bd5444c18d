"""What a node offers as the scheduler sees it, in the v1 shape of ResourceSlices."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any, assert_never

from api import names
from dra_driver.model.gpus import Version
from dra_driver.model.health import DeviceTaint
from dra_driver.model.mps import ALL_CORES
from dra_driver.model.offer import (
    AdminAccess,
    Device,
    Exclusive,
    Fractional,
    Offer,
    Replica,
    counter_set_name,
)
from dra_driver.model.profiles import SharingStrategy
from dra_driver.plan.health.messages import timestamp

_LONGEST_STRING = 64  # bytes: DeviceAttributeMaxValueLength of resource.k8s.io
# Attributes and capacities of a device: ResourceSliceMaxAttributesAndCapacitiesPerDevice.
_MOST_NAMES = 32
_NAMES_THAT_MATTER_LEAST = (names.PCIE_SWITCH, names.NVLINK_CLIQUE, names.NVLINK_PEERS)

_Named = dict[str, dict[str, Any]]
_Attributes = Mapping[str, Mapping[str, Any]]


def engine_capacity(device: Device) -> dict[str, int]:
    """The engines of a partition, by capacity; nothing for a GPU as a whole."""
    if device.partition is None:
        return {}
    engines = device.partition.profile.engines
    return {
        names.MULTIPROCESSORS: engines.multiprocessors,
        names.COPY_ENGINES: engines.copy,
        names.DECODERS: engines.decoders,
        names.ENCODERS: engines.encoders,
        names.JPEG_ENGINES: engines.jpeg,
        names.OFA_ENGINES: engines.ofa,
    }


def memory_slices(device: Device) -> dict[str, int]:
    """Which units a partition has that exists, by capacity: one of each."""
    if device.partition is None or device.instance is None:
        return {}
    placement = device.partition.placement
    units = range(placement.start, placement.end)
    return {f"{names.MEMORY_SLICE}{unit}": 1 for unit in units}


def published_devices(offer: Offer) -> tuple[dict[str, Any], ...]:
    """The devices in the order in which the scheduler should prefer them."""
    return tuple(_document(device) for device in offer.devices)


def published_counters(offer: Offer) -> tuple[dict[str, Any], ...]:
    """The counters that its devices take of, which go into slices of their own."""
    return tuple(
        {"name": counter_set.name, "counters": _counters(counter_set.counters)}
        for counter_set in offer.counter_sets
    )


@functools.lru_cache(maxsize=64)  # every claim is told of the devices that it has
def attributes_of(device: Device) -> _Attributes:
    """What CEL and the workload can know of *device*."""
    gpu, partition = device.gpu, device.partition
    topology = gpu.topology
    strategies = device.rules.strategies
    whole = partition is None
    instance = (device.instance.uuid or None) if device.instance else None
    # An instance has no NVLink; who asks for a GPU may look at how many peers it has.
    peers = topology.nvlink_peers if whole else 0 if device.as_gpu else None
    values: dict[str, str | int | Version | None] = {
        names.TYPE: type_of(device),
        names.UUID: gpu.uuid if whole else instance,
        names.PARENT_UUID: None if whole else gpu.uuid,
        names.PROFILE: partition.profile.name if partition else None,
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
        names.NVLINK_CLIQUE: topology.nvlink_clique if whole else None,
        names.NVLINK_PEERS: peers,
        names.TIME_SLICING: SharingStrategy.TIME_SLICING in strategies,
        names.MPS: SharingStrategy.MPS in strategies,
        names.AS_GPU: device.as_gpu or None,
    }
    return {name: _attribute(values[name]) for name in sorted(values) if values[name] is not None}


def type_of(device: Device) -> str:
    """The attribute "type", on which DeviceClasses select."""
    if device.partition is not None:
        return names.TYPE_MIG
    match device.shape:
        case Exclusive():
            return names.TYPE_GPU
        case Fractional(renamed=renamed) | Replica(renamed=renamed):
            return names.TYPE_GPU_SHARED if renamed else names.TYPE_GPU
        case AdminAccess():
            return names.TYPE_GPU_MONITOR
        case _:
            assert_never(device.shape)


def _document(device: Device) -> dict[str, Any]:
    attributes = attributes_of(device)
    document: dict[str, Any] = {"name": device.name}
    taints = [_taint(taint) for taint in device.taints]
    document |= _as_many_as_fit(device, attributes, _capacity(device))
    match device.shape:
        case Fractional():
            document["allowMultipleAllocations"] = True
        case AdminAccess():
            taints.insert(0, {"key": names.MONITOR_TAINT, "effect": "NoSchedule"})
        case Exclusive() | Replica():
            pass
        case _:
            assert_never(device.shape)
    if taints:
        document["taints"] = taints
    if device.takes:
        consumed = {"counterSet": counter_set_name(device.gpu), "counters": _counters(device.takes)}
        document["consumesCounters"] = [consumed]
    return document


def _taint(taint: DeviceTaint) -> dict[str, str]:
    """Since when it is so we say ourselves: the API server would say when it was published."""
    value = {"value": taint.value} if taint.value else {}
    effect = {"effect": taint.effect.value, "timeAdded": timestamp(taint.since)}
    return {"key": taint.key, **value, **effect}


def _as_many_as_fit(
    device: Device, attributes: _Attributes, capacity: _Named
) -> dict[str, _Attributes]:
    """*attributes* and *capacity*, and the memory slices, where there is room for all of those:
    some of them would say that the others are not there. What matters least makes room."""
    excess = len(attributes) + len(capacity) - _MOST_NAMES
    slices = memory_slices(device)
    omittable = [name for name in _NAMES_THAT_MATTER_LEAST if name in attributes]
    if excess + len(slices) <= len(omittable):
        capacity |= {name: _amount(number, device) for name, number in slices.items()}
        excess += len(slices)
    omitted = omittable[: max(excess, 0)]
    published = {name: value for name, value in attributes.items() if name not in omitted}
    return {"attributes": published, "capacity": dict(sorted(capacity.items()))}


def _capacity(device: Device) -> _Named:
    match device.shape:
        case Fractional() as shape:
            capacity = _policies(device, shape)
        case Replica(memory_bytes=memory, cores=cores):
            reserved = {names.CORES: {"value": str(cores)}} if cores else {}
            capacity = reserved | _memory(memory)
        case AdminAccess():
            # Every name that its GPU may have: a selector on a missing one aborts the scheduling.
            whole = {names.CORES: {"value": str(ALL_CORES)}, names.SHARES: {"value": "1"}}
            capacity = whole | _memory(device.memory_bytes)
        case Exclusive():
            capacity = _memory(device.memory_bytes)
        case _:
            assert_never(device.shape)
    return capacity | {
        name: _amount(number, device) for name, number in engine_capacity(device).items()
    }


def _memory(size: int | None) -> _Named:
    return {} if size is None else {names.MEMORY: {"value": bytes_quantity(size)}}


def _policies(device: Device, shape: Fractional) -> _Named:
    """Each with a default, since a capacity without one goes to the first claim as a whole."""
    capacity = {
        names.MEMORY: {
            "value": bytes_quantity(device.memory_bytes or shape.memory_default),
            "requestPolicy": {
                "default": bytes_quantity(shape.memory_default),
                "validRange": {
                    "min": bytes_quantity(shape.memory_least),
                    "max": bytes_quantity(shape.memory_default),
                    "step": bytes_quantity(shape.memory_step),
                },
            },
        },
        names.SHARES: _counted(shape.shares, default=1, least=1),
    }
    if shape.cores:
        capacity[names.CORES] = _counted(ALL_CORES, default=shape.cores_default, least=0)
    return capacity


def _amount(number: int, device: Device) -> dict[str, Any]:
    """What all claims on *device* use together: none of them takes it from the others."""
    shared = isinstance(device.shape, Fractional)
    return _counted(number, default=0, least=0) if shared else {"value": str(number)}


def _counted(most: int, default: int, least: int) -> dict[str, Any]:
    policy: dict[str, Any] = {"default": str(default)}
    if most == least:
        # A range needs room for one step (validateRequestPolicy): this one is a list of one.
        policy["validValues"] = [str(most)]
    else:
        policy["validRange"] = {"min": str(least), "max": str(most), "step": "1"}
    return {"value": str(most), "requestPolicy": policy}


def _counters(amounts: Iterable[tuple[str, int]]) -> dict[str, dict[str, str]]:
    return {name: {"value": str(number)} for name, number in amounts}


def _attribute(value: str | int | Version | None) -> dict[str, Any]:
    if isinstance(value, Version):
        return {"version": str(value)}
    if isinstance(value, bool):
        return {"bool": value}
    if isinstance(value, int):
        return {"int": value}
    return {"string": _truncated(str(value))}


def _truncated(text: str) -> str:
    """At most 64 bytes, without a broken character at the end."""
    return text.encode()[:_LONGEST_STRING].decode(errors="ignore")


def bytes_quantity(size: int) -> str:
    """In the canonical form of the API server for whole MiB, which NVML's totals are; else plain
    bytes."""
    for unit, exponent in (("Ti", 40), ("Gi", 30), ("Mi", 20), ("Ki", 10)):
        if size >= 1 << exponent and size % (1 << exponent) == 0:
            return f"{size >> exponent}{unit}"
    return str(size)
