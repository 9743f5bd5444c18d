"""Usage of GPUs as text: a bar for each, below it a line for each claim and MPS server on it.

A GPU with MIG shows its memory units instead, and below it each of its partitions like a GPU.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from dra_driver.base.frozen import frozen
from dra_driver.cli.mig_picture import memory_units, placement_letter, unit_width
from dra_driver.cli.mig_status import OccupiedPlacement, occupied_placements
from dra_driver.cli.mps_usage import (
    ClaimsMpsUsage,
    MpsNamespaceUsage,
    server_message,
    usage_messages,
)
from dra_driver.cli.terminal import GIB, BarStyle, Terminal, bar_style, even, format_gib, longest
from dra_driver.cli.usage import GpuUsage, HeldDevice
from dra_driver.model.profiles import GuardPolicy
from dra_driver.model.records import ClaimMemoryLimit

_NARROWEST, _WIDEST = 12, 60  # of a bar
_GAP = "  "

_UNCERTAIN = "it is not known what is free"
_NO_MPS = ClaimsMpsUsage()


@frozen
class _UsageRow:
    """A line with a bar, and what stands below it."""

    usage: GpuUsage
    mark: str = ""  # of a partition: which of the units of its GPU are its own
    blocks: tuple[OccupiedPlacement, ...] = ()  # of a GPU with MIG

    @property
    def title(self) -> str:
        return f"{_GAP}{self.mark} {self.usage.name}" if self.mark else self.usage.name

    @property
    def indent(self) -> str:
        return _GAP * 2 if self.mark else ""

    @property
    def product(self) -> str:
        """Of a GPU; the name of a partition says enough."""
        usage = self.usage
        return usage.gpu.product_name if usage.gpu and not self.mark else ""


def usage_bars(
    usages: Sequence[GpuUsage], terminal: Terminal, mps: ClaimsMpsUsage = _NO_MPS
) -> str:
    """Every GPU with its bar and its claims; *mps*: which of those are under MPS."""
    rows = [row for usage in usages for row in _rows(usage)]
    style = bar_style(terminal)
    heads = _heads(rows, terminal)
    names = longest([use.record.known_as for row in rows for use in row.usage.held_devices])
    amounts = longest([_amount(use) for row in rows for use in row.usage.held_devices])
    lines = []
    for row, title in zip(rows, heads, strict=True):
        usage = row.usage
        lines.append(title)
        for index, use in enumerate(usage.held_devices):
            mark = style.admin_access if use.holding.admin else style.mark(index)
            name, amount = use.record.known_as.ljust(names), _amount(use).rjust(amounts)
            details = ", ".join(filter(None, _use_text(use, mps.of(use.record, use.holding))))
            text = _GAP.join((name, amount, details)).rstrip()
            lines.append(f"{row.indent}{_GAP}{mark} {text}")
        servers = [server for server in mps.servers if usage.uuid in server.gpus]
        lines += [f"{row.indent}{_GAP}{_GAP}{server_message(server)}" for server in servers]
    return "\n".join(lines)


def _rows(usage: GpuUsage) -> Iterator[_UsageRow]:
    held = [device.holding for device in usage.all_held]
    blocks = occupied_placements(usage.gpu, held) if usage.gpu and usage.parts else ()
    yield _UsageRow(usage, blocks=blocks)
    for part in usage.parts:
        place = next((i for i, block in enumerate(blocks) if block.key == part.key), None)
        yield _UsageRow(
            part, "-" if place is None else placement_letter(place, blocks[place].claimed)
        )


def bar(amounts: Sequence[int], total: int, width: int, style: BarStyle) -> str:
    """*amounts* out of *total* as *width* cells, what is left over as free ones."""
    number = cells([*amounts, max(0, total - sum(amounts))], width)
    taken = "".join(style.mark(index, count) for index, count in enumerate(number[:-1]))
    return taken + style.free * number[-1]


def cells(parts: Sequence[int], width: int) -> list[int]:
    """How many of *width* cells each of *parts* gets: *width* in all, and one at least for each
    part that is something, while there are enough."""
    total = sum(parts)
    if total <= 0:
        return [0] * len(parts)
    exact = [part * width / total for part in parts]
    number = [max(int(share), 1) if part else 0 for part, share in zip(parts, exact, strict=True)]
    least = 1 if sum(1 for part in parts if part) <= width else 0
    while sum(number) > width:
        place = max(
            (p for p in range(len(parts)) if number[p] > least),
            key=lambda p: number[p] - exact[p],
        )
        number[place] -= 1
    while sum(number) < width:
        place = max((p for p in range(len(parts)) if parts[p]), key=lambda p: exact[p] - number[p])
        number[place] += 1
    return number


def _heads(rows: Sequence[_UsageRow], terminal: Terminal) -> list[str]:
    """The lines of the GPUs, all alike; where there is little room without the products, then
    without cores and shares, then without the bars."""
    plain = [row.title for row in rows]
    names = longest([row.title for row in rows if not row.mark])
    names_and_products = [row.title.ljust(names) + _GAP + row.product for row in rows]
    for starts, detailed in ((names_and_products, True), (plain, True), (plain, False)):
        tails = [usage_summary(row.usage, detailed) for row in rows]
        room = terminal.width - longest(starts) - longest(tails) - 2 * len(_GAP) - len("[]")
        if room >= _NARROWEST:
            style = bar_style(terminal)
            bars = [_bar_of(row, min(room, _WIDEST), style) for row in rows]
            return _joined(even(starts), bars, tails)
    return _joined(even(plain), [usage_summary(row.usage, False) for row in rows])


def _joined(*columns: Sequence[str]) -> list[str]:
    return [_GAP.join(cells) for cells in zip(*columns, strict=True)]


def _bar_of(row: _UsageRow, width: int, style: BarStyle) -> str:
    usage = row.usage
    if usage.uncertain:
        style = replace(style, free="?")
    number = usage.gpu.mig.units if usage.gpu and usage.gpu.mig else 0
    if row.blocks and (wide := unit_width(number, width + len("[]"))) > 0:
        padding = width + len("[]") - (number * (wide + 1) + 1)
        return memory_units(row.blocks, number, wide, style) + " " * padding
    if usage.parts:
        return " " * (width + len("[]"))
    amounts = [use.amount for use in usage.held_devices]
    if usage.held.whole:
        shares = [int(amount.whole) for amount in amounts]
        return f"[{bar(shares, sum(shares), width, style)}]"
    if usage.memory_bytes is None:
        return f"[{'?'.center(width)}]"
    taken = [amount.memory_bytes for amount in amounts]
    return f"[{bar(taken, usage.memory_bytes, width, style)}]"


def usage_summary(usage: GpuUsage, detailed: bool = True) -> str:
    """How much of a GPU is held and free, in words; *detailed*: cores and shares, too."""
    held, total = usage.held, usage.memory_bytes
    if usage.parts:
        return _in_partitions_text(usage, total)
    if held.whole:
        return "all of it held" if total is None else f"all {format_gib(total)} held"
    if usage.uncertain:
        known = f"{format_gib(held.memory_bytes)} held, " if held.memory_bytes else ""
        return f"{known}{_UNCERTAIN}"
    if held.shares == 0:
        return "all of it free" if total is None else f"all {format_gib(total)} free"
    if total is None:
        parts = [f"{format_gib(held.memory_bytes)} held"]
    else:
        free = (usage.free_bytes or 0) / GIB
        parts = [f"{held.memory_bytes / GIB:.1f} of {format_gib(total)} held, {free:.1f} free"]
    if held.cores and detailed:
        parts.append(f"{held.cores} % of the cores")
    if usage.shares is not None and detailed:
        parts.append(f"{held.shares} of {usage.shares} shares")
    return ", ".join(parts)


def _in_partitions_text(usage: GpuUsage, total: int | None) -> str:
    """How much of a GPU is in partitions, in words."""
    number = len(usage.parts)
    text = "1 partition" if number == 1 else f"{number} partitions"
    if total is not None and usage.partitioned_bytes:
        text += f" with {usage.partitioned_bytes / GIB:.1f} of {format_gib(total)}"
    if usage.held.whole:
        return f"{text}, and all of it is held"
    return f"{text}, {_UNCERTAIN}" if usage.uncertain else text


def _amount(use: HeldDevice) -> str:
    """How much memory a claim has, in words."""
    amount = use.amount
    if use.holding.admin:
        return "admin access"
    if amount.whole:
        return "all of it"
    return format_gib(amount.memory_bytes) if amount.memory_bytes else "one part"


def _use_text(use: HeldDevice, mps: Sequence[MpsNamespaceUsage]) -> tuple[str, ...]:
    """The other facts of a claim; empty: does not apply. *mps*: the namespaces of which it
    has the device."""
    amount, holding = use.amount, use.holding
    part = not amount.whole and not holding.admin
    cores_shown = any(mps_use.namespace.percent == amount.cores for mps_use in mps)
    return (
        holding.device if holding.device != holding.unit else "",
        _mps_text(mps),
        f"{amount.cores} % of the cores" if part and amount.cores and not cores_shown else "",
        f"{amount.shares} shares" if part and amount.shares != 1 else "",
        f"interval {use.interval}" if use.interval is not None else "",
        _limit_text(use, mps),
        "not yet prepared" if not use.record.completed else "",
        _pod_text(use),
    )


def _mps_text(mps: Sequence[MpsNamespaceUsage]) -> str:
    texts = [", ".join(filter(None, usage_messages(mps_use))) for mps_use in mps]
    return f"MPS {' or '.join(texts)}" if texts else ""


def _limit_text(use: HeldDevice, mps: Sequence[MpsNamespaceUsage]) -> str:
    limit: ClaimMemoryLimit | None = use.holding.limit
    if limit is None:
        limited = any(mps_use.memory_bytes is not None for mps_use in mps)
        return "" if use.holding.admin or use.amount.whole or limited else "no limit"
    text = f"guard {limit.guard.policy}"
    if limit.guard.policy is GuardPolicy.KILL:
        text += f" after {limit.guard.grace_seconds:g} s"
    return f"{text}, strict" if limit.strict else text


def _pod_text(use: HeldDevice) -> str:
    record = use.record
    names = [pod.name for pod in record.pods]
    if record.allocation is not None:  # its own name does not tell the namespace
        names = [f"{record.claim.namespace}/{name}" for name in names]
    return f"pod{'s' if len(names) > 1 else ''} {', '.join(names)}" if names else ""
