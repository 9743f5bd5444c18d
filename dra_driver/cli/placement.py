"""Which claims can never be served with the published devices, and why.

Only what is certain is told: an amount that no device has, a capacity that none knows, a type that
is not there. Whether other claims are in the way is not asked, nor what selectors say beyond what
``selectors`` understands; where that is in doubt, a device counts as one that could be had. So the
scheduler places none of the claims that are told of, except on a monitor device without admin
access, and on a GPU that is not shared in the way that the claim asks for: those rules are the
driver's, which refuses such claims when they are prepared.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from api import names
from dra_driver.cli.capacities import fits, lacking
from dra_driver.cli.market import Market, Published
from dra_driver.cli.selectors import may_match, variables_of_others
from dra_driver.cli.strategies import Asked, strategy_of

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of the pending claims, how many were judged, and what is wrong with which."""

    judged: int
    problems: tuple[tuple[str, str], ...]  # (namespace/name, why it can never be served)


@dataclass(frozen=True, slots=True)
class _Request:
    """One way to serve a request: itself, or one entry of its ``firstAvailable``."""

    path: str
    asked: Document
    name: str = ""
    configs: Sequence[Document] = ()  # of its claim

    @property
    def class_name(self) -> str:
        return str(self.asked.get("deviceClassName"))

    @property
    def selectors(self) -> Sequence[Document]:
        """Its own, besides those of its class."""
        return self.asked.get("selectors") or ()

    @property
    def admin(self) -> bool:
        return bool(self.asked.get("adminAccess"))

    @property
    def amounts(self) -> Mapping[str, str]:
        return {
            str(name): str(amount)
            for name, amount in ((self.asked.get("capacity") or {}).get("requests") or {}).items()
        }


def judge(claims: Iterable[Document], market: Market) -> Verdict:
    """What is wrong with those of *claims* (documents of v1) that wait for devices of the driver;
    claims that other drivers could serve are not judged."""
    judged, problems = 0, []
    for claim in claims:
        ways = _requests(claim) if _is_pending(claim) else []
        if not any(_is_ours(way, market) for request in ways for way in request):
            continue
        judged += 1
        if why := "; ".join(found for request in ways if (found := _hopeless(request, market))):
            metadata = claim["metadata"]
            problems.append((f"{metadata.get('namespace', '')}/{metadata['name']}", why))
    return Verdict(judged, tuple(sorted(problems)))


def _is_pending(claim: Document) -> bool:
    gone = claim["metadata"].get("deletionTimestamp")
    return not gone and not (claim.get("status") or {}).get("allocation")


def _requests(claim: Document) -> list[list[_Request]]:
    """Every request of a claim as the ways to serve it."""
    found = []
    devices = (claim.get("spec") or {}).get("devices") or {}
    configs = devices.get("config") or ()
    for index, request in enumerate(devices.get("requests") or ()):
        path, name = f"spec.devices.requests[{index}]", str(request.get("name"))
        if "exactly" in request:
            found.append([_Request(f"{path}.exactly", request["exactly"], name, configs)])
        else:
            listed = request.get("firstAvailable") or ()
            found.append(
                [
                    _Request(
                        f"{path}.firstAvailable[{i}]", one, f"{name}/{one.get('name')}", configs
                    )
                    for i, one in enumerate(listed)
                ]
            )
    return found


def _hopeless(ways: Sequence[_Request], market: Market) -> str:
    """Why none of the *ways* to serve a request can be gone; empty: one of them may be."""
    reasons = []
    for way in ways:
        reason = _is_ours(way, market) and _impossible(way, market)
        if not reason:
            return ""
        reasons.append(reason)
    return "; ".join(reasons)


def _is_ours(request: _Request, market: Market) -> bool:
    """Whether no device of another driver can serve *request*."""
    found = market.classes.get(request.class_name)
    if found is None:  # the chart's are called like that
        return f".{request.class_name}".endswith(f".{market.driver}")
    return not may_match(
        [*_selectors(found), *request.selectors], variables_of_others(market.driver)
    )


def _selectors(device_class: Document) -> Sequence[Document]:
    return (device_class.get("spec") or {}).get("selectors") or ()


