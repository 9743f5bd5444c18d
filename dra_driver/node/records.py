"""The ledger's file format: a record as JSON, readable by the release before and the one after.

Every document says which version of the format it is, and the oldest one that can read it
(``readableFrom``); fields that a reader does not know are ignored. A format that older releases
would misread raises ``readableFrom``.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, assert_never

from dra_driver.kubeletplugin.claims import (
    ClaimRef,
    ClaimUid,
    Pod,
    PodUid,
    PreparedDevice,
    ShareId,
)
from dra_driver.model.devices import DeviceName, GpuUuid
from dra_driver.model.holdings import Holding, Limit, Record
from dra_driver.model.offer import Exclusive, Monitor, Replica, Shape, Sliceable
from dra_driver.model.profiles import Guard, GuardPolicy
from dra_driver.model.steps import (
    Interval,
    LimitMemory,
    MakeDeviceNodes,
    PodLimit,
    SetTimeSlice,
    Step,
)

VERSION = 2  # 1: whole GPUs only
READABLE_FROM = 1


class UnreadableRecord(ValueError):
    """This is no record, or one of a release that this one cannot read."""


def encode_record(record: Record) -> bytes:
    """The document of *record*: the same bytes for the same record."""
    document: dict[str, Any] = {
        "version": VERSION,
        "readableFrom": READABLE_FROM,
        "claim": {
            "namespace": record.claim.namespace,
            "name": record.claim.name,
            "uid": record.claim.uid,
        },
        "state": "completed" if record.completed else "started",
        "holdings": [_encode_holding(holding) for holding in record.holdings],
        "steps": [_encode_step(step) for step in record.steps if _is_old(step)],
        "sharing": [_encode_step(step) for step in record.steps if not _is_old(step)],
        "pods": [{"name": pod.name, "uid": pod.uid} for pod in record.pods],
        "podClaimName": record.pod_claim_name,
    }
    if record.prepared is not None:
        document["prepared"] = [_encode_prepared(device) for device in record.prepared]
        document["spec"] = record.spec
    return json.dumps(document, separators=(",", ":"), sort_keys=True).encode()


def decode_record(text: bytes) -> Record:
    """The record in *text*. UnreadableRecord says why it is none."""
    try:
        document = json.loads(text)
    except ValueError as e:
        raise UnreadableRecord(f"it is not JSON ({e})") from e
    try:
        if document["readableFrom"] > VERSION:
            raise UnreadableRecord(
                f"a newer release wrote it (format {document['version']}, this one reads "
                f"{VERSION}); run that release again, or drain the node first"
            )
        return _decode(document)
    except (KeyError, TypeError, AttributeError, ValueError) as e:
        if isinstance(e, UnreadableRecord):
            raise
        raise UnreadableRecord(f"it is damaged ({type(e).__name__}: {e})") from e


def _decode(document: Mapping[str, Any]) -> Record:
    claim = document["claim"]
    ref = ClaimRef(_text(claim["namespace"]), _text(claim["name"]), ClaimUid(_text(claim["uid"])))
    completed = {"started": False, "completed": True}[document["state"]]
    return Record(
        claim=ref,
        holdings=tuple(_decode_holding(holding, ref) for holding in document["holdings"]),
        steps=tuple(
            _decode_step(step) for step in (*document["steps"], *document.get("sharing", ()))
        ),
        pods=tuple(
            Pod(_text(pod["name"]), PodUid(_text(pod["uid"]))) for pod in document.get("pods", ())
        ),
        pod_claim_name=_text(document.get("podClaimName", "")),
        prepared=tuple(_decode_prepared(d) for d in document["prepared"]) if completed else None,
        spec=_text(document["spec"]) if completed else None,
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def _encode_holding(holding: Holding) -> dict[str, Any]:
    document: dict[str, Any] = {
        "device": holding.device,
        "share": holding.share,
        "consumed": dict(holding.consumed),
        "admin": holding.admin,
        "gpu": holding.gpu,
        "shape": _encode_shape(holding.shape),
    }
    if (limit := holding.limit) is not None:
        document["limit"] = {
            "memoryBytes": limit.memory_bytes,
            "guard": limit.guard.policy.value,
            "graceSeconds": limit.guard.grace_seconds,
            "strict": limit.strict,
        }
    return document


def _decode_holding(document: Mapping[str, Any], claim: ClaimRef) -> Holding:
    share, gpu, limit = document["share"], document.get("gpu"), document.get("limit")
    return Holding(
        claim=claim,
        device=DeviceName(_text(document["device"])),
        share=ShareId(_text(share)) if share is not None else None,
        consumed=tuple(sorted((_text(k), _text(v)) for k, v in document["consumed"].items())),
        admin=bool(document["admin"]),
        gpu=GpuUuid(_text(gpu)) if gpu is not None else None,
        shape=_decode_shape(document["shape"]) if "shape" in document else Exclusive(),
        limit=_decode_limit(limit) if limit is not None else None,
    )


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


def _is_old(step: Step) -> bool:
    """Whether a reader of version 1 knows it. It takes back a claim without knowing the others."""
    return isinstance(step, MakeDeviceNodes)


def _encode_step(step: Step) -> dict[str, Any]:
    match step:
        case MakeDeviceNodes(minors=minors):
            return {"step": "MakeDeviceNodes", "minors": list(minors)}
        case SetTimeSlice(gpu=gpu, interval=interval, before=before):
            return {"step": "SetTimeSlice", "gpu": gpu, "interval": interval, "before": before}
        case LimitMemory(gpu=gpu, pods=pods, strict=strict):
            limits = [{"pod": one.pod, "memoryBytes": one.memory_bytes} for one in pods]
            return {"step": "LimitMemory", "gpu": gpu, "pods": limits, "strict": strict}
        case _:
            assert_never(step)


def _decode_step(document: Mapping[str, Any]) -> Step:
    match document["step"]:
        case "MakeDeviceNodes":
            return MakeDeviceNodes(tuple(int(minor) for minor in document["minors"]))
        case "SetTimeSlice":
            before = document["before"]
            return SetTimeSlice(
                GpuUuid(_text(document["gpu"])),
                Interval(document["interval"]),
                None if before is None else Interval(before),
            )
        case "LimitMemory":
            pods = tuple(
                PodLimit(PodUid(_text(one["pod"])), _bytes(one["memoryBytes"]))
                for one in document["pods"]
            )
            return LimitMemory(GpuUuid(_text(document["gpu"])), pods, bool(document["strict"]))
        case other:
            raise UnreadableRecord(f"its step {other!r} is unknown")


def _bytes(value: Any) -> int | None:
    return None if value is None else int(value)


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
        requests=tuple(_text(request) for request in document["requests"]),
        pool=_text(document["pool"]),
        device=_text(document["device"]),
        cdi_ids=tuple(_text(cdi_id) for cdi_id in document["cdiIds"]),
        share=ShareId(_text(share)) if share is not None else None,
    )
