"""GPUs with MIG as text: a line of memory units for each, and below it what has them and what fits.

For example::

    gpu-0  NVIDIA A100-SXM4-40GB  [AAAAAAA|bbb|.|.]  2 free of 8
      A  3g.20gb  team-a/training  MIG-…
      b  2g.10gb  MIG-…  not made by this driver
      .  room for 1 x 1g.5gb

Capital letters are claims. A unit has the same width on every GPU, so that GPUs can be compared.
How many more partitions fit follows from the counters of the GPU's devices.
"""

import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dra_driver.cli.mig_status import OccupiedPlacement, holdings_of_gpu, occupied_placements
from dra_driver.cli.terminal import BarStyle, Terminal, bar_style
from dra_driver.model.gpus import DeviceName, Gpu, GpuUuid, Placement
from dra_driver.model.mig_layouts import LayoutInstance
from dra_driver.model.offer import Device, Offer, counter_set_name
from dra_driver.model.records import HoldingsByDevice


@dataclass(frozen=True, slots=True)
class AvailablePartitions:
    """What a GPU could still be cut into."""

    partitions: tuple[tuple[str, int], ...] = ()  # (profile, the most of it), the smallest first
    whole: bool = False  # or all of it could be given to one claim
    offered: bool = False  # it is cut when a claim needs it


NO_AVAILABLE_PARTITIONS = AvailablePartitions()


def available_partitions(
    offered: Offer, gpu: Gpu, taken: Collection[Placement], held: Collection[DeviceName]
) -> AvailablePartitions:
    """*taken*: the placements of *gpu* where something is; *held*: the devices that claims hold."""
    its = [device for device in offered.devices if device.gpu.uuid == gpu.uuid]
    left = _remaining_counters(
        offered, gpu, (d for d in its if d.name in held or d.instance is not None)
    )
    by_profile: dict[str, list[Device]] = {}
    for device in its:
        if device.partition is not None and device.created_for_claims:
            by_profile.setdefault(device.partition.profile.name, []).append(device)
    names = sorted(by_profile, key=lambda name: _size(by_profile[name][0]))
    most = ((name, _most(by_profile[name], left, taken)) for name in names)
    whole = any(d.takes and d.partition is None and _fits(d, left) for d in its) and not taken
    fits = tuple((name, number) for name, number in most if number)
    return AvailablePartitions(fits, whole, offered=bool(by_profile))


def _remaining_counters(offered: Offer, gpu: Gpu, used: Iterable[Device]) -> dict[str, int]:
    name = counter_set_name(gpu)
    left = {k: v for one in offered.counter_sets if one.name == name for k, v in one.counters}
    for device in used:
        _subtract_counters(device, left)
    return left


def _subtract_counters(device: Device, left: dict[str, int]) -> None:
    for name, amount in device.takes:
        left[name] = left.get(name, 0) - amount


def _fits(device: Device, left: Mapping[str, int]) -> bool:
    return all(left.get(name, 0) >= amount for name, amount in device.takes)


def _most(
    devices: Sequence[Device], before: Mapping[str, int], taken: Collection[Placement]
) -> int:
    """Partitions of one profile are equally long: one after the other, from the left, is best."""
    left, number = dict(before), 0
    for device in sorted(devices, key=_start):
        if _fits(device, left) and not any(_placement(device).overlaps(one) for one in taken):
            _subtract_counters(device, left)
            number += 1
    return number


def _placement(device: Device) -> Placement:
    return device.partition.placement if device.partition else Placement(0, 0)


def _start(device: Device) -> int:
    return _placement(device).start


def _size(device: Device) -> tuple[int, int, str]:
    profile = device.partition.profile if device.partition else None
    return (profile.slices, profile.memory_bytes, profile.name) if profile else (0, 0, "")


