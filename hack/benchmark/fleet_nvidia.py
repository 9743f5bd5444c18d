"""What NVIDIA's driver publishes of the same fleet, with its dynamic MIG on some nodes.

Of each GPU it publishes every placement of every profile, and keeps them apart by a counter for
each kind of engine, one for the memory and one for each unit of it. (cmd/gpu-kubelet-plugin,
partitions.go.)
"""

from collections.abc import Iterator, Mapping
from typing import Any

from api import names
from dra_driver.kubeletplugin.slices.reconcile import Pool, SliceContent, split_into_slices
from dra_driver.model.gpus import Gpu, MigInfo, MigProfile, Partition, Placement
from dra_driver.model.offer import Device, counter_set_name, partition_name
from dra_driver.plan.offer.slice_documents import attributes_of, bytes_quantity
from hack.benchmark.fleet_nodes import FleetNode
from hack.benchmark.fleet_shapes import plain

_NOT_THERE = frozenset(
    (names.NVLINK_CLIQUE, names.NVLINK_PEERS, names.PCIE_SWITCH, names.TIME_SLICING, names.MPS)
)
_ENGINES = {  # by the field of Engines: the capacity, the counter
    "multiprocessors": ("multiprocessors", "multiprocessors"),
    "copy": ("copyEngines", "copy-engines"),
    "decoders": ("decoders", "decoders"),
    "encoders": ("encoders", "encoders"),
    "jpeg": ("jpegEngines", "jpeg-engines"),
    "ofa": ("ofaEngines", "ofa-engines"),
}

Document = dict[str, Any]
Amounts = Mapping[str, int]
"""By fields of Engines, and "memory" in bytes."""


def nvidia_partitioned(node: FleetNode) -> Pool:
    """A slice for the counters and one for each GPU; without partitions, exclusive devices."""
    if not node.partitioned:
        return split_into_slices(node.name, [_less(document) for document in plain(node).devices])
    with_mig = [(gpu, gpu.mig) for gpu in node.gpus if gpu.mig]
    counters = tuple(_counter_set(gpu, mig) for gpu, mig in with_mig)
    gpus = (SliceContent(tuple(_devices(gpu, mig))) for gpu, mig in with_mig)
    return Pool(node.name, (SliceContent(shared_counters=counters), *gpus))


def _less(document: Mapping[str, Any]) -> Document:
    """Without the attributes that are ours alone."""
    attributes = document["attributes"].items()
    return {
        **document,
        "attributes": {name: value for name, value in attributes if name not in _NOT_THERE},
    }


def _devices(gpu: Gpu, mig: MigInfo) -> Iterator[Document]:
    """The whole GPU, then its partitions by name."""
    attributes = _less({"attributes": attributes_of(Device(gpu))})["attributes"]
    everything = _most(mig)
    yield {
        "name": gpu.name,
        "attributes": attributes,
        "capacity": _capacity(everything),
        "consumesCounters": [_consumed(gpu, everything, Placement(0, mig.units))],
    }
    partitions = (Partition(each, place) for each in mig.profiles for place in each.placements)
    parents = {name: value for name, value in attributes.items() if name != names.UUID}
    parents |= {"type": {"string": "mig"}, "parentUUID": attributes[names.UUID]}
    for name, each in sorted((partition_name(gpu, each), each) for each in partitions):
        amounts = _amounts(each.profile)
        yield {
            "name": name,
            "attributes": {**parents, "profile": {"string": each.profile.name}},
            "capacity": _capacity(amounts),
            "consumesCounters": [_consumed(gpu, amounts, each.placement)],
        }


def _amounts(profile: MigProfile) -> Amounts:
    engines = {field: getattr(profile.engines, field) for field in _ENGINES}
    return {names.MEMORY: profile.memory_bytes, **engines}


def _most(mig: MigInfo) -> Amounts:
    """What a GPU has in all: of each kind the most that any profile has."""
    each = [_amounts(profile) for profile in mig.profiles]
    return {field: max(amounts[field] for amounts in each) for field in each[0]}


def _capacity(amounts: Amounts) -> Document:
    engines = {_ENGINES[field][0]: str(amounts[field]) for field in _ENGINES}
    every = {names.MEMORY: bytes_quantity(amounts[names.MEMORY]), **engines}
    return {name: {"value": value} for name, value in every.items()}


def _counters(amounts: Amounts, placement: Placement) -> Document:
    engines = {_ENGINES[field][1]: str(amounts[field]) for field in _ENGINES}
    units = {f"memory-slice-{unit}": "1" for unit in range(placement.start, placement.end)}
    every = {names.MEMORY: bytes_quantity(amounts[names.MEMORY]), **engines, **units}
    return {name: {"value": value} for name, value in every.items()}


def _counter_set(gpu: Gpu, mig: MigInfo) -> Document:
    everything = _counters(_most(mig), Placement(0, mig.units))
    return {"name": counter_set_name(gpu), "counters": everything}


def _consumed(gpu: Gpu, amounts: Amounts, placement: Placement) -> Document:
    return {"counterSet": counter_set_name(gpu), "counters": _counters(amounts, placement)}