def _impossible(request: _Request, market: Market) -> str:
    """Each step leaves fewer devices; the first that leaves none is the reason."""
    if request.class_name not in market.classes:
        return f"{request.path}.deviceClassName: there is no DeviceClass {request.class_name}"
    devices: Sequence[Published] = market.devices
    for left, why in _STEPS:
        fewer = left(request, devices, market)
        if not fewer:
            return why(request, devices, market)
        devices = fewer
    return _too_many(request, devices)


def _of_class(
    request: _Request, devices: Sequence[Published], market: Market
) -> Sequence[Published]:
    selectors = _selectors(market.classes[request.class_name])
    return [device for device in devices if may_match(selectors, device.variables)]


def _no_class(request: _Request, devices: Sequence[Published], market: Market) -> str:
    kinds = ", ".join(sorted({device.kind for device in devices if device.kind}))
    why = (
        f"{request.path}.deviceClassName: no node publishes a device that DeviceClass "
        f"{request.class_name} selects; there are devices of type {kinds}"
    )
    if _shared_so(request, devices, market):
        return why
    return f"{why}; {_not_shared_so(request, devices, market)}"


def _selected(
    request: _Request, devices: Sequence[Published], market: Market
) -> Sequence[Published]:
    return [device for device in devices if may_match(request.selectors, device.variables)]


def _none_selected(request: _Request, devices: Sequence[Published], market: Market) -> str:
    return f"{request.path}.selectors: none of the {len(devices)} devices of its class match them"


def _permitted(
    request: _Request, devices: Sequence[Published], market: Market
) -> Sequence[Published]:
    return [d for d in devices if request.admin or d.kind != names.TYPE_GPU_MONITOR]


def _not_permitted(request: _Request, devices: Sequence[Published], market: Market) -> str:
    return (
        f"{request.path}.adminAccess: only monitor devices match, which are for claims with "
        "adminAccess: true in a namespace with the label "
        'resource.kubernetes.io/admin-access: "true"'
    )


def _tolerated(
    request: _Request, devices: Sequence[Published], market: Market
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


def _not_tolerated(request: _Request, devices: Sequence[Published], market: Market) -> str:
    return (
        f"{request.path}.tolerations: monitor devices have the taint {names.MONITOR_TAINT}; "
        f"add a toleration with key: {names.MONITOR_TAINT} and operator: Exists"
    )


def _strategy(request: _Request, market: Market) -> Asked | None:
    """Who looks on shares nothing, whatever its configuration says."""
    if request.admin:
        return None
    device_class = market.classes[request.class_name]
    return strategy_of(request.name, market.driver, device_class, request.configs)


def _shared_so(
    request: _Request, devices: Sequence[Published], market: Market
) -> Sequence[Published]:
    asked = _strategy(request, market)
    return devices if asked is None else [d for d in devices if asked.offered_by(d)]


def _not_shared_so(request: _Request, devices: Sequence[Published], market: Market) -> str:
    asked = _strategy(request, market)
    return asked.refused(len(devices)) if asked else ""


def _large_enough(
    request: _Request, devices: Sequence[Published], market: Market
) -> Sequence[Published]:
    wanted = request.amounts.items()
    return [
        device
        for device in devices
        if all(fits(amount, device.capacity.get(name)) for name, amount in wanted)
    ]


def _none_large_enough(request: _Request, devices: Sequence[Published], market: Market) -> str:
    reasons = [
        f"{request.path}.capacity.requests[{name}]: {why}"
        for name, amount in sorted(request.amounts.items())
        if (why := lacking(name, amount, devices, market.driver))
    ]
    if reasons:
        return "; ".join(reasons)
    asked = ", ".join(f"{name}: {amount}" for name, amount in sorted(request.amounts.items()))
    return f"{request.path}.capacity.requests: no one device has all of it ({asked})"


_Step = Callable[[_Request, Sequence[Published], Market], Sequence[Published]]
_Why = Callable[[_Request, Sequence[Published], Market], str]
_STEPS: tuple[tuple[_Step, _Why], ...] = (
    (_of_class, _no_class),
    (_selected, _none_selected),
    (_permitted, _not_permitted),
    (_tolerated, _not_tolerated),
    (_shared_so, _not_shared_so),
    (_large_enough, _none_large_enough),
)


def _too_many(request: _Request, devices: Sequence[Published]) -> str:
    """A claim is served by one node, and a request by different devices of it."""
    if request.asked.get("allocationMode") == "All":
        return ""
    count = int(request.asked.get("count") or 1)
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
