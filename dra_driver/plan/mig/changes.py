"""What has to be done to a GPU so that it looks like its layout; or why that cannot be."""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from dra_driver.model.devices import Gpu
from dra_driver.model.layouts import Change, Wanted
from dra_driver.model.mig import Fixed, Mig, MigProfile, PartitionKey
from dra_driver.model.resets import outside
from dra_driver.plan.mig.layouts import shown
from dra_driver.plan.mig.placing import place, profiles_of, too_much

_REMOVE = "remove them (nvidia-smi mig -dci, then -dgi), or choose another layout"


@dataclass(frozen=True, slots=True)
class Misfit:
    """The GPU cannot look like that."""

    reason: str
    always: bool = False  # whatever is on the GPU


def decide(
    gpu: Gpu,
    wanted: Wanted,
    made: Collection[PartitionKey],
    claimed: Collection[PartitionKey] = (),
) -> Change | Misfit:
    """What makes *gpu* look as *wanted*: all of it, or nothing.

    *made*: what layouts have made of it, or taken over; the rest is foreign and stays. *claimed*:
    what is cut for claims, which goes with them. A GPU that looks as wanted already, and of which
    layouts have made nothing, is taken over.
    """
    if gpu.mig is None:
        why = f": {gpu.mig_problem}" if gpu.mig_problem else ""
        return Misfit(f"{_named(gpu)} cannot be cut into partitions{why}", always=True)
    there = _There(gpu, gpu.mig, frozenset(made), frozenset(claimed))
    found = _on(there, wanted) if wanted.on else _off(there, wanted)
    why = "" if isinstance(found, Misfit) else _fixed(gpu, gpu.mig.fixed, wanted, found)
    return Misfit(why, always=True) if why else found


class _There:
    """What is on the GPU, without what claims have."""

    def __init__(
        self,
        gpu: Gpu,
        mig: Mig,
        made: frozenset[PartitionKey],
        claimed: frozenset[PartitionKey],
    ) -> None:
        self.gpu = gpu
        self.mig = mig
        self.odd = {one.key for one in mig.odd} - claimed
        self.whole = {one.key for one in mig.instances} - claimed
        self.all = self.whole | self.odd
        # Ours are at most empty: who made compute instances in one may be using them.
        taken_over = {one.key for one in mig.odd if one.cis}
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


def _off(there: _There, wanted: Wanted) -> Change | Misfit:
    if there.foreign:
        return _in_the_way(there, wanted, there.foreign)
    switch = False if there.mig.on else None
    return Change(there.gpu.uuid, tuple(sorted(there.made)), switch)


def _on(there: _There, wanted: Wanted) -> Change | Misfit:
    mig = there.mig
    profiles, unknown = profiles_of(mig, wanted.counts)
    if unknown:
        return Misfit(_unknown(there, wanted, unknown), always=True)
    why = too_much(mig, profiles)
    if why or place(mig, profiles) is None:
        return Misfit(_does_not_fit(there, wanted, why), always=True)
    if mig.on and _is_that(there, profiles):
        keep = there.made if there.known else there.all
        return Change(there.gpu.uuid, keep=tuple(sorted(keep)))
    return _cut(there, wanted, profiles)


def _is_that(there: _There, profiles: Iterable[MigProfile]) -> bool:
    ids = Counter(profile.id for profile in profiles)
    return not there.odd and Counter(key.profile_id for key in there.whole) == ids


def _cut(there: _There, wanted: Wanted, profiles: list[MigProfile]) -> Change | Misfit:
    """What is there of it can stay, unless the rest finds no place then."""
    left, strange = _without(profiles, there.foreign - there.odd)
    strange |= there.foreign & there.odd
    if strange:
        return _in_the_way(there, wanted, strange)
    for staying in (there.made - there.odd, frozenset[PartitionKey]()):
        rest, others = _without(left, staying)
        stays = staying - others
        cut = place(there.mig, rest, there.foreign | stays)
        if cut is not None:
            return Change(
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


def _in_the_way(there: _There, wanted: Wanted, keys: Iterable[PartitionKey]) -> Misfit:
    return Misfit(
        f"{_named(there.gpu)} has instances that this driver did not make and that are in the way "
        f"of layout {wanted.layout!r}: {there.names(keys)}; {_REMOVE}"
    )


def _unknown(there: _There, wanted: Wanted, names: Iterable[str]) -> str:
    has = ", ".join(profile.name for profile in there.mig.profiles) or "none"
    return (
        f"{_named(there.gpu)} has no profile {', '.join(names)}, which layout {wanted.layout!r} "
        f"has; it has: {has}"
    )


def _does_not_fit(there: _There, wanted: Wanted, why: str) -> str:
    return (
        f"layout {wanted.layout!r} does not fit on {_named(there.gpu)}: {shown(wanted.counts)}: "
        f"{why or 'there is no place for all of them at once'}"
    )


def _fixed(gpu: Gpu, fixed: Fixed, wanted: Wanted, change: Change) -> str:
    """Why nobody can do that in this virtual machine."""
    if fixed is Fixed.NOTHING or change.is_nothing:
        return ""
    if fixed is Fixed.MODE and change.switch is None:
        return ""
    why = outside(fixed, gpu.pci_bus_id, wanted.on)
    return f"{_named(gpu)} cannot be made what layout {wanted.layout!r} says: {why}"


def _named(gpu: Gpu) -> str:
    return f"{gpu.name} ({gpu.product_name})"
