"""In which order partitions are tried: the scheduler takes the first that fits.

What is to last is room for the largest partitions that are not the whole board. They have few
places; call one a block. So small ones first go where no block is, then into the block that holds
the most of them, front to back, before they touch the next; and the largest ones take the block
first that the small ones fill last. A kind of few compute slices for its memory goes first where
no kind of more slices fits. A claim that any partition can serve gets a small one.

With first fit this leaves as much room as the best of all orders, to within a hundredth, on every
board (``tests/plan/test_mig_order.py``).
"""

from collections.abc import Collection, Iterable

from dra_driver.model.mig import Partition, Placement


def packed(partitions: Iterable[Partition]) -> list[Partition]:
    """Those first that leave the most room for larger ones."""
    found = list(partitions)
    places = {one.placement for one in found}
    size = _block_size(places)
    room = {
        block: sum(block.contains(one) for one in places if one.size < size)
        for block in sorted(places)
        if block.size == size
    }
    most: dict[Placement, int] = {}  # compute slices that a partition in this place can have
    for one in found:
        most[one.placement] = max(most.get(one.placement, 0), one.profile.slices)
    return sorted(
        found,
        key=lambda one: (
            one.placement.size,
            one.profile.slices,
            one.profile.id,
            most[one.placement] > one.profile.slices,
            _place(one.placement, room),
        ),
    )


def _block_size(places: Collection[Placement]) -> int:
    """Of the largest placements that do not have all of the board."""
    end = max((one.end for one in places), default=0)
    return max((one.size for one in places if one.size < end), default=0)


def _place(placement: Placement, room: dict[Placement, int]) -> tuple[int, int, int]:
    """*room*: how many smaller places each block has."""
    around = next((one for one in room if one != placement and one.contains(placement)), None)
    if around is not None:
        return 1, -room[around], placement.start
    return 0, room.get(placement, 0), -placement.start
