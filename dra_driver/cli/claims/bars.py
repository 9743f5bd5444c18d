"""Usage of GPUs as text: a bar for each, below it a line for each claim and MPS server on it.

A GPU that is cut shows its memory units instead, and below it each of its partitions like a GPU.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dra_driver.cli.mig_picture import memory_units, placement_letter, unit_width
from dra_driver.cli.mig_status import OccupiedPlacement, occupied_placements
from dra_driver.cli.mps_usage import ClaimsMpsUsage, MpsNamespaceUse, server_message, use_messages
from dra_driver.cli.terminal import GIB, BarStyle, Terminal, bar_style, format_gib
from dra_driver.cli.usage import DeviceUse, GpuUsage
from dra_driver.model.offer import gpu_name_of
from dra_driver.model.profiles import GuardPolicy
from dra_driver.model.records import ClaimMemoryLimit

_NARROWEST, _WIDEST = 12, 60  # of a bar
_GAP = "  "

_NO_MPS = ClaimsMpsUsage()


@dataclass(frozen=True, slots=True)
class _UsageRow:
    """A line with a bar, and what stands below it."""

    usage: GpuUsage
    mark: str = ""  # of a partition: which of the units of its GPU are its own
    blocks: tuple[OccupiedPlacement, ...] = ()  # of a GPU that is cut

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
    hand = bar_style(terminal)
    heads = _heads(rows, terminal)
    names = _width([str(use.record.claim) for row in rows for use in row.usage.uses])
    amounts = _width([_amount(use) for row in rows for use in row.usage.uses])
    lines = []
    for row, head in zip(rows, heads, strict=True):
        usage = row.usage
        lines.append(head)
        for place, use in enumerate(usage.uses):
            mark = hand.onlooker if use.holding.admin else hand.mark(place)
            name, amount = str(use.record.claim).ljust(names), _amount(use).rjust(amounts)
            rest = ", ".join(filter(None, _use_text(use, mps.of(use.record, use.holding))))
            text = _GAP.join((name, amount, rest)).rstrip()
            lines.append(f"{row.indent}{_GAP}{mark} {text}")
        servers = [server for server in mps.servers if usage.uuid in server.gpus]
        lines += [f"{row.indent}{_GAP}{_GAP}{server_message(server)}" for server in servers]
    return "\n".join(lines)


def _rows(usage: GpuUsage) -> Iterator[_UsageRow]:
    held = [use.holding for one in (usage, *usage.parts) for use in one.uses]
    drawn = occupied_placements(usage.gpu, held) if usage.gpu and usage.parts else ()
    yield _UsageRow(usage, blocks=drawn)
    for part in usage.parts:
        place = next((i for i, each in enumerate(drawn) if each.key == part.key), None)
        yield _UsageRow(
            part, "-" if place is None else placement_letter(place, drawn[place].claimed)
        )


def bar(amounts: Sequence[int], total: int, width: int, hand: BarStyle) -> str:
    """*amounts* out of *total* as *width* cells, what is left over as free ones."""
    number = cells([*amounts, max(0, total - sum(amounts))], width)
    taken = "".join(hand.mark(place, many) for place, many in enumerate(number[:-1]))
    return taken + hand.free * number[-1]


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
    names = _width([row.title for row in rows if not row.mark])
    both = [row.title.ljust(names) + _GAP + row.product for row in rows]
    for starts, every in ((both, True), (plain, True), (plain, False)):
        tails = [usage_summary(row.usage, every) for row in rows]
        room = terminal.width - _width(starts) - _width(tails) - 2 * len(_GAP) - len("[]")
        if room >= _NARROWEST:
            hand = bar_style(terminal)
            bars = [_bar_of(row, min(room, _WIDEST), hand) for row in rows]
            return _joined(_even(starts), bars, tails)
    return _joined(_even(plain), [usage_summary(row.usage, False) for row in rows])


def _joined(*columns: Sequence[str]) -> list[str]:
    return [_GAP.join(cells) for cells in zip(*columns, strict=True)]


def _even(texts: Sequence[str]) -> list[str]:
    return [text.ljust(_width(texts)) for text in texts]


def _width(texts: Sequence[str]) -> int:
    return max(map(len, texts), default=0)


def _bar_of(row: _UsageRow, width: int, hand: BarStyle) -> str:
    usage = row.usage
    number = usage.gpu.mig.units if usage.gpu and usage.gpu.mig else 0
    if row.blocks and (wide := unit_width(number, width + len("[]"))) > 0:
        rest = width + len("[]") - (number * (wide + 1) + 1)
        return memory_units(row.blocks, number, wide, hand) + " " * rest
    if usage.parts:
        return " " * (width + len("[]"))
    amounts = [use.amount for use in usage.uses]
    if usage.held.whole:
        shares = [int(each.whole) for each in amounts]
        return f"[{bar(shares, sum(shares), width, hand)}]"
    if usage.memory_bytes is None:
        return f"[{'?'.center(width)}]"
    taken = [each.memory_bytes for each in amounts]
    return f"[{bar(taken, usage.memory_bytes, width, hand)}]"


def usage_summary(usage: GpuUsage, every: bool = True) -> str:
    """How much of a GPU is held and free, in words; *every*: cores and shares, too."""
    held, total = usage.held, usage.memory_bytes
    if usage.parts:
        return _in_partitions_text(usage, total)
    if held.whole:
        return "all of it held" if total is None else f"all {format_gib(total)} held"
    if held.shares == 0:
        return "all of it free" if total is None else f"all {format_gib(total)} free"
    if total is None:
        words = [f"{format_gib(held.memory_bytes)} held"]
    else:
        free = (usage.free_bytes or 0) / GIB
        words = [f"{held.memory_bytes / GIB:.1f} of {format_gib(total)} held, {free:.1f} free"]
    if held.cores and every:
        words.append(f"{held.cores} % of the cores")
    if usage.shares is not None and every:
        words.append(f"{held.shares} of {usage.shares} shares")
    return ", ".join(words)


def _in_partitions_text(usage: GpuUsage, total: int | None) -> str:
    """How much of a GPU is in partitions, in words."""
    number = len(usage.parts)
    words = "1 partition" if number == 1 else f"{number} partitions"
    if total is not None and usage.cut_bytes:
        words += f" with {usage.cut_bytes / GIB:.1f} of {format_gib(total)}"
    return f"{words}, and all of it is held" if usage.held.whole else words


def _amount(use: DeviceUse) -> str:
    """How much memory a claim has, in words."""
    amount = use.amount
    if use.holding.admin:
        return "looks on"
    if amount.whole:
        return "all of it"
    return format_gib(amount.memory_bytes) if amount.memory_bytes else "one part"


def _use_text(use: DeviceUse, mps: Sequence[MpsNamespaceUse]) -> tuple[str, ...]:
    """What else is told of a claim; empty: not of this one. *mps*: the namespaces of which it
    has the device."""
    amount, name = use.amount, use.holding.device
    part = not amount.whole and not use.holding.admin
    told = any(one.namespace.percent == amount.cores for one in mps)
    return (
        name if name != gpu_name_of(name) and use.holding.partition is None else "",
        _mps_text(mps),
        f"{amount.cores} % of the cores" if part and amount.cores and not told else "",
        f"{amount.shares} shares" if part and amount.shares != 1 else "",
        f"interval {use.interval}" if use.interval is not None else "",
        _limit_text(use, mps),
        "not yet prepared" if not use.record.completed else "",
        _pod_text(use),
    )


def _mps_text(mps: Sequence[MpsNamespaceUse]) -> str:
    each = [", ".join(filter(None, use_messages(one))) for one in mps]
    return f"MPS {' or '.join(each)}" if each else ""


def _limit_text(use: DeviceUse, mps: Sequence[MpsNamespaceUse]) -> str:
    limit: ClaimMemoryLimit | None = use.holding.limit
    if limit is None:
        limited = any(one.memory_bytes is not None for one in mps)
        return "" if use.holding.admin or use.amount.whole or limited else "no limit"
    words = f"guard {limit.guard.policy}"
    if limit.guard.policy is GuardPolicy.KILL:
        words += f" after {limit.guard.grace_seconds:g} s"
    return f"{words}, strict" if limit.strict else words


def _pod_text(use: DeviceUse) -> str:
    names = [pod.name for pod in use.record.pods]
    return f"pod{'s' if len(names) > 1 else ''} {', '.join(names)}" if names else ""
