"""Where the partitions of a layout go on a GPU."""

from collections import Counter
from collections.abc import Iterable, Sequence

from dra_driver.model.layouts import Counts
from dra_driver.model.mig import Mig, MigProfile, Partition, PartitionKey
from dra_driver.plan.mig.engines import supplies


def profiles_of(mig: Mig, counts: Counts) -> tuple[list[MigProfile], tuple[str, ...]]:
    """The profiles that *counts* names, each as often as it says; and the names that the board does
    not know."""
    by_name = {profile.name: profile for profile in mig.profiles}
    known = [by_name[name] for name, count in counts if name in by_name for _ in range(count)]
    return known, tuple(name for name, _ in counts if name not in by_name)


def place(
    mig: Mig, wanted: Sequence[MigProfile], fixed: Iterable[PartitionKey] = ()
) -> tuple[PartitionKey, ...] | None:
    """A place for each of *wanted* where none overlaps another one or *fixed*; None: there is none.

    The largest first, since they have the fewest places.
    """
    taken = _taken(fixed)
    units = sum(profile.size for profile in wanted)
    if units + taken.bit_count() > mig.units:
        return None
    ordered = sorted(wanted, key=lambda one: (-one.size, len(one.placements), one.number))
    found = _search(ordered, taken, ())
    return None if found is None else tuple(sorted(found))


def too_much(mig: Mig, wanted: Sequence[MigProfile]) -> str:
    """What the board has too little of, wherever *wanted* are; empty: it has enough."""
    for profile, count in Counter(wanted).items():
        if count > profile.most:
            return f"there can be {profile.most} of {profile.name}"
    for supply in supplies(mig, ()):
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
        if placement.start > after and not taken & _taken([key]):
            done = _search(left[1:], taken | _taken([key]), (*found, key))
            if done is not None:
                return done
    return None


def _taken(keys: Iterable[PartitionKey]) -> int:
    """Memory units as bits."""
    return sum(((1 << key.size) - 1) << key.start for key in keys)
