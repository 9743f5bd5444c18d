"""What the API server makes of a ResourceSlice: fields dropped, added, rewritten, or all refused.

Only quantities are rewritten by our own code, which has a test of its own against Kubernetes'
examples.
"""

import copy
import time
from collections.abc import Callable
from typing import Any

from dra_driver.k8s.quantity import canonical
from tests.fakes.pool_rules import slice_problems

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


def as_stored(written: Object, before: Object | None, disabled: set[str]) -> Object:
    """*given* as it is kept when the gates in *disabled* are off."""
    stored = copy.deepcopy(written)
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
    problems = slice_problems(spec.get("devices") or (), spec.get("sharedCounters") or ())
    return next((f"spec: Invalid value: {problem}" for problem in problems), "")


def _fixed(spec: Object, path: str) -> Any:
    return spec["pool"].get("name") if path == "pool" else spec.get(path)


def _pool(spec: Object) -> Object:
    return spec.get("pool") or {}


_SLICE_RULES: tuple[tuple[Callable[[Object], bool], str], ...] = (
    (lambda s: not 0 < len(s.get("driver") or "") < 64, "driver: Invalid value"),
    (lambda s: not _pool(s).get("name"), "pool.name: Required value"),
    (lambda s: _pool(s).get("resourceSliceCount", 0) < 1, "pool.resourceSliceCount: too small"),
    (lambda s: _pool(s).get("generation", -1) < 0, "pool.generation: too small"),
    (
        lambda s: sum(bool(s.get(f)) for f in ("nodeName", "nodeSelector", "allNodes")) != 1,
        "nodeName: Invalid value: exactly one of nodeName, nodeSelector, allNodes is required",
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
