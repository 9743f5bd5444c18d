"""The ledger's file format: a record as JSON, readable by the release before and the one after.

Every document says which version of the format it is, and the oldest one that can read it
(``readableFrom``); fields that a reader does not know are ignored. A format that older releases
would misread raises ``readableFrom``.

Steps in the ledger's file format.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar, assert_never

from dra_driver.base.errors import NodeError
from dra_driver.k8s.claims import ClaimRef, ClaimUid, Pod, PodUid, PreparedDevice, ShareId
from dra_driver.kubeletplugin.device_metadata import MetadataDocument
from dra_driver.model.gpus import DeviceName, GpuUuid, MigInstance, PartitionKey
from dra_driver.model.mps import MpsNamespace, MpsNamespaceName
from dra_driver.model.offer import AdminAccess, Exclusive, Fractional, Replica, Shape
from dra_driver.model.profiles import GuardPolicy, GuardRules, MpsTenants
from dra_driver.model.records import ClaimMemoryLimit, ClaimRecord, Holding
from dra_driver.model.steps import (
    ComputeMode,
    CreateDeviceNodes,
    CreatePartition,
    GpuSetting,
    PodMemoryLimit,
    RemoveMpsNamespace,
    RemovePartition,
    ServeMpsNamespace,
    SetComputeMode,
    SetMemoryLimits,
    SetMigMode,
    SetTimeSlice,
    Step,
    TimeSliceInterval,
)
from dra_driver.node.mps import agent_protocol

STEP_SECTIONS: Final = ("steps", "partitions", "sharing", "serving")
"""Where the steps stand that version 1, 4, 2 and 3 of the format brought: in the order in which
they are carried out."""


class UnreadableRecord(ValueError):
    """This is no record, or one of a release that this one cannot read."""


def as_text(value: Any) -> str:
    """*value*, if it is a string."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def step_section(step: Step) -> str:
    """Below which of the ``STEP_SECTIONS`` it is written."""
    match step:
        case CreateDeviceNodes():
            return STEP_SECTIONS[0]
        case SetTimeSlice() | SetMemoryLimits():
            return STEP_SECTIONS[2]
        case SetComputeMode() | ServeMpsNamespace() | RemoveMpsNamespace():
            return STEP_SECTIONS[3]
        case SetMigMode() | CreatePartition() | RemovePartition():
            return STEP_SECTIONS[1]
        case _:
            assert_never(step)


def oldest_reader(steps: Iterable[Step]) -> int:
    """The oldest version that can read a record with *steps* and take its claim back.

    What is set for MPS outlives a claim that is taken back without knowing of it: the compute mode
    of a GPU, and a server. So do a partition and the MIG mode.
    """
    keys = {step_section(step) for step in steps}
    return 4 if STEP_SECTIONS[1] in keys else 3 if STEP_SECTIONS[3] in keys else 1


def encode_step(step: Step) -> dict[str, Any]:
    """The document of *step*."""
    match step:
        case CreateDeviceNodes(minors=minors):
            return {"step": "CreateDeviceNodes", "minors": list(minors)}
        case SetTimeSlice() | SetComputeMode() | SetMigMode():
            return _encode_setting(step)
        case SetMemoryLimits(gpu=gpu, pods=pods, strict=strict):
            limits = [{"pod": one.pod, "memoryBytes": one.memory_bytes} for one in pods]
            return {"step": "SetMemoryLimits", "gpu": gpu, "pods": limits, "strict": strict}
        case CreatePartition(gpu=gpu, key=key):
            return {"step": "CreatePartition", "gpu": gpu, "partition": encode_partition_key(key)}
        case RemovePartition(gpu=gpu, key=key, uuid=uuid, unless=unless):
            document = {
                "step": "RemovePartition",
                "gpu": gpu,
                "partition": encode_partition_key(key),
            }
            return document | {"uuid": uuid, "unless": sorted(unless)}
        case ServeMpsNamespace(namespace=namespace):
            return {"step": "ServeMpsNamespace", "namespace": agent_protocol.encode(namespace)}
        case RemoveMpsNamespace(namespace=name):
            return {"step": "RemoveMpsNamespace", "namespace": name}
        case _:
            assert_never(step)


