"""The rules for a device's capacity: quantities, and how much of one a claim may take (KEP-5075).

Rules: validateRequestPolicy in k8s.io/kubernetes/pkg/apis/resource/validation.
"""

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from dra_driver.kubeletplugin import quantity

Document = Mapping[str, Any]

_MAX_VALID_VALUES = 10


def check_capacity(capacity: Mapping[str, Document], many_claims: bool) -> Iterator[str]:
    """What is wrong with the *capacity* of a device that *many_claims* may share, or only one."""
    for key, entry in sorted(capacity.items()):
        for problem in _problems(entry, many_claims):
            yield f"capacity {key!r}: {problem}"


def _problems(entry: Document, many_claims: bool) -> Iterator[str]:
    policy = entry.get("requestPolicy")
    given = {"value": entry.get("value")}
    if policy:
        given |= _amounts(policy)
    bad = [f"{name} {text!r} is not a quantity" for name, text in given.items() if not _is(text)]
    if bad or not policy:
        yield from bad
        return
    if not many_claims:
        yield "a requestPolicy needs allowMultipleAllocations on the device"
    amounts = {name: quantity.parse(str(text)) for name, text in given.items()}
    if amounts.get("default", 0) > amounts["value"]:
        # The API server takes this, but no claim that leaves the amount open could be served.
        yield "default is more than value"
    yield from _range_problems(policy, amounts)
    yield from _values_problems(policy, amounts)


def _amounts(policy: Document) -> dict[str, Any]:
    """Every quantity that *policy* says, by name."""
    ranged = policy.get("validRange") or {}
    values = enumerate(policy.get("validValues") or ())
    found = {"default": policy.get("default")} if policy.get("default") is not None else {}
    return {
        **found,
        **{name: ranged[name] for name in ("min", "max", "step") if ranged.get(name) is not None},
        **{f"validValues[{index}]": value for index, value in values},
    }


def _is(text: Any) -> bool:
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
