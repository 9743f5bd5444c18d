"""What the API server takes of ResourceSlices: the rules by which the fake one refuses them.

Rules: k8s.io/kubernetes/pkg/apis/resource/validation, and the limits in k8s.io/api/resource/v1.
:func:`validate_pool` is what tests hold our pools against; the end-to-end tests hold it against a
real API server.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from dra_driver.k8s import quantity
from dra_driver.kubeletplugin.slices.reconcile import (
    MAX_COUNTER_SETS,
    MAX_DEVICES,
    MAX_DEVICES_ADVANCED,
    Pool,
    is_advanced,
    pool_problems,
)

Document = Mapping[str, Any]

_MAX_VALID_VALUES = 10


def _capacity_problems(capacity: Mapping[str, Document], many_claims: bool) -> Iterator[str]:
    """What is wrong with the *capacity* of a device that *many_claims* may share, or only one."""
    for key, entry in sorted(capacity.items()):
        for problem in _policy_problems(entry, many_claims):
            yield f"capacity {key!r}: {problem}"


def _policy_problems(entry: Document, many_claims: bool) -> Iterator[str]:
    policy = entry.get("requestPolicy")
    quantities = {"value": entry.get("value")}
    if policy:
        quantities |= _amounts(policy)
    bad = [
        f"{name} {text!r} is not a quantity"
        for name, text in quantities.items()
        if not _is_quantity(text)
    ]
    if bad or not policy:
        yield from bad
        return
    if not many_claims:
        yield "a requestPolicy needs allowMultipleAllocations on the device"
    amounts = {name: quantity.parse(str(text)) for name, text in quantities.items()}
    yield from _range_problems(policy, amounts)
    yield from _values_problems(policy, amounts)


def _amounts(policy: Document) -> dict[str, Any]:
    """Every quantity that *policy* says, by name."""
    ranged = policy.get("validRange") or {}
    values = enumerate(policy.get("validValues") or ())
    amounts = {"default": policy.get("default")} if policy.get("default") is not None else {}
    return {
        **amounts,
        **{name: ranged[name] for name in ("min", "max", "step") if ranged.get(name) is not None},
        **{f"validValues[{index}]": value for index, value in values},
    }


def _is_quantity(text: Any) -> bool:
    try:
        quantity.parse(str(text))
    except ValueError:
        return False
    return True


def _range_problems(policy: Document, amounts: Mapping[str, Fraction]) -> Iterator[str]:
    if policy.get("validRange") is None:
        return
    if policy.get("validValues"):
        yield "validRange and validValues exclude each other"
    if "min" not in amounts or "default" not in amounts:
        yield "validRange needs min and default"
        return
    least, default, value = amounts["min"], amounts["default"], amounts["value"]
    most = amounts.get("max", value)
    if not least <= default <= most <= value:
        yield "not min <= default <= max <= value"
    step = amounts.get("step")
    if step is None:
        return
    if step <= 0 or least + step > value:
        yield "step has to be positive, and min + step at most value"
    elif (default - least) % step or ("max" in amounts and (most - least) % step):
        yield "default and max have to be min plus a multiple of step"


def _values_problems(policy: Document, amounts: Mapping[str, Fraction]) -> Iterator[str]:
    values = [
        amounts[f"validValues[{index}]"] for index, _ in enumerate(policy.get("validValues") or ())
    ]
    if not values:
        return
    if len(values) > _MAX_VALID_VALUES:
        yield f"{len(values)} validValues, at most {_MAX_VALID_VALUES} are taken"
    if sorted(set(values)) != values or values[-1] > amounts["value"]:
        yield "validValues have to ascend and be at most value"
    if amounts.get("default") not in values:
        yield "validValues need a default that is one of them"


_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_C_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")
_LABEL_PART = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_NUMBER = r"(0|[1-9][0-9]*)"
_IDENTIFIER = r"(0|[1-9][0-9]*|[0-9]*[A-Za-z-][0-9A-Za-z-]*)"
_SEMVER = re.compile(
    rf"{_NUMBER}\.{_NUMBER}\.{_NUMBER}(-{_IDENTIFIER}(\.{_IDENTIFIER})*)?(\+[0-9A-Za-z-]+(\.[0-9A-Za-z-]+)*)?"
)
_VALUES = ("bool", "int", "string", "version", "bools", "ints", "strings", "versions")
_EFFECTS = ("NoSchedule", "NoExecute", "None")

_MAX_DOMAIN = 63
_MAX_ATTRIBUTES = 32
_MAX_VALUES = 48
_MAX_VALUE_BYTES = 64
_MAX_COUNTERS = 32
_MAX_CONSUMED_SETS = 2
_MAX_TAINTS = 16
_MAX_POOL_NAME = 253


def validate_pool(pool: Pool, driver: str = "") -> tuple[str, ...]:
    """Everything that is wrong with *pool*, as sentences that name the device; none if it is right.

    With *driver*, also attributes that are published both with and without the driver's domain.
    """
    return tuple(_problems(pool, driver))


def _problems(pool: Pool, driver: str) -> Iterator[str]:
    parts = pool.name.split("/")
    if len(pool.name) > _MAX_POOL_NAME or not all(map(_SUBDOMAIN.fullmatch, parts)):
        yield f"pool {pool.name!r}: the name is not DNS subdomains separated by '/'"
    yield from pool_problems(pool)
    for part in pool.slices:
        yield from slice_problems(part.devices, part.shared_counters, driver)
    for device in pool.devices:
        for key, entry in sorted((device.get("capacity") or {}).items()):
            if _default_beyond_value(entry):
                # The API server takes this, but no claim that leaves the amount open is served.
                yield f"device {device.get('name')!r}: capacity {key!r}: default is more than value"


def slice_problems(
    devices: Sequence[Document], counter_sets: Sequence[Document], driver: str = ""
) -> Iterator[str]:
    """Why the API server refuses a slice with these devices and counter sets."""
    most = MAX_DEVICES_ADVANCED if any(map(is_advanced, devices)) else MAX_DEVICES
    if len(devices) > most:
        yield f"{len(devices)} devices in a slice, at most {most} are taken"
    if len(counter_sets) > MAX_COUNTER_SETS:
        yield f"{len(counter_sets)} counter sets in a slice, at most {MAX_COUNTER_SETS} are taken"
    if devices and counter_sets:
        yield "devices and counter sets in a slice, which need slices of their own"
    names = Counter(device.get("name") for device in devices)
    yield from (f"device {name!r} is there twice" for name, count in names.items() if count > 1)
    yield from _counter_set_problems(counter_sets)
    for device in devices:
        for problem in (*_device_problems(device, driver), *_consumed_problems(device)):
            yield f"device {device.get('name')!r}: {problem}"


def _default_beyond_value(entry: Document) -> bool:
    texts = [(entry.get("requestPolicy") or {}).get("default"), entry.get("value")]
    if not all(map(_is_quantity, texts)):
        return False
    default, value = (quantity.parse(str(text)) for text in texts)
    return default > value


def _counter_set_problems(sets: Iterable[Document]) -> Iterator[str]:
    sets = list(sets)
    names = (each.get("name", "") for each in sets)
    yield from (f"counter set {name!r} is there more than once" for name in _duplicates(names))
    for each in sets:
        name, counters = each.get("name", ""), each.get("counters") or {}
        if not _LABEL.fullmatch(name):
            yield f"counter set {name!r}: the name is not a DNS label"
        if not 1 <= len(counters) <= _MAX_COUNTERS:
            yield f"counter set {name!r} has {len(counters)} counters, not 1 to {_MAX_COUNTERS}"
        bad = sorted(key for key in counters if not _LABEL.fullmatch(key))
        yield from (f"counter set {name!r}: counter {key!r} is not a DNS label" for key in bad)


def _device_problems(device: Document, driver: str) -> Iterator[str]:
    attributes, capacity = device.get("attributes") or {}, device.get("capacity") or {}
    if not _LABEL.fullmatch(device.get("name", "")):
        yield "the name is not a DNS label"
    if len(attributes) + len(capacity) > _MAX_ATTRIBUTES:
        number = len(attributes) + len(capacity)
        yield f"{number} attributes and capacities, at most {_MAX_ATTRIBUTES} together are taken"
    if (number := sum(map(_number_of_values, attributes.values()))) > _MAX_VALUES:
        yield f"{number} attribute values, at most {_MAX_VALUES} are taken"
    for entries, kind in ((attributes, "attribute"), (capacity, "capacity")):
        plain = Counter(key.removeprefix(f"{driver}/") if driver else key for key in entries)
        yield from (
            f"{kind} {key!r} is there with and without the driver's domain"
            for key, number in sorted(plain.items())
            if number > 1
        )
        yield from (_key_problem(kind, key) for key in sorted(entries) if not _is_key(key))
    for key, value in sorted(attributes.items()):
        yield from (f"attribute {key!r} {problem}" for problem in _value_problems(value))
    yield from _capacity_problems(capacity, bool(device.get("allowMultipleAllocations")))
    yield from _taint_problems(device.get("taints") or ())


def _is_key(key: str) -> bool:
    domain, slash, name = key.rpartition("/")
    return bool(
        _C_IDENTIFIER.fullmatch(name)
        and (not slash or (len(domain) <= _MAX_DOMAIN and _SUBDOMAIN.fullmatch(domain)))
    )


def _key_problem(kind: str, key: str) -> str:
    return (
        f"{kind} {key!r}: a name is a C identifier of at most 32 bytes, "
        f"behind an optional DNS subdomain of at most {_MAX_DOMAIN} and '/'"
    )


def _number_of_values(attribute: Document) -> int:
    return sum(len(value) if isinstance(value, list) else 1 for value in attribute.values())


def _value_problems(attribute: Document) -> Iterator[str]:
    if len(attribute) != 1 or next(iter(attribute)) not in _VALUES:
        yield f"has to have exactly one of {', '.join(_VALUES)}"
        return
    ((kind, value),) = attribute.items()
    values = value if kind.endswith("s") else [value]
    if not isinstance(values, list) or not values:
        yield "is a list without values"
        return
    yield from (problem for each in values if (problem := _one_problem(kind.rstrip("s"), each)))


def _one_problem(kind: str, value: Any) -> str:
    if kind in ("bool", "int"):
        if type(value) is not (bool if kind == "bool" else int):
            return f"{value!r} is not of type {kind}"
        return "" if -(2**63) <= value < 2**63 else f"{value} does not fit into 64 bits"
    if not isinstance(value, str):
        return f"{value!r} is not a string"
    if len(value.encode()) > _MAX_VALUE_BYTES:
        return f"{value!r} has {len(value.encode())} bytes, at most {_MAX_VALUE_BYTES} are taken"
    if kind == "version" and not _SEMVER.fullmatch(value):
        return f"{value!r} is not a semantic version like 1.2.3 (semver.org 2.0.0)"
    return ""


def _consumed_problems(device: Document) -> Iterator[str]:
    consumed = device.get("consumesCounters") or ()
    if len(consumed) > _MAX_CONSUMED_SETS:
        yield f"consumes {len(consumed)} counter sets, at most {_MAX_CONSUMED_SETS} are taken"
    names = [each.get("counterSet", "") for each in consumed]
    yield from (f"consumes counter set {name!r} more than once" for name in _duplicates(names))
    for each in consumed:
        if not 1 <= len(each.get("counters") or {}) <= _MAX_COUNTERS:
            yield f"consumes {len(each.get('counters') or {})} counters, not 1 to {_MAX_COUNTERS}"


def _taint_problems(taints: Iterable[Document]) -> Iterator[str]:
    taints = list(taints)
    if len(taints) > _MAX_TAINTS:
        yield f"{len(taints)} taints, at most {_MAX_TAINTS} are taken"
    for taint in taints:
        key, value, effect = (str(taint.get(part) or "") for part in ("key", "value", "effect"))
        domain, slash, name = key.rpartition("/")
        if not _LABEL_PART.fullmatch(name) or (slash and not _SUBDOMAIN.fullmatch(domain)):
            yield f"taint {key!r}: the key is not a label name"
        if value and not _LABEL_PART.fullmatch(value):
            yield f"taint {key!r}: {value!r} is not a label value"
        if effect not in _EFFECTS:
            yield f"taint {key!r}: the effect {effect!r} is none of {', '.join(_EFFECTS)}"


def _duplicates(names: Iterable[str]) -> list[str]:
    return sorted(name for name, number in Counter(names).items() if number > 1)
