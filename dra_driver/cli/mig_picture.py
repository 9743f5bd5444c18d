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

from dra_driver.cli.mig_status import OccupiedPlacement, occupied_placements
from dra_driver.cli.terminal import BarStyle, Terminal, bar_style
from dra_driver.model.gpus import Gpu, GpuUuid, Placement
from dra_driver.model.mig_layouts import LayoutInstance
from dra_driver.model.offer import Device, Offer, counter_set_name
from dra_driver.model.records import Holding, HoldingsByGpu


@dataclass(frozen=True, slots=True)
class AvailablePartitions:
    """The partitions that could still be created on a GPU."""

    partitions: tuple[tuple[str, int], ...] = ()  # (profile, the most of it), the smallest first
    whole_gpu: bool = False  # or all of it could be given to one claim
    offered: bool = False  # partitions are created when a claim needs one


NO_AVAILABLE_PARTITIONS = AvailablePartitions()


def available_partitions(
    offered: Offer, gpu: Gpu, taken: Collection[Placement], holdings: Collection[Holding]
) -> AvailablePartitions:
    """*taken*: the placements of *gpu* where something is; *holdings*: what claims hold of it."""
    gpu_devices = [device for device in offered.devices if device.gpu.uuid == gpu.uuid]
    used = (
        device
        for device in gpu_devices
        if device.instance is not None or any(h.is_of(device) for h in holdings if not h.admin)
    )
    remaining = _remaining_counters(offered, gpu, used)
    by_profile: dict[str, list[Device]] = {}
    for device in gpu_devices:
        if device.partition is not None and device.created_for_claims:
            by_profile.setdefault(device.partition.profile.name, []).append(device)
    names = sorted(by_profile, key=lambda name: _size(by_profile[name][0]))
    most = ((name, _most(by_profile[name], remaining, taken)) for name in names)
    whole = (
        any(d.takes and d.partition is None and _fits(d, remaining) for d in gpu_devices)
        and not taken
    )
    fits = tuple((name, number) for name, number in most if number)
    return AvailablePartitions(fits, whole, offered=bool(by_profile))


def _remaining_counters(offered: Offer, gpu: Gpu, used: Iterable[Device]) -> dict[str, int]:
    name = counter_set_name(gpu)
    remaining = {
        k: v
        for counter_set in offered.counter_sets
        if counter_set.name == name
        for k, v in counter_set.counters
    }
    for device in used:
        _subtract_counters(device, remaining)
    return remaining


def _subtract_counters(device: Device, remaining: dict[str, int]) -> None:
    for name, amount in device.takes:
        remaining[name] = remaining.get(name, 0) - amount


def _fits(device: Device, remaining: Mapping[str, int]) -> bool:
    return all(remaining.get(name, 0) >= amount for name, amount in device.takes)


def _most(
    devices: Sequence[Device], before: Mapping[str, int], taken: Collection[Placement]
) -> int:
    """Partitions of one profile are equally long: one after the other, from the left, is best."""
    remaining, number = dict(before), 0
    for device in sorted(devices, key=_start):
        if _fits(device, remaining) and not any(
            _placement(device).overlaps(placement) for placement in taken
        ):
            _subtract_counters(device, remaining)
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
    available: AvailablePartitions = NO_AVAILABLE_PARTITIONS

    @property
    def units(self) -> int:
        return self.gpu.mig.units if self.gpu.mig else 0

    @property
    def free(self) -> int:
        """How many of its units are free."""
        taken_units = {
            unit for block in self.blocks for unit in range(block.placement.start, _end(block))
        }
        return self.units - len(taken_units & set(range(self.units)))


def gpu_mig_pictures(
    offered: Offer,
    gpus: Iterable[Gpu],
    held: HoldingsByGpu,
    layout_instances: Mapping[GpuUuid, Collection[LayoutInstance]],
) -> tuple[GpuMigPicture, ...]:
    """Those of *gpus* on which there is something to see: MIG mode is on, or partitions are
    offered. *layout_instances*: what layouts made."""
    partitioned = {device.gpu.uuid for device in offered.devices if device.partition is not None}
    pictures = []
    for gpu in gpus:
        if gpu.mig is None or not gpu.mig.profiles or not (gpu.mig.on or gpu.uuid in partitioned):
            continue
        holdings = held.get(gpu.uuid, ())
        placements = occupied_placements(gpu, holdings, layout_instances.get(gpu.uuid, ()))
        occupied = [block.placement for block in placements]
        pictures.append(
            GpuMigPicture(gpu, placements, available_partitions(offered, gpu, occupied, holdings))
        )
    return tuple(pictures)