def decode_step(document: Mapping[str, Any]) -> Step:
    """The step in *document*. UnreadableRecord, KeyError, TypeError or ValueError: it is none."""
    kind = as_text(document["step"])
    if kind not in _DECODERS:
        raise UnreadableRecord(f"its step {kind!r} is unknown")
    return _DECODERS[kind](document)


def _encode_setting(step: GpuSetting) -> dict[str, Any]:
    match step:
        case SetTimeSlice(gpu=gpu, interval=interval, before=before):
            return {"step": "SetTimeSlice", "gpu": gpu, "interval": interval, "before": before}
        case SetComputeMode(gpu=gpu, mode=mode, before=before):
            return {"step": "SetComputeMode", "gpu": gpu, "mode": mode, "before": before}
        case SetMigMode(gpu=gpu, on=on, before=before):
            return {"step": "SetMigMode", "gpu": gpu, "on": on, "before": before}
        case _:
            assert_never(step)


def _time_slice(document: Mapping[str, Any]) -> Step:
    interval, before = TimeSliceInterval(document["interval"]), document["before"]
    return SetTimeSlice(_gpu(document), interval, _unless_none(TimeSliceInterval, before))


def _memory(document: Mapping[str, Any]) -> Step:
    pods = tuple(
        PodMemoryLimit(PodUid(as_text(one["pod"])), _unless_none(int, one["memoryBytes"]))
        for one in document["pods"]
    )
    return SetMemoryLimits(_gpu(document), pods, bool(document["strict"]))


def _compute_mode(document: Mapping[str, Any]) -> Step:
    mode, before = ComputeMode(document["mode"]), document["before"]
    return SetComputeMode(_gpu(document), mode, _unless_none(ComputeMode, before))


def _mig_mode(document: Mapping[str, Any]) -> Step:
    before = _unless_none(bool, document["before"])
    return SetMigMode(_gpu(document), bool(document["on"]), before)


def encode_partition_key(key: PartitionKey) -> dict[str, int]:
    """The document of *key*."""
    return {
        "profile": key.profile_id,
        "start": key.start,
        "size": key.size,
        "slices": key.slices,
    }


def decode_partition_key(document: Mapping[str, Any]) -> PartitionKey:
    """The key in *document*. KeyError, TypeError or ValueError: it is none."""
    return PartitionKey(*(int(document[one]) for one in ("profile", "start", "size", "slices")))


def _gpu(document: Mapping[str, Any]) -> GpuUuid:
    return _uuid(document["gpu"])


def _uuid(value: Any) -> GpuUuid:
    return GpuUuid(as_text(value))


def _mps_namespace(document: Any) -> MpsNamespace:
    try:
        return agent_protocol.decode(MpsNamespace, document, "its namespace")
    except NodeError as e:
        raise UnreadableRecord(f"it is damaged ({e})") from e


_Value = TypeVar("_Value")


def _unless_none(kind: Callable[[Any], _Value], value: Any) -> _Value | None:
    return None if value is None else kind(value)


_DECODERS: Final[Mapping[str, Callable[[Mapping[str, Any]], Step]]] = {
    "CreateDeviceNodes": lambda one: CreateDeviceNodes(
        tuple(int(minor) for minor in one["minors"])
    ),
    "SetTimeSlice": _time_slice,
    "SetMemoryLimits": _memory,
    "SetComputeMode": _compute_mode,
    "SetMigMode": _mig_mode,
    "CreatePartition": lambda one: CreatePartition(
        _gpu(one), decode_partition_key(one["partition"])
    ),
    "RemovePartition": lambda one: RemovePartition(
        _gpu(one),
        decode_partition_key(one["partition"]),
        _unless_none(_uuid, one.get("uuid")),
        frozenset(map(_uuid, one.get("unless", ()))),
    ),
    "ServeMpsNamespace": lambda one: ServeMpsNamespace(_mps_namespace(one["namespace"])),
    "RemoveMpsNamespace": lambda one: RemoveMpsNamespace(
        MpsNamespaceName(as_text(one["namespace"]))
    ),
}


RECORD_VERSION = 4  # 1: whole GPUs only; 2: no MPS; 3: no partitions


