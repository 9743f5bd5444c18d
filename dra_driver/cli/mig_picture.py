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
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from dra_driver.base.frozen import frozen
from dra_driver.cli.mig_status import OccupiedPlacement, occupied_placements
from dra_driver.cli.terminal import BarStyle, Terminal, bar_style, even, longest
from dra_driver.model.gpus import Gpu, GpuUuid, MigProfile, Placement
from dra_driver.model.mig_layouts import LayoutInstance
from dra_driver.model.offer import Device, Offer, counter_set_name
from dra_driver.model.records import Holding, HoldingsByGpu


@frozen
class AvailablePartitions:
    """The partitions that could still be created on a GPU."""

    partitions: tuple[tuple[str, int], ...]  # (profile, the most of it), the smallest first
    whole_gpu: bool  # or all of it could be given to one claim
    offered: bool  # partitions are created when a claim needs one


def available_partitions(
    offered: Offer, gpu: Gpu, taken: Collection[Placement], holdings: Collection[Holding]
) -> AvailablePartitions:
    """*taken*: the placements of *gpu* where something is; *holdings*: what claims hold of it."""
    gpu_devices = [device for device in offered.devices if device.gpu.uuid == gpu.uuid]
    sets = [each for each in offered.counter_sets if each.name == counter_set_name(gpu)]
    remaining = Counter({name: amount for each in sets for name, amount in each.counters})
    for device in gpu_devices:
        if device.instance is not None or any(h.is_of(device) for h in holdings if not h.admin):
            remaining.subtract(dict(device.takes))
    by_profile: dict[MigProfile, list[tuple[Placement, Device]]] = defaultdict(list)
    for device in gpu_devices:
        if device.partition is not None and device.created_for_claims:
            by_profile[device.partition.profile].append((device.partition.placement, device))
    profiles = sorted(by_profile, key=lambda p: (p.slices, p.memory_bytes, p.name))
    most = ((profile.name, _most(by_profile[profile], remaining, taken)) for profile in profiles)
    fits = tuple((name, number) for name, number in most if number)
    whole = (d for d in gpu_devices if d.takes and d.partition is None and _fits(d, remaining))
    return AvailablePartitions(fits, not taken and any(whole), offered=bool(by_profile))


def _fits(device: Device, remaining: Mapping[str, int]) -> bool:
    return all(remaining[name] >= amount for name, amount in device.takes)


def _most(
    devices: Sequence[tuple[Placement, Device]],
    before: Counter[str],
    taken: Collection[Placement],
) -> int:
    """Partitions of one profile are equally long: one after the other, from the left, is best."""
    remaining, number = before.copy(), 0
    for placement, device in sorted(devices, key=lambda entry: entry[0].start):
        if _fits(device, remaining) and not any(map(placement.overlaps, taken)):
            remaining.subtract(dict(device.takes))
            number += 1
    return number


_WIDEST = 4  # characters of one unit
_GAP = "  "
_FIRM = "\N{NO-BREAK SPACE}"  # where no line ends
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@frozen
class GpuMigPicture:
    """One GPU, what is taken of it, and what still fits."""

    gpu: Gpu
    blocks: tuple[OccupiedPlacement, ...]
    available: AvailablePartitions

    @property
    def units(self) -> int:
        return self.gpu.mig.units if self.gpu.mig else 0

    @property
    def free(self) -> int:
        """How many of its units are free."""
        placements = [block.placement for block in self.blocks]
        taken = {unit for placement in placements for unit in range(placement.start, placement.end)}
        return self.units - len(taken & set(range(self.units)))


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
        titles = longest([block.title for block in picture.blocks])
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
        start, end = max(block.placement.start, position), min(block.placement.end, number)
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


def _heads(pictures: Sequence[GpuMigPicture], terminal: Terminal, style: BarStyle) -> list[str]:
    """Where there is little room without the products, then without the words."""
    names = even([picture.gpu.name for picture in pictures])
    products = even([picture.gpu.product_name for picture in pictures])
    names_and_products = [_GAP.join(columns) for columns in zip(names, products, strict=True)]
    summaries = [f"{picture.free} free of {picture.units}" for picture in pictures]
    nothing = [""] * len(pictures)
    most = max((picture.units for picture in pictures), default=0)
    for titles, tails in ((names_and_products, summaries), (names, summaries), (names, nothing)):
        space = terminal.width - longest(titles) - longest(tails)
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
