"""Usage of GPUs as text: a bar for each, below it a line for each claim and MPS server on it."""

from collections.abc import Sequence
from dataclasses import dataclass

from dra_driver.cli.mps_usage import MpsUses, SpaceUse, server_words, use_words
from dra_driver.cli.sizes import GIB, gib
from dra_driver.cli.terminal import Terminal
from dra_driver.cli.usage import Usage, Use
from dra_driver.model.holdings import Limit
from dra_driver.model.offer import board
from dra_driver.model.profiles import GuardPolicy

_NARROWEST, _WIDEST = 12, 60  # of a bar
_GAP = "  "

_COLOURS = (36, 33, 35, 32, 34, 31)  # SGR: cyan, yellow, magenta, green, blue, red
_RESET = "\x1b[0m"
_NO_MPS = MpsUses()


@dataclass(frozen=True, slots=True)
class Pen:
    """What a bar is drawn with."""

    marks: str  # of the first claim, the second, …, and again from the start
    free: str
    onlooker: str
    colour: bool = False

    def mark(self, place: int, number: int = 1) -> str:
        """*number* cells of the claim at *place* on its GPU."""
        return self.coloured(place, self.marks[place % len(self.marks)] * number)

    def coloured(self, place: int, text: str) -> str:
        if not self.colour or not text:
            return text
        return f"\x1b[{_COLOURS[place % len(_COLOURS)]}m{text}{_RESET}"


def pen(terminal: Terminal) -> Pen:
    if terminal.unicode:
        return Pen("█▓▒", "·", "○", terminal.colour)
    return Pen("#=+*%", ".", "o", terminal.colour)


def picture(usages: Sequence[Usage], terminal: Terminal, mps: MpsUses = _NO_MPS) -> str:
    """Every GPU with its bar and its claims; *mps*: which of those are under MPS."""
    hand = pen(terminal)
    heads = _heads(usages, terminal)
    names = _width([str(use.record.claim) for usage in usages for use in usage.uses])
    amounts = _width([_amount(use) for usage in usages for use in usage.uses])
    lines = []
    for usage, head in zip(usages, heads, strict=True):
        lines.append(head)
        for place, use in enumerate(usage.uses):
            mark = hand.onlooker if use.holding.admin else hand.mark(place)
            name, amount = str(use.record.claim).ljust(names), _amount(use).rjust(amounts)
            rest = ", ".join(filter(None, _words(use, mps.of(use.record, use.holding))))
            lines.append(f"{_GAP}{mark} {_GAP.join((name, amount, rest)).rstrip()}")
        servers = [server for server in mps.servers if usage.uuid in server.gpus]
        lines += [f"{_GAP}{_GAP}{server_words(server)}" for server in servers]
    return "\n".join(lines)


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


def _heads(usages: Sequence[Usage], terminal: Terminal) -> list[str]:
    """The lines of the GPUs, all alike; where there is little room without the products, then
    without cores and shares, then without the bars."""
    plain = [usage.name for usage in usages]
    products = [usage.gpu.product_name if usage.gpu else "" for usage in usages]
    both = [f"{name}{_GAP}{product}" for name, product in zip(_even(plain), products, strict=True)]
    for starts, every in ((both, True), (plain, True), (plain, False)):
        tails = [summary(usage, every) for usage in usages]
        room = terminal.width - _width(starts) - _width(tails) - 2 * len(_GAP) - len("[]")
        if room >= _NARROWEST:
            hand = pen(terminal)
            bars = [_bar_of(usage, min(room, _WIDEST), hand) for usage in usages]
            return _joined(_even(starts), bars, tails)
    return _joined(_even(plain), [summary(usage, False) for usage in usages])


def _joined(*columns: Sequence[str]) -> list[str]:
    return [_GAP.join(cells) for cells in zip(*columns, strict=True)]


def _even(texts: Sequence[str]) -> list[str]:
    return [text.ljust(_width(texts)) for text in texts]


def _width(texts: Sequence[str]) -> int:
    return max(map(len, texts), default=0)


def _bar_of(usage: Usage, width: int, hand: Pen) -> str:
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
        name if name != board(name) else "",
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
