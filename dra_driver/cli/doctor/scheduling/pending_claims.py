"""Claims that wait and can never be served with the published devices, and why.

Only what is certain is reported: an amount that no device has, a capacity that none knows, a type
that is not there. Whether other claims are in the way is not asked, nor what selectors say beyond
what ``selectors`` understands; where that is in doubt, a device counts as one that could be had. So
the scheduler places none of the reported claims, except on a monitor device without admin access,
and on a GPU that is not shared in the way that the claim asks for: those rules are the driver's,
which refuses such claims when they are prepared.

Requests of one claim have to be served together: every choice of devices is tried, node by node,
against the counters of the GPUs (KEP-4815) and the attributes that have to match. After so many
steps that nobody would wait for more, the answer is yes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count
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
from dra_driver.cli.doctor.scheduling.published_devices import (
    Counter,
    PublishedDevice,
    PublishedDevices,
)
from dra_driver.cli.findings import Finding, ok, skip, warn
from dra_driver.k8s.resource_versions import convert_claim_to_v1

Document = Mapping[str, Any]

_STEPS = 20_000  # of one claim: some hundredths of a second


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to serve a request: *number* different ones of *devices*."""

    name: str  # of the request, with its subrequest
    number: int
    devices: Sequence[PublishedDevice]


def fit_together(
    requests: Sequence[Sequence[Candidate]],
    counters: Mapping[str, Mapping[Counter, Fraction]],
    constraints: Sequence[Document] = (),
) -> bool:
    """Whether some node can serve all *requests*, each in one of its ways. *counters*: how much
    there is, by node; *constraints*: as in the claim."""
    steps = count()
    nodes = sorted({device.node for ways in requests for way in ways for device in way.devices})
    return any(
        _Search(node, requests, constraints, steps).finds(dict(counters.get(node, {})))
        for node in nodes
    )


class _Search:
    """All choices on one node, depth first."""

    def __init__(
        self,
        node: str,
        requests: Sequence[Sequence[Candidate]],
        constraints: Sequence[Document],
        steps: Iterator[int],
    ) -> None:
        self._requests = [
            [
                Candidate(way.name, way.number, [one for one in way.devices if one.node == node])
                for way in ways
            ]
            for ways in requests
        ]
        self._takes = {
            one.name: one.takes for ways in self._requests for way in ways for one in way.devices
        }
        self._constraints = constraints
        self._steps = steps
        self._chosen: list[tuple[str, PublishedDevice]] = []

    def finds(self, left: dict[Counter, Fraction], at: int = 0) -> bool:
        if at == len(self._requests):
            return True
        return any(self._more(way, way.number, 0, left, at) for way in self._requests[at])

    def _more(
        self, way: Candidate, number: int, start: int, left: dict[Counter, Fraction], at: int
    ) -> bool:
        """*number* more devices of *way*, from its *start*-th on; then the next requests."""
        if number == 0:
            return self.finds(left, at + 1)
        for place in range(start, len(way.devices) - number + 1):
            if next(self._steps) >= _STEPS:
                return True
            device = way.devices[place]
            rest = self._without(device, left)
            if rest is None or not self._matches(way.name, device):
                continue
            self._chosen.append((way.name, device))
            if self._more(way, number - 1, place + 1, rest, at):
                return True
            self._chosen.pop()
        return False

    def _without(
        self, device: PublishedDevice, left: dict[Counter, Fraction]
    ) -> dict[Counter, Fraction] | None:
        """What is *left* of the counters beside *device*; None: it cannot be had any more."""
        if any(one.name == device.name for _, one in self._chosen):
            return left if device.document.get("allowMultipleAllocations") else None
        rest = dict(left)
        for counter, amount in self._takes[device.name].items():
            rest[counter] = rest.get(counter, Fraction(0)) - amount
            if rest[counter] < 0:
                return None
        return rest

    def _matches(self, name: str, device: PublishedDevice) -> bool:
        for constraint in self._constraints:
            attribute = constraint.get("matchAttribute")
            if not attribute or not _concerns(constraint, name):
                continue
            others = [one for other, one in self._chosen if _concerns(constraint, other)]
            if others and _differ(others[0].attribute(attribute), device.attribute(attribute)):
                return False
        return True


def _differ(one: Any, other: Any) -> bool:
    """Of lists (KEP-5491) some part has to match, and that is not asked here."""
    return not isinstance(one, list) and not isinstance(other, list) and one != other


def _concerns(constraint: Document, name: str) -> bool:
    """Whether it is for the request *name*, which can be one of several ways to serve another."""
    names = constraint.get("requests") or ()
    return not names or name in names or name.partition("/")[0] in names


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
