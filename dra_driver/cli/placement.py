"""Which claims can never be served with the published devices, and why.

Only what is certain is told: an amount that no device has, a capacity that none knows, a type that
is not there. Whether other claims are in the way is not asked, nor what selectors say beyond what
``selectors`` understands; where that is in doubt, a device counts as one that could be had. So the
scheduler places none of the claims that are told of, except on a monitor device without admin
access, and on a GPU that is not shared in the way that the claim asks for: those rules are the
driver's, which refuses such claims when they are prepared.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from api import names
from dra_driver.cli.capacities import fits, lacking
from dra_driver.cli.market import Market, Published
from dra_driver.cli.missing_keys import missing_key
from dra_driver.cli.requests import Request, requests_of
from dra_driver.cli.selectors import may_match, variables_of_others
from dra_driver.cli.strategies import Asked, strategy_of
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
        if not any(_is_ours(way, market) for request in ways for way in request):
            continue
        judged += 1
        why = "; ".join(found for request in ways if (found := _hopeless(request, market)))
        name = f"{claim['metadata'].get('namespace', '')}/{claim['metadata']['name']}"
        if why := why or _crowded(claim, ways, market):
            problems.append((name, why))
        elif risk := "; ".join(_risks((way for request in ways for way in request), market)):
            risks.append((name, risk))
    return Verdict(judged, tuple(sorted(problems)), tuple(sorted(risks)))


def _risks(ways: Iterable[Request], market: Market) -> Iterator[str]:
    for way in ways:
        if way.class_name in market.classes:
            found = missing_key(way, _of_class(way, market.devices, market))
            yield from (found,) if found else ()


def _is_pending(claim: Document) -> bool:
    gone = claim["metadata"].get("deletionTimestamp")
    return not gone and not (claim.get("status") or {}).get("allocation")


def _hopeless(ways: Sequence[Request], market: Market) -> str:
    """Why none of the *ways* to serve a request can be gone; empty: one of them may be."""
    reasons = []
    for way in ways:
        reason = _is_ours(way, market) and _left(way, market)[1]
        if not reason:
            return ""
        reasons.append(reason)
    return "; ".join(reasons)


def _crowded(claim: Document, requests: Sequence[Sequence[Request]], market: Market) -> str:
    """Why its requests, each of which could be served, cannot be served together.

    Where one is for all devices, for another driver's, or for nothing that counters keep apart,
    nobody asks; nor where it is one device alone.
    """
    if len(requests) == 1 and all(way.count == 1 for way in requests[0]):
        return ""
    every = [[_way(way, market) for way in ways if not way.admin] for ways in requests]
    wanted = [ways for ways in every if ways]
    flat = [way for ways in wanted for way in ways]
    if None in flat or not any(d.takes for way in flat if way for d in way.devices):
        return ""
    found = [[way for way in ways if way and way.devices] for ways in wanted]
    constraints = ((claim.get("spec") or {}).get("devices") or {}).get("constraints") or ()
    if fit_together(found, market.counters, constraints):
        return ""
    return (
        "spec.devices: on no node can it have all of that at once: partitions of one GPU take the "
        "same memory units, and so does the GPU as a whole; ask for fewer or smaller ones"
    )


def _way(request: Request, market: Market) -> Way | None:
    if request.every or not _is_ours(request, market):
        return None
    devices, why = _left(request, market)
    return Way(request.name, request.count, () if why else devices)


def _is_ours(request: Request, market: Market) -> bool:
    """Whether no device of another driver can serve *request*."""
    found = market.classes.get(request.class_name)
    if found is None:  # the chart's are called like that
        return f".{request.class_name}".endswith(f".{market.driver}")
    return not may_match(
        [*_selectors(found), *request.selectors], variables_of_others(market.driver)
    )


def _selectors(device_class: Document) -> Sequence[Document]:
    return (device_class.get("spec") or {}).get("selectors") or ()


def _left(request: Request, market: Market) -> tuple[Sequence[Published], str]:
    """The devices that can serve *request*, or why there is none. Each step leaves fewer; the first
    that leaves none is the reason."""
    if request.class_name not in market.classes:
        return (), f"{request.path}.deviceClassName: there is no DeviceClass {request.class_name}"
    devices: Sequence[Published] = market.devices
    for left, why in _STEPS:
        fewer = left(request, devices, market)
        if not fewer:
            return (), why(request, devices, market)
        devices = fewer
    return devices, _too_many(request, devices)


def _of_class(
    request: Request, devices: Sequence[Published], market: Market
) -> Sequence[Published]:
    selectors = _selectors(market.classes[request.class_name])
    return [device for device in devices if may_match(selectors, device.variables)]


def _no_class(request: Request, devices: Sequence[Published], market: Market) -> str:
    kinds = ", ".join(sorted({device.kind for device in devices if device.kind}))
    why = (
        f"{request.path}.deviceClassName: no node publishes a device that DeviceClass "
        f"{request.class_name} selects; there are devices of type {kinds}"
    )
    if _shared_so(request, devices, market):
        return why
    return f"{why}; {_not_shared_so(request, devices, market)}"


def _selected(
    request: Request, devices: Sequence[Published], market: Market
) -> Sequence[Published]:
    return [device for device in devices if may_match(request.selectors, device.variables)]


def _none_selected(request: Request, devices: Sequence[Published], market: Market) -> str:
    why = f"{request.path}.selectors: none of the {len(devices)} devices of its class match them"
    profiles = sorted({device.profile for device in devices if device.profile})
    kinds = f"their MIG profiles are {', '.join(profiles)}" if profiles else ""
    return "; ".join(part for part in (why, kinds, missing_key(request, devices)) if part)


def _permitted(
    request: Request, devices: Sequence[Published], market: Market
) -> Sequence[Published]:
    return [d for d in devices if request.admin or d.kind != names.TYPE_GPU_MONITOR]


def _not_permitted(request: Request, devices: Sequence[Published], market: Market) -> str:
    return (
        f"{request.path}.adminAccess: only monitor devices match, which are for claims with "
        "adminAccess: true in a namespace with the label "
        'resource.kubernetes.io/admin-access: "true"'
    )


def _tolerated(
    request: Request, devices: Sequence[Published], market: Market
) -> Sequence[Published]:
    """Other taints come and go with the health of a GPU; a monitor device has its own always."""
    tolerations = request.asked.get("tolerations") or ()
    return [
        device
        for device in devices
        if device.kind != names.TYPE_GPU_MONITOR
        or all(
            any(_tolerates(one, taint) for one in tolerations)
            for taint in device.document.get("taints") or ()
            if taint.get("key") == names.MONITOR_TAINT
        )
    ]


def _not_tolerated(request: Request, devices: Sequence[Published], market: Market) -> str:
    return (
        f"{request.path}.tolerations: monitor devices have the taint {names.MONITOR_TAINT}; "
        f"add a toleration with key: {names.MONITOR_TAINT} and operator: Exists"
    )


def _strategies(request: Request, market: Market) -> Mapping[bool, Asked]:
    """What it asks for of partitions (true) and of GPUs (false). Who looks on shares nothing,
    whatever its configuration says."""
    if request.admin:
        return {}
    device_class = market.classes[request.class_name]
    each = {
        partition: strategy_of(
            request.name, market.driver, device_class, request.configs, partition
        )
        for partition in (False, True)
    }
    return {partition: asked for partition, asked in each.items() if asked}


def _is_partition(device: Published) -> bool:
    return device.kind == names.TYPE_MIG


def _shared_so(
    request: Request, devices: Sequence[Published], market: Market
) -> Sequence[Published]:
    asked = _strategies(request, market)
    return [
        device
        for device in devices
        if (one := asked.get(_is_partition(device))) is None or one.offered_by(device)
    ]


def _not_shared_so(request: Request, devices: Sequence[Published], market: Market) -> str:
    number = Counter(map(_is_partition, devices))
    asked = _strategies(request, market)
    return "; ".join(one.refused(number[kind]) for kind, one in asked.items() if number[kind])


def _large_enough(
    request: Request, devices: Sequence[Published], market: Market
) -> Sequence[Published]:
    wanted = request.amounts.items()
    return [
        device
        for device in devices
        if all(fits(amount, device.capacity.get(name)) for name, amount in wanted)
    ]


def _none_large_enough(request: Request, devices: Sequence[Published], market: Market) -> str:
    reasons = [
        f"{request.path}.capacity.requests[{name}]: {why}"
        for name, amount in sorted(request.amounts.items())
        if (why := lacking(name, amount, devices, market.driver))
    ]
    if reasons:
        return "; ".join(reasons)
    asked = ", ".join(f"{name}: {amount}" for name, amount in sorted(request.amounts.items()))
    return f"{request.path}.capacity.requests: no one device has all of it ({asked})"


_Step = Callable[[Request, Sequence[Published], Market], Sequence[Published]]
_Why = Callable[[Request, Sequence[Published], Market], str]
_STEPS: tuple[tuple[_Step, _Why], ...] = (
    (_of_class, _no_class),
    (_selected, _none_selected),
    (_permitted, _not_permitted),
    (_tolerated, _not_tolerated),
    (_shared_so, _not_shared_so),
    (_large_enough, _none_large_enough),
)


def _too_many(request: Request, devices: Sequence[Published]) -> str:
    """A claim is served by one node, and a request by different devices of it."""
    if request.every:
        return ""
    count = request.count
    (node, number) = Counter(device.node for device in devices).most_common(1)[0]
    if count <= number:
        return ""
    return (
        f"{request.path}.count: asks for {count}, but no node has more than {number} such ({node})"
    )


def _tolerates(toleration: Document, taint: Document) -> bool:
    """As ``DeviceToleration.ToleratesTaint`` of k8s.io/api has it."""
    if toleration.get("effect") and toleration["effect"] != taint.get("effect"):
        return False
    if toleration.get("key") and toleration["key"] != taint.get("key"):
        return False
    if toleration.get("operator") == "Exists":
        return True
    return (toleration.get("value") or "") == (taint.get("value") or "")
