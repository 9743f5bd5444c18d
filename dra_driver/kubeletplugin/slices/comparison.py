"""What counts when two ResourceSlices are compared, and what an API server dropped from one.

An API server does not give back what it was given: it rewrites quantities, drops empty lists, adds
the time to taints, and drops fields whose feature gate is off. Comparing without that in mind
means writing for ever.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any

from dra_driver.k8s import quantity

Document = Mapping[str, Any]
TaintKey = tuple[str, str, str, str]  # device, key, value, effect
TaintTimes = Mapping[TaintKey, str]

_SAME_TIME = timedelta(seconds=1)  # metav1.Time keeps whole seconds


def comparable_spec(spec: Document) -> str:
    """What of the *spec* of a slice of v1 counts, as canonical JSON: equal for equal slices.

    Without the pool, whose generation and count are bookkeeping, and without the taints' times.
    """
    return json.dumps(_normal(spec), sort_keys=True, separators=(",", ":"))


def dropped_fields(sent: Document, stored: Document) -> tuple[str, ...]:
    """Which fields of the *sent* spec are missing or different in the *stored* one, sorted.

    >>> sent = {"devices": [{"name": "a", "taints": [{"key": "k", "effect": "NoExecute"}]}]}
    >>> dropped_fields(sent, {"devices": [{"name": "a"}]})
    ('devices[].taints',)
    """
    return tuple(sorted(set(_differences("", _normal(sent), _normal(stored)))))


def taint_times(specs: Iterable[Document]) -> TaintTimes:
    """When each taint in *specs* was added, where that is said."""
    return {
        (device["name"], *_identity(taint)): taint["timeAdded"]
        for spec in specs
        for device in spec.get("devices") or ()
        for taint in device.get("taints") or ()
        if taint.get("timeAdded")
    }


def with_taint_times(spec: Document, times: TaintTimes) -> dict[str, Any]:
    """*spec*, its taints with their time in *times*, unless they say another themselves."""
    return {**spec, "devices": [_timed(device, times) for device in spec.get("devices") or ()]}


def same_taint_times(spec: Document, times: TaintTimes) -> bool:
    """Whether every time that *spec* gives agrees with that of the same taint in *times*."""
    own = taint_times([spec])
    return all(_agree(time, times[key]) for key, time in own.items() if key in times)


def _timed(device: Document, times: TaintTimes) -> Document:
    if not device.get("taints"):
        return device
    taints = []
    for taint in device["taints"]:
        known = times.get((device["name"], *_identity(taint)))
        keep = known and (not taint.get("timeAdded") or _agree(taint["timeAdded"], known))
        taints.append({**taint, "timeAdded": known} if keep else taint)
    return {**device, "taints": taints}


def _identity(taint: Document) -> tuple[str, str, str]:
    return taint.get("key", ""), taint.get("value") or "", taint.get("effect", "")


def _agree(time: str, known: str) -> bool:
    try:
        return abs(datetime.fromisoformat(time) - datetime.fromisoformat(known)) <= _SAME_TIME
    except (ValueError, TypeError):  # no time, or one with and one without a zone
        return time == known


def _normal(spec: Document) -> Any:
    plain: dict[str, Any] = {key: value for key, value in spec.items() if key != "pool"}
    plain["devices"] = [_normal_device(device) for device in spec.get("devices") or ()]
    plain["sharedCounters"] = [
        {**each, "counters": _amounts(each.get("counters"))}
        for each in spec.get("sharedCounters") or ()
    ]
    return _without_empty(plain)


def _normal_device(device: Document) -> Document:
    return {
        **device,
        "capacity": _amounts(device.get("capacity")),
        "consumesCounters": [
            {**each, "counters": _amounts(each.get("counters"))}
            for each in device.get("consumesCounters") or ()
        ],
        "taints": [
            {key: value for key, value in taint.items() if key != "timeAdded" and value != ""}
            for taint in device.get("taints") or ()
        ],
    }


def _amounts(value: Any) -> Any:
    """*value* with every quantity in it as the API server writes it."""
    if isinstance(value, Mapping):
        return {key: _amounts(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_amounts(each) for each in value]
    try:
        return quantity.canonical(str(value))
    except ValueError:
        return value


def _without_empty(value: Any) -> Any:
    """*value* without what JSON's omitempty leaves out; False and 0 are values."""
    if isinstance(value, Mapping):
        plain = {key: _without_empty(each) for key, each in value.items()}
        return {key: each for key, each in plain.items() if not _is_empty(each)}
    if isinstance(value, list | tuple):
        return [_without_empty(each) for each in value]
    return value


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, Mapping | list) and not value)


def _differences(path: str, sent: Any, stored: Any) -> Iterator[str]:
    if isinstance(sent, Mapping) and isinstance(stored, Mapping):
        for key, value in sent.items():
            below = f"{path}.{key}" if path else key
            if key in stored:
                yield from _differences(below, value, stored[key])
            else:
                yield below
    elif isinstance(sent, list) and isinstance(stored, list) and len(sent) == len(stored):
        for sent_item, stored_item in zip(sent, stored, strict=True):
            yield from _differences(f"{path}[]", sent_item, stored_item)
    elif sent != stored:
        yield path
