"""Which of the published devices can serve one request, or why none of them can."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from api import names
from dra_driver.cli.capacities import fits, lacking
from dra_driver.cli.market import Market, Published
from dra_driver.cli.missing_keys import missing_key
from dra_driver.cli.requests import Request
from dra_driver.cli.selectors import may_match, variables_of_others
from dra_driver.cli.strategies import Asked, strategy_of

Document = Mapping[str, Any]


def is_ours(request: Request, market: Market) -> bool:
    """Whether no device of another driver can serve *request*."""
    found = market.classes.get(request.class_name)
    if found is None:  # the chart's are called like that
        return f".{request.class_name}".endswith(f".{market.driver}")
    return not may_match(
        [*_selectors(found), *request.selectors], variables_of_others(market.driver)
    )


def _selectors(device_class: Document) -> Sequence[Document]:
    return (device_class.get("spec") or {}).get("selectors") or ()


def candidates(request: Request, market: Market) -> tuple[Sequence[Published], str]:
    """The devices that can serve *request*, or why there is none. Each step leaves fewer; the first
    that leaves none is the reason."""
    if request.class_name not in market.classes:
        where = request.field("deviceClassName")
        return (), f"{where}: there is no DeviceClass {request.class_name}"
    devices: Sequence[Published] = market.devices
    for left, why in _STEPS:
        fewer = left(request, devices, market)
        if not fewer:
            return (), why(request, devices, market)
        devices = fewer
    return devices, _too_many(request, devices)


def of_class(request: Request, devices: Sequence[Published], market: Market) -> Sequence[Published]:
    selectors = _selectors(market.classes[request.class_name])
    return [device for device in devices if may_match(selectors, device.variables)]


def _no_class(request: Request, devices: Sequence[Published], market: Market) -> str:
    kinds = ", ".join(sorted({device.kind for device in devices if device.kind}))
    why = (
        f"{request.field('deviceClassName')}: no node publishes a device that DeviceClass "
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
        f"{request.field('adminAccess')}: only monitor devices match, which are for claims with "
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
        f"{request.field('tolerations')}: monitor devices have the taint {names.MONITOR_TAINT}; "
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
    (of_class, _no_class),
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
    where = request.field("count")
    return f"{where}: asks for {count}, but no node has more than {number} such ({node})"


def _tolerates(toleration: Document, taint: Document) -> bool:
    """As ``DeviceToleration.ToleratesTaint`` of k8s.io/api has it."""
    if toleration.get("effect") and toleration["effect"] != taint.get("effect"):
        return False
    if toleration.get("key") and toleration["key"] != taint.get("key"):
        return False
    if toleration.get("operator") == "Exists":
        return True
    return (toleration.get("value") or "") == (taint.get("value") or "")
