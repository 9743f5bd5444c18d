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
from fractions import Fraction
from itertools import count
from typing import Any

from dra_driver.base.errors import Forbidden
from dra_driver.base.frozen import frozen
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
from dra_driver.cli.doctor.scheduling.tainted import ADVICE, waits_for_taints
from dra_driver.cli.findings import Finding, ok, skip, warn
from dra_driver.k8s.resource_versions import convert_claim_to_v1

Document = Mapping[str, Any]

_STEPS = 20_000  # of one claim: some hundredths of a second


@frozen
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
                Candidate(
                    way.name, way.number, [device for device in way.devices if device.node == node]
                )
                for way in ways
            ]
            for ways in requests
        ]
        self._takes = {
            device.name: device.takes
            for ways in self._requests
            for way in ways
            for device in way.devices
        }
        self._constraints = constraints
        self._steps = steps
        self._chosen: list[tuple[str, PublishedDevice]] = []

    def finds(self, counters: dict[Counter, Fraction], at: int = 0) -> bool:
        if at == len(self._requests):
            return True
        return any(self._more(way, way.number, 0, counters, at) for way in self._requests[at])

    def _more(
        self, way: Candidate, number: int, start: int, counters: dict[Counter, Fraction], at: int
    ) -> bool:
        """*number* more devices of *way*, from its *start*-th on; then the next requests."""
        if number == 0:
            return self.finds(counters, at + 1)
        for place in range(start, len(way.devices) - number + 1):
            if next(self._steps) >= _STEPS:
                return True
            device = way.devices[place]
            remaining = self._without(device, counters)
            if remaining is None or not self._matches(way.name, device):
                continue
            self._chosen.append((way.name, device))
            if self._more(way, number - 1, place + 1, remaining, at):
                return True
            self._chosen.pop()
        return False

    def _without(
        self, device: PublishedDevice, counters: dict[Counter, Fraction]
    ) -> dict[Counter, Fraction] | None:
        """What is left of *counters* beside *device*; None: it cannot be had any more."""
        if any(chosen.name == device.name for _, chosen in self._chosen):
            return counters if device.document.get("allowMultipleAllocations") else None
        remaining = dict(counters)
        for counter, amount in self._takes[device.name].items():
            remaining[counter] = remaining.get(counter, Fraction(0)) - amount
            if remaining[counter] < 0:
                return None
        return remaining

    def _matches(self, name: str, device: PublishedDevice) -> bool:
        for constraint in self._constraints:
            attribute = constraint.get("matchAttribute")
            if not attribute or not _concerns(constraint, name):
                continue
            others = [chosen for name, chosen in self._chosen if _concerns(constraint, name)]
            if others and _differ(others[0].attribute(attribute), device.attribute(attribute)):
                return False
        return True


def _differ(value: Any, other: Any) -> bool:
    """Of lists (KEP-5491) some part has to match, and that is not asked here."""
    return not isinstance(value, list) and not isinstance(other, list) and value != other


def _concerns(constraint: Document, name: str) -> bool:
    """Whether it is for the request *name*, which can be one of several ways to serve another."""
    names = constraint.get("requests") or ()
    return not names or name in names or name.partition("/")[0] in names


@frozen
class Verdict:
    """Of the pending claims, how many were judged, and what is wrong with which: its namespace and
    name, and what it is."""

    judged: int
    problems: tuple[tuple[str, str], ...]  # why it can never be served
    risks: tuple[tuple[str, str], ...] = ()  # why it may not be, though it could
    tainted: tuple[tuple[str, str], ...] = ()  # which taints have to go first


def judge(claims: Iterable[Document], published: PublishedDevices) -> Verdict:
    """What is wrong with those of *claims* (documents of v1) that wait for devices of the driver;
    claims that other drivers could serve are not judged."""
    judged = 0
    problems, risks, tainted = [], [], []
    for claim in claims:
        ways = requests_of(claim) if _is_pending(claim) else []
        if not any(is_ours(way, published) for request in ways for way in request):
            continue
        judged += 1
        name = f"{claim['metadata'].get('namespace', '')}/{claim['metadata']['name']}"
        constraints = ((claim.get("spec") or {}).get("devices") or {}).get("constraints") or ()
        if why := unservable(ways, published, "spec.devices", constraints):
            problems.append((name, why))
        elif risk := "; ".join(_risks((way for request in ways for way in request), published)):
            risks.append((name, risk))
        elif why := waits_for_taints(ways, published):
            tainted.append((name, why))
    return Verdict(judged, *(tuple(sorted(each)) for each in (problems, risks, tainted)))


