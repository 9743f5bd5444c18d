"""How a GPU gets its layout: what to remove, and what to create where; or why it cannot get it."""

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
    requested = [by_name[name] for name, count in counts if name in by_name for _ in range(count)]
    return requested, tuple(name for name, _ in counts if name not in by_name)


def place_partitions(
    mig: MigInfo, requested: Sequence[MigProfile], fixed: Iterable[PartitionKey] = ()
) -> tuple[PartitionKey, ...] | None:
    """A place for each of *requested* where none overlaps another one or *fixed*; None: there is
    none.

    The largest first, since they have the fewest places.
    """
    used_units = _used_units(fixed)
    units = sum(profile.size for profile in requested)
    if units + used_units.bit_count() > mig.units:
        return None
    largest_first = sorted(
        requested,
        key=lambda profile: (-profile.size, len(profile.placements), profile.number),
    )
    keys = _search(largest_first, used_units, ())
    return None if keys is None else tuple(sorted(keys))


def capacity_problem(mig: MigInfo, requested: Sequence[MigProfile]) -> str:
    """What the board has too little of, wherever *requested* are; empty: it has enough."""
    for profile, count in Counter(requested).items():
        if count > profile.most:
            return f"there can be {profile.most} of {profile.name}"
    for supply in engine_supplies(mig, ()):
        needed = sum(supply.of(profile) for profile in requested)
        if needed > supply.available:
            has = supply.available
            return f"they need {needed} {supply.name} together, and the board has {has}"
    return ""


def _search(
    unplaced: Sequence[MigProfile], used_units: int, placed: tuple[PartitionKey, ...]
) -> tuple[PartitionKey, ...] | None:
    """By trying; equal partitions in the order of their places, so that none is tried twice."""
    if not unplaced:
        return placed
    profile = unplaced[0]
    after = placed[-1].start if placed and placed[-1].profile_id == profile.id else -1
    for placement in profile.placements:
        key = Partition(profile, placement).key
        if placement.start > after and not used_units & _used_units([key]):
            keys = _search(unplaced[1:], used_units | _used_units([key]), (*placed, key))
            if keys is not None:
                return keys
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
    desired: DesiredLayout,
    managed: Collection[PartitionKey],
    claimed: Collection[PartitionKey] = (),
) -> LayoutChange | LayoutError:
    """What makes *gpu* look as *desired*: all of it, or nothing.

    *managed*: what layouts created on it, or took over; the rest is unmanaged and stays. *claimed*:
    what was created for claims, which goes with them. A GPU that looks as desired already, and on
    which layouts created nothing, is taken over.
    """
    if gpu.mig is None:
        reason = f": {gpu.mig_problem}" if gpu.mig_problem else ""
        return LayoutError(f"{_described(gpu)} cannot be partitioned{reason}", always=True)
    present = _PresentInstances(gpu, gpu.mig, frozenset(managed), frozenset(claimed))
    change = _mode_on(present, desired) if desired.on else _mode_off(present, desired)
    if isinstance(change, LayoutError):
        return change
    problem = _guest_problem(gpu, gpu.mig.fixed, desired, change)
    return LayoutError(problem, always=True) if problem else change


class _PresentInstances:
    """What is on the GPU, without what claims have."""

    def __init__(
        self,
        gpu: Gpu,
        mig: MigInfo,
        managed: frozenset[PartitionKey],
        claimed: frozenset[PartitionKey],
    ) -> None:
        self.gpu = gpu
        self.mig = mig
        self.unusable = {instance.key for instance in mig.unusable} - claimed
        self.whole = {instance.key for instance in mig.instances} - claimed
        self.all = self.whole | self.unusable
        # Ours are at most empty: whoever created compute instances in one may be using them.
        divided_by_others = {instance.key for instance in mig.unusable if instance.cis}
        self.managed = (self.all & managed) - divided_by_others
        self.unmanaged = self.all - self.managed
        self.had_layout = bool(managed)

    def names(self, keys: Iterable[PartitionKey]) -> str:
        """As people know them: ``1g.10gb at 3``."""
        profiles = {profile.id: profile.name for profile in self.mig.profiles}
        return ", ".join(
            f"{profiles.get(key.profile_id, f'profile {key.profile_id}')} at {key.start}"
            for key in sorted(keys)
        )


def _mode_off(present: _PresentInstances, desired: DesiredLayout) -> LayoutChange | LayoutError:
    if present.unmanaged:
        return _in_the_way(present, desired, present.unmanaged)
    switch = False if present.mig.on else None
    return LayoutChange(present.gpu.uuid, tuple(sorted(present.managed)), switch)


def _mode_on(present: _PresentInstances, desired: DesiredLayout) -> LayoutChange | LayoutError:
    mig = present.mig
    profiles, unknown = requested_profiles(mig, desired.counts)
    if unknown:
        return LayoutError(_unknown_profiles(present, desired, unknown), always=True)
    problem = capacity_problem(mig, profiles)
    if problem or place_partitions(mig, profiles) is None:
        return LayoutError(_does_not_fit(present, desired, problem), always=True)
    if mig.on and _has_exactly(present, profiles):
        keep = present.managed if present.had_layout else present.all
        return LayoutChange(present.gpu.uuid, keep=tuple(sorted(keep)))
    return _repartition(present, desired, profiles)


