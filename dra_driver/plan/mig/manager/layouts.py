"""The named layouts, what each means for a GPU, and where the profile holds beside them.

No partitions are created for claims on a GPU that a layout governs.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from api.mig_parted import MigConfig
from api.mig_parted import layouts as read
from api.names import MIG_CONFIG_LABEL
from dra_driver.model.gpus import Gpu, GpuUuid, Inventory, MigInfo
from dra_driver.model.mig_layouts import DesiredLayout, MigLayout, MigLayoutEntry, ProfileCounts
from dra_driver.model.profiles import GpuSelector, Profile, ProfileEntry, Rules
from dra_driver.plan.profiles.rules import rules_by_gpu


def without_dynamic_mig(
    profile: Profile, gpus: Sequence[Gpu], governed: Collection[GpuUuid]
) -> Profile:
    """*profile* for these *gpus*, without partitions for claims on those that are *governed*; the
    same object where that makes no difference."""
    rules, _ = rules_by_gpu(profile, gpus)
    dynamic = {uuid for uuid in governed if uuid in rules and rules[uuid].mig.dynamic}
    if not dynamic:
        return profile
    entries = [
        part
        for entry in profile.entries
        for part in _split(entry, {uuid for uuid in rules if rules[uuid] is entry.rules}, dynamic)
    ]
    return replace(profile, entries=tuple(entries))


def profile_until_gpus_seen(profile: Profile, gpus: Sequence[Gpu], expected: bool) -> Profile:
    """*profile*, without partitions for claims on unseen GPUs that a layout may govern: on all
    other than *gpus* where a layout is *expected* for the whole node, else where the profile names
    one. The same object where that makes no difference."""
    if not any(_waits(entry.rules, expected) for entry in profile.entries):
        return profile
    rules, _ = rules_by_gpu(profile, gpus)
    entries: list[ProfileEntry] = []
    for entry in profile.entries:
        if not _waits(entry.rules, expected):
            entries.append(entry)
            continue
        if entry_gpus := frozenset(uuid for uuid in rules if rules[uuid] is entry.rules):
            entries.append(replace(entry, selection=GpuSelector(uuids=entry_gpus)))
        entries.append(replace(entry, rules=_without_dynamic(entry.rules)))
    return replace(profile, entries=tuple(entries))


def profile_until_layouts_known(profile: Profile) -> Profile:
    """*profile* while it is not known which GPUs layouts govern: without partitions for claims; the
    same object where it has none."""
    if not any(entry.rules.mig.dynamic for entry in profile.entries):
        return profile
    warning = (
        f"profile {profile.name!r}: partitions are created for claims once it is known whether the "
        f"node's label {MIG_CONFIG_LABEL} names a layout, which goes before it"
    )
    entries = (replace(entry, rules=_without_dynamic(entry.rules)) for entry in profile.entries)
    return replace(profile, entries=tuple(entries), warnings=(*profile.warnings, warning))


def _split(
    entry: ProfileEntry, entry_gpus: set[GpuUuid], dynamic: set[GpuUuid]
) -> Iterator[ProfileEntry]:
    """*entry* without partitions for claims on the *dynamic* GPUs. *entry_gpus*: the GPUs that it
    holds for."""
    if entry_gpus & dynamic:
        of_layouts = replace(entry, rules=_without_dynamic(entry.rules))
        if entry_gpus <= dynamic:
            yield of_layouts
            return
        yield replace(of_layouts, selection=GpuSelector(uuids=frozenset(entry_gpus & dynamic)))
    yield entry


def _waits(rules: Rules, expected: bool) -> bool:
    return rules.mig.dynamic and (expected or bool(rules.mig.layout))


def _without_dynamic(rules: Rules) -> Rules:
    return replace(rules, mig=replace(rules.mig, dynamic=False))


_OFF, _ON, _BALANCED = "all-disabled", "all-enabled", "all-balanced"
_BALANCE: Mapping[int, Mapping[int, int]] = {7: {1: 2, 2: 1, 3: 1}, 4: {1: 2, 2: 1}}
"""By the compute slices of the board: how many partitions of how many slices."""

# ``UnavailableGpu.what``
_BUS_ID = re.compile(r"GPU ([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])\b")


def decode_layouts(
    document: Mapping[str, Any], where: str
) -> dict[str, MigLayout | tuple[str, ...]]:
    """The layouts in a file of mig-parted by name, or everything that is wrong with one.

    ConfigError: something is wrong with all of them.
    """
    return {
        name: layout
        if isinstance(layout, tuple)
        else MigLayout(name, tuple(map(_entry, layout)), where)
        for name, layout in read(document).items()
    }


def built_in_layouts(gpus: Iterable[Gpu]) -> dict[str, MigLayout]:
    """The layouts that these GPUs have without a file, as mig-parted calls them."""
    entries: dict[str, list[MigLayoutEntry]] = {_BALANCED: [], _OFF: [], _ON: []}
    for gpu in gpus:
        for name, entry in _own(gpu):
            entries.setdefault(name, []).append(entry)
    return {
        name: MigLayout(name, tuple(layout_entries))
        for name, layout_entries in sorted(entries.items())
    }


def pci_indexes(inventory: Inventory) -> dict[GpuUuid, int]:
    """The number of each GPU in files of mig-parted: its place in the order of the PCI bus. GPUs
    that cannot be offered count, where their place is known."""
    matches = (_BUS_ID.match(gpu.what) for gpu in inventory.unavailable)
    bus_ids = {match[1] for match in matches if match} | {g.pci_bus_id for g in inventory.gpus}
    indexes = {bus_id: index for index, bus_id in enumerate(sorted(bus_ids))}
    return {gpu.uuid: indexes[gpu.pci_bus_id] for gpu in inventory.gpus}


def desired_layout(layout: MigLayout, gpu: Gpu, index: int) -> DesiredLayout | None:
    """How *gpu*, which has this *index* on the bus, should look by *layout*; None: it stays as it
    is. An entry for all GPUs does not count for those without MIG, as with mig-parted."""
    entry = next((entry for entry in reversed(layout.entries) if _selects(entry, gpu, index)), None)
    if entry is None or (gpu.mig is None and (entry.indexes is None or not entry.on)):
        return None
    return DesiredLayout(layout.name, entry.on, entry.counts)


def format_counts(counts: ProfileCounts) -> str:
    """As in a message: ``2x 1g.10gb, 1x 3g.40gb``."""
    return ", ".join(f"{count}x {name}" for name, count in counts) or "no partitions"


def _entry(config: MigConfig) -> MigLayoutEntry:
    counts = sorted((config.mig_devices or {}).items())
    return MigLayoutEntry(
        config.mig_enabled,
        tuple((name, count) for name, count in counts if count),
        None if config.devices == "all" else frozenset(config.devices),
        frozenset(int(pci_id, 16) for pci_id in config.device_filter),
    )


def _selects(entry: MigLayoutEntry, gpu: Gpu, index: int) -> bool:
    if entry.indexes is not None and index not in entry.indexes:
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
    # Of the plain profiles with so many compute slices, the one with the least memory.
    profiles = sorted(
        (profile for profile in mig.profiles if profile.is_plain),
        key=lambda profile: (profile.memory_bytes, profile.number),
        reverse=True,
    )
    by_slices = {profile.slices: profile.name for profile in profiles}
    return tuple((by_slices[n], count) for n, count in shares.items() if n in by_slices)
