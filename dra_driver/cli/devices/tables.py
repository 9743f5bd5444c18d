"""The devices of a node as tables: GPUs and monitors in one, partitions in another."""

from collections.abc import Iterator, Sequence
from typing import assert_never

from dra_driver.cli.terminal import format_gib, format_table
from dra_driver.model.gpus import Gpu, MigProfile
from dra_driver.model.mps import ALL_CORES
from dra_driver.model.offer import AdminAccess, Device, Exclusive, Fractional, Replica, Shape
from dra_driver.model.profiles import Rules
from dra_driver.plan.offer.shapes import describe_shape

_MIB = 1024**2
_AMOUNTS = ("DEFAULT", "LEAST", "STEP", "SHARES", "CORES")
_HEAD = ("DEVICE", "PRODUCT", "SHAPE", "MEMORY", *_AMOUNTS, "UUID")
_WIDE_HEAD = ("SHARED BY", "PCI BUS", "NUMA", "PCIE SWITCH", "NVLINK")
_PARTITIONS = ("PARTITION", "PROFILE", "SMS", "MEMORY", "SHAPE", *_AMOUNTS, "UUID")
_WIDE_PARTITIONS = ("SHARED BY", "COPY", "DEC", "ENC", "JPEG", "OFA", "TAKES")


def device_tables(devices: Sequence[Device], wide: bool) -> list[str]:
    """One table, two, or none. Partitions that are cut for claims and alike but for where they are
    share a row, unless it is to be *wide*."""
    gpus = [_row(device, wide) for device in devices if device.partition is None]
    parts = _partition_rows(devices, wide)
    found = []
    if gpus:
        found.append(format_table((*_HEAD, *(_WIDE_HEAD if wide else ())), gpus))
    if parts:
        found.append(format_table((*_PARTITIONS, *(_WIDE_PARTITIONS if wide else ())), parts))
    return found


def _row(device: Device, wide: bool) -> tuple[str, ...]:
    gpu = device.gpu
    row = (
        device.name,
        gpu.product_name,
        _shape(device.shape),
        _memory(device),
        *_amounts(device.shape),
        gpu.uuid,
    )
    return (*row, _shared_by(device.rules), *_place(gpu)) if wide else row


def _partition_rows(devices: Sequence[Device], wide: bool) -> list[tuple[str, ...]]:
    alike: dict[tuple[str, ...], list[Device]] = {}
    for device in devices:
        if device.partition is not None:
            row = _partition_row(device, device.partition.profile, wide)
            alike.setdefault((device.name if wide else device.gpu.name, *row), []).append(device)
    return [(_names(its), *row) for (_, *row), its in alike.items()]


def _partition_row(device: Device, profile: MigProfile, wide: bool) -> tuple[str, ...]:
    """Without its name."""
    shape = _shape(device.shape)
    row = (
        profile.name,
        str(profile.engines.multiprocessors),
        _memory(device),
        f"{shape} (also as GPU)" if device.as_gpu else shape,
        *_amounts(device.shape),
        (device.instance.uuid or "cut by a layout") if device.instance else "cut for claims",
    )
    return (*row, *_wide_partition(device, profile)) if wide else row


def _wide_partition(device: Device, profile: MigProfile) -> tuple[str, ...]:
    engines = profile.engines
    numbers = (engines.copy, engines.decoders, engines.encoders, engines.jpeg, engines.ofa)
    takes = ", ".join(f"{amount} of {name}" for name, amount in device.takes)
    return (_shared_by(device.rules), *map(str, numbers), takes or "-")


def _names(devices: Sequence[Device]) -> str:
    """Of devices that differ in their first unit only, as a shell would read it:
    ``gpu-0-mig-2g10gb-14-{0,2,4}``."""
    if len(devices) == 1:
        return devices[0].name
    stem, _, _ = devices[0].name.rpartition("-")
    starts = sorted(int(device.name.rpartition("-")[2]) for device in devices)
    return f"{stem}-{{{','.join(map(str, starts))}}}"


def _memory(device: Device) -> str:
    return "?" if device.memory_bytes is None else format_gib(device.memory_bytes)


def _shared_by(rules: Rules) -> str:
    """The strategies that are possible, the default one first."""
    others = [each for each in rules.strategies if each is not rules.default_strategy]
    return ", ".join([rules.default_strategy, *others]) if rules.strategies else "-"


def _shape(shape: Shape) -> str:
    match shape:
        case Replica(place=place):
            return f"{place + 1} of {describe_shape(shape)}"
        case AdminAccess():
            return f"{describe_shape(shape)} (admin access)"
        case _:
            return describe_shape(shape)


def _amounts(shape: Shape) -> Iterator[str]:
    """Memory by default, least and step; the most shares; the most cores, or those of each."""
    match shape:
        case Fractional(memory_default=default, memory_least=least, memory_step=step):
            yield from (f"{amount // _MIB}Mi" for amount in (default, least, step))
            yield str(shape.shares)
            yield _cores(shape)
        case Replica(memory_bytes=memory, cores=cores):
            yield from ("-" if memory is None else f"{memory // _MIB}Mi", "-", "-", "1")
            yield f"{cores} %" if cores else "-"
        case Exclusive() | AdminAccess():
            yield from "-----"
        case _:
            assert_never(shape)


def _cores(shape: Fractional) -> str:
    if not shape.cores:
        return "-"
    each = shape.cores_default
    return f"{ALL_CORES} % ({each} % each)" if each else f"{ALL_CORES} %"


def _place(gpu: Gpu) -> tuple[str, ...]:
    topology = gpu.topology
    peers = f"{topology.nvlink_clique} ({topology.nvlink_peers} peers)"
    return (
        gpu.pci_bus_id,
        "-" if topology.numa_node is None else str(topology.numa_node),
        topology.pcie_switch or "-",
        peers if topology.nvlink_clique else "-",
    )