def encode_record(record: ClaimRecord) -> bytes:
    """The document of *record*: the same bytes for the same record."""
    document: dict[str, Any] = {
        "version": RECORD_VERSION,
        "readableFrom": _oldest_reader_of_holding(record),
        "claim": {
            "namespace": record.claim.namespace,
            "name": record.claim.name,
            "uid": record.claim.uid,
        },
        "state": "completed" if record.completed else "started",
        "holdings": [_encode_holding(holding) for holding in record.holdings],
        **_encode_steps(record.steps),
        "pods": [{"name": pod.name, "uid": pod.uid} for pod in record.pods],
        "podClaimName": record.pod_claim_name,
    }
    if record.prepared is not None:
        document["prepared"] = [_encode_prepared(device) for device in record.prepared]
        document["spec"] = record.spec
        document["documents"] = [dataclasses.asdict(one) for one in record.documents]
    return json.dumps(document, separators=(",", ":"), sort_keys=True).encode()


def decode_record(content: bytes) -> ClaimRecord:
    """The record in *content*. UnreadableRecord says why it is none."""
    try:
        document = json.loads(content)
    except ValueError as e:
        raise UnreadableRecord(f"it is not JSON ({e})") from e
    try:
        if document["readableFrom"] > RECORD_VERSION:
            raise UnreadableRecord(
                f"a newer release wrote it (format {document['version']}, this one reads "
                f"{RECORD_VERSION}); run that release again, or drain the node first"
            )
        return _decode(document)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as e:
        if isinstance(e, UnreadableRecord):
            raise
        raise UnreadableRecord(f"it is damaged ({type(e).__name__}: {e})") from e


def _decode(document: Mapping[str, Any]) -> ClaimRecord:
    claim = document["claim"]
    ref = ClaimRef(
        as_text(claim["namespace"]), as_text(claim["name"]), ClaimUid(as_text(claim["uid"]))
    )
    completed = {"started": False, "completed": True}[document["state"]]
    return ClaimRecord(
        claim=ref,
        holdings=tuple(_decode_holding(holding, ref) for holding in document["holdings"]),
        steps=tuple(
            decode_step(step) for key in STEP_SECTIONS for step in _steps_below(document, key)
        ),
        pods=tuple(
            Pod(as_text(pod["name"]), PodUid(as_text(pod["uid"])))
            for pod in document.get("pods", ())
        ),
        pod_claim_name=as_text(document.get("podClaimName", "")),
        prepared=tuple(_decode_prepared(d) for d in document["prepared"]) if completed else None,
        spec=as_text(document["spec"]) if completed else None,
        documents=tuple(map(_decode_document, document["documents"])) if completed else (),
    )


def _encode_holding(holding: Holding) -> dict[str, Any]:
    document: dict[str, Any] = {
        "device": holding.device,
        "share": holding.share,
        "consumed": dict(holding.consumed),
        "admin": holding.admin,
        "gpu": holding.gpu,
        "shape": _encode_shape(holding.shape),
        "request": holding.request,
        "tenants": holding.tenants.value,
    }
    if (limit := holding.limit) is not None:
        document["limit"] = {
            "memoryBytes": limit.memory_bytes,
            "guard": limit.guard.policy.value,
            "graceSeconds": limit.guard.grace_seconds,
            "strict": limit.strict,
        }
    if holding.partition is not None:
        document["partition"] = encode_partition_key(holding.partition)
        document["cut"] = holding.cut
    if (instance := holding.instance) is not None:
        document["instance"] = {"gi": instance.gi, "ci": instance.ci, "uuid": instance.uuid}
    if holding.offered:
        document["offered"] = list(holding.offered)
    return document


def _oldest_reader_of_holding(record: ClaimRecord) -> int:
    """An older release would take a holding of a partition for one of the whole GPU."""
    partition = any(holding.partition is not None for holding in record.holdings)
    return 4 if partition else oldest_reader(record.steps)