def _has_exactly(present: _PresentInstances, profiles: Iterable[MigProfile]) -> bool:
    ids = Counter(profile.id for profile in profiles)
    return not present.unusable and Counter(key.profile_id for key in present.whole) == ids


def _repartition(
    present: _PresentInstances, desired: DesiredLayout, profiles: list[MigProfile]
) -> LayoutChange | LayoutError:
    """What is there of it can stay, unless the rest finds no place then."""
    missing, in_the_way = _without(profiles, present.unmanaged - present.unusable)
    in_the_way |= present.unmanaged & present.unusable
    if in_the_way:
        return _in_the_way(present, desired, in_the_way)
    for may_stay in (present.managed - present.unusable, frozenset[PartitionKey]()):
        to_create, not_requested = _without(missing, may_stay)
        stays = may_stay - not_requested
        create = place_partitions(present.mig, to_create, present.unmanaged | stays)
        if create is not None:
            return LayoutChange(
                present.gpu.uuid,
                tuple(sorted(present.managed - stays)),
                None if present.mig.on else True,
                create,
                tuple(sorted(stays)),
            )
    return _in_the_way(present, desired, present.unmanaged)


def _without(
    profiles: list[MigProfile], keys: Iterable[PartitionKey]
) -> tuple[list[MigProfile], set[PartitionKey]]:
    """What of *profiles* is missing besides *keys*, and which of the keys are none of them."""
    missing = list(profiles)
    others: set[PartitionKey] = set()
    for key in sorted(keys):
        profile = next((profile for profile in missing if profile.id == key.profile_id), None)
        if profile is None:
            others.add(key)
        else:
            missing.remove(profile)
    return missing, others


def _in_the_way(
    present: _PresentInstances, desired: DesiredLayout, keys: Iterable[PartitionKey]
) -> LayoutError:
    return LayoutError(
        f"{_described(present.gpu)} has instances that this driver did not make and that are in "
        f"the way of layout {desired.layout!r}: {present.names(keys)}; {_REMOVE}"
    )


def _unknown_profiles(
    present: _PresentInstances, desired: DesiredLayout, names: Iterable[str]
) -> str:
    known = ", ".join(profile.name for profile in present.mig.profiles) or "none"
    return (
        f"{_described(present.gpu)} has no profile {', '.join(names)}, which layout "
        f"{desired.layout!r} has; it has: {known}"
    )


def _does_not_fit(present: _PresentInstances, desired: DesiredLayout, problem: str) -> str:
    return (
        f"layout {desired.layout!r} does not fit on {_described(present.gpu)}: "
        f"{format_counts(desired.counts)}: "
        f"{problem or 'there is no place for all of them at once'}"
    )


def _guest_problem(
    gpu: Gpu, fixed: GuestRestriction, desired: DesiredLayout, change: LayoutChange
) -> str:
    """Why nobody can do that in this virtual machine."""
    if fixed is GuestRestriction.NOTHING or change.is_nothing:
        return ""
    if fixed is GuestRestriction.MODE and change.switch is None:
        return ""
    problem = guest_mode_problem(fixed, gpu.pci_bus_id, desired.on)
    return f"{_described(gpu)} cannot be made what layout {desired.layout!r} says: {problem}"


def _described(gpu: Gpu) -> str:
    return f"{gpu.name} ({gpu.product_name})"


_NO_ID = -1


def preview_layout(
    gpu: Gpu, desired: DesiredLayout, state: MigState, claimed: CreatedPartitions, waits_for: str
) -> tuple[Gpu, LayoutOutcome | None]:
    """*gpu* as it looks when it looks as *desired*, and no outcome; or *gpu* as it is, and how far
    its layout is.

    *waits_for*: what has to end before it can be changed. What *state* says of a layout that is not
    applied counts: only an attempt can tell whether a board can be switched.
    """
    last = state.outcomes.get(gpu.uuid)
    if last is not None and last.layout == desired.layout and last.state is not LayoutState.SUCCESS:
        return gpu, last
    managed = partition_keys(still_present(gpu, state.instances.get(gpu.uuid, ())))
    claimed_keys = {key for uuid, key in claimed if uuid == gpu.uuid}
    change = plan_layout_change(gpu, desired, managed, claimed_keys)
    if isinstance(change, LayoutError):
        if waits_for and not change.always:
            reason = f"{waits_for}; then: {change.reason}"
            return gpu, LayoutOutcome(desired.layout, LayoutState.PENDING, reason)
        return gpu, LayoutOutcome(desired.layout, LayoutState.FAILED, change.reason)
    if change.is_nothing:
        return gpu, LayoutOutcome(desired.layout, LayoutState.SUCCESS)
    if waits_for or gpu.mig is None:
        return gpu, LayoutOutcome(desired.layout, LayoutState.PENDING, waits_for)
    return replace(gpu, mig=_changed(gpu.mig, change)), None


def _changed(mig: MigInfo, change: LayoutChange) -> MigInfo:
    instances = [instance for instance in mig.instances if instance.key not in change.remove]
    # Nobody knows the ids and UUIDs of new ones before they are there.
    instances += [MigInstance(key, _NO_ID, _NO_ID, GpuUuid("")) for key in change.create]
    unusable = (instance for instance in mig.unusable if instance.key not in change.remove)
    return replace(
        mig,
        on=mig.on if change.switch is None else change.switch,
        pending=mig.pending if change.switch is None else change.switch,
        instances=tuple(sorted(instances, key=lambda instance: instance.key)),
        unusable=tuple(unusable),
    )
