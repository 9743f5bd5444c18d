"""The versions of resource.k8s.io: v1 inside, converted where documents come in and go out.

Between v1beta2 and v1 only the version differs. In v1beta1 what a device has stands below
``basic``, and what a request asks stands beside its name instead of below ``exactly``. (Types of
k8s.io/api/resource; everything newer in v1beta1 went below ``basic`` too.)
"""

from collections.abc import Iterable, Mapping
from typing import Any

from dra_driver.base.errors import NotServed
from dra_driver.k8s.api import Document

RESOURCE_GROUP = "resource.k8s.io"
VERSIONS = ("v1", "v1beta2", "v1beta1")  # newest first


def choose_version(served: Iterable[str]) -> str:
    """The newest version that we and the API server know.

    NotServed: there is none; it says what to turn on.
    """
    served = tuple(served)
    for version in VERSIONS:
        if version in served:
            return version
    raise NotServed(
        f"the API server serves no version of {RESOURCE_GROUP} that this driver knows "
        f"({', '.join(VERSIONS)}); it serves {', '.join(served) or 'nothing'}. "
        "Kubernetes 1.34 and newer serve v1; on 1.32 and 1.33 turn on the feature gate "
        "DynamicResourceAllocation and start kube-apiserver with "
        f"--runtime-config={RESOURCE_GROUP}/v1beta1=true (1.33: also {RESOURCE_GROUP}/v1beta2=true)"
    )


def convert_slice_from_v1(version: str, document: Mapping[str, Any]) -> Document:
    """A ResourceSlice of v1 in the shape of *version*."""
    return _with_devices(version, document, _nested if version == "v1beta1" else dict)


def convert_slice_to_v1(document: Mapping[str, Any]) -> Document:
    """A ResourceSlice of any version in the shape of v1. Items of a list do not say theirs."""
    return _with_devices("v1", document, _flat)


def convert_claim_to_v1(document: Mapping[str, Any]) -> Document:
    """A ResourceClaim of any version in the shape of v1."""
    spec = dict(document.get("spec") or {})
    devices = dict(spec.get("devices") or {})
    if devices.get("requests"):  # a claim without any has null there: Go writes no empty list
        devices["requests"] = [_exactly(request) for request in devices["requests"]]
        spec["devices"] = devices
    return {**document, "apiVersion": f"{RESOURCE_GROUP}/v1", "kind": "ResourceClaim", "spec": spec}


def _with_devices(version: str, document: Mapping[str, Any], convert: Any) -> Document:
    spec = dict(document.get("spec") or {})
    if spec.get("devices"):
        spec["devices"] = [convert(device) for device in spec["devices"]]
    return {
        **document,
        "apiVersion": f"{RESOURCE_GROUP}/{version}",
        "kind": "ResourceSlice",
        "spec": spec,
    }


def _nested(device: Mapping[str, Any]) -> Document:
    return {
        "name": device["name"],
        "basic": {key: value for key, value in device.items() if key != "name"},
    }


def _flat(device: Mapping[str, Any]) -> Document:
    return {
        **{key: value for key, value in device.items() if key != "basic"},
        **(device.get("basic") or {}),
    }


def _exactly(request: Mapping[str, Any]) -> Document:
    if "exactly" in request or "firstAvailable" in request:
        return dict(request)
    fields = {key: value for key, value in request.items() if key != "name"}
    return {"name": request["name"], "exactly": fields}
