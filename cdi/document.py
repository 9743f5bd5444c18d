"""A spec as a document: the tables of the CDI file format, one row a field, in the SPEC's order."""

from dataclasses import replace
from typing import Final

from cdi.errors import CdiSpecError
from cdi.records import FLAG, NUMBER, PAIRS, TEXT, TEXTS, Document, Field, Record, many
from cdi.spec import (
    ContainerEdits,
    Device,
    DeviceNode,
    Hook,
    IntelRdt,
    Mount,
    NetDevice,
    Spec,
)
from cdi.validate import check
from cdi.version import oldest_version, version_problem

_DEVICE_NODE: Final = Record(
    DeviceNode,
    (
        Field("path", "path", TEXT, required=True),
        Field("hostPath", "host_path", TEXT),
        Field("type", "type", TEXT),
        Field("major", "major", NUMBER),
        Field("minor", "minor", NUMBER),
        Field("fileMode", "file_mode", NUMBER),
        Field("permissions", "permissions", TEXT),
        Field("uid", "uid", NUMBER),
        Field("gid", "gid", NUMBER),
    ),
)
_MOUNT: Final = Record(
    Mount,
    (
        Field("hostPath", "host_path", TEXT, required=True),
        Field("containerPath", "container_path", TEXT, required=True),
        Field("type", "type", TEXT),
        Field("options", "options", TEXTS),
    ),
)
_HOOK: Final = Record(
    Hook,
    (
        Field("hookName", "hook_name", TEXT, required=True),
        Field("path", "path", TEXT, required=True),
        Field("args", "args", TEXTS),
        Field("env", "env", TEXTS),
        Field("timeout", "timeout", NUMBER),
    ),
)
_INTEL_RDT: Final = Record(
    IntelRdt,
    (
        Field("closID", "clos_id", TEXT),
        Field("l3CacheSchema", "l3_cache_schema", TEXT),
        Field("memBwSchema", "mem_bw_schema", TEXT),
        Field("schemata", "schemata", TEXTS),
        Field("enableMonitoring", "enable_monitoring", FLAG),
    ),
)
_NET_DEVICE: Final = Record(
    NetDevice,
    (
        Field("hostInterfaceName", "host_interface_name", TEXT, required=True),
        Field("name", "name", TEXT, required=True),
    ),
)
_CONTAINER_EDITS: Final = Record(
    ContainerEdits,
    (
        Field("env", "env", TEXTS),
        Field("deviceNodes", "device_nodes", many(_DEVICE_NODE.codec)),
        Field("mounts", "mounts", many(_MOUNT.codec)),
        Field("hooks", "hooks", many(_HOOK.codec)),
        Field("additionalGids", "additional_gids", many(NUMBER)),
        Field("intelRdt", "intel_rdt", _INTEL_RDT.codec),
        Field("netDevices", "net_devices", many(_NET_DEVICE.codec)),
    ),
)
_DEVICE: Final = Record(
    Device,
    (
        Field("name", "name", TEXT, required=True),
        Field("annotations", "annotations", PAIRS),
        Field("containerEdits", "container_edits", _CONTAINER_EDITS.codec, required=True),
    ),
)
_SPEC: Final = Record(
    Spec,
    (
        Field("kind", "kind", TEXT, required=True),
        Field("annotations", "annotations", PAIRS),
        Field("devices", "devices", many(_DEVICE.codec), required=True),
        Field("containerEdits", "container_edits", _CONTAINER_EDITS.codec),
    ),
)

_RECORDS: Final = (
    _SPEC,
    _DEVICE,
    _CONTAINER_EDITS,
    _DEVICE_NODE,
    _MOUNT,
    _HOOK,
    _INTEL_RDT,
    _NET_DEVICE,
)
FIELD_NAMES: Final = frozenset(
    {"cdiVersion", *(field.name for record in _RECORDS for field in record.fields)}
)
"""Every name the format has, wherever it may stand."""


def to_document(spec: Spec) -> Document:
    """Give the document of a legal spec, at the oldest version that can say it."""
    edits = spec.container_edits
    own = {} if edits.is_empty else {"containerEdits": edits_document(edits)}
    return head_document(spec) | own


def head_document(spec: Spec) -> Document:
    """Give the document of a legal spec as far as its own edits, which stand last."""
    check(spec)
    head = replace(spec, container_edits=ContainerEdits())
    return {"cdiVersion": oldest_version(spec), **_SPEC.write(head)}


def edits_document(edits: ContainerEdits) -> Document:
    """Give the object of a spec's own edits, which were checked with the spec."""
    return _CONTAINER_EDITS.write(edits)


def from_document(document: object) -> Spec:
    """Read a document; problems of shape are reported before problems of content."""
    if not isinstance(document, dict):
        raise CdiSpecError(["a spec must be an object"])
    body = dict(document)
    version = body.pop("cdiVersion", None)
    problems: list[str] = []
    if not isinstance(version, str):
        problems.append("cdiVersion: must be a string")
    spec: Spec = _SPEC.read(body, "", problems)
    if problems:
        raise CdiSpecError(problems)
    if problem := version_problem(version, spec):
        raise CdiSpecError([f"cdiVersion: {problem}"])
    check(spec)
    return spec
