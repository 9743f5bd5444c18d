"""What a GPU looks like once its layout is applied, or why it stays as it is.

Where the partitions of a layout go on a GPU.

What has to be done to a GPU so that it looks like its layout; or why that cannot be.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from dra_driver.model.gpus import (
    Gpu,
    GpuUuid,
    GuestRestriction,
    MigInfo,
    MigInstance,
    MigProfile,
    Partition,
    PartitionKey,
    guest_mode_problem,
)
from dra_driver.model.mig_layouts import (
    DesiredLayout,
    LayoutChange,
    LayoutOutcome,
    LayoutState,
    MigState,
    ProfileCounts,
)
from dra_driver.plan.mig.counters import engine_supplies
from dra_driver.plan.mig.manager.layouts import format_counts
from dra_driver.plan.mig.manager.state import partition_keys, still_present
from dra_driver.plan.mig.partitions import CreatedPartitions


def requested_profiles(
    mig: MigInfo, counts: ProfileCounts
) -> tuple[list[MigProfile], tuple[str, ...]]:
    """The profiles that *counts* names, each as often as it says; and the names that the board does
    not know."""
    by_name = {profile.name: profile for profile in mig.profiles}
    known = [by_name[name] for name, count in counts if name in by_name for _ in range(count)]
    return known, tuple(name for name, _ in counts if name not in by_name)


def place_partitions(
    mig: MigInfo, wanted: Sequence[MigProfile], fixed: Iterable[PartitionKey] = ()
) -> tuple[PartitionKey, ...] | None:
    """A place for each of *wanted* where none overlaps another one or *fixed*; None: there is none.

    The largest first, since they have the fewest places.
    """
    taken = _used_units(fixed)
    units = sum(profile.size for profile in wanted)
    if units + taken.bit_count() > mig.units:
        return None
    ordered = sorted(wanted, key=lambda one: (-one.size, len(one.placements), one.number))
    found = _search(ordered, taken, ())
    return None if found is None else tuple(sorted(found))


def capacity_problem(mig: MigInfo, wanted: Sequence[MigProfile]) -> str:
    """What the board has too little of, wherever *wanted* are; empty: it has enough."""
    for profile, count in Counter(wanted).items():
        if count > profile.most:
            return f"there can be {profile.most} of {profile.name}"
    for supply in engine_supplies(mig, ()):
        needed = sum(supply.of(profile) for profile in wanted)
        if needed > supply.left:
            return f"they need {needed} {supply.name} together, and the board has {supply.left}"
    return ""


def _search(
    left: Sequence[MigProfile], taken: int, found: tuple[PartitionKey, ...]
) -> tuple[PartitionKey, ...] | None:
    """By trying; equal partitions in the order of their places, so that none is tried twice."""
    if not left:
        return found
    profile = left[0]
    after = found[-1].start if found and found[-1].profile_id == profile.id else -1
    for placement in profile.placements:
        key = Partition(profile, placement).key
        if placement.start > after and not taken & _used_units([key]):
            done = _search(left[1:], taken | _used_units([key]), (*found, key))
            if done is not None:
                return done
    return None


def _used_units(keys: Iterable[PartitionKey]) -> int:
    """Memory units as bits."""
    return sum(((1 << key.size) - 1) << key.start for key in keys)


_REMOVE = "remove them (nvidia-smi mig -dci, then -dgi), or choose another layout"


@dataclass(frozen=True, slots=True)
class LayoutError:
    """The GPU cannot look like that."""

    reason: str
    always: bool = False  # whatever is on the GPU


def plan_layout_change(
    gpu: Gpu,
    wanted: DesiredLayout,
    made: Collection[PartitionKey],
    claimed: Collection[PartitionKey] = (),
) -> LayoutChange | LayoutError:
    """What makes *gpu* look as *wanted*: all of it, or nothing.

    *made*: what layouts have made of it, or taken over; the rest is foreign and stays. *claimed*:
    what is cut for claims, which goes with them. A GPU that looks as wanted already, and of which
    layouts have made nothing, is taken over.
    """
    if gpu.mig is None:
        why = f": {gpu.mig_problem}" if gpu.mig_problem else ""
        return LayoutError(f"{_named(gpu)} cannot be cut into partitions{why}", always=True)
    there = _ExistingInstances(gpu, gpu.mig, frozenset(made), frozenset(claimed))
    found = _on(there, wanted) if wanted.on else _off(there, wanted)
    why = "" if isinstance(found, LayoutError) else _fixed(gpu, gpu.mig.fixed, wanted, found)
    return LayoutError(why, always=True) if why else found


class _ExistingInstances:
    """What is on the GPU, without what claims have."""

    def __init__(
        self,
        gpu: Gpu,
        mig: MigInfo,
        made: frozenset[PartitionKey],
        claimed: frozenset[PartitionKey],
    ) -> None:
        self.gpu = gpu
        self.mig = mig
        self.unusable = {one.key for one in mig.unusable} - claimed
        self.whole = {one.key for one in mig.instances} - claimed
        self.all = self.whole | self.unusable
        # Ours are at most empty: who made compute instances in one may be using them.
        taken_over = {one.key for one in mig.unusable if one.cis}
        self.made = (self.all & made) - taken_over
        self.foreign = self.all - self.made
        self.known = bool(made)  # whether a layout was here before

    def names(self, keys: Iterable[PartitionKey]) -> str:
        """As people know them: ``1g.10gb at 3``."""
        profiles = {profile.id: profile.name for profile in self.mig.profiles}
        return ", ".join(
            f"{profiles.get(key.profile_id, f'profile {key.profile_id}')} at {key.start}"
            for key in sorted(keys)
        )


def _off(there: _ExistingInstances, wanted: DesiredLayout) -> LayoutChange | LayoutError:
    if there.foreign:
        return _in_the_way(there, wanted, there.foreign)
    switch = False if there.mig.on else None
    return LayoutChange(there.gpu.uuid, tuple(sorted(there.made)), switch)


def _on(there: _ExistingInstances, wanted: DesiredLayout) -> LayoutChange | LayoutError:
    mig = there.mig
    profiles, unknown = requested_profiles(mig, wanted.counts)
    if unknown:
        return LayoutError(_unknown(there, wanted, unknown), always=True)
    why = capacity_problem(mig, profiles)
    if why or place_partitions(mig, profiles) is None:
        return LayoutError(_does_not_fit(there, wanted, why), always=True)
    if mig.on and _is_that(there, profiles):
        keep = there.made if there.known else there.all
        return LayoutChange(there.gpu.uuid, keep=tuple(sorted(keep)))
    return _cut(there, wanted, profiles)


def _is_that(there: _ExistingInstances, profiles: Iterable[MigProfile]) -> bool:
    ids = Counter(profile.id for profile in profiles)
    return not there.unusable and Counter(key.profile_id for key in there.whole) == ids


def _cut(
    there: _ExistingInstances, wanted: DesiredLayout, profiles: list[MigProfile]
) -> LayoutChange | LayoutError:
    """What is there of it can stay, unless the rest finds no place then."""
    left, strange = _without(profiles, there.foreign - there.unusable)
    strange |= there.foreign & there.unusable
    if strange:
        return _in_the_way(there, wanted, strange)
    for staying in (there.made - there.unusable, frozenset[PartitionKey]()):
        rest, others = _without(left, staying)
        stays = staying - others
        cut = place_partitions(there.mig, rest, there.foreign | stays)
        if cut is not None:
            return LayoutChange(
                there.gpu.uuid,
                tuple(sorted(there.made - stays)),
                None if there.mig.on else True,
                cut,
                tuple(sorted(stays)),
            )
    return _in_the_way(there, wanted, there.foreign)


def _without(
    profiles: list[MigProfile], keys: Iterable[PartitionKey]
) -> tuple[list[MigProfile], set[PartitionKey]]:
    """What of *profiles* is left without *keys*, and which of the keys are none of them."""
    left = list(profiles)
    others: set[PartitionKey] = set()
    for key in sorted(keys):
        one = next((profile for profile in left if profile.id == key.profile_id), None)
        if one is None:
            others.add(key)
        else:
            left.remove(one)
    return left, others


def _in_the_way(
    there: _ExistingInstances, wanted: DesiredLayout, keys: Iterable[PartitionKey]
) -> LayoutError:
    return LayoutError(
        f"{_named(there.gpu)} has instances that this driver did not make and that are in the way "
        f"of layout {wanted.layout!r}: {there.names(keys)}; {_REMOVE}"
    )


def _unknown(there: _ExistingInstances, wanted: DesiredLayout, names: Iterable[str]) -> str:
    has = ", ".join(profile.name for profile in there.mig.profiles) or "none"
    return (
        f"{_named(there.gpu)} has no profile {', '.join(names)}, which layout {wanted.layout!r} "
        f"has; it has: {has}"
    )


def _does_not_fit(there: _ExistingInstances, wanted: DesiredLayout, why: str) -> str:
    return (
        f"layout {wanted.layout!r} does not fit on {_named(there.gpu)}: "
        f"{format_counts(wanted.counts)}: "
        f"{why or 'there is no place for all of them at once'}"
    )


def _fixed(gpu: Gpu, fixed: GuestRestriction, wanted: DesiredLayout, change: LayoutChange) -> str:
    """Why nobody can do that in this virtual machine."""
    if fixed is GuestRestriction.NOTHING or change.is_nothing:
        return ""
    if fixed is GuestRestriction.MODE and change.switch is None:
        return ""
    why = guest_mode_problem(fixed, gpu.pci_bus_id, wanted.on)
    return f"{_named(gpu)} cannot be made what layout {wanted.layout!r} says: {why}"


def _named(gpu: Gpu) -> str:
    return f"{gpu.name} ({gpu.product_name})"


_NO_ID = -1


def preview_layout(
    gpu: Gpu, wanted: DesiredLayout, book: MigState, claimed: CreatedPartitions, waits: str
) -> tuple[Gpu, LayoutOutcome | None]:
    """*gpu* as it looks when it looks as *wanted*, and nothing to be said of it; or *gpu* as it is,
    and how far its layout is.

    *waits*: what has to end before it can be changed. What *book* says of a layout that is not
    applied counts: only who tries it can know whether a board can be switched.
    """
    last = book.outcomes.get(gpu.uuid)
    if last is not None and last.layout == wanted.layout and last.state is not LayoutState.SUCCESS:
        return gpu, last
    ours = partition_keys(still_present(gpu, book.made.get(gpu.uuid, ())))
    found = plan_layout_change(
        gpu, wanted, ours, {key for uuid, key in claimed if uuid == gpu.uuid}
    )
    if isinstance(found, LayoutError):
        return gpu, _unfit(found, wanted, waits)
    if found.is_nothing:
        return gpu, LayoutOutcome(wanted.layout, LayoutState.SUCCESS)
    if waits or gpu.mig is None:
        return gpu, LayoutOutcome(wanted.layout, LayoutState.PENDING, waits)
    return replace(gpu, mig=_changed(gpu.mig, found)), None


def _unfit(found: LayoutError, wanted: DesiredLayout, waits: str) -> LayoutOutcome:
    if waits and not found.always:
        return LayoutOutcome(wanted.layout, LayoutState.PENDING, f"{waits}; then: {found.reason}")
    return LayoutOutcome(wanted.layout, LayoutState.FAILED, found.reason)


def _changed(mig: MigInfo, change: LayoutChange) -> MigInfo:
    instances = [one for one in mig.instances if one.key not in change.remove]
    instances += [_to_come(key) for key in change.cut]
    return replace(
        mig,
        on=mig.on if change.switch is None else change.switch,
        pending=mig.pending if change.switch is None else change.switch,
        instances=tuple(sorted(instances, key=lambda one: one.key)),
        unusable=tuple(one for one in mig.unusable if one.key not in change.remove),
    )


def _to_come(key: PartitionKey) -> MigInstance:
    """Nobody knows its ids and its UUID before it is there."""
    return MigInstance(key, _NO_ID, _NO_ID, GpuUuid(""))
