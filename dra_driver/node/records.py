"""The ledger's file format: a record as JSON, readable by the release before and the one after.

Every document says which version of the format it is, and the oldest one that can read it
(``readableFrom``); fields that a reader does not know are ignored. A format that older releases
would misread raises ``readableFrom``.
"""

import json
from collections.abc import Mapping
from typing import Any, assert_never

from dra_driver.kubeletplugin.claims import ClaimRef, ClaimUid, PreparedDevice, ShareId
from dra_driver.model.devices import DeviceName
from dra_driver.model.holdings import Holding, Record
from dra_driver.model.steps import MakeDeviceNodes, Step

VERSION = 1
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
        "steps": [_encode_step(step) for step in record.steps],
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
        steps=tuple(_decode_step(step) for step in document["steps"]),
        prepared=tuple(_decode_prepared(d) for d in document["prepared"]) if completed else None,
        spec=_text(document["spec"]) if completed else None,
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def _encode_holding(holding: Holding) -> dict[str, Any]:
    return {
        "device": holding.device,
        "share": holding.share,
        "consumed": dict(holding.consumed),
        "admin": holding.admin,
    }


def _decode_holding(document: Mapping[str, Any], claim: ClaimRef) -> Holding:
    share = document["share"]
    return Holding(
        claim=claim,
        device=DeviceName(_text(document["device"])),
        share=ShareId(_text(share)) if share is not None else None,
        consumed=tuple(sorted((_text(k), _text(v)) for k, v in document["consumed"].items())),
        admin=bool(document["admin"]),
    )


def _encode_step(step: Step) -> dict[str, Any]:
    match step:
        case MakeDeviceNodes(minors=minors):
            return {"step": "MakeDeviceNodes", "minors": list(minors)}
        case _:
            assert_never(step)


def _decode_step(document: Mapping[str, Any]) -> Step:
    match document["step"]:
        case "MakeDeviceNodes":
            return MakeDeviceNodes(tuple(int(minor) for minor in document["minors"]))
        case other:
            raise UnreadableRecord(f"its step {other!r} is unknown")


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
