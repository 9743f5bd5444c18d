"""Usage of GPUs as text: a bar for each, below it a line for each claim and MPS server on it.

A GPU that is cut shows its memory units instead, and below it each of its partitions like a GPU.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dra_driver.cli.mig_blocks import Block, blocks
from dra_driver.cli.mig_picture import letter, unit_width, units
from dra_driver.cli.mps_usage import MpsUses, SpaceUse, server_words, use_words
from dra_driver.cli.pens import Pen, pen
from dra_driver.cli.sizes import GIB, gib
from dra_driver.cli.terminal import Terminal
from dra_driver.cli.usage import Usage, Use
from dra_driver.model.holdings import Limit
from dra_driver.model.offer import board
from dra_driver.model.profiles import GuardPolicy

_NARROWEST, _WIDEST = 12, 60  # of a bar
_GAP = "  "

_NO_MPS = MpsUses()


@dataclass(frozen=True, slots=True)
class _Row:
    """A line with a bar, and what stands below it."""

    usage: Usage
    mark: str = ""  # of a partition: which of the units of its GPU are its own
    blocks: tuple[Block, ...] = ()  # of a GPU that is cut

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


def picture(usages: Sequence[Usage], terminal: Terminal, mps: MpsUses = _NO_MPS) -> str:
    """Every GPU with its bar and its claims; *mps*: which of those are under MPS."""
    rows = [row for usage in usages for row in _rows(usage)]
    hand = pen(terminal)
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
            rest = ", ".join(filter(None, _words(use, mps.of(use.record, use.holding))))
            text = _GAP.join((name, amount, rest)).rstrip()
            lines.append(f"{row.indent}{_GAP}{mark} {text}")
        servers = [server for server in mps.servers if usage.uuid in server.gpus]
        lines += [f"{row.indent}{_GAP}{_GAP}{server_words(server)}" for server in servers]
    return "\n".join(lines)


def _rows(usage: Usage) -> Iterator[_Row]:
    held = [use.holding for one in (usage, *usage.parts) for use in one.uses]
    drawn = blocks(usage.gpu, held) if usage.gpu and usage.parts else ()
    yield _Row(usage, blocks=drawn)
    for part in usage.parts:
        place = next((i for i, each in enumerate(drawn) if each.key == part.key), None)
        yield _Row(part, "-" if place is None else letter(place, drawn[place].claimed))


def bar(amounts: Sequence[int], total: int, width: int, hand: Pen) -> str:
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


def _heads(rows: Sequence[_Row], terminal: Terminal) -> list[str]:
    """The lines of the GPUs, all alike; where there is little room without the products, then
    without cores and shares, then without the bars."""
    plain = [row.title for row in rows]
    names = _width([row.title for row in rows if not row.mark])
    both = [row.title.ljust(names) + _GAP + row.product for row in rows]
    for starts, every in ((both, True), (plain, True), (plain, False)):
        tails = [summary(row.usage, every) for row in rows]
        room = terminal.width - _width(starts) - _width(tails) - 2 * len(_GAP) - len("[]")
        if room >= _NARROWEST:
            hand = pen(terminal)
            bars = [_bar_of(row, min(room, _WIDEST), hand) for row in rows]
            return _joined(_even(starts), bars, tails)
    return _joined(_even(plain), [summary(row.usage, False) for row in rows])


def _joined(*columns: Sequence[str]) -> list[str]:
    return [_GAP.join(cells) for cells in zip(*columns, strict=True)]


def _even(texts: Sequence[str]) -> list[str]:
    return [text.ljust(_width(texts)) for text in texts]


def _width(texts: Sequence[str]) -> int:
    return max(map(len, texts), default=0)


def _bar_of(row: _Row, width: int, hand: Pen) -> str:
    usage = row.usage
    number = usage.gpu.mig.units if usage.gpu and usage.gpu.mig else 0
    if row.blocks and (wide := unit_width(number, width + len("[]"))) > 0:
        rest = width + len("[]") - (number * (wide + 1) + 1)
        return units(row.blocks, number, wide, hand) + " " * rest
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


def summary(usage: Usage, every: bool = True) -> str:
    """How much of a GPU is held and free, in words; *every*: cores and shares, too."""
    held, total = usage.held, usage.memory_bytes
    if usage.parts:
        return _cut(usage, total)
    if held.whole:
        return "all of it held" if total is None else f"all {gib(total)} held"
    if held.shares == 0:
        return "all of it free" if total is None else f"all {gib(total)} free"
    if total is None:
        words = [f"{gib(held.memory_bytes)} held"]
    else:
        free = (usage.free_bytes or 0) / GIB
        words = [f"{held.memory_bytes / GIB:.1f} of {gib(total)} held, {free:.1f} free"]
    if held.cores and every:
        words.append(f"{held.cores} % of the cores")
    if usage.shares is not None and every:
        words.append(f"{held.shares} of {usage.shares} shares")
    return ", ".join(words)


def _cut(usage: Usage, total: int | None) -> str:
    """How much of a GPU is in partitions, in words."""
    number = len(usage.parts)
    words = "1 partition" if number == 1 else f"{number} partitions"
    if total is not None and usage.cut_bytes:
        words += f" with {usage.cut_bytes / GIB:.1f} of {gib(total)}"
    return f"{words}, and all of it is held" if usage.held.whole else words


def _amount(use: Use) -> str:
    """How much memory a claim has, in words."""
    amount = use.amount
    if use.holding.admin:
        return "looks on"
    if amount.whole:
        return "all of it"
    return gib(amount.memory_bytes) if amount.memory_bytes else "one part"


def _words(use: Use, mps: Sequence[SpaceUse]) -> tuple[str, ...]:
    """What else is told of a claim; empty: not of this one. *mps*: the spaces in one of which it
    has the device."""
    amount, name = use.amount, use.holding.device
    part = not amount.whole and not use.holding.admin
    told = any(one.space.percent == amount.cores for one in mps)
    return (
        name if name != board(name) and use.holding.partition is None else "",
        _mps_words(mps),
        f"{amount.cores} % of the cores" if part and amount.cores and not told else "",
        f"{amount.shares} shares" if part and amount.shares != 1 else "",
        f"interval {use.interval}" if use.interval is not None else "",
        _limit_words(use, mps),
        "not yet prepared" if not use.record.completed else "",
        _pod_words(use),
    )


def _mps_words(mps: Sequence[SpaceUse]) -> str:
    each = [", ".join(filter(None, use_words(one))) for one in mps]
    return f"MPS {' or '.join(each)}" if each else ""


def _limit_words(use: Use, mps: Sequence[SpaceUse]) -> str:
    limit: Limit | None = use.holding.limit
    if limit is None:
        limited = any(one.memory_bytes is not None for one in mps)
        return "" if use.holding.admin or use.amount.whole or limited else "no limit"
    words = f"guard {limit.guard.policy}"
    if limit.guard.policy is GuardPolicy.KILL:
        words += f" after {limit.guard.grace_seconds:g} s"
    return f"{words}, strict" if limit.strict else words


def _pod_words(use: Use) -> str:
    names = [pod.name for pod in use.record.pods]
    return f"pod{'s' if len(names) > 1 else ''} {', '.join(names)}" if names else ""
