"""Counters that keep the partitions of a GPU, and the GPU as a whole, from overlapping.

On every board so far the placements nest. So memory units are not counted one by one: a block of
units gets a counter where it contains smaller placements or is the placement of several devices,
and each device in the block takes as many as it has units. A device that is the whole board takes
from a counter of its own, or empties the largest blocks, whichever publishes fewer numbers, since
each number costs the scheduler something.

An engine gets a counter only where partitions could take more than there are: a board has one
optical flow accelerator, say, and each of the seven partitions that could have it leaves room for
the other six. Most boards need no such counter for their plain profiles.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from operator import add, le

from dra_driver.base.frozen import frozen
from dra_driver.model.gpus import MigInfo, MigProfile, Partition, PartitionKey, Placement

CounterAmounts = tuple[tuple[str, int], ...]  # (counter, how much), by counter


@frozen
class PartitionCounters:
    """How much there is of each counter, and how much each placement takes."""

    amounts: CounterAmounts
    by_placement: tuple[tuple[Placement, CounterAmounts], ...]

    def of(self, placement: Placement) -> CounterAmounts:
        """What a device with this placement takes."""
        return dict(self.by_placement).get(placement, ())


def partition_counters(placements: Iterable[Placement], board: Placement) -> PartitionCounters:
    """The counters for devices with these *placements*, one each: the whole GPU has all of
    *board*."""
    devices = Counter(placements)
    if not _nest(sorted(devices)):
        return _by_unit(devices, board)
    with_board = _as_counters(*_by_block(devices))
    smaller = _inside(devices, board)
    largest = [place for place in smaller if not any(_inside((place,), other) for other in smaller)]
    if not largest or not devices[board]:
        return with_board
    # What takes the whole board empties its largest blocks.
    beside_board = Counter({place: devices[place] for place in smaller})
    amounts, takes = _by_block(beside_board, largest)
    takes[board] = tuple((_name(block), block.size) for block in largest)
    without_board = _as_counters(amounts, takes)
    return min(without_board, with_board, key=lambda counters: _cost(counters, devices))


def _nest(placements: Sequence[Placement]) -> bool:
    return all(
        placement.contains(other) or other.contains(placement) or not placement.overlaps(other)
        for number, placement in enumerate(placements)
        for other in placements[number + 1 :]
    )


def _inside(devices: Iterable[Placement], block: Placement) -> list[Placement]:
    return sorted(device for device in devices if device != block and block.contains(device))


def _by_block(
    devices: Counter[Placement], always: Collection[Placement] = ()
) -> tuple[dict[str, int], dict[Placement, CounterAmounts]]:
    """The size of each block that is counted, and what each placement takes. *always*: blocks that
    are counted whatever is in them."""
    counted = [
        block
        for block in sorted(devices)
        if block in always or devices[block] > 1 or _inside(devices, block)
    ]
    takes = {
        device: tuple((_name(block), device.size) for block in counted if block.contains(device))
        for device in devices
    }
    return {_name(block): block.size for block in counted}, takes


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
    amounts: dict[str, int], takes: dict[Placement, CounterAmounts]
) -> PartitionCounters:
    return PartitionCounters(
        tuple(sorted(amounts.items())),
        tuple((take, tuple(sorted(takes[take]))) for take in sorted(takes)),
    )


def _cost(counters: PartitionCounters, devices: Counter[Placement]) -> tuple[int, int]:
    """How many numbers are published in devices, and how many counters there are."""
    published = sum(
        devices[placement] * len(amounts) for placement, amounts in counters.by_placement
    )
    return published, len(counters.amounts)


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


@frozen
class EngineSupply:
    """An engine, or the instances of a profile: what partitions take beside memory."""

    name: str
    available: int
    by_profile: tuple[tuple[int, int], ...]  # (id of the profile, how much one of it takes)

    def of(self, profile: MigProfile) -> int:
        return dict(self.by_profile).get(profile.id, 0)


def engine_supplies(mig: MigInfo, existing: Collection[PartitionKey]) -> tuple[EngineSupply, ...]:
    """How much is available of each engine, and how many instances of each profile may be added.

    *existing*: instances that nobody removes have their engines, whether they are used or not. The
    board has as much of an engine as the partition that is all of it.
    """
    return (*_engines(mig, existing), *_numbers(mig, existing))


def can_be_added(partition: Partition, supplies: Collection[EngineSupply]) -> bool:
    """Whether enough is available for it, if nothing else is added."""
    return all(supply.of(partition.profile) <= supply.available for supply in supplies)


def scarce_engines(
    mig: MigInfo, partitions: Sequence[Partition], supplies: Collection[EngineSupply]
) -> tuple[EngineSupply, ...]:
    """Those of which *partitions* that fit beside each other could take more than is available.

    The smallest supply comes first: its counter often keeps the partitions from taking too much of
    another, which then needs no counter.
    """
    smaller = [partition for partition in partitions if partition.placement != whole_board(mig)]
    scarce: list[EngineSupply] = []
    for supply in sorted(supplies, key=lambda supply: supply.available):
        if _most(smaller, supply, scarce, mig.units) > supply.available:
            scarce.append(supply)
    return tuple(scarce)


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
        available = max(0, profile.most - number)
        yield EngineSupply(f"profile-{profile.id}", available, ((profile.id, 1),))


def _most(
    partitions: Sequence[Partition],
    supply: EngineSupply,
    scarce: Sequence[EngineSupply],
    units: int,
) -> int:
    """The most that partitions take of *supply* that do not overlap, and for which there is enough
    of *scarce*.

    It is computed memory unit by memory unit: for all amounts of *scarce* that may be used below
    the unit, the most that is taken of *supply*.
    """
    best: list[dict[tuple[int, ...], int]] = [{tuple(0 for _ in scarce): 0}]
    for unit in range(1, units + 1):
        most = dict(best[-1])
        for partition in partitions:
            if partition.placement.end == unit:
                profile = partition.profile
                for used, taken in best[partition.placement.start].items():
                    total = tuple(map(add, used, (other.of(profile) for other in scarce)))
                    if all(map(le, total, (other.available for other in scarce))):
                        most[total] = max(most.get(total, 0), taken + supply.of(profile))
        best.append(most)
    return max(best[-1].values())
