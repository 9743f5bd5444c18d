"""How a GPU gets its layout: what to remove, and what to create where; or why it cannot get it."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from dra_driver.base.frozen import frozen
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
    none. The largest come first, since they have the fewest places."""
    used_units = _used_units(fixed)
    if sum(profile.size for profile in requested) + used_units.bit_count() > mig.units:
        return None
    largest_first = sorted(
        requested, key=lambda profile: (-profile.size, len(profile.placements), profile.number)
    )
    keys = _search(largest_first, used_units, ())
    return None if keys is None else tuple(sorted(keys))


def capacity_problem(mig: MigInfo, requested: Sequence[MigProfile]) -> str:
    """What the board has too little of, wherever *requested* are placed; empty: it has enough."""
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
    """Tries all places; equal partitions are placed in order, so that no choice is tried twice."""
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


@frozen
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

    *managed*: what layouts created on it, or took over; other instances are unmanaged and stay.
    *claimed*: what was created for claims, and is removed with them. A GPU that looks as desired
    already, and on which layouts created nothing, is taken over.
    """
    if gpu.mig is None:
        reason = f": {gpu.mig_problem}" if gpu.mig_problem else ""
        return LayoutError(f"{_described(gpu)} cannot be partitioned{reason}", always=True)
    planner = _LayoutPlanner(gpu, gpu.mig, desired, frozenset(managed), frozenset(claimed))
    change = planner.turn_on() if desired.on else planner.turn_off()
    if isinstance(change, LayoutError):
        return change
    problem = _guest_problem(gpu, gpu.mig.fixed, desired, change)
    return LayoutError(problem, always=True) if problem else change


class _LayoutPlanner:
    """The instances on the GPU, without those of claims, and how they become a layout."""

    def __init__(
        self,
        gpu: Gpu,
        mig: MigInfo,
        desired: DesiredLayout,
        managed: frozenset[PartitionKey],
        claimed: frozenset[PartitionKey],
    ) -> None:
        self._gpu = gpu
        self._mig = mig
        self._desired = desired
        self._unusable = {instance.key for instance in mig.unusable} - claimed
        self._whole = {instance.key for instance in mig.instances} - claimed
        present = self._whole | self._unusable
        # Whoever created compute instances in a managed GPU instance may be using them.
        divided_by_others = {instance.key for instance in mig.unusable if instance.cis}
        self._managed = (present & managed) - divided_by_others
        self._unmanaged = present - self._managed
        self._had_layout = bool(managed)

    def turn_off(self) -> LayoutChange | LayoutError:
        """Without partitions and MIG mode."""
        if self._unmanaged:
            return self._in_the_way(self._unmanaged)
        switch = False if self._mig.on else None
        return LayoutChange(self._gpu.uuid, tuple(sorted(self._managed)), switch)

    def turn_on(self) -> LayoutChange | LayoutError:
        """With exactly the partitions of the layout."""
        desired, mig = self._desired, self._mig
        profiles, unknown = requested_profiles(mig, desired.counts)
        if unknown:
            known = ", ".join(profile.name for profile in mig.profiles) or "none"
            return LayoutError(
                f"{_described(self._gpu)} has no profile {', '.join(unknown)}, which layout "
                f"{desired.layout!r} has; it has: {known}",
                always=True,
            )
        problem = capacity_problem(mig, profiles)
        if problem or place_partitions(mig, profiles) is None:
            return LayoutError(
                f"layout {desired.layout!r} does not fit on {_described(self._gpu)}: "
                f"{format_counts(desired.counts)}: "
                f"{problem or 'there is no place for all of them at once'}",
                always=True,
            )
        if mig.on and self._has_exactly(profiles):
            keep = self._managed if self._had_layout else self._whole
            return LayoutChange(self._gpu.uuid, keep=tuple(sorted(keep)))
        return self._repartition(profiles)

    def _has_exactly(self, profiles: Iterable[MigProfile]) -> bool:
        ids = Counter(profile.id for profile in profiles)
        return not self._unusable and Counter(key.profile_id for key in self._whole) == ids

    def _repartition(self, profiles: list[MigProfile]) -> LayoutChange | LayoutError:
        """Instances of the layout stay, unless there is no place for the others then."""
        missing, in_the_way = _without(profiles, self._unmanaged - self._unusable)
        in_the_way |= self._unmanaged & self._unusable
        if in_the_way:
            return self._in_the_way(in_the_way)
        for may_stay in (self._managed - self._unusable, frozenset[PartitionKey]()):
            to_create, not_requested = _without(missing, may_stay)
            stays = may_stay - not_requested
            create = place_partitions(self._mig, to_create, self._unmanaged | stays)
            if create is not None:
                return LayoutChange(
                    self._gpu.uuid,
                    tuple(sorted(self._managed - stays)),
                    None if self._mig.on else True,
                    create,
                    tuple(sorted(stays)),
                )
        return self._in_the_way(self._unmanaged)

    def _in_the_way(self, keys: Iterable[PartitionKey]) -> LayoutError:
        names = {profile.id: profile.name for profile in self._mig.profiles}
        instances = ", ".join(
            f"{names.get(key.profile_id, f'profile {key.profile_id}')} at {key.start}"
            for key in sorted(keys)
        )
        return LayoutError(
            f"{_described(self._gpu)} has instances that this driver did not make and that are in "
            f"the way of layout {self._desired.layout!r}: {instances}; remove them (nvidia-smi mig "
            "-dci, then -dgi), or choose another layout"
        )


def _without(
    profiles: list[MigProfile], keys: Iterable[PartitionKey]
) -> tuple[list[MigProfile], set[PartitionKey]]:
    """The *profiles* that are missing beside *keys*, and the keys that are of none of them."""
    missing = list(profiles)
    others: set[PartitionKey] = set()
    for key in sorted(keys):
        profile = next((profile for profile in missing if profile.id == key.profile_id), None)
        if profile is None:
            others.add(key)
        else:
            missing.remove(profile)
    return missing, others


def _guest_problem(
    gpu: Gpu, fixed: GuestRestriction, desired: DesiredLayout, change: LayoutChange
) -> str:
    """Why the *change* cannot be made in this virtual machine."""
    if fixed is GuestRestriction.NOTHING or change.is_nothing:
        return ""
    if fixed is GuestRestriction.MODE and change.switch is None:
        return ""
    problem = guest_mode_problem(fixed, gpu.pci_bus_id, desired.on)
    return f"{_described(gpu)} cannot be made what layout {desired.layout!r} says: {problem}"


def _described(gpu: Gpu) -> str:
    return f"{gpu.name} ({gpu.product_name})"


def preview_layout(
    gpu: Gpu, desired: DesiredLayout, state: MigState, claimed: CreatedPartitions, waits_for: str
) -> tuple[Gpu, LayoutOutcome | None]:
    """*gpu* as *desired*, and no outcome; or *gpu* as it is, and the outcome of its layout.

    *waits_for*: what has to end before the GPU can be changed. The outcome in *state* counts while
    the layout is not applied: only an attempt can tell whether a board can be switched.
    """
    layout, last = desired.layout, state.outcomes.get(gpu.uuid)
    if last is not None and last.layout == layout and last.state is not LayoutState.SUCCESS:
        return gpu, last
    managed = partition_keys(still_present(gpu, state.instances.get(gpu.uuid, ())))
    claimed_keys = {key for uuid, key in claimed if uuid == gpu.uuid}
    change = plan_layout_change(gpu, desired, managed, claimed_keys)
    if isinstance(change, LayoutError):
        if waits_for and not change.always:
            reason = f"{waits_for}; then: {change.reason}"
            return gpu, LayoutOutcome(layout, LayoutState.PENDING, reason)
        return gpu, LayoutOutcome(layout, LayoutState.FAILED, change.reason)
    if change.is_nothing:
        return gpu, LayoutOutcome(layout, LayoutState.SUCCESS)
    if waits_for or gpu.mig is None:
        return gpu, LayoutOutcome(layout, LayoutState.PENDING, waits_for)
    return replace(gpu, mig=_changed(gpu.mig, change)), None


def _changed(mig: MigInfo, change: LayoutChange) -> MigInfo:
    instances = [instance for instance in mig.instances if instance.key not in change.remove]
    # New instances have no ids and UUIDs yet.
    instances += [MigInstance(key, -1, -1, GpuUuid("")) for key in change.create]
    unusable = (instance for instance in mig.unusable if instance.key not in change.remove)
    if change.switch is not None:
        mig = replace(mig, on=change.switch, pending=change.switch)
    return replace(
        mig,
        instances=tuple(sorted(instances, key=lambda instance: instance.key)),
        unusable=tuple(unusable),
    )
