"""Which named layouts there are, and what each says of a GPU.

A profile where layouts govern GPUs: those are not cut for claims besides.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from api.mig_parted import MigConfig
from api.mig_parted import layouts as read
from api.names import MIG_CONFIG_LABEL
from dra_driver.model.gpus import Gpu, GpuUuid, Inventory, MigInfo, MigProfile
from dra_driver.model.mig_layouts import DesiredLayout, MigLayout, MigLayoutEntry, ProfileCounts
from dra_driver.model.profiles import GpuSelector, Profile, ProfileEntry, Rules
from dra_driver.plan.profiles.rules import rules_by_gpu


def without_dynamic_mig(
    profile: Profile, gpus: Sequence[Gpu], governed: Collection[GpuUuid]
) -> Profile:
    """*profile* for these *gpus*, where those that are *governed* are not cut for claims; the same
    where it makes no difference."""
    rules, _ = rules_by_gpu(profile, gpus)
    cut = {uuid for uuid in governed if uuid in rules and rules[uuid].mig.dynamic}
    if not cut:
        return profile
    entries = [
        one
        for entry in profile.entries
        for one in _split(entry, {uuid for uuid in rules if rules[uuid] is entry.rules}, cut)
    ]
    return replace(profile, entries=tuple(entries))


def profile_until_gpus_seen(profile: Profile, gpus: Sequence[Gpu], expected: bool) -> Profile:
    """*profile*, where no GPU but these is cut for claims that may be the business of a layout:
    any, where one is *expected* of the whole node, or what the profile names one for; the same
    where it makes no difference."""
    if not any(_waits(entry.rules, expected) for entry in profile.entries):
        return profile
    rules, _ = rules_by_gpu(profile, gpus)
    entries: list[ProfileEntry] = []
    for entry in profile.entries:
        if not _waits(entry.rules, expected):
            entries.append(entry)
            continue
        if its := frozenset(uuid for uuid in rules if rules[uuid] is entry.rules):
            entries.append(replace(entry, selection=GpuSelector(uuids=its)))
        entries.append(replace(entry, rules=_not_cut(entry.rules)))
    return replace(profile, entries=tuple(entries))


def profile_until_layouts_known(profile: Profile) -> Profile:
    """*profile* as long as it is not known what layouts govern: nothing is cut for claims; the same
    where it has nothing cut."""
    if not any(entry.rules.mig.dynamic for entry in profile.entries):
        return profile
    warning = (
        f"profile {profile.name!r}: GPUs are cut for claims once it is known whether the node's "
        f"label {MIG_CONFIG_LABEL} names a layout, which goes before it"
    )
    entries = (replace(entry, rules=_not_cut(entry.rules)) for entry in profile.entries)
    return replace(profile, entries=tuple(entries), warnings=(*profile.warnings, warning))


def _split(entry: ProfileEntry, its: set[GpuUuid], cut: set[GpuUuid]) -> Iterator[ProfileEntry]:
    """*its*: the GPUs that it holds for."""
    if its & cut:
        of_layouts = replace(entry, rules=_not_cut(entry.rules))
        if its <= cut:
            yield of_layouts
            return
        yield replace(of_layouts, selection=GpuSelector(uuids=frozenset(its & cut)))
    yield entry


def _waits(rules: Rules, expected: bool) -> bool:
    return rules.mig.dynamic and (expected or bool(rules.mig.layout))


def _not_cut(rules: Rules) -> Rules:
    return replace(rules, mig=replace(rules.mig, dynamic=False))


_OFF, _ON, _BALANCED = "all-disabled", "all-enabled", "all-balanced"
_BALANCE: Mapping[int, Mapping[int, int]] = {7: {1: 2, 2: 1, 3: 1}, 4: {1: 2, 2: 1}}
"""By the compute slices of the board: how many partitions of how many slices."""


_BUS_ID = re.compile(r"GPU ([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])\b")  # ``Withheld.what``


def decode_layouts(
    document: Mapping[str, Any], where: str
) -> dict[str, MigLayout | tuple[str, ...]]:
    """The layouts in a file of mig-parted by name, or everything that is wrong with one.

    ConfigError: something is wrong with all of them.
    """
    return {
        name: said if isinstance(said, tuple) else MigLayout(name, tuple(map(_entry, said)), where)
        for name, said in read(document).items()
    }


def built_in_layouts(gpus: Iterable[Gpu]) -> dict[str, MigLayout]:
    """The layouts that these GPUs have without a file, as mig-parted calls them."""
    entries: dict[str, list[MigLayoutEntry]] = {_BALANCED: [], _OFF: [], _ON: []}
    for gpu in gpus:
        for name, entry in _own(gpu):
            entries.setdefault(name, []).append(entry)
    return {name: MigLayout(name, tuple(found)) for name, found in sorted(entries.items())}


def pci_indexes(inventory: Inventory) -> dict[GpuUuid, int]:
    """The number that files of mig-parted have for each GPU: its place in the order of the PCI bus.

    Those that are there and cannot be offered count, as far as it is known where they are.
    """
    unavailable = (_BUS_ID.match(one.what) for one in inventory.unavailable)
    there = {found[1] for found in unavailable if found} | {g.pci_bus_id for g in inventory.gpus}
    order = {bus_id: place for place, bus_id in enumerate(sorted(there))}
    return {gpu.uuid: order[gpu.pci_bus_id] for gpu in inventory.gpus}


def desired_layout(layout: MigLayout, gpu: Gpu, place: int) -> DesiredLayout | None:
    """What *layout* says of *gpu*, which has this *place* on the bus; None: nothing.

    What it says of all GPUs is not meant for those that cannot be cut, as with mig-parted.
    """
    entry = next((entry for entry in reversed(layout.entries) if _selects(entry, gpu, place)), None)
    if entry is None:
        return None
    if gpu.mig is None and (entry.indexes is None or not entry.on):
        return None
    return DesiredLayout(layout.name, entry.on, entry.counts)


def format_counts(counts: ProfileCounts) -> str:
    """As people read it: ``2x 1g.10gb, 1x 3g.40gb``."""
    return ", ".join(f"{count}x {name}" for name, count in counts) or "no partitions"


def _entry(said: MigConfig) -> MigLayoutEntry:
    counts = sorted((said.mig_devices or {}).items())
    return MigLayoutEntry(
        said.mig_enabled,
        tuple((name, count) for name, count in counts if count),
        None if said.devices == "all" else frozenset(said.devices),
        frozenset(int(each, 16) for each in said.device_filter),
    )


def _selects(entry: MigLayoutEntry, gpu: Gpu, place: int) -> bool:
    if entry.indexes is not None and place not in entry.indexes:
        return False
    if entry.gpus is not None and gpu.uuid not in entry.gpus:
        return False
    return not entry.pci_ids or (bool(gpu.pci_id) and int(gpu.pci_id, 16) in entry.pci_ids)


def _own(gpu: Gpu) -> Iterator[tuple[str, MigLayoutEntry]]:
    """The built-in layouts of one GPU."""
    if gpu.mig is None:
        return
    only = frozenset([gpu.uuid])
    yield _OFF, MigLayoutEntry(on=False, gpus=only)
    yield _ON, MigLayoutEntry(on=True, gpus=only)
    for profile in gpu.mig.profiles:
        name = f"all-{profile.name.replace('+', '.')}"
        yield name, MigLayoutEntry(True, ((profile.name, profile.most),), gpus=only)
    if counts := _balanced(gpu.mig):
        yield _BALANCED, MigLayoutEntry(True, counts, gpus=only)


def _balanced(mig: MigInfo) -> ProfileCounts:
    slices = max((profile.slices for profile in mig.profiles), default=0)
    shares = _BALANCE.get(slices, {})
    found = {number: _usual(mig.profiles, number) for number in shares}
    return tuple((one.name, shares[number]) for number, one in found.items() if one)


def _usual(profiles: Sequence[MigProfile], slices: int) -> MigProfile | None:
    """Of the plain profiles with so many compute slices, the one with the least memory."""
    plain = [profile for profile in profiles if profile.is_plain and profile.slices == slices]
    return min(plain, key=lambda one: (one.memory_bytes, one.number), default=None)
