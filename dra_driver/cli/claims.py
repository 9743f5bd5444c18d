"""``dra-driver claims``: who holds what on this node, from the ledger alone; nothing is changed."""

import json
from collections.abc import Mapping
from typing import Any

from dra_driver.cli.table import table
from dra_driver.kubeletplugin.claims import ClaimUid
from dra_driver.model.holdings import Record
from dra_driver.node.boot import boot_id
from dra_driver.node.ledger import SetAside, read_directory
from dra_driver.settings import NodeSettings


def claims(settings: NodeSettings, output: str) -> str:
    """What the ledger says, as a table or as JSON."""
    records, aside = read_directory(settings.ledger_dir / boot_id(settings.host_root))
    ordered = sorted(records.values(), key=lambda record: record.claim)
    if output == "json":
        return json.dumps(_document(ordered, aside), indent=2, sort_keys=True)
    return _text(ordered, aside, settings)


def _document(records: list[Record], aside: Mapping[ClaimUid, SetAside]) -> dict[str, Any]:
    return {
        "claims": [
            {
                "namespace": record.claim.namespace,
                "name": record.claim.name,
                "uid": record.claim.uid,
                "state": _state(record),
                "devices": [
                    {"name": h.device, "share": h.share, "adminAccess": h.admin}
                    for h in record.holdings
                ],
                "cdiDevices": [i for device in record.prepared or () for i in device.cdi_ids],
            }
            for record in records
        ],
        "unreadable": [
            {"uid": found.uid, "path": str(found.path), "reason": found.reason}
            for found in aside.values()
        ],
    }


def _text(records: list[Record], aside: Mapping[ClaimUid, SetAside], settings: NodeSettings) -> str:
    lines = []
    if records:
        head = ("NAMESPACE", "CLAIM", "DEVICES", "STATE", "UID")
        lines.append(table(head, [_row(record) for record in records]))
    else:
        lines.append(f"no claim is prepared on this node (ledger: {settings.ledger_dir})")
    lines += [f"unreadable: {found.path}: {found.reason}" for found in aside.values()]
    return "\n".join(lines)


def _row(record: Record) -> tuple[str, ...]:
    devices = ",".join(h.device + (" (admin)" if h.admin else "") for h in record.holdings)
    return (
        record.claim.namespace,
        record.claim.name,
        devices,
        _state(record),
        record.claim.uid,
    )


def _state(record: Record) -> str:
    return "prepared" if record.completed else "started"
