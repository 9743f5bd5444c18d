"""``dra-driver claims``: who holds how much of what on this node, and what is free.

What is held is what the ledger says; how much there is, a look at the GPUs. Where that look fails
it is said so, and the rest is answered all the same. No API server is asked. Nothing is changed,
but for device files of the driver that are missing: looking at the GPUs makes them
(``--ledger-only`` and ``-o table`` do not look).

``-o json`` prints one object::

    {"gpus": [{"name", "uuid", "product",             of every GPU; null where it is not known
               "memoryBytes", "heldBytes", "freeBytes",
               "coresHeld",                           percent, of 100
               "sharesHeld", "shares",                claims at once; shares null: it is not divided
               "claims": ["namespace/name", ...]}],
     "claims": [{"namespace", "name", "uid",
                 "state",                             "started" or "prepared"
                 "pods": ["name", ...],
                 "devices": [{"name", "gpu", "share", "adminAccess",
                              "shape",                "exclusive", "sliceable", "4 replicas", ...
                              "whole",                true: no other claim can be on that GPU
                              "memoryBytes", "cores", "shares",  of a part; else null
                              "interval",             "Long", ...; null: it asked for none
                              "limit"}],              null, or {"memoryBytes", "strict",
                                                      "guard", "graceSeconds"}
                 "cdiDevices": ["vendor/class=name", ...]}],
     "unreadable": [{"uid", "path", "reason",         records that this release cannot read
                     "mayHold": ["gpu-0", ...]}],     empty: any GPU
     "notOffered": [{"what", "reason"}]}              GPUs of which nothing is known, and why
"""

import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dra_driver.cli.bars import picture
from dra_driver.cli.findings import some
from dra_driver.cli.table import table
from dra_driver.cli.terminal import Terminal
from dra_driver.cli.usage import Usage, Use, claims_on, usages
from dra_driver.errors import NodeError
from dra_driver.kubeletplugin.claims import ClaimUid
from dra_driver.model.devices import ALL_GPUS, Withheld
from dra_driver.model.holdings import Limit, Record
from dra_driver.model.inventory import Inventory
from dra_driver.node.boot import boot_id
from dra_driver.node.ledger import SetAside, read_directory
from dra_driver.node.machine import Place, open_node
from dra_driver.plan.offer import described
from dra_driver.settings import NodeSettings


@dataclass(frozen=True, slots=True)
class Report:
    """What there is to tell; claims by namespace and name."""

    records: tuple[Record, ...]
    aside: Mapping[ClaimUid, SetAside]
    inventory: Inventory

    @property
    def usages(self) -> tuple[Usage, ...]:
        return usages(self.records, self.inventory.gpus)


def claims(
    settings: NodeSettings, output: str, terminal: Terminal, ledger_only: bool = False
) -> str:
    """As *bars*, as a *table*, or as *json*. *ledger_only*: the GPUs are not looked at."""
    records, aside = read_directory(settings.ledger_dir / boot_id(settings.host_root))
    ordered = tuple(sorted(records.values(), key=lambda record: record.claim))
    looks = output != "table" and not ledger_only  # the table tells nothing of the GPUs
    report = Report(ordered, aside, look(settings.place) if looks else Inventory())
    if output == "json":
        return json.dumps(document(report), indent=2, sort_keys=True)
    return _text(report, settings, output, terminal)


def look(place: Place) -> Inventory:
    """The GPUs that can be seen, and why others cannot."""
    try:
        with tempfile.TemporaryDirectory() as sim_dir, open_node(place, Path(sim_dir)) as node:
            return node.refresh()
    except NodeError as e:
        return Inventory(withheld=(Withheld(ALL_GPUS, str(e)),))


def document(report: Report) -> dict[str, Any]:
    """The answer for programs; the module says what is in it."""
    return {
        "gpus": [_gpu(usage) for usage in report.usages],
        "claims": [_claim(record) for record in report.records],
        "unreadable": [
            {
                "uid": found.uid,
                "path": str(found.path),
                "reason": found.reason,
                "mayHold": sorted(found.mentions),
            }
            for found in report.aside.values()
        ],
        "notOffered": [
            {"what": found.what, "reason": found.reason} for found in report.inventory.withheld
        ],
    }


def _gpu(usage: Usage) -> dict[str, Any]:
    return {
        "name": usage.name,
        "uuid": usage.uuid,
        "product": usage.gpu.product_name if usage.gpu else None,
        "memoryBytes": usage.memory_bytes,
        "heldBytes": usage.held_bytes,
        "freeBytes": usage.free_bytes,
        "coresHeld": 100 if usage.held.whole else usage.held.cores,
        "sharesHeld": usage.held.shares,
        "shares": usage.shares,
        "claims": [str(record.claim) for record in claims_on(usage)],
    }


def _claim(record: Record) -> dict[str, Any]:
    return {
        "namespace": record.claim.namespace,
        "name": record.claim.name,
        "uid": record.claim.uid,
        "state": _state(record),
        "pods": [pod.name for pod in record.pods],
        "devices": [_device(Use(record, holding)) for holding in record.holdings],
        "cdiDevices": [i for device in record.prepared or () for i in device.cdi_ids],
    }


def _device(use: Use) -> dict[str, Any]:
    holding, amount = use.holding, use.amount
    part = not amount.whole and not holding.admin
    return {
        "name": holding.device,
        "gpu": holding.gpu,
        "share": holding.share,
        "adminAccess": holding.admin,
        "shape": described(holding.shape),
        "whole": amount.whole,
        "memoryBytes": amount.memory_bytes or None if part else None,
        "cores": amount.cores if part else None,
        "shares": amount.shares if part else None,
        "interval": None if use.interval is None else str(use.interval),
        "limit": None if holding.limit is None else _limit(holding.limit),
    }


def _limit(limit: Limit) -> dict[str, Any]:
    return {
        "memoryBytes": limit.memory_bytes,
        "strict": limit.strict,
        "guard": str(limit.guard.policy),
        "graceSeconds": limit.guard.grace_seconds,
    }


def _text(report: Report, settings: NodeSettings, output: str, terminal: Terminal) -> str:
    lines = []
    shown = report.usages
    if output == "bars" and shown:
        lines.append(picture(shown, terminal))
    elif report.records:
        lines.append(_table(report.records))
    if not report.records:
        lines.append(f"no claim is prepared on this node (ledger: {settings.ledger_dir})")
    lines += [
        f"unreadable: {found.path}: {found.reason}; its claim may hold "
        f"{some(sorted(found.mentions)) or 'any GPU'}"
        for found in report.aside.values()
    ]
    lines += [f"not offered: {gone.what}: {gone.reason}" for gone in report.inventory.withheld]
    return "\n".join(lines)


def _table(records: Sequence[Record]) -> str:
    head = ("NAMESPACE", "CLAIM", "DEVICES", "STATE", "UID")
    return table(head, [_row(record) for record in records])


def _row(record: Record) -> tuple[str, ...]:
    devices = Counter(h.device + (" (admin)" if h.admin else "") for h in record.holdings)
    return (
        record.claim.namespace,
        record.claim.name,
        ",".join(name if times == 1 else f"{name} x{times}" for name, times in devices.items()),
        _state(record),
        record.claim.uid,
    )


def _state(record: Record) -> str:
    return "prepared" if record.completed else "started"
