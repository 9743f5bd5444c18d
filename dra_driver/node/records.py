"""The ledger's file format: a record as JSON, readable by the release before and the one after.

Every document says which version of the format it is, and the oldest one that can read it
(``readableFrom``); fields that a reader does not know are ignored. A format that older releases
would misread raises ``readableFrom``.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, assert_never

from dra_driver.kubeletplugin.claims import (
    ClaimRef,
    ClaimUid,
    Pod,
    PodUid,
    PreparedDevice,
    ShareId,
)
from dra_driver.kubeletplugin.device_metadata import Document
from dra_driver.model.devices import DeviceName, GpuUuid
from dra_driver.model.holdings import Holding, Limit, Record
from dra_driver.model.mig import Instance, PartitionKey
from dra_driver.model.offer import Exclusive, Monitor, Replica, Shape, Sliceable
from dra_driver.model.profiles import Guard, GuardPolicy, Tenants
from dra_driver.model.steps import Step
from dra_driver.node.step_records import (
    STEP_KEYS,
    UnreadableRecord,
    decode_key,
    decode_step,
    encode_key,
    encode_step,
    readable_from,
    step_key,
    text,
)

VERSION = 4  # 1: whole GPUs only; 2: no MPS; 3: no partitions


def encode_record(record: Record) -> bytes:
    """The document of *record*: the same bytes for the same record."""
    document: dict[str, Any] = {
        "version": VERSION,
        "readableFrom": _readable_from(record),
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


def decode_record(content: bytes) -> Record:
    """The record in *content*. UnreadableRecord says why it is none."""
    try:
        document = json.loads(content)
    except ValueError as e:
        raise UnreadableRecord(f"it is not JSON ({e})") from e
    try:
        if document["readableFrom"] > VERSION:
            raise UnreadableRecord(
                f"a newer release wrote it (format {document['version']}, this one reads "
                f"{VERSION}); run that release again, or drain the node first"
            )
        return _decode(document)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as e:
        if isinstance(e, UnreadableRecord):
            raise
        raise UnreadableRecord(f"it is damaged ({type(e).__name__}: {e})") from e


def _decode(document: Mapping[str, Any]) -> Record:
    claim = document["claim"]
    ref = ClaimRef(text(claim["namespace"]), text(claim["name"]), ClaimUid(text(claim["uid"])))
    completed = {"started": False, "completed": True}[document["state"]]
    return Record(
        claim=ref,
        holdings=tuple(_decode_holding(holding, ref) for holding in document["holdings"]),
        steps=tuple(decode_step(step) for key in STEP_KEYS for step in _steps_below(document, key)),
        pods=tuple(
            Pod(text(pod["name"]), PodUid(text(pod["uid"]))) for pod in document.get("pods", ())
        ),
        pod_claim_name=text(document.get("podClaimName", "")),
        prepared=tuple(_decode_prepared(d) for d in document["prepared"]) if completed else None,
        spec=text(document["spec"]) if completed else None,
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
        document["partition"] = encode_key(holding.partition)
        document["cut"] = holding.cut
    if (instance := holding.instance) is not None:
        document["instance"] = {"gi": instance.gi, "ci": instance.ci, "uuid": instance.uuid}
    if holding.offered:
        document["offered"] = list(holding.offered)
    return document


def _readable_from(record: Record) -> int:
    """An older release would take a holding of a partition for one of the whole GPU."""
    partition = any(holding.partition is not None for holding in record.holdings)
    return 4 if partition else readable_from(record.steps)


def _decode_holding(document: Mapping[str, Any], claim: ClaimRef) -> Holding:
    share, gpu, limit = document["share"], document.get("gpu"), document.get("limit")
    partition = decode_key(document["partition"]) if "partition" in document else None
    return Holding(
        claim=claim,
        device=DeviceName(text(document["device"])),
        share=ShareId(text(share)) if share is not None else None,
        consumed=tuple(sorted((text(k), text(v)) for k, v in document["consumed"].items())),
        admin=bool(document["admin"]),
        gpu=GpuUuid(text(gpu)) if gpu is not None else None,
        shape=_decode_shape(document["shape"]) if "shape" in document else Exclusive(),
        limit=_decode_limit(limit) if limit is not None else None,
        request=text(document.get("request", "")),
        tenants=Tenants(document.get("tenants", Tenants.ANY)),
        partition=partition,
        cut=bool(document.get("cut", False)),
        instance=_decode_instance(partition, document.get("instance")),
        offered=tuple(text(profile) for profile in document.get("offered", ())),
    )


def _decode_instance(
    partition: PartitionKey | None, document: Mapping[str, Any] | None
) -> Instance | None:
    if partition is None or document is None:
        return None
    uuid = GpuUuid(text(document["uuid"]))
    return Instance(partition, int(document["gi"]), int(document["ci"]), uuid)


def _decode_limit(document: Mapping[str, Any]) -> Limit:
    guard = Guard(GuardPolicy(document["guard"]), float(document["graceSeconds"]))
    return Limit(int(document["memoryBytes"]), guard, bool(document["strict"]))


def _encode_shape(shape: Shape) -> dict[str, Any]:
    match shape:
        case Exclusive() | Monitor():
            return {"shape": type(shape).__name__}
        case Sliceable() | Replica():
            return {"shape": type(shape).__name__, **dataclasses.asdict(shape)}
        case _:
            assert_never(shape)


def _decode_shape(document: Mapping[str, Any]) -> Shape:
    fields = {key: value for key, value in document.items() if key != "shape"}
    match document["shape"]:
        case "Exclusive":
            return Exclusive()
        case "Monitor":
            return Monitor()
        case "Sliceable":
            return Sliceable(**_checked(fields, Sliceable))
        case "Replica":
            return Replica(**_checked(fields, Replica))
        case other:
            raise UnreadableRecord(f"its shape {other!r} is unknown")


def _checked(fields: Mapping[str, Any], shape: type[Sliceable] | type[Replica]) -> dict[str, Any]:
    """The fields that this release knows; all of them are numbers, yes or no."""
    known = {one.name for one in dataclasses.fields(shape)}
    wrong = {k: v for k, v in fields.items() if k in known and not isinstance(v, int | None)}
    if wrong:
        raise TypeError(f"{wrong} in a shape")
    return {key: value for key, value in fields.items() if key in known}


def _encode_steps(steps: Sequence[Step]) -> dict[str, list[dict[str, Any]]]:
    """Each below the key of its version: older readers do not look at newer keys."""
    return {
        key: [encode_step(step) for step in steps if step_key(step) == key] for key in STEP_KEYS
    }


def _steps_below(document: Mapping[str, Any], key: str) -> Sequence[Mapping[str, Any]]:
    found: Sequence[Mapping[str, Any]] = (
        document[key] if key == STEP_KEYS[0] else document.get(key, ())
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
        requests=tuple(text(request) for request in document["requests"]),
        pool=text(document["pool"]),
        device=text(document["device"]),
        cdi_ids=tuple(text(cdi_id) for cdi_id in document["cdiIds"]),
        share=ShareId(text(share)) if share is not None else None,
    )


def _decode_document(document: Mapping[str, Any]) -> Document:
    return Document(*(text(document[field.name]) for field in dataclasses.fields(Document)))
