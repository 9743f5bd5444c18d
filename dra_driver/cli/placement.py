"""Which claims can never be served with the published devices, and why.

Only what is certain is told: an amount that no device has, a capacity that none knows, a type that
is not there. Whether other claims are in the way is not asked, nor what selectors say beyond what
``selectors`` understands; where that is in doubt, a device counts as one that could be had. So the
scheduler places none of the claims that are told of, except on a monitor device without admin
access, and on a GPU that is not shared in the way that the claim asks for: those rules are the
driver's, which refuses such claims when they are prepared.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dra_driver.cli.candidates import candidates, is_ours, of_class
from dra_driver.cli.market import Market
from dra_driver.cli.missing_keys import missing_key
from dra_driver.cli.requests import Request, requests_of
from dra_driver.cli.together import Way, fit_together

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of the pending claims, how many were judged, and what is wrong with which: its namespace and
    name, and what it is."""

    judged: int
    problems: tuple[tuple[str, str], ...]  # why it can never be served
    risks: tuple[tuple[str, str], ...] = ()  # why it may not be, though it could


def judge(claims: Iterable[Document], market: Market) -> Verdict:
    """What is wrong with those of *claims* (documents of v1) that wait for devices of the driver;
    claims that other drivers could serve are not judged."""
    judged = 0
    problems, risks = [], []
    for claim in claims:
        ways = requests_of(claim) if _is_pending(claim) else []
        if not any(is_ours(way, market) for request in ways for way in request):
            continue
        judged += 1
        name = f"{claim['metadata'].get('namespace', '')}/{claim['metadata']['name']}"
        constraints = ((claim.get("spec") or {}).get("devices") or {}).get("constraints") or ()
        if why := unservable(ways, market, "spec.devices", constraints):
            problems.append((name, why))
        elif risk := "; ".join(_risks((way for request in ways for way in request), market)):
            risks.append((name, risk))
    return Verdict(judged, tuple(sorted(problems)), tuple(sorted(risks)))


def unservable(
    requests: Sequence[Sequence[Request]],
    market: Market,
    where: str,
    constraints: Sequence[Document] = (),
) -> str:
    """Why *requests*, each as the ways to serve it, can never be served; empty: they may be.
    *where*: what they are all together."""
    hopeless = [found for ways in requests if (found := _hopeless(ways, market))]
    if hopeless or not _crowded(requests, market, constraints):
        return "; ".join(hopeless)
    return (
        f"{where}: on no node can it have all of that at once: partitions of one GPU take the "
        "same memory units, and so does the GPU as a whole; ask for fewer or smaller ones"
    )


def _risks(ways: Iterable[Request], market: Market) -> Iterator[str]:
    for way in ways:
        if way.class_name in market.classes:
            found = missing_key(way, of_class(way, market.devices, market))
            yield from (found,) if found else ()


def _is_pending(claim: Document) -> bool:
    gone = claim["metadata"].get("deletionTimestamp")
    return not gone and not (claim.get("status") or {}).get("allocation")


def _hopeless(ways: Sequence[Request], market: Market) -> str:
    """Why none of the *ways* to serve a request can be gone; empty: one of them may be."""
    reasons = []
    for way in ways:
        reason = is_ours(way, market) and candidates(way, market)[1]
        if not reason:
            return ""
        reasons.append(reason)
    return "; ".join(reasons)


def _crowded(
    requests: Sequence[Sequence[Request]], market: Market, constraints: Sequence[Document]
) -> bool:
    """Whether *requests*, each of which could be served, cannot be served together.

    Where one is for all devices, for another driver's, or for nothing that counters keep apart,
    nobody asks; nor where it is one device alone.
    """
    if len(requests) == 1 and all(way.count == 1 for way in requests[0]):
        return False
    every = [[_way(way, market) for way in ways if not way.admin] for ways in requests]
    wanted = [ways for ways in every if ways]
    flat = [way for ways in wanted for way in ways]
    if None in flat or not any(d.takes for way in flat if way for d in way.devices):
        return False
    found = [[way for way in ways if way and way.devices] for ways in wanted]
    return not fit_together(found, market.counters, constraints)


def _way(request: Request, market: Market) -> Way | None:
    if request.every or not is_ours(request, market):
        return None
    devices, why = candidates(request, market)
    return Way(request.name, request.count, () if why else devices)