_WIDEST = 4  # characters of one unit
_GAP = "  "
_FIRM = "\N{NO-BREAK SPACE}"  # where no line ends
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class GpuMigPicture:
    """One GPU, what is taken of it, and what still fits."""

    gpu: Gpu
    blocks: tuple[OccupiedPlacement, ...] = ()
    room: AvailablePartitions = NO_AVAILABLE_PARTITIONS

    @property
    def units(self) -> int:
        return self.gpu.mig.units if self.gpu.mig else 0

    @property
    def free(self) -> int:
        """How many of its units are nobody's."""
        every = {unit for one in self.blocks for unit in range(one.placement.start, _end(one))}
        return self.units - len(every & set(range(self.units)))


def gpu_mig_pictures(
    offered: Offer,
    gpus: Iterable[Gpu],
    held: HoldingsByDevice,
    laid: Mapping[GpuUuid, Collection[LayoutInstance]],
) -> tuple[GpuMigPicture, ...]:
    """Those of *gpus* on which there is something to see: MIG mode is on, or partitions are
    offered. *laid*: what layouts made."""
    cut = {device.gpu.uuid for device in offered.devices if device.partition is not None}
    found = []
    for gpu in gpus:
        if gpu.mig is None or not gpu.mig.profiles or not (gpu.mig.on or gpu.uuid in cut):
            continue
        its = occupied_placements(gpu, holdings_of_gpu(gpu, held), laid.get(gpu.uuid, ()))
        taken = [block.placement for block in its]
        found.append(
            GpuMigPicture(gpu, its, available_partitions(offered, gpu, taken, held.keys()))
        )
    return tuple(found)


def mig_picture(shown: Sequence[GpuMigPicture], terminal: Terminal) -> str:
    """Every board with its blocks."""
    hand = bar_style(terminal)
    lines = []
    for board, head in zip(shown, _heads(shown, terminal, hand), strict=True):
        lines.append(head)
        titles = max((len(block.what) for block in board.blocks), default=0)
        for place, block in enumerate(board.blocks):
            mark = hand.coloured(place, placement_letter(place, block.claimed))
            lines += _entry(mark, f"{block.what.ljust(titles)}{_GAP}{block.whose}", terminal)
        if words := _available_text(board.room):
            lines += _entry(hand.free, words, terminal)
        elif board.free and board.room.offered:
            lines += _entry(hand.free, "too little for any partition that is offered", terminal)
    return "\n".join(lines)


def placement_letter(place: int, claimed: bool) -> str:
    """The mark of the block at *place* on its board.

    >>> letter(0, claimed=True), letter(1, claimed=False)
    ('A', 'b')
    """
    found = _LETTERS[place % len(_LETTERS)]
    return found.upper() if claimed else found


def memory_units(
    blocks: Sequence[OccupiedPlacement], number: int, width: int, hand: BarStyle
) -> str:
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
        cells.append(hand.coloured(place, placement_letter(place, block.claimed) * length))
        at = end
    cells += [hand.free * width] * (number - at)
    return f"[{hand.edge.join(cells)}]"


def unit_width(number: int, room: int) -> int:
    """How many characters each of *number* units can have in brackets *room* wide; 0: none."""
    return min(_WIDEST, (room - 1) // number - 1) if number else 0


def _end(block: OccupiedPlacement) -> int:
    return block.placement.end


def _heads(shown: Sequence[GpuMigPicture], terminal: Terminal, hand: BarStyle) -> list[str]:
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
    drawn = [memory_units(board.blocks, board.units, max(width, 1), hand) for board in shown]
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


def _available_text(found: AvailablePartitions) -> str:
    each = [_FIRM.join((str(number), "x", name)) for name, number in found.partitions]
    if found.whole:
        each.append(_FIRM.join(("all", "of", "it")))
    return f"room{_FIRM}for{_FIRM}{f' or{_FIRM}'.join(each)}" if each else ""


def _even(texts: Sequence[str]) -> list[str]:
    return [text.ljust(max(map(len, texts), default=0)) for text in texts]
