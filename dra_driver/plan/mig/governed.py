"""A profile where layouts govern GPUs: those are not cut for claims besides."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from api.names import MIG_CONFIG_LABEL
from dra_driver.model.devices import Gpu, GpuUuid
from dra_driver.model.profiles import Entry, Profile, Rules, Selection
from dra_driver.plan.profiles import rules_by_gpu


def without_cutting(
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


def until_seen(profile: Profile, gpus: Sequence[Gpu], expected: bool) -> Profile:
    """*profile*, where no GPU but these is cut for claims that may be the business of a layout:
    any, where one is *expected* of the whole node, or what the profile names one for; the same
    where it makes no difference."""
    if not any(_waits(entry.rules, expected) for entry in profile.entries):
        return profile
    rules, _ = rules_by_gpu(profile, gpus)
    entries: list[Entry] = []
    for entry in profile.entries:
        if not _waits(entry.rules, expected):
            entries.append(entry)
            continue
        if its := frozenset(uuid for uuid in rules if rules[uuid] is entry.rules):
            entries.append(replace(entry, selection=Selection(uuids=its)))
        entries.append(replace(entry, rules=_not_cut(entry.rules)))
    return replace(profile, entries=tuple(entries))


def until_known(profile: Profile) -> Profile:
    """*profile* as long as it is not known what layouts govern: nothing is cut for claims; the same
    where it has nothing cut."""
    if not any(entry.rules.mig.dynamic for entry in profile.entries):
        return profile
    note = (
        f"profile {profile.name!r}: GPUs are cut for claims once it is known whether the node's "
        f"label {MIG_CONFIG_LABEL} names a layout, which goes before it"
    )
    entries = (replace(entry, rules=_not_cut(entry.rules)) for entry in profile.entries)
    return replace(profile, entries=tuple(entries), notes=(*profile.notes, note))


def _split(entry: Entry, its: set[GpuUuid], cut: set[GpuUuid]) -> Iterator[Entry]:
    """*its*: the GPUs that it holds for."""
    if its & cut:
        of_layouts = replace(entry, rules=_not_cut(entry.rules))
        if its <= cut:
            yield of_layouts
            return
        yield replace(of_layouts, selection=Selection(uuids=frozenset(its & cut)))
    yield entry


def _waits(rules: Rules, expected: bool) -> bool:
    return rules.mig.dynamic and (expected or bool(rules.mig.layout))


def _not_cut(rules: Rules) -> Rules:
    return replace(rules, mig=replace(rules.mig, dynamic=False))
