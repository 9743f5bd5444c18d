"""Claims that a container cannot have together: on two MPS servers, or with and without one."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dra_driver.kubeletplugin.claims import ClaimRef
from dra_driver.kubeletplugin.pods import PodSpec
from dra_driver.model.holdings import Record
from dra_driver.model.profiles import Tenants
from dra_driver.plan.mps_containers import User, strictest, users

_HOW = (
    "write both as requests of one claim with the same strategy, or use them in different "
    "containers"
)


@dataclass(frozen=True, slots=True)
class _Sides:
    """The requests of a claim, but for those that look on.

    Of a GPU, or a MIG partition, that a claim has parts of both under MPS and without, all count as
    under MPS.
    """

    claim: ClaimRef
    under: frozenset[str]
    without: frozenset[str]


def apart_problems(
    mine: Record, others: Iterable[Record], pods: Iterable[PodSpec]
) -> Sequence[str]:
    """Containers that use *mine* and another claim, though no MPS server leads to both."""
    sides, more = _sides(mine), [_sides(other) for other in others if other.claim != mine.claim]
    return [problem for one in users(pods) for problem in _problems(one, sides, more)]


def has_gpus(record: Record) -> bool:
    """Whether it is more than looking on."""
    return any(not holding.admin for holding in record.holdings)


def served_requests(record: Record) -> frozenset[str]:
    """The requests under MPS; "": one that an earlier release did not name."""
    return _sides(record).under


def tenants_of(record: Record) -> Tenants:
    """Whose pods may use it, by what the profile said when it was prepared."""
    return strictest(holding.tenants for holding in record.holdings)


def _sides(record: Record) -> _Sides:
    served = {gpu for space in record.spaces for gpu in space.gpus}
    taken = [holding for holding in record.holdings if not holding.admin]
    return _Sides(
        record.claim,
        frozenset(one.request for one in taken if one.uuid in served),
        frozenset(one.request for one in taken if one.uuid not in served),
    )


def _problems(one: User, mine: _Sides, others: Iterable[_Sides]) -> Iterator[str]:
    used = [its for its in others if one.requests(its.claim, its.under | its.without)]
    under = _names(its for its in used if one.requests(its.claim, its.under))
    without = _names(its for its in used if one.requests(its.claim, its.without))
    if one.requests(mine.claim, mine.under):
        if under:
            yield (
                f"{one} uses claim {under} too: it is under MPS as well, and a program reaches "
                "one MPS server; write both as requests of one claim, or use them in different "
                "containers"
            )
        if without:
            yield (
                f"{one} uses claim {without} too, which is not under MPS: a program under MPS sees "
                f"no other GPU; {_HOW}"
            )
    elif under and one.requests(mine.claim, mine.without):
        yield (
            f"{one} uses claim {under} too, which is under MPS: a program under MPS sees no other "
            f"GPU; {_HOW}"
        )


def _names(sides: Iterable[_Sides]) -> str:
    return ", ".join(sorted(its.claim.name for its in sides))
