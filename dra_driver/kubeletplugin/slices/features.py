"""Which fields of a ResourceSlice an API server keeps, found by asking it to create some.

A feature gate that is off does not make the API server refuse a field: it drops it without a word
(KEP-4381, "strategy"), and what was meant as one share of a device is then all of it. No version
tells, since gates can be set either way. So each feature is asked about by a slice that is
created with ``dryRun=All``: it goes through conversion, admission, validation and the dropping of
fields, and is stored nowhere.
"""

from typing import Any

from dra_driver.base.errors import Refused
from dra_driver.base.frozen import frozen
from dra_driver.k8s.api import Document, KubernetesApi
from dra_driver.k8s.resource_versions import (
    RESOURCE_GROUP,
    convert_slice_from_v1,
    convert_slice_to_v1,
)
from dra_driver.kubeletplugin.slices.comparison import dropped_fields

_COUNTERS = "probe"


@frozen
class SliceFeatures:
    """What the API server keeps of a slice, beyond devices with plain attributes and capacity."""

    device_taints: bool  # KEP-5055, gate DRADeviceTaints
    consumable_capacity: bool  # KEP-5075, gate DRAConsumableCapacity
    shared_counters: bool  # KEP-4815, gate DRAPartitionableDevices
    counters_apart: bool  # devices may use counters of another slice (1.35 and newer) …
    counters_beside: bool  # … or only of their own (1.33 and 1.34)
    list_attributes: bool  # KEP-5491, gate DRAListTypeAttributes


def probe_slice_features(api: KubernetesApi, version: str, driver: str, node: str) -> SliceFeatures:
    """What the API server keeps of slices of *driver* on *node*, in *version* of its group.

    Five to seven requests; nothing is stored. ApiServerError: it refuses even a plain
    slice, so nothing is known.
    """

    def dropped(spec: Document) -> tuple[str, ...]:
        return dropped_fields(*_dry_run(api, version, _document(spec, driver, node)))

    def features(spec: Document) -> bool:
        try:
            return not dropped(spec)
        except Refused:  # what is left of it without the field is no slice
            return False

    dropped(_devices())  # anything refused from here on is refused for what it has in addition
    counters = features(_counter_sets())
    return SliceFeatures(
        device_taints=features(
            _devices(taints=[{"key": f"{driver}/probe", "effect": "NoSchedule"}])
        ),
        consumable_capacity=features(
            _devices(allowMultipleAllocations=True, capacity=_consumable())
        ),
        shared_counters=counters,
        counters_apart=counters and features(_consumer()),
        counters_beside=counters and features({**_counter_sets(), **_consumer()}),
        list_attributes=features(_devices(attributes={"probe": {"ints": [0, 1]}})),
    )


def probe_device_features(
    api: KubernetesApi, version: str, driver: str, node: str
) -> tuple[bool, bool, bool]:
    """Whether consumable capacity, taints, and devices that use counters of another slice, are
    kept: what a plugin has to know before it publishes.

    One request, or two where such devices are refused (1.33 and 1.34). ApiServerError: nothing is
    known.
    """
    taints = [{"key": f"{driver}/probe", "effect": "NoSchedule"}]
    plain = _devices(taints=taints, allowMultipleAllocations=True, capacity=_consumable())
    counting = _devices(**{**plain["devices"][0], **_consumer()["devices"][0]})
    try:
        _, stored = _dry_run(api, version, _document(counting, driver, node))
    except Refused:
        _, stored = _dry_run(api, version, _document(plain, driver, node))
    device: Document = next(iter(stored.get("devices") or ({},)))
    policy = device.get("capacity", {}).get("probe", {}).get("requestPolicy")
    return (
        bool(device.get("allowMultipleAllocations") and policy),
        bool(device.get("taints")),
        bool(device.get("consumesCounters")),
    )


def _dry_run(api: KubernetesApi, version: str, document: Document) -> tuple[Document, Document]:
    """The spec that is sent, and what the API server would keep of it."""
    path = f"/apis/{RESOURCE_GROUP}/{version}/resourceslices"
    answer = api.create(path, convert_slice_from_v1(version, document), {"dryRun": "All"})
    return document["spec"], convert_slice_to_v1(answer)["spec"]


def _document(spec: Document, driver: str, node: str) -> Document:
    # As the slices of the node are, since an admission policy may let only those pass.
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    return {
        "metadata": {"generateName": f"probe-{driver}-"},
        "spec": {"driver": driver, "nodeName": node, "pool": pool, **spec},
    }


def _devices(**fields: Any) -> Document:
    return {"devices": [{"name": "probe", **fields}]}


def _consumable() -> Document:
    ranged = {"min": "1", "max": "4", "step": "1"}
    return {"probe": {"value": "4", "requestPolicy": {"default": "4", "validRange": ranged}}}


def _counter_sets() -> Document:
    return {"sharedCounters": [{"name": _COUNTERS, "counters": {"probe": {"value": "1"}}}]}


def _consumer() -> Document:
    consumed = {"counterSet": _COUNTERS, "counters": {"probe": {"value": "1"}}}
    return _devices(consumesCounters=[consumed])
