"""Counters that let no two partitions of one GPU overlap, nor the whole of it, with few of them.

On every board so far the placements nest. So a block of memory units gets a counter, and what lies
in it takes as many of it as it has units; units are not counted one by one. Which blocks: those
that contain smaller placements or are those of several devices. What takes the whole board takes
from a counter of its own, or empties the largest blocks, whichever makes fewer numbers: each of
them costs the scheduler something.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dra_driver.model.mig import Placement

Amounts = tuple[tuple[str, int], ...]  # (counter, how much), by counter


@dataclass(frozen=True, slots=True)
class Blocks:
    """How much there is of each counter, and how much each placement takes."""

    there: Amounts
    by_placement: tuple[tuple[Placement, Amounts], ...]

    def of(self, placement: Placement) -> Amounts:
        """What a device takes that has this placement."""
        return dict(self.by_placement).get(placement, ())


def blocks(placements: Iterable[Placement], board: Placement) -> Blocks:
    """The counters for devices with these *placements*, one each: the whole GPU has all of
    *board*."""
    devices = Counter(placements)
    if not _nest(sorted(devices)):
        return _by_unit(devices, board)
    largest = [one for one in _inside(devices, board) if _is_largest(one, devices, board)]
    of_board = _tree(devices, board)
    if not largest or not devices[board]:
        return of_board
    return min(_without_board(devices, board, largest), of_board, key=lambda b: _cost(b, devices))


def _nest(placements: Sequence[Placement]) -> bool:
    return all(
        one.contains(other) or other.contains(one) or not one.overlaps(other)
        for number, one in enumerate(placements)
        for other in placements[number + 1 :]
    )


def _inside(devices: Iterable[Placement], block: Placement) -> list[Placement]:
    return sorted(one for one in devices if one != block and block.contains(one))


def _is_largest(placement: Placement, devices: Iterable[Placement], board: Placement) -> bool:
    """Whether nothing but the board is around it."""
    return not any(
        placement in _inside((placement,), one) for one in devices if one not in (placement, board)
    )


def _tree(devices: Counter[Placement], board: Placement) -> Blocks:
    """With a counter for the board where a device takes all of it."""
    counted = [one for one in sorted(devices) if devices[one] > 1 or _inside(devices, one)]
    takes = {
        one: tuple((_name(block), one.size) for block in counted if block.contains(one))
        for one in devices
    }
    return _blocks({_name(block): block.size for block in counted}, takes)


def _without_board(
    devices: Counter[Placement], board: Placement, largest: Sequence[Placement]
) -> Blocks:
    """What takes the whole board empties its *largest* blocks."""
    smaller = Counter({one: number for one, number in devices.items() if one != board})
    counted = [
        one
        for one in sorted(smaller)
        if one in largest or smaller[one] > 1 or _inside(smaller, one)
    ]
    takes = {
        one: tuple((_name(block), one.size) for block in counted if block.contains(one))
        for one in smaller
    }
    takes[board] = tuple((_name(block), block.size) for block in largest)
    return _blocks({_name(block): block.size for block in counted}, takes)


def _by_unit(devices: Counter[Placement], board: Placement) -> Blocks:
    """A counter for each memory unit that several devices have."""
    counted = [
        unit
        for unit in range(board.start, board.end)
        if sum(number for one, number in devices.items() if _has(one, unit)) > 1
    ]
    takes = {
        one: tuple((_unit_name(unit), 1) for unit in counted if _has(one, unit)) for one in devices
    }
    return _blocks({_unit_name(unit): 1 for unit in counted}, takes)


def _has(placement: Placement, unit: int) -> bool:
    return placement.start <= unit < placement.end


def _blocks(there: dict[str, int], takes: dict[Placement, Amounts]) -> Blocks:
    return Blocks(
        tuple(sorted(there.items())),
        tuple((one, tuple(sorted(takes[one]))) for one in sorted(takes)),
    )


def _cost(found: Blocks, devices: Counter[Placement]) -> tuple[int, int]:
    """How many numbers are published in devices, and how many counters there are."""
    numbers = sum(devices[one] * len(amounts) for one, amounts in found.by_placement)
    return numbers, len(found.there)


def _name(block: Placement) -> str:
    return f"block-{block.start}-{block.size}"


def _unit_name(unit: int) -> str:
    return f"memory-slice-{unit}"
