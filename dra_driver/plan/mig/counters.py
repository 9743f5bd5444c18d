"""Counters that let no two partitions of one GPU overlap, nor the whole of it, with few of them.

On every board so far the placements nest. So a block of memory units gets a counter, and what lies
in it takes as many of it as it has units; units are not counted one by one. Which blocks: those
that contain smaller placements or are those of several devices. What takes the whole board takes
from a counter of its own, or empties the largest blocks, whichever makes fewer numbers: each of
them costs the scheduler something.

What a board has besides memory gets a counter only where partitions could take more than there is:
a board has one optical flow accelerator, say, and each of the seven partitions that could have it
leaves room for the other six. Most boards need no such counter for their plain profiles.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dra_driver.model.gpus import MigInfo, MigProfile, Partition, PartitionKey, Placement

CounterAmounts = tuple[tuple[str, int], ...]  # (counter, how much), by counter


@dataclass(frozen=True, slots=True)
class PartitionCounters:
    """How much there is of each counter, and how much each placement takes."""

    there: CounterAmounts
    by_placement: tuple[tuple[Placement, CounterAmounts], ...]

    def of(self, placement: Placement) -> CounterAmounts:
        """What a device takes that has this placement."""
        return dict(self.by_placement).get(placement, ())


def partition_counters(placements: Iterable[Placement], board: Placement) -> PartitionCounters:
    """The counters for devices with these *placements*, one each: the whole GPU has all of
    *board*."""
    devices = Counter(placements)
    if not _nest(sorted(devices)):
        return _by_unit(devices, board)
    largest = [
        placement for placement in _inside(devices, board) if _is_largest(placement, devices, board)
    ]
    of_board = _tree(devices, board)
    if not largest or not devices[board]:
        return of_board
    return min(_without_board(devices, board, largest), of_board, key=lambda b: _cost(b, devices))


def _nest(placements: Sequence[Placement]) -> bool:
    return all(
        placement.contains(other) or other.contains(placement) or not placement.overlaps(other)
        for number, placement in enumerate(placements)
        for other in placements[number + 1 :]
    )


def _inside(devices: Iterable[Placement], block: Placement) -> list[Placement]:
    return sorted(device for device in devices if device != block and block.contains(device))


def _is_largest(placement: Placement, devices: Iterable[Placement], board: Placement) -> bool:
    """Whether nothing but the board is around it."""
    return not any(
        placement in _inside((placement,), device)
        for device in devices
        if device not in (placement, board)
    )


def _tree(devices: Counter[Placement], board: Placement) -> PartitionCounters:
    """With a counter for the board where a device takes all of it."""
    counted = [
        device for device in sorted(devices) if devices[device] > 1 or _inside(devices, device)
    ]
    takes = {
        device: tuple((_name(block), device.size) for block in counted if block.contains(device))
        for device in devices
    }
    return _as_counters({_name(block): block.size for block in counted}, takes)


def _without_board(
    devices: Counter[Placement], board: Placement, largest: Sequence[Placement]
) -> PartitionCounters:
    """What takes the whole board empties its *largest* blocks."""
    smaller = Counter(
        {placement: number for placement, number in devices.items() if placement != board}
    )
    counted = [
        placement
        for placement in sorted(smaller)
        if placement in largest or smaller[placement] > 1 or _inside(smaller, placement)
    ]
    takes = {
        placement: tuple(
            (_name(block), placement.size) for block in counted if block.contains(placement)
        )
        for placement in smaller
    }
    takes[board] = tuple((_name(block), block.size) for block in largest)
    return _as_counters({_name(block): block.size for block in counted}, takes)


def _by_unit(devices: Counter[Placement], board: Placement) -> PartitionCounters:
    """A counter for each memory unit that several devices have."""
    counted = [
        unit
        for unit in range(board.start, board.end)
        if sum(number for placement, number in devices.items() if _has(placement, unit)) > 1
    ]
    takes = {
        device: tuple((_unit_name(unit), 1) for unit in counted if _has(device, unit))
        for device in devices
    }
    return _as_counters({_unit_name(unit): 1 for unit in counted}, takes)


def _has(placement: Placement, unit: int) -> bool:
    return placement.start <= unit < placement.end


def _as_counters(
    there: dict[str, int], takes: dict[Placement, CounterAmounts]
) -> PartitionCounters:
    return PartitionCounters(
        tuple(sorted(there.items())),
        tuple((take, tuple(sorted(takes[take]))) for take in sorted(takes)),
    )


def _cost(counters: PartitionCounters, devices: Counter[Placement]) -> tuple[int, int]:
    """How many numbers are published in devices, and how many counters there are."""
    published = sum(
        devices[placement] * len(amounts) for placement, amounts in counters.by_placement
    )
    return published, len(counters.there)


def _name(block: Placement) -> str:
    return f"block-{block.start}-{block.size}"


def _unit_name(unit: int) -> str:
    return f"memory-slice-{unit}"


_KINDS: tuple[tuple[str, Callable[[MigProfile], int]], ...] = (
    ("multiprocessors", lambda profile: profile.engines.multiprocessors),
    ("copy-engines", lambda profile: profile.engines.copy),
    ("decoders", lambda profile: profile.engines.decoders),
    ("encoders", lambda profile: profile.engines.encoders),
    ("ofa-engines", lambda profile: profile.engines.ofa),
    ("jpeg-engines", lambda profile: profile.engines.jpeg),
)


@dataclass(frozen=True, slots=True)
class EngineSupply:
    """Something that partitions take of, beside their memory."""

    name: str
    left: int
    by_profile: tuple[tuple[int, int], ...]  # (id of the profile, how much one of it takes)

    def of(self, profile: MigProfile) -> int:
        return dict(self.by_profile).get(profile.id, 0)


def engine_supplies(mig: MigInfo, existing: Collection[PartitionKey]) -> tuple[EngineSupply, ...]:
    """What is left of each engine, and how many instances of each profile may be added.

    *existing*: what exists and is nobody's to remove: it has its engines, whoever uses it. How much
    the board has is what the partition has that is all of it; what that does not tell is not known.
    """
    return (*_engines(mig, existing), *_numbers(mig, existing))


def can_be_added(partition: Partition, supplies: Collection[EngineSupply]) -> bool:
    """Whether enough is left for it, if nothing else is added."""
    return all(supply.of(partition.profile) <= supply.left for supply in supplies)


def scarce_engines(
    mig: MigInfo, partitions: Sequence[Partition], supplies: Collection[EngineSupply]
) -> tuple[EngineSupply, ...]:
    """Those of which *partitions* that fit beside each other could take more than is left.

    What there is least of comes first: it often keeps the partitions from taking too much of
    something else, which then needs no counter.
    """
    smaller = [partition for partition in partitions if partition.placement != whole_board(mig)]
    kept: list[EngineSupply] = []
    for supply in sorted(supplies, key=lambda supply: supply.left):
        if _most(smaller, supply, kept, mig.units) > supply.left:
            kept.append(supply)
    return tuple(kept)


def engine_amounts(
    partition: Partition, supplies: Collection[EngineSupply], board: Placement
) -> CounterAmounts:
    """What *partition* takes of *supplies*; one that is all of the *board* is alone anyway."""
    if partition.placement == board:
        return ()
    return tuple(
        (supply.name, amount) for supply in supplies if (amount := supply.of(partition.profile))
    )


def whole_board(mig: MigInfo) -> Placement:
    """All of it."""
    return Placement(0, mig.units)


def _engines(mig: MigInfo, existing: Collection[PartitionKey]) -> Iterator[EngineSupply]:
    whole = [profile for profile in mig.profiles if whole_board(mig) in profile.placements]
    existing_profiles = [profile for key in existing if (profile := mig.profile(key.profile_id))]
    for name, count in _KINDS:
        total = max(map(count, whole), default=0)
        if any(count(profile) > total for profile in mig.profiles):
            continue  # the driver does not say how much there is
        amounts = tuple((profile.id, count(profile)) for profile in mig.profiles)
        yield EngineSupply(name, max(0, total - sum(map(count, existing_profiles))), amounts)


def _numbers(mig: MigInfo, existing: Collection[PartitionKey]) -> Iterator[EngineSupply]:
    for profile in mig.profiles:
        number = sum(key.profile_id == profile.id for key in existing)
        left = max(0, profile.most - number)
        yield EngineSupply(f"profile-{profile.id}", left, ((profile.id, 1),))


def _most(
    partitions: Sequence[Partition], supply: EngineSupply, kept: Sequence[EngineSupply], units: int
) -> int:
    """The most that partitions take of *supply* which do not overlap, and for which enough is left
    of what is *kept*.

    From the first memory unit on: for every way to use up what is kept the most that was taken.
    """
    nothing = tuple(0 for _ in kept)
    best: list[dict[tuple[int, ...], int]] = [{nothing: 0}]
    for unit in range(1, units + 1):
        here = dict(best[-1])
        for partition in partitions:
            if partition.placement.end == unit:
                _add(here, best[partition.placement.start], partition.profile, (supply, *kept))
        best.append(here)
    return max(best[-1].values())


def _add(
    here: dict[tuple[int, ...], int],
    before: Mapping[tuple[int, ...], int],
    profile: MigProfile,
    supplies: tuple[EngineSupply, ...],
) -> None:
    """To what is possible *here*: what was *before*, and one more of *profile*."""
    first, *kept = supplies
    for used, taken in before.items():
        total = tuple(
            number + supply.of(profile) for number, supply in zip(used, kept, strict=True)
        )
        if all(number <= supply.left for number, supply in zip(total, kept, strict=True)):
            here[total] = max(here.get(total, 0), taken + first.of(profile))
