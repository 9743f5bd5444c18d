"""GPUs that can be cut, as text: a line of memory units for each, and whose those are.

For example::

    gpu-0  NVIDIA A100-SXM4-40GB  [AAAAAAA|bbb|.|.]  2 free of 8
      A  3g.20gb  team-a/training  MIG-…
      b  2g.10gb  MIG-…  not made by this driver
      .  room for 1 x 1g.5gb

Capital letters are claims. A unit is equally wide everywhere, so that boards can be compared.
"""

import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dra_driver.cli.mig_blocks import Block, blocks, holdings_of
from dra_driver.cli.mig_room import NO_ROOM, Room, room
from dra_driver.cli.pens import Pen, pen
from dra_driver.cli.terminal import Terminal
from dra_driver.model.devices import Gpu, GpuUuid
from dra_driver.model.holdings import Held
from dra_driver.model.layouts import Made
from dra_driver.model.offer import Offer

_WIDEST = 4  # characters of one unit
_GAP = "  "
_FIRM = "\N{NO-BREAK SPACE}"  # where no line ends
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class Board:
    """One GPU, what is taken of it, and what still fits."""

    gpu: Gpu
    blocks: tuple[Block, ...] = ()
    room: Room = NO_ROOM

    @property
    def units(self) -> int:
        return self.gpu.mig.units if self.gpu.mig else 0

    @property
    def free(self) -> int:
        """How many of its units are nobody's."""
        every = {unit for one in self.blocks for unit in range(one.placement.start, _end(one))}
        return self.units - len(every & set(range(self.units)))


def boards(
    offered: Offer,
    gpus: Iterable[Gpu],
    held: Held,
    laid: Mapping[GpuUuid, Collection[Made]],
) -> tuple[Board, ...]:
    """Those of *gpus* on which there is something to see: MIG mode is on, or partitions are
    offered. *laid*: what layouts made."""
    cut = {device.gpu.uuid for device in offered.devices if device.partition is not None}
    found = []
    for gpu in gpus:
        if gpu.mig is None or not gpu.mig.profiles or not (gpu.mig.on or gpu.uuid in cut):
            continue
        its = blocks(gpu, holdings_of(gpu, held), laid.get(gpu.uuid, ()))
        taken = [block.placement for block in its]
        found.append(Board(gpu, its, room(offered, gpu, taken, held.keys())))
    return tuple(found)


def mig_picture(shown: Sequence[Board], terminal: Terminal) -> str:
    """Every board with its blocks."""
    hand = pen(terminal)
    lines = []
    for board, head in zip(shown, _heads(shown, terminal, hand), strict=True):
        lines.append(head)
        titles = max((len(block.what) for block in board.blocks), default=0)
        for place, block in enumerate(board.blocks):
            mark = hand.coloured(place, letter(place, block.claimed))
            lines += _entry(mark, f"{block.what.ljust(titles)}{_GAP}{block.whose}", terminal)
        if words := _room_words(board.room):
            lines += _entry(hand.free, words, terminal)
        elif board.free and board.room.offered:
            lines += _entry(hand.free, "too little for any partition that is offered", terminal)
    return "\n".join(lines)


def letter(place: int, claimed: bool) -> str:
    """The mark of the block at *place* on its board.

    >>> letter(0, claimed=True), letter(1, claimed=False)
    ('A', 'b')
    """
    found = _LETTERS[place % len(_LETTERS)]
    return found.upper() if claimed else found


def units(blocks: Sequence[Block], number: int, width: int, hand: Pen) -> str:
    """The *number* units of a board, each *width* characters wide, in brackets.

    What overlaps a block further left is drawn as far as it sticks out.
    """
    cells, at = [], 0
    for place, block in enumerate(blocks):
        start, end = max(block.placement.start, at), min(_end(block), number)
        if start >= end:
            continue
        cells += [hand.free * width] * (start - at)
        length = (end - start) * (width + 1) - 1
        cells.append(hand.coloured(place, letter(place, block.claimed) * length))
        at = end
    cells += [hand.free * width] * (number - at)
    return f"[{hand.edge.join(cells)}]"


def unit_width(number: int, room: int) -> int:
    """How many characters each of *number* units can have in brackets *room* wide; 0: none."""
    return min(_WIDEST, (room - 1) // number - 1) if number else 0


def _end(block: Block) -> int:
    return block.placement.end


def _heads(shown: Sequence[Board], terminal: Terminal, hand: Pen) -> list[str]:
    """Where there is little room without the products, then without the words."""
    names = _even([board.gpu.name for board in shown])
    products = _even([board.gpu.product_name for board in shown])
    both = [_GAP.join(each) for each in zip(names, products, strict=True)]
    words = [f"{board.free} free of {board.units}" for board in shown]
    nothing = [""] * len(shown)
    most = max((board.units for board in shown), default=0)
    for starts, tails in ((both, words), (names, words), (names, nothing)):
        left = terminal.width - max(map(len, starts), default=0) - max(map(len, tails), default=0)
        if (width := unit_width(most, left - 2 * len(_GAP))) > 0:
            break
    drawn = [units(board.blocks, board.units, max(width, 1), hand) for board in shown]
    lines = zip(starts, drawn, tails, strict=True)
    return [_GAP.join(each).rstrip() for each in lines]


def _entry(mark: str, text: str, terminal: Terminal) -> list[str]:
    """A line below a board, and further ones where the terminal is too narrow for it."""
    indent = len(_GAP) + 1 + len(_GAP)
    first, *rest = textwrap.wrap(
        text, max(terminal.width - indent, 20), break_long_words=False, break_on_hyphens=False
    )
    lines = [f"{_GAP}{mark}{_GAP}{first}", *(" " * indent + line for line in rest)]
    return [line.replace(_FIRM, " ") for line in lines]


def _room_words(found: Room) -> str:
    each = [_FIRM.join((str(number), "x", name)) for name, number in found.partitions]
    if found.whole:
        each.append(_FIRM.join(("all", "of", "it")))
    return f"room{_FIRM}for{_FIRM}{f' or{_FIRM}'.join(each)}" if each else ""


def _even(texts: Sequence[str]) -> list[str]:
    return [text.ljust(max(map(len, texts), default=0)) for text in texts]
