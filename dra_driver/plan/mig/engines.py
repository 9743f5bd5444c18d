"""Counters for what a board has besides memory, where its partitions could take more of it.

A board has one optical flow accelerator, say, and each of the seven partitions that could have it
leaves room for the other six. Most boards need no such counter for their plain profiles.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dra_driver.model.mig import Mig, MigProfile, Partition, PartitionKey, Placement
from dra_driver.plan.mig.blocks import Amounts

_KINDS: tuple[tuple[str, Callable[[MigProfile], int]], ...] = (
    ("multiprocessors", lambda profile: profile.engines.multiprocessors),
    ("copy-engines", lambda profile: profile.engines.copy),
    ("decoders", lambda profile: profile.engines.decoders),
    ("encoders", lambda profile: profile.engines.encoders),
    ("ofa-engines", lambda profile: profile.engines.ofa),
    ("jpeg-engines", lambda profile: profile.engines.jpeg),
)


@dataclass(frozen=True, slots=True)
class Supply:
    """Something that partitions take of, beside their memory."""

    name: str
    left: int
    by_profile: tuple[tuple[int, int], ...]  # (id of the profile, how much one of it takes)

    def of(self, profile: MigProfile) -> int:
        return dict(self.by_profile).get(profile.id, 0)


def supplies(mig: Mig, there: Collection[PartitionKey]) -> tuple[Supply, ...]:
    """What is left of each engine, and how many instances of each profile may be added.

    *there*: what exists and is nobody's to remove: it has its engines, whoever uses it. How much
    the board has is what the partition has that is all of it; what that does not tell is not known.
    """
    return (*_engines(mig, there), *_numbers(mig, there))


def can_be_added(partition: Partition, found: Collection[Supply]) -> bool:
    """Whether enough is left for it, if nothing else is added."""
    return all(one.of(partition.profile) <= one.left for one in found)


def scarce(
    mig: Mig, partitions: Sequence[Partition], found: Collection[Supply]
) -> tuple[Supply, ...]:
    """Those of which *partitions* that fit beside each other could take more than is left.

    What there is least of comes first: it often keeps the partitions from taking too much of
    something else, which then needs no counter.
    """
    smaller = [one for one in partitions if one.placement != board_of(mig)]
    kept: list[Supply] = []
    for supply in sorted(found, key=lambda one: one.left):
        if _most(smaller, supply, kept, mig.units) > supply.left:
            kept.append(supply)
    return tuple(kept)


def takes(partition: Partition, found: Collection[Supply], board: Placement) -> Amounts:
    """What *partition* takes of *found*; one that is all of the *board* is alone anyway."""
    if partition.placement == board:
        return ()
    return tuple((one.name, number) for one in found if (number := one.of(partition.profile)))


def board_of(mig: Mig) -> Placement:
    """All of it."""
    return Placement(0, mig.units)


def _engines(mig: Mig, there: Collection[PartitionKey]) -> Iterator[Supply]:
    whole = [profile for profile in mig.profiles if board_of(mig) in profile.placements]
    used = [profile for key in there if (profile := mig.profile(key.profile_id))]
    for name, count in _KINDS:
        total = max(map(count, whole), default=0)
        if any(count(profile) > total for profile in mig.profiles):
            continue  # the driver does not say how much there is
        amounts = tuple((profile.id, count(profile)) for profile in mig.profiles)
        yield Supply(name, max(0, total - sum(map(count, used))), amounts)


def _numbers(mig: Mig, there: Collection[PartitionKey]) -> Iterator[Supply]:
    for profile in mig.profiles:
        number = sum(key.profile_id == profile.id for key in there)
        left = max(0, profile.most - number)
        yield Supply(f"profile-{profile.id}", left, ((profile.id, 1),))


def _most(
    partitions: Sequence[Partition], supply: Supply, kept: Sequence[Supply], units: int
) -> int:
    """The most that partitions take of *supply* which do not overlap, and for which enough is left
    of what is *kept*.

    From the first memory unit on: for every way to use up what is kept the most that was taken.
    """
    nothing = tuple(0 for _ in kept)
    best: list[dict[tuple[int, ...], int]] = [{nothing: 0}]
    for unit in range(1, units + 1):
        here = dict(best[-1])
        for one in partitions:
            if one.placement.end == unit:
                _add(here, best[one.placement.start], one.profile, (supply, *kept))
        best.append(here)
    return max(best[-1].values())


def _add(
    here: dict[tuple[int, ...], int],
    before: Mapping[tuple[int, ...], int],
    profile: MigProfile,
    supplies: tuple[Supply, ...],
) -> None:
    """To what is possible *here*: what was *before*, and one more of *profile*."""
    first, *kept = supplies
    for used, taken in before.items():
        now = tuple(number + one.of(profile) for number, one in zip(used, kept, strict=True))
        if all(number <= one.left for number, one in zip(now, kept, strict=True)):
            here[now] = max(here.get(now, 0), taken + first.of(profile))
