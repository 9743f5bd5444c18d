"""Which claims wait for a device that no node has? Read from the API server; nothing is changed.

Which claims can never be served with the published devices, and why.

Only what is certain is told: an amount that no device has, a capacity that none knows, a type that
is not there. Whether other claims are in the way is not asked, nor what selectors say beyond what
``selectors`` understands; where that is in doubt, a device counts as one that could be had. So the
scheduler places none of the claims that are told of, except on a monitor device without admin
access, and on a GPU that is not shared in the way that the claim asks for: those rules are the
driver's, which refuses such claims when they are prepared.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dra_driver.base.errors import Forbidden
from dra_driver.cli.doctor.cluster_checks import CheckedCluster
from dra_driver.cli.doctor.scheduling.candidates import (
    DeviceRequest,
    candidates,
    is_ours,
    missing_key,
    of_class,
    requests_of,
)
from dra_driver.cli.doctor.scheduling.counters import Candidate, fit_together
from dra_driver.cli.doctor.scheduling.published_devices import PublishedDevices
from dra_driver.cli.findings import Finding, ok, skip, warn
from dra_driver.k8s.resource_versions import convert_claim_to_v1

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of the pending claims, how many were judged, and what is wrong with which: its namespace and
    name, and what it is."""

    judged: int
    problems: tuple[tuple[str, str], ...]  # why it can never be served
    risks: tuple[tuple[str, str], ...] = ()  # why it may not be, though it could


def judge(claims: Iterable[Document], market: PublishedDevices) -> Verdict:
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
    requests: Sequence[Sequence[DeviceRequest]],
    market: PublishedDevices,
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


def _risks(ways: Iterable[DeviceRequest], market: PublishedDevices) -> Iterator[str]:
    for way in ways:
        if way.class_name in market.classes:
            found = missing_key(way, of_class(way, market.devices, market))
            yield from (found,) if found else ()


def _is_pending(claim: Document) -> bool:
    gone = claim["metadata"].get("deletionTimestamp")
    return not gone and not (claim.get("status") or {}).get("allocation")


def _hopeless(ways: Sequence[DeviceRequest], market: PublishedDevices) -> str:
    """Why none of the *ways* to serve a request can be gone; empty: one of them may be."""
    reasons = []
    for way in ways:
        reason = is_ours(way, market) and candidates(way, market)[1]
        if not reason:
            return ""
        reasons.append(reason)
    return "; ".join(reasons)


def _crowded(
    requests: Sequence[Sequence[DeviceRequest]],
    market: PublishedDevices,
    constraints: Sequence[Document],
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


def _way(request: DeviceRequest, market: PublishedDevices) -> Candidate | None:
    if request.every or not is_ours(request, market):
        return None
    devices, why = candidates(request, market)
    return Candidate(request.name, request.count, () if why else devices)


CLAIMS = "pending claims"
_MOST_TOLD = 20
_NOTE = "CEL selectors are looked at as far as they ask for driver, type and the like"


def pending_claims(
    cluster: CheckedCluster, market: Callable[[], PublishedDevices]
) -> Iterator[Finding]:
    try:
        found = market()
        claims = (convert_claim_to_v1(each) for each in cluster.listed("resourceclaims"))
        verdict = judge(claims, found)
    except Forbidden as e:
        yield skip(
            CLAIMS,
            f"cannot be judged by this account ({e}); name an administrator's --kubeconfig",
        )
        return
    if found.devices:
        yield from of_verdict(verdict)
    else:
        yield of_nothing(verdict.judged, cluster.driver)


def of_verdict(verdict: Verdict) -> Iterator[Finding]:
    """Whoever wrote such a claim has to change it: that is no fault of this node."""
    for name, why in verdict.problems[:_MOST_TOLD]:
        yield warn(
            CLAIMS,
            f"{name} can never be served as it is: {why}",
            "who made it has to delete it and make another, since what a claim asks for cannot be "
            "changed; or let a node offer it",
        )
    if (more := len(verdict.problems) - _MOST_TOLD) > 0:
        yield warn(CLAIMS, f"{more} more can never be served", "mend those first, then ask again")
    for name, why in verdict.risks[:_MOST_TOLD]:
        yield warn(
            CLAIMS,
            f"{name} may not be served although it could be: {why}",
            "who made it has to delete it and make another with such a selector",
        )
    rest = verdict.judged - len(verdict.problems) - len(verdict.risks)
    if rest or not (verdict.problems or verdict.risks):
        yield ok(CLAIMS, f"{rest} wait, and nothing is known that they could not get ({_NOTE})")


def of_nothing(waiting: int, driver: str) -> Finding:
    if not waiting:
        return ok(CLAIMS, f"none; no node publishes a device of {driver}")
    return warn(
        CLAIMS,
        f"{waiting} wait, and no node publishes a device of {driver}",
        "kubectl get resourceslices; see what the plugin's pods log",
    )