def _decode_holding(document: Mapping[str, Any], claim: ClaimRef) -> Holding:
    share, gpu, limit = document["share"], document.get("gpu"), document.get("limit")
    partition = decode_partition_key(document["partition"]) if "partition" in document else None
    return Holding(
        claim=claim,
        device=DeviceName(as_text(document["device"])),
        share=ShareId(as_text(share)) if share is not None else None,
        consumed=tuple(sorted((as_text(k), as_text(v)) for k, v in document["consumed"].items())),
        admin=bool(document["admin"]),
        gpu=GpuUuid(as_text(gpu)) if gpu is not None else None,
        shape=_decode_shape(document["shape"]) if "shape" in document else Exclusive(),
        limit=_decode_limit(limit) if limit is not None else None,
        request=as_text(document.get("request", "")),
        tenants=MpsTenants(document.get("tenants", MpsTenants.ANY)),
        partition=partition,
        cut=bool(document.get("cut", False)),
        instance=_decode_instance(partition, document.get("instance")),
        offered=tuple(as_text(profile) for profile in document.get("offered", ())),
    )


def _decode_instance(
    partition: PartitionKey | None, document: Mapping[str, Any] | None
) -> MigInstance | None:
    if partition is None or document is None:
        return None
    uuid = GpuUuid(as_text(document["uuid"]))
    return MigInstance(partition, int(document["gi"]), int(document["ci"]), uuid)


def _decode_limit(document: Mapping[str, Any]) -> ClaimMemoryLimit:
    guard = GuardRules(GuardPolicy(document["guard"]), float(document["graceSeconds"]))
    return ClaimMemoryLimit(int(document["memoryBytes"]), guard, bool(document["strict"]))


def _encode_shape(shape: Shape) -> dict[str, Any]:
    match shape:
        case Exclusive() | AdminAccess():
            return {"shape": type(shape).__name__}
        case Fractional() | Replica():
            return {"shape": type(shape).__name__, **dataclasses.asdict(shape)}
        case _:
            assert_never(shape)


def _decode_shape(document: Mapping[str, Any]) -> Shape:
    fields = {key: value for key, value in document.items() if key != "shape"}
    match document["shape"]:
        case "Exclusive":
            return Exclusive()
        case "AdminAccess":
            return AdminAccess()
        case "Fractional":
            return Fractional(**_checked(fields, Fractional))
        case "Replica":
            return Replica(**_checked(fields, Replica))
        case other:
            raise UnreadableRecord(f"its shape {other!r} is unknown")


def _checked(fields: Mapping[str, Any], shape: type[Fractional] | type[Replica]) -> dict[str, Any]:
    """The fields that this release knows; all of them are numbers, yes or no."""
    known = {one.name for one in dataclasses.fields(shape)}
    wrong = {k: v for k, v in fields.items() if k in known and not isinstance(v, int | None)}
    if wrong:
        raise TypeError(f"{wrong} in a shape")
    return {key: value for key, value in fields.items() if key in known}


def _encode_steps(steps: Sequence[Step]) -> dict[str, list[dict[str, Any]]]:
    """Each below the key of its version: older readers do not look at newer keys."""
    return {
        key: [encode_step(step) for step in steps if step_section(step) == key]
        for key in STEP_SECTIONS
    }


def _steps_below(document: Mapping[str, Any], key: str) -> Sequence[Mapping[str, Any]]:
    found: Sequence[Mapping[str, Any]] = (
        document[key] if key == STEP_SECTIONS[0] else document.get(key, ())
    )
    return found


def _encode_prepared(device: PreparedDevice) -> dict[str, Any]:
    return {
        "requests": list(device.requests),
        "pool": device.pool,
        "device": device.device,
        "cdiIds": list(device.cdi_ids),
        "share": device.share,
    }


def _decode_prepared(document: Mapping[str, Any]) -> PreparedDevice:
    share = document["share"]
    return PreparedDevice(
        requests=tuple(as_text(request) for request in document["requests"]),
        pool=as_text(document["pool"]),
        device=as_text(document["device"]),
        cdi_ids=tuple(as_text(cdi_id) for cdi_id in document["cdiIds"]),
        share=ShareId(as_text(share)) if share is not None else None,
    )


def _decode_document(document: Mapping[str, Any]) -> MetadataDocument:
    return MetadataDocument(
        *(as_text(document[field.name]) for field in dataclasses.fields(MetadataDocument))
    )
