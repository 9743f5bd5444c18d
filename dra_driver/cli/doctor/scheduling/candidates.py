"""The requests of a claim, and which published devices can serve each, or why none can.

A selector can ask a device for an attribute that it does not have, without asking whether it is
there. CEL then ends with an error, and the scheduler tries no other device for the claim.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from api import names
from dra_driver.base.frozen import frozen
from dra_driver.cli.doctor.scheduling.published_devices import (
    PublishedDevice,
    PublishedDevices,
    fits,
    lacking,
)
from dra_driver.cli.doctor.scheduling.selectors import (
    ERROR,
    UNKNOWN,
    Domains,
    Variables,
    evaluate,
    may_match,
    variables_of_others,
)
from dra_driver.k8s.claims import OpaqueConfig, parse_toleration
from dra_driver.model.health import Effect
from dra_driver.model.profiles import SharingStrategy

Document = Mapping[str, Any]


@frozen
class DeviceRequest:
    """One way to serve a request: itself, or one entry of its ``firstAvailable``."""

    path: str
    spec: Document
    name: str = ""  # with its subrequest: "gpu/large"
    configs: Sequence[Document] = ()  # of its claim
    has_fields: bool = True  # False: what is at its path is no more than a number

    def field(self, name: str) -> str:
        """Where *name* of it stands."""
        return f"{self.path}.{name}" if self.has_fields else self.path

    @property
    def class_name(self) -> str:
        return str(self.spec.get("deviceClassName"))

    @property
    def selectors(self) -> Sequence[Document]:
        """Its own, besides those of its class."""
        return self.spec.get("selectors") or ()

    @property
    def admin(self) -> bool:
        return bool(self.spec.get("adminAccess"))

    @property
    def every(self) -> bool:
        """Whether it is for all devices of a node that match."""
        return self.spec.get("allocationMode") == "All"

    @property
    def count(self) -> int:
        return int(self.spec.get("count") or 1)

    @property
    def amounts(self) -> Mapping[str, str]:
        return {
            str(name): str(amount)
            for name, amount in ((self.spec.get("capacity") or {}).get("requests") or {}).items()
        }


def requests_of(claim: Document) -> list[list[DeviceRequest]]:
    """Every request of a claim as the ways to serve it."""
    requests = []
    devices = (claim.get("spec") or {}).get("devices") or {}
    configs = devices.get("config") or ()
    for index, request in enumerate(devices.get("requests") or ()):
        path, name = f"spec.devices.requests[{index}]", str(request.get("name"))
        if "exactly" in request:
            requests.append([DeviceRequest(f"{path}.exactly", request["exactly"], name, configs)])
        else:
            listed = request.get("firstAvailable") or ()
            requests.append(
                [
                    DeviceRequest(
                        f"{path}.firstAvailable[{i}]",
                        alternative,
                        f"{name}/{alternative.get('name')}",
                        configs,
                    )
                    for i, alternative in enumerate(listed)
                ]
            )
    return requests


@frozen
class RequestedStrategy:
    """A strategy, and the field that asks for it."""

    strategy: str
    path: str

    def offered_by(self, device: PublishedDevice) -> bool:
        """An older plugin does not say: it knows no MPS, and lets processes take turns."""
        attributes = device.document.get("attributes") or {}
        if self.strategy == SharingStrategy.MPS:
            return bool((attributes.get(names.MPS) or {}).get("bool"))
        return bool((attributes.get(names.TIME_SLICING) or {}).get("bool", True))

    def refused(self, number: int) -> str:
        """Why none of *number* devices will do."""
        text = f"{self.path}: none of the {number} devices that it could have is shared by "
        if self.strategy == SharingStrategy.MPS:
            return (
                f"{text}MPS, for which a node has an MPS agent, a GPU compute capability 7.0 or "
                "above, and a profile does not forbid it"
            )
        return f"{text}{self.strategy}, as the profiles of their nodes have it"


def strategy_of(
    request: str,
    driver: str,
    device_class: Document,
    claim: Sequence[Document],
    partition: bool = False,
) -> RequestedStrategy | None:
    """What the configuration that counts for *request* asks for: the last of its class and its
    *claim* that is for GPUs, or for a MIG *partition*. None: it asks for nothing."""
    kind = "MigDeviceConfig" if partition else "GpuConfig"
    spec = device_class.get("spec") or {}
    name = (device_class.get("metadata") or {}).get("name")
    of_class = _configs(spec.get("config") or (), driver, f"DeviceClass {name}, spec.config")
    of_claim = _configs(claim, driver, "spec.devices.config")
    for config in reversed([*of_class, *of_claim]):
        if config.concerns(request) and config.parameters.get("kind") == kind:
            strategy = (config.parameters.get("sharing") or {}).get("strategy")
            return (
                RequestedStrategy(str(strategy), f"{config.path}.sharing.strategy")
                if strategy
                else None
            )
    return None


def _configs(listed: Sequence[Document], driver: str, path: str) -> Iterator[OpaqueConfig]:
    for index, config in enumerate(listed):
        opaque = config.get("opaque") or {}
        parameters = opaque.get("parameters")
        if opaque.get("driver") == driver and isinstance(parameters, dict):
            where = f"{path}[{index}].opaque.parameters"
            yield OpaqueConfig("", tuple(config.get("requests") or ()), parameters, where)


_WORD = re.compile(r"[A-Za-z_]\w*")


def missing_key(request: DeviceRequest, devices: Sequence[PublishedDevice]) -> str:
    """At which of *devices*, those of its class, *request* ends with an error, and how it would
    not; empty: at none, as far as that can be told."""
    lacks = [(device, lack) for device in devices if (lack := _missing(request, device.variables))]
    if not lacks:
        return ""
    device, (field, key) = lacks[0]
    more = f" (and {len(lacks) - 1} more of its class)" if len(lacks) > 1 else ""
    domain = device.variables.fields["driver"]
    return (
        f"{request.path}.selectors: {device.place}{more} has no {key}, which ends "
        f"the scheduler's search with an error (no such key: {key}); ask first whether it is "
        f"there: '{key}' in device.{field}['{domain}'] && …"
    )


_Key = tuple[str, str]  # of attributes or of capacity, and its name


def _missing(request: DeviceRequest, variables: Variables) -> _Key | None:
    """One of its selectors is asked after the other, until one is false."""
    for selector in request.selectors:
        expression = (selector.get("cel") or {}).get("expression") or "true"
        answer = evaluate(expression, variables)
        if answer is ERROR:
            return _culprit(expression, variables)
        if answer is not True:
            return None
    return None


def _culprit(expression: str, variables: Variables) -> _Key | None:
    """With which it would be no error."""
    words = dict.fromkeys(_WORD.findall(expression))
    each = ((field, word) for word in words for field in ("attributes", "capacity"))
    return next((key for key in each if _helps(key, expression, variables)), None)


def _helps(key: _Key, expression: str, variables: Variables) -> bool:
    field, word = key
    domains = variables.fields[field].items()
    more = Domains({domain: {word: UNKNOWN} | keys for domain, keys in domains})
    with_it = Variables({**variables.fields, field: more})
    return evaluate(expression, with_it) is not ERROR


def is_ours(request: DeviceRequest, published: PublishedDevices) -> bool:
    """Whether no device of another driver can serve *request*."""
    device_class = published.classes.get(request.class_name)
    if device_class is None:  # the chart's are called like that
        return f".{request.class_name}".endswith(f".{published.driver}")
    return not may_match(
        [*_selectors(device_class), *request.selectors], variables_of_others(published.driver)
    )


def _selectors(device_class: Document) -> Sequence[Document]:
    return (device_class.get("spec") or {}).get("selectors") or ()


def candidates(
    request: DeviceRequest, published: PublishedDevices
) -> tuple[Sequence[PublishedDevice], str]:
    """The devices that can serve *request*, or why there is none. Each step leaves fewer; the first
    that leaves none is the reason."""
    if request.class_name not in published.classes:
        where = request.field("deviceClassName")
        return (), f"{where}: there is no DeviceClass {request.class_name}"
    devices: Sequence[PublishedDevice] = published.devices
    for keep, why in _STEPS:
        fewer = keep(request, devices, published)
        if not fewer:
            return (), why(request, devices, published)
        devices = fewer
    return devices, _too_many(request, devices)


def of_class(
    request: DeviceRequest, devices: Sequence[PublishedDevice], published: PublishedDevices
) -> Sequence[PublishedDevice]:
    selectors = _selectors(published.classes[request.class_name])
    return [device for device in devices if may_match(selectors, device.variables)]


def _no_class(
    request: DeviceRequest, devices: Sequence[PublishedDevice], published: PublishedDevices
) -> str:
    kinds = ", ".join(sorted({device.kind for device in devices if device.kind}))
    why = (
        f"{request.field('deviceClassName')}: no node publishes a device that DeviceClass "
        f"{request.class_name} selects; there are devices of type {kinds}"
    )
    if _shared_so(request, devices, published):
        return why
    return f"{why}; {_not_shared_so(request, devices, published)}"


def _selected(
    request: DeviceRequest, devices: Sequence[PublishedDevice], published: PublishedDevices
) -> Sequence[PublishedDevice]:
    return [device for device in devices if may_match(request.selectors, device.variables)]


def _none_selected(
    request: DeviceRequest, devices: Sequence[PublishedDevice], published: PublishedDevices
) -> str:
    why = f"{request.path}.selectors: none of the {len(devices)} devices of its class match them"
    profiles = sorted({device.profile for device in devices if device.profile})
    kinds = f"their MIG profiles are {', '.join(profiles)}" if profiles else ""
    return "; ".join(part for part in (why, kinds, missing_key(request, devices)) if part)


def _permitted(
    request: DeviceRequest, devices: Sequence[PublishedDevice], published: PublishedDevices
) -> Sequence[PublishedDevice]:
    return [d for d in devices if request.admin or d.kind != names.TYPE_GPU_MONITOR]


def _not_permitted(
    request: DeviceRequest, devices: Sequence[PublishedDevice], published: PublishedDevices
) -> str:
    return (
        f"{request.field('adminAccess')}: only monitor devices match, which are for claims with "
        "adminAccess: true in a namespace with the label "
        'resource.kubernetes.io/admin-access: "true"'
    )


def _tolerated(
    request: DeviceRequest, devices: Sequence[PublishedDevice], published: PublishedDevices
) -> Sequence[PublishedDevice]:
    """Only the monitor taint counts, which a monitor device always has: others may be temporary."""
    return [
        device
        for device in devices
        if device.kind != names.TYPE_GPU_MONITOR
        or all(
            taint.get("key") != names.MONITOR_TAINT for taint in untolerated_taints(request, device)
        )
    ]


def _not_tolerated(
    request: DeviceRequest, devices: Sequence[PublishedDevice], published: PublishedDevices
) -> str:
    return (
        f"{request.field('tolerations')}: monitor devices have the taint {names.MONITOR_TAINT}; "
        f"add a toleration with key: {names.MONITOR_TAINT} and operator: Exists"
    )


def _strategies(
    request: DeviceRequest, published: PublishedDevices
) -> Mapping[bool, RequestedStrategy]:
    """What it asks for of partitions (true) and of GPUs (false). Admin access shares nothing,
    whatever its configuration says."""
    if request.admin:
        return {}
    device_class = published.classes[request.class_name]
    strategies = {
        partition: strategy_of(
            request.name, published.driver, device_class, request.configs, partition
        )
        for partition in (False, True)
    }
    return {partition: strategy for partition, strategy in strategies.items() if strategy}


def _is_partition(device: PublishedDevice) -> bool:
    return device.kind == names.TYPE_MIG


def _shared_so(
    request: DeviceRequest, devices: Sequence[PublishedDevice], published: PublishedDevices
) -> Sequence[PublishedDevice]:
    strategies = _strategies(request, published)
    return [
        device
        for device in devices
        if (strategy := strategies.get(_is_partition(device))) is None
        or strategy.offered_by(device)
    ]


def _not_shared_so(
    request: DeviceRequest, devices: Sequence[PublishedDevice], published: PublishedDevices
) -> str:
    number = Counter(map(_is_partition, devices))
    strategies = _strategies(request, published)
    return "; ".join(
        strategy.refused(number[kind]) for kind, strategy in strategies.items() if number[kind]
    )


def _large_enough(
    request: DeviceRequest, devices: Sequence[PublishedDevice], published: PublishedDevices
) -> Sequence[PublishedDevice]:
    amounts = request.amounts.items()
    return [
        device
        for device in devices
        if all(fits(amount, device.capacity.get(name)) for name, amount in amounts)
    ]


def _none_large_enough(
    request: DeviceRequest, devices: Sequence[PublishedDevice], published: PublishedDevices
) -> str:
    reasons = [
        f"{request.path}.capacity.requests[{name}]: {why}"
        for name, amount in sorted(request.amounts.items())
        if (why := lacking(name, amount, devices, published.driver))
    ]
    if reasons:
        return "; ".join(reasons)
    amounts = ", ".join(f"{name}: {amount}" for name, amount in sorted(request.amounts.items()))
    return f"{request.path}.capacity.requests: no one device has all of it ({amounts})"


_Step = Callable[
    [DeviceRequest, Sequence[PublishedDevice], PublishedDevices], Sequence[PublishedDevice]
]
_Why = Callable[[DeviceRequest, Sequence[PublishedDevice], PublishedDevices], str]
_STEPS: tuple[tuple[_Step, _Why], ...] = (
    (of_class, _no_class),
    (_selected, _none_selected),
    (_permitted, _not_permitted),
    (_tolerated, _not_tolerated),
    (_shared_so, _not_shared_so),
    (_large_enough, _none_large_enough),
)


def _too_many(request: DeviceRequest, devices: Sequence[PublishedDevice]) -> str:
    """A claim is served by one node, and a request by different devices of it."""
    if request.every:
        return ""
    count = request.count
    (node, number) = Counter(device.node for device in devices).most_common(1)[0]
    if count <= number:
        return ""
    where = request.field("count")
    return f"{where}: asks for {count}, but no node has more than {number} such ({node})"


def untolerated_taints(request: DeviceRequest, device: PublishedDevice) -> Sequence[Document]:
    """The taints of *device* for which the scheduler does not give it to *request*."""
    tolerations = [parse_toleration(each) for each in request.spec.get("tolerations") or ()]
    return [
        taint
        for taint in device.document.get("taints") or ()
        if taint.get("effect") in _KEEPING_AWAY
        and not any(
            each.tolerates(taint.get("key") or "", taint.get("value") or "", taint["effect"])
            for each in tolerations
        )
    ]


_KEEPING_AWAY = (Effect.NO_SCHEDULE, Effect.NO_EXECUTE)
