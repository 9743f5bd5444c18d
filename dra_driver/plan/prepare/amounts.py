"""How much of a GPU a claim takes, and whether that is still there: the driver's own account.

The scheduler does the same sums. This one is the last guard against a GPU in too many hands:
force-deleted pods, slices that changed while a claim was on its way, two drivers on a node.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import assert_never

from api import names
from dra_driver.base.frozen import frozen
from dra_driver.k8s import quantity
from dra_driver.model.mps import ALL_CORES
from dra_driver.model.offer import AdminAccess, Exclusive, Fractional, Replica, Shape
from dra_driver.model.records import Holding


@frozen
class Amount:
    """A part of a GPU; *whole*: all of it, and nobody else may be there."""

    memory_bytes: int = 0
    cores: int = 0  # percent
    shares: int = 1
    whole: bool = False

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(
            self.memory_bytes + other.memory_bytes,
            self.cores + other.cores,
            self.shares + other.shares,
            self.whole or other.whole,
        )


NO_AMOUNT = Amount(shares=0)
WHOLE_AMOUNT = Amount(whole=True)


def requested_amount(consumed: Iterable[tuple[str, str]], shape: Shape) -> Amount:
    """What a claim takes that was allocated a device of *shape* with this consumed capacity.

    Without any it was allocated while the device was exclusive, and has all of it. A claim that
    has all the memory that there is has the whole GPU: no other claim is without memory.
    """
    match shape:
        case Exclusive():
            return WHOLE_AMOUNT
        case AdminAccess():
            return NO_AMOUNT
        case Replica(memory_bytes=memory, cores=cores):
            return Amount(memory or 0, cores)
        case Fractional():
            return _sliced(_by_bare_name(consumed), shape)
        case _:
            assert_never(shape)


def total_amount(holdings: Iterable[Holding]) -> Amount:
    """What *holdings* of one GPU take together."""
    return sum((requested_amount(h.consumed, h.shape) for h in holdings if not h.admin), NO_AMOUNT)


def shortage(amount: Amount, held: Amount, memory_bytes: int | None, shape: Shape) -> str:
    """Why *amount* does not fit beside what is *held* of a GPU, or of a partition, with so much
    memory (None: not known); empty: it fits."""
    if held != NO_AMOUNT and (held.whole or amount.whole):
        return "all of it" if amount.whole else "it, all of which is taken"
    both = amount + held
    total = memory_bytes or 0
    lacking = []
    if both.memory_bytes > total and memory_bytes is not None:
        free = max(0, total - held.memory_bytes)
        lacking.append(f"{amount.memory_bytes >> 20}Mi of memory, of which {free >> 20}Mi are free")
    if both.cores > ALL_CORES:
        lacking.append(f"{amount.cores} % of the cores, of which {ALL_CORES - held.cores} are free")
    most = _most_shares(shape)
    if both.shares > most:
        lacking.append(f"{amount.shares} of {most} shares, of which {most - held.shares} are free")
    return " and ".join(lacking)


def _sliced(consumed: Mapping[str, str], shape: Fractional) -> Amount:
    if names.MEMORY not in consumed:
        return WHOLE_AMOUNT
    memory = quantity.rounded_up(consumed[names.MEMORY])
    cores = quantity.rounded_up(consumed.get(names.CORES, "0"))
    if shape.replicas == 1 and memory >= shape.memory_default:
        return replace(WHOLE_AMOUNT, cores=cores)
    return Amount(memory, cores, quantity.rounded_up(consumed.get(names.SHARES, "1")))


def _by_bare_name(consumed: Iterable[tuple[str, str]]) -> dict[str, str]:
    return {name.rpartition("/")[2]: value for name, value in consumed}


def _most_shares(shape: Shape) -> int:
    match shape:
        case Fractional(shares=most) | Replica(of=most):
            return most
        case Exclusive() | AdminAccess():
            return 1
        case _:
            assert_never(shape)