def unservable(
    requests: Sequence[Sequence[DeviceRequest]],
    published: PublishedDevices,
    where: str,
    constraints: Sequence[Document] = (),
) -> str:
    """Why *requests*, each as the ways to serve it, can never be served; empty: they may be.
    *where*: what they are all together."""
    hopeless = [reason for ways in requests if (reason := _hopeless(ways, published))]
    if hopeless or not _crowded(requests, published, constraints):
        return "; ".join(hopeless)
    return (
        f"{where}: on no node can it have all of that at once: partitions of one GPU take the "
        "same memory units, and so does the GPU as a whole; ask for fewer or smaller ones"
    )


def _risks(ways: Iterable[DeviceRequest], published: PublishedDevices) -> Iterator[str]:
    for way in ways:
        if way.class_name in published.classes:
            risk = missing_key(way, of_class(way, published.devices, published))
            yield from (risk,) if risk else ()


def _is_pending(claim: Document) -> bool:
    gone = claim["metadata"].get("deletionTimestamp")
    return not gone and not (claim.get("status") or {}).get("allocation")


def _hopeless(ways: Sequence[DeviceRequest], published: PublishedDevices) -> str:
    """Why none of the *ways* to serve a request can be gone; empty: one of them may be."""
    reasons = []
    for way in ways:
        reason = is_ours(way, published) and candidates(way, published)[1]
        if not reason:
            return ""
        reasons.append(reason)
    return "; ".join(reasons)


def _crowded(
    requests: Sequence[Sequence[DeviceRequest]],
    published: PublishedDevices,
    constraints: Sequence[Document],
) -> bool:
    """Whether *requests*, each of which could be served, cannot be served together.

    Where one is for all devices, for another driver's, or for nothing that counters keep apart,
    nobody asks; nor where it is one device alone.
    """
    if len(requests) == 1 and all(way.count == 1 for way in requests[0]):
        return False
    ways_of_requests = [
        [_way(way, published) for way in ways if not way.admin] for ways in requests
    ]
    relevant = [ways for ways in ways_of_requests if ways]
    all_ways = [way for ways in relevant for way in ways]
    if None in all_ways or not any(d.takes for way in all_ways if way for d in way.devices):
        return False
    possible = [[way for way in ways if way and way.devices] for ways in relevant]
    return not fit_together(possible, published.counters, constraints)


def _way(request: DeviceRequest, published: PublishedDevices) -> Candidate | None:
    if request.every or not is_ours(request, published):
        return None
    devices, why = candidates(request, published)
    return Candidate(request.name, request.count, () if why else devices)


CLAIMS = "pending claims"
_MOST_TOLD = 20
_NOTE = "CEL selectors are looked at as far as they ask for driver, type and the like"


def pending_claims(
    cluster: CheckedCluster, read_published: Callable[[], PublishedDevices]
) -> Iterator[Finding]:
    try:
        published = read_published()
        claims = (convert_claim_to_v1(each) for each in cluster.listed("resourceclaims"))
        verdict = judge(claims, published)
    except Forbidden as e:
        yield skip(
            CLAIMS,
            f"cannot be judged by this account ({e}); name an administrator's --kubeconfig",
        )
        return
    if published.devices:
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
    for name, why in verdict.tainted[:_MOST_TOLD]:
        yield warn(CLAIMS, f"{name} waits: {why}", ADVICE)
    told = len(verdict.problems) + len(verdict.risks) + len(verdict.tainted)
    number = verdict.judged - told
    if number or not told:
        yield ok(CLAIMS, f"{number} wait, and nothing is known that they could not get ({_NOTE})")


def of_nothing(waiting: int, driver: str) -> Finding:
    if not waiting:
        return ok(CLAIMS, f"none; no node publishes a device of {driver}")
    return warn(
        CLAIMS,
        f"{waiting} wait, and no node publishes a device of {driver}",
        "kubectl get resourceslices; see what the plugin's pods log",
    )
