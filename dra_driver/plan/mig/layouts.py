"""Which named layouts there are, and what each says of a GPU."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from api.mig_parted import MigConfig
from api.mig_parted import layouts as read
from dra_driver.model.devices import Gpu, GpuUuid
from dra_driver.model.inventory import Inventory
from dra_driver.model.layouts import Counts, Layout, LayoutEntry, Wanted
from dra_driver.model.mig import Mig, MigProfile

_OFF, _ON, _BALANCED = "all-disabled", "all-enabled", "all-balanced"
_BALANCE: Mapping[int, Mapping[int, int]] = {7: {1: 2, 2: 1, 3: 1}, 4: {1: 2, 2: 1}}
"""By the compute slices of the board: how many partitions of how many slices."""


_BUS_ID = re.compile(r"GPU ([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])\b")  # ``Withheld.what``


def layouts_of(document: Mapping[str, Any], where: str) -> dict[str, Layout | tuple[str, ...]]:
    """The layouts in a file of mig-parted by name, or everything that is wrong with one.

    ConfigError: something is wrong with all of them.
    """
    return {
        name: said if isinstance(said, tuple) else Layout(name, tuple(map(_entry, said)), where)
        for name, said in read(document).items()
    }


def built_in(gpus: Iterable[Gpu]) -> dict[str, Layout]:
    """The layouts that these GPUs have without a file, as mig-parted calls them."""
    entries: dict[str, list[LayoutEntry]] = {_BALANCED: [], _OFF: [], _ON: []}
    for gpu in gpus:
        for name, entry in _own(gpu):
            entries.setdefault(name, []).append(entry)
    return {name: Layout(name, tuple(found)) for name, found in sorted(entries.items())}


def places(inventory: Inventory) -> dict[GpuUuid, int]:
    """The number that files of mig-parted have for each GPU: its place in the order of the PCI bus.

    Those that are there and cannot be offered count, as far as it is known where they are.
    """
    withheld = (_BUS_ID.match(one.what) for one in inventory.withheld)
    there = {found[1] for found in withheld if found} | {g.pci_bus_id for g in inventory.gpus}
    order = {bus_id: place for place, bus_id in enumerate(sorted(there))}
    return {gpu.uuid: order[gpu.pci_bus_id] for gpu in inventory.gpus}


def wanted(layout: Layout, gpu: Gpu, place: int) -> Wanted | None:
    """What *layout* says of *gpu*, which has this *place* on the bus; None: nothing.

    What it says of all GPUs is not meant for those that cannot be cut, as with mig-parted.
    """
    entry = next((one for one in reversed(layout.entries) if _selects(one, gpu, place)), None)
    if entry is None:
        return None
    if gpu.mig is None and (entry.indexes is None or not entry.on):
        return None
    return Wanted(layout.name, entry.on, entry.counts)


def shown(counts: Counts) -> str:
    """As people read it: ``2x 1g.10gb, 1x 3g.40gb``."""
    return ", ".join(f"{count}x {name}" for name, count in counts) or "no partitions"


def _entry(said: MigConfig) -> LayoutEntry:
    counts = sorted((said.mig_devices or {}).items())
    return LayoutEntry(
        said.mig_enabled,
        tuple((name, count) for name, count in counts if count),
        None if said.devices == "all" else frozenset(said.devices),
        frozenset(int(each, 16) for each in said.device_filter),
    )


def _selects(entry: LayoutEntry, gpu: Gpu, place: int) -> bool:
    if entry.indexes is not None and place not in entry.indexes:
        return False
    if entry.gpus is not None and gpu.uuid not in entry.gpus:
        return False
    return not entry.pci_ids or (bool(gpu.pci_id) and int(gpu.pci_id, 16) in entry.pci_ids)


def _own(gpu: Gpu) -> Iterator[tuple[str, LayoutEntry]]:
    """The built-in layouts of one GPU."""
    if gpu.mig is None:
        return
    only = frozenset([gpu.uuid])
    yield _OFF, LayoutEntry(on=False, gpus=only)
    yield _ON, LayoutEntry(on=True, gpus=only)
    for profile in gpu.mig.profiles:
        name = f"all-{profile.name.replace('+', '.')}"
        yield name, LayoutEntry(True, ((profile.name, profile.most),), gpus=only)
    if counts := _balanced(gpu.mig):
        yield _BALANCED, LayoutEntry(True, counts, gpus=only)


def _balanced(mig: Mig) -> Counts:
    slices = max((profile.slices for profile in mig.profiles), default=0)
    shares = _BALANCE.get(slices, {})
    found = {number: _usual(mig.profiles, number) for number in shares}
    return tuple((one.name, shares[number]) for number, one in found.items() if one)


def _usual(profiles: Sequence[MigProfile], slices: int) -> MigProfile | None:
    """Of the plain profiles with so many compute slices, the one with the least memory."""
    plain = [one for one in profiles if one.is_plain and one.slices == slices]
    return min(plain, key=lambda one: (one.memory_bytes, one.number), default=None)
