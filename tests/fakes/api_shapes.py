"""resource.k8s.io in the versions before v1, as the fake API server reads and writes them.

A field that the version does not have is refused, as the real server does when asked to be strict.
"""

from typing import Any

from tests.fakes.api_objects import CUSTOM, RESOURCES, Refusal
from tests.fakes.slice_rules import DEVICE_FIELDS

Object = dict[str, Any]

OLD = "resource.k8s.io/v1beta1"
CUSTOM_KINDS = frozenset(RESOURCES[plural].kind for plural in CUSTOM)


def read_as(api_version: str, kind: str, document: Object) -> Object:
    """*given*, sent to *api_version*, in the shape of v1."""
    said = (document.get("apiVersion"), document.get("kind"))
    if said == (None, None) and kind not in CUSTOM_KINDS:
        said = (api_version, kind)  # of what is built in, the path says it
    if said != (api_version, kind):
        kind_sent = f"{document.get('apiVersion')} {document.get('kind')}"
        raise Refusal(
            400, "BadRequest", f"the object is a {kind_sent}, the path a {api_version} {kind}"
        )
    if kind != "ResourceSlice" or not document["spec"].get("devices"):
        return document
    devices = []
    for device in document["spec"]["devices"]:
        if api_version == OLD:
            _refuse_unknown(device, {"name", "basic"})
            device = {"name": device["name"], **device["basic"]}
        _refuse_unknown(device, DEVICE_FIELDS)
        devices.append(device)
    return {**document, "spec": {**document["spec"], "devices": devices}}


def write_as(api_version: str, stored: Object) -> Object:
    """*stored*, which is in the shape of v1, as *api_version* shows it."""
    shown = {**stored, "apiVersion": api_version}
    if api_version != OLD:
        return shown
    spec = dict(stored.get("spec") or {})
    if stored["kind"] == "ResourceSlice" and "devices" in spec:
        spec["devices"] = [
            {"name": device["name"], "basic": {k: v for k, v in device.items() if k != "name"}}
            for device in spec["devices"]
        ]
    if stored["kind"] == "ResourceClaim" and spec.get("devices", {}).get("requests"):
        requests = [
            {"name": each["name"], **each.get("exactly", {})} if "exactly" in each else each
            for each in spec["devices"]["requests"]
        ]
        spec["devices"] = {**spec["devices"], "requests": requests}
    return {**shown, "spec": spec} if spec else shown


def _refuse_unknown(device: Object, known: set[str]) -> None:
    for field in sorted(set(device) - known):
        message = f'strict decoding error: unknown field "spec.devices[].{field}"'
        raise Refusal(400, "BadRequest", message)