def mig_picture(pictures: Sequence[GpuMigPicture], terminal: Terminal) -> str:
    """Every board with its blocks."""
    style = bar_style(terminal)
    lines = []
    for picture, head in zip(pictures, _heads(pictures, terminal, style), strict=True):
        lines.append(head)
        titles = max((len(block.title) for block in picture.blocks), default=0)
        for index, block in enumerate(picture.blocks):
            mark = style.coloured(index, placement_letter(index, block.claimed))
            lines += _entry(mark, f"{block.title.ljust(titles)}{_GAP}{block.owner}", terminal)
        if text := _available_text(picture.available):
            lines += _entry(style.free, text, terminal)
        elif picture.free and picture.available.offered:
            lines += _entry(style.free, "too little for any partition that is offered", terminal)
    return "\n".join(lines)


def placement_letter(index: int, claimed: bool) -> str:
    """The mark of the block at *index* on its board.

    >>> placement_letter(0, claimed=True), placement_letter(1, claimed=False)
    ('A', 'b')
    """
    letter = _LETTERS[index % len(_LETTERS)]
    return letter.upper() if claimed else letter


def memory_units(
    blocks: Sequence[OccupiedPlacement], number: int, width: int, style: BarStyle
) -> str:
    """The *number* units of a board, each *width* characters wide, in brackets.

    What overlaps a block further left is drawn as far as it sticks out.
    """
    cells, position = [], 0
    for index, block in enumerate(blocks):
        start, end = max(block.placement.start, position), min(_end(block), number)
        if start >= end:
            continue
        cells += [style.free * width] * (start - position)
        length = (end - start) * (width + 1) - 1
        cells.append(style.coloured(index, placement_letter(index, block.claimed) * length))
        position = end
    cells += [style.free * width] * (number - position)
    return f"[{style.edge.join(cells)}]"


def unit_width(number: int, room: int) -> int:
    """How many characters each of *number* units can have in brackets *room* wide; 0: none."""
    return min(_WIDEST, (room - 1) // number - 1) if number else 0


def _end(block: OccupiedPlacement) -> int:
    return block.placement.end


def _heads(pictures: Sequence[GpuMigPicture], terminal: Terminal, style: BarStyle) -> list[str]:
    """Where there is little room without the products, then without the words."""
    names = _even([picture.gpu.name for picture in pictures])
    products = _even([picture.gpu.product_name for picture in pictures])
    names_and_products = [_GAP.join(columns) for columns in zip(names, products, strict=True)]
    summaries = [f"{picture.free} free of {picture.units}" for picture in pictures]
    nothing = [""] * len(pictures)
    most = max((picture.units for picture in pictures), default=0)
    for titles, tails in ((names_and_products, summaries), (names, summaries), (names, nothing)):
        space = terminal.width - max(map(len, titles), default=0) - max(map(len, tails), default=0)
        if (width := unit_width(most, space - 2 * len(_GAP))) > 0:
            break
    bars = [
        memory_units(picture.blocks, picture.units, max(width, 1), style) for picture in pictures
    ]
    lines = zip(titles, bars, tails, strict=True)
    return [_GAP.join(columns).rstrip() for columns in lines]


def _entry(mark: str, text: str, terminal: Terminal) -> list[str]:
    """A line below a board, and further ones where the terminal is too narrow for it."""
    indent = len(_GAP) + 1 + len(_GAP)
    first, *more_lines = textwrap.wrap(
        text, max(terminal.width - indent, 20), break_long_words=False, break_on_hyphens=False
    )
    lines = [f"{_GAP}{mark}{_GAP}{first}", *(" " * indent + line for line in more_lines)]
    return [line.replace(_FIRM, " ") for line in lines]


def _available_text(available: AvailablePartitions) -> str:
    texts = [_FIRM.join((str(number), "x", name)) for name, number in available.partitions]
    if available.whole_gpu:
        texts.append(_FIRM.join(("all", "of", "it")))
    return f"room{_FIRM}for{_FIRM}{f' or{_FIRM}'.join(texts)}" if texts else ""


def _even(texts: Sequence[str]) -> list[str]:
    return [text.ljust(max(map(len, texts), default=0)) for text in texts]
