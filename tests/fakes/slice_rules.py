"""What the API server makes of a ResourceSlice: fields dropped, added, rewritten, or all refused.

Written from the API's documentation and not from our own checks, which it tests. Only quantities
are rewritten by our own code, which has a test of its own against Kubernetes' examples.
"""

import copy
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from dra_driver.k8s.quantity import canonical

Object = dict[str, Any]

GATED = {
    "DRADeviceTaints": ("taints",),
    "DRAPartitionableDevices": ("consumesCounters", "nodeName", "nodeSelector", "allNodes"),
    "DRADeviceBindingConditions": (
        "bindsToNode",
        "bindingConditions",
        "bindingFailureConditions",
    ),
    "DRAConsumableCapacity": ("allowMultipleAllocations",),
    "DRANodeAllocatableResources": ("nodeAllocatableResources",),
}
DEVICE_FIELDS = {
    "name",
    "attributes",
    "capacity",
    *(field for fields in GATED.values() for field in fields),
}
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")
_IDENTIFIER = re.compile(r"([a-z0-9.-]{1,63}/)?[A-Za-z_][A-Za-z0-9_]{0,31}$")
_SEMVER = re.compile(
    r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?$"
)
_EFFECTS = ("NoSchedule", "NoExecute", "None")


def as_stored(given: Object, before: Object | None, disabled: set[str]) -> Object:
    """*given* as it is kept when the gates in *disabled* are off."""
    stored = copy.deepcopy(given)
    spec, old = stored["spec"], (before or {}).get("spec") or {}
    used = {field for device in old.get("devices") or () for field in device}
    dropped = {field for gate in disabled for field in GATED.get(gate, ())} - used
    for device in spec.get("devices") or ():
        for field in dropped:
            device.pop(field, None)
        _rewrite(device, "DRAConsumableCapacity" in disabled)
    if "DRAPartitionableDevices" in disabled and not old.get("sharedCounters"):
        spec.pop("sharedCounters", None)
    _canonical_values([each.get("counters") or {} for each in spec.get("sharedCounters") or ()])
    for field in ("devices", "sharedCounters"):
        if not spec.get(field):
            spec.pop(field, None)
    return stored


def refuse_slice(spec: Object, before: Object | None) -> str:
    """Why the slice with *spec* is refused, which was *before*; empty if it is taken."""
    for broken, message in _SLICE_RULES:
        if broken(spec):
            return f"spec.{message}"
    for path in ("driver", "nodeName", "pool"):
        if before and _fixed(before, path) != _fixed(spec, path):
            return f"spec.{path}: Invalid value: field is immutable"
    for index, device in enumerate(spec.get("devices") or ()):
        for broken, message in _DEVICE_RULES:
            if broken(device):
                return f"spec.devices[{index}].{message}"
    return ""


def _fixed(spec: Object, path: str) -> Any:
    return spec["pool"].get("name") if path == "pool" else spec.get(path)


def _most(spec: Object) -> int:
    devices = _devices(spec)
    return 64 if any(d.get("taints") or d.get("consumesCounters") for d in devices) else 128


def _devices(spec: Object) -> list[Object]:
    return spec.get("devices") or []


def _pool(spec: Object) -> Object:
    return spec.get("pool") or {}


def _values(device: Object, kind: str) -> Iterator[str]:
    return (each[kind] for each in (device.get("attributes") or {}).values() if kind in each)


def _names(device: Object) -> tuple[str, ...]:
    return (*(device.get("attributes") or ()), *(device.get("capacity") or ()))


_SLICE_RULES: tuple[tuple[Callable[[Object], bool], str], ...] = (
    (lambda s: not 0 < len(s.get("driver") or "") < 64, "driver: Invalid value"),
    (lambda s: not _pool(s).get("name"), "pool.name: Required value"),
    (lambda s: _pool(s).get("resourceSliceCount", 0) < 1, "pool.resourceSliceCount: too small"),
    (lambda s: _pool(s).get("generation", -1) < 0, "pool.generation: too small"),
    (
        lambda s: sum(bool(s.get(f)) for f in ("nodeName", "nodeSelector", "allNodes")) != 1,
        "nodeName: Invalid value: exactly one of nodeName, nodeSelector, allNodes is required",
    ),
    (lambda s: len(_devices(s)) > _most(s), "devices: Too many: must have at most 128 (64) items"),
    (lambda s: bool(s.get("devices") and s.get("sharedCounters")), "devices: Forbidden: counters"),
    (lambda s: len(s.get("sharedCounters") or ()) > 8, "sharedCounters: Too many"),
    (
        lambda s: len({d["name"] for d in _devices(s)}) < len(_devices(s)),
        "devices: Duplicate value",
    ),
)
_DEVICE_RULES: tuple[tuple[Callable[[Object], bool], str], ...] = (
    (lambda d: not _LABEL.match(d.get("name", "")), "name: Invalid value: no DNS label"),
    (lambda d: len(_names(d)) > 32, "attributes: Too many: at most 32 with capacity"),
    (lambda d: not all(map(_IDENTIFIER.match, _names(d))), "attributes: no C identifier"),
    (
        lambda d: any(len(each) != 1 for each in (d.get("attributes") or {}).values()),
        "attributes: Invalid value: exactly one value must be specified",
    ),
    (
        lambda d: any(len(v.encode()) > 64 for k in ("string", "version") for v in _values(d, k)),
        "attributes: Too long: may not be more than 64 bytes",
    ),
    (lambda d: not all(map(_SEMVER.match, _values(d, "version"))), "attributes: no semver"),
    (lambda d: len(d.get("consumesCounters") or ()) > 2, "consumesCounters: Too many"),
    (
        lambda d: any(
            each.get("requestPolicy") and not d.get("allowMultipleAllocations")
            for each in (d.get("capacity") or {}).values()
        ),
        "capacity: Forbidden: requestPolicy without allowMultipleAllocations",
    ),
    (
        lambda d: any(
            not taint.get("key") or taint.get("effect") not in _EFFECTS
            for taint in d.get("taints") or ()
        ),
        "taints: Required value: key and effect",
    ),
)


def _rewrite(device: Object, without_policies: bool) -> None:
    for each in (device.get("capacity") or {}).values():
        if without_policies:
            each.pop("requestPolicy", None)
        _canonical_values(each)
    _canonical_values([each["counters"] for each in device.get("consumesCounters") or ()])
    for taint in device.get("taints") or ():
        taint.setdefault("timeAdded", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    for field in [key for key, value in device.items() if value in ({}, [], None)]:
        del device[field]


def _canonical_values(value: Any) -> None:
    """Rewrite every quantity below *value*, which is a dict or list."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in list(items):
        if isinstance(each, dict | list):
            _canonical_values(each)
        else:
            value[key] = canonical(str(each))
