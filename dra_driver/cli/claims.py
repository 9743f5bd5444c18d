"""``dra-driver claims``: who holds how much of what on this node, and what is free.

What is held is what the ledger says; how much there is, a look at the GPUs; who runs under MPS, the
node's MPS agent. Where one of them does not answer it is said so, and the rest is answered all the
same. No API server is asked. Nothing is changed, but for device files of the driver that are
missing: looking at the GPUs makes them (``--ledger-only`` and ``-o table`` do not look, and
``--ledger-only`` asks no agent).

``-o json`` prints one object::

    {"gpus": [{"name", "uuid", "product",             of every GPU; null where it is not known
               "memoryBytes", "heldBytes",            held: by claims, also of its partitions
               "freeBytes",                           not held, nor in a partition
               "coresHeld",                           percent, of 100
               "sharesHeld", "shares",                claims at once; shares null: it is not divided
               "claims": ["namespace/name", ...],     also those on its partitions
               "partitions": [{"name", "uuid",        those that are there or held; uuid null: not
                               "profile",             cut yet; profile null: not known
                               "start", "size",       in memory units
                               ...}]}],               ...: from memoryBytes to claims, as above
     "claims": [{"namespace", "name", "uid",
                 "state",                             "started" or "prepared"
                 "pods": ["name", ...],
                 "devices": [{"name", "gpu", "share", "adminAccess",
                              "shape",                "exclusive", "sliceable", "4 replicas", ...
                              "whole",                true: no other claim can be on that GPU
                              "memoryBytes", "cores", "shares",  of a part; else null
                              "partition",            null, or {"start", "size", "uuid", "cut"};
                                                      cut: for claims, and goes with the last
                              "interval",             "Long", ...; null: it asked for none
                              "limit",                null, or {"memoryBytes", "strict",
                                                      "guard", "graceSeconds"}
                              "mps"}],                null, or {"percent", "memoryLimitBytes",
                                                      "memoryUsedBytes", "clients": [number, ...],
                                                      "protocol", "pipeDirectory", "server"};
                                                      null in it: no limit, or not known; null
                                                      where mpsSpaces has several for that GPU and
                                                      nobody can tell in which the device is
                 "mpsSpaces": [{"space", "gpu",       of each of its spaces on each GPU: two
                                ...}],                containers can have two; ...: as in mps
                 "cdiDevices": ["vendor/class=name", ...]}],
     "unreadable": [{"uid", "path", "reason",         records that this release cannot read
                     "mayHold": ["gpu-0", ...]}],     empty: any GPU
     "notOffered": [{"what", "reason"}],              GPUs of which nothing is known, and why
     "mpsServers": [{"name", "gpus": [uuid, ...],     as the MPS agent tells
                     "protocol", "ready", "reason",
                     "restarts",
                     "clients": [number, ...],        of the host's processes
                     "claims": ["namespace/name", ...]}],
     "mpsAgent": {"answers",                          null: it was not asked
                  "problem"}}                         why it does not answer
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dra_driver.cli.bars import picture
from dra_driver.cli.findings import some
from dra_driver.cli.mps_document import (
    agent_document,
    device_document,
    server_document,
    space_document,
)
from dra_driver.cli.mps_usage import MpsUses, Told, server_words, use_words
from dra_driver.cli.sight import Ask, Sight, ask_agent, look, told_by
from dra_driver.cli.table import table
from dra_driver.cli.terminal import Terminal
from dra_driver.cli.usage import Usage, Use, claims_on, usages
from dra_driver.kubeletplugin.claims import ClaimUid
from dra_driver.model.holdings import Holding, Limit, Record
from dra_driver.model.inventory import Inventory
from dra_driver.model.mig import PartitionKey
from dra_driver.node.boot import boot_id
from dra_driver.node.ledger_files import SetAside, read_directory
from dra_driver.plan.offer import described
from dra_driver.settings import ClaimsSettings


@dataclass(frozen=True, slots=True)
class Report:
    """What there is to tell; claims by namespace and name."""

    records: tuple[Record, ...]
    aside: Mapping[ClaimUid, SetAside]
    inventory: Inventory
    mps: MpsUses = field(default_factory=MpsUses)

    @property
    def usages(self) -> tuple[Usage, ...]:
        return usages(self.records, self.inventory.gpus)


def claims(
    settings: ClaimsSettings,
    output: str,
    terminal: Terminal,
    ledger_only: bool = False,
    ask: Ask = ask_agent,
) -> str:
    """As *bars*, as a *table*, or as *json*. *ledger_only*: neither the GPUs are looked at, nor is
    the MPS agent asked."""
    records, aside = read_directory(settings.ledger_dir / boot_id(settings.host_root))
    ordered = tuple(sorted(records.values(), key=lambda record: record.claim))
    looks = output != "table" and not ledger_only  # the table tells nothing of the GPUs
    sight = look(settings, MpsUses(ordered).gpus) if looks else Sight()
    told = Told() if ledger_only else told_by(ask, settings.mps_socket)
    uses = MpsUses(ordered, replace(told, used=sight.used))
    report = Report(ordered, aside, sight.inventory, uses)
    if output == "json":
        return json.dumps(document(report), indent=2, sort_keys=True)
    return text(report, settings.ledger_dir, output, terminal)


def document(report: Report) -> dict[str, Any]:
    """The answer for programs; the module says what is in it."""
    return {
        "gpus": [_gpu(usage) for usage in report.usages],
        "claims": [_claim(record, report.mps) for record in report.records],
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
        "mpsServers": [server_document(server, report.mps) for server in report.mps.servers],
        "mpsAgent": agent_document(report.mps),
    }


def _gpu(usage: Usage) -> dict[str, Any]:
    return {
        "name": usage.name,
        "uuid": usage.uuid,
        "product": usage.gpu.product_name if usage.gpu else None,
        **_held(usage),
        "partitions": [_partition(part, part.key) for part in usage.parts if part.key],
    }


def _partition(usage: Usage, key: PartitionKey) -> dict[str, Any]:
    known = usage.partition
    return {
        "name": usage.name,
        "uuid": usage.uuid,
        "profile": known.profile.name if known else None,
        "start": key.start,
        "size": key.size,
        **_held(usage),
    }


def _held(usage: Usage) -> dict[str, Any]:
    return {
        "memoryBytes": usage.memory_bytes,
        "heldBytes": usage.held_bytes,
        "freeBytes": usage.free_bytes,
        "coresHeld": 100 if usage.held.whole else usage.held.cores,
        "sharesHeld": usage.held.shares,
        "shares": usage.shares,
        "claims": [str(record.claim) for record in claims_on(usage)],
    }


def _claim(record: Record, mps: MpsUses) -> dict[str, Any]:
    return {
        "namespace": record.claim.namespace,
        "name": record.claim.name,
        "uid": record.claim.uid,
        "state": _state(record),
        "pods": [pod.name for pod in record.pods],
        "devices": [_device(Use(record, holding), mps) for holding in record.holdings],
        "mpsSpaces": [space_document(use) for use in mps.of_claim(record)],
        "cdiDevices": [i for device in record.prepared or () for i in device.cdi_ids],
    }


def _device(use: Use, mps: MpsUses) -> dict[str, Any]:
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
        "partition": holding.partition and _of_partition(holding, holding.partition),
        "interval": None if use.interval is None else str(use.interval),
        "limit": None if holding.limit is None else _limit(holding.limit),
        "mps": device_document(mps.of(use.record, holding)),
    }


def _of_partition(holding: Holding, key: PartitionKey) -> dict[str, Any]:
    return {"start": key.start, "size": key.size, "uuid": holding.memory_of, "cut": holding.cut}


def _limit(limit: Limit) -> dict[str, Any]:
    return {
        "memoryBytes": limit.memory_bytes,
        "strict": limit.strict,
        "guard": str(limit.guard.policy),
        "graceSeconds": limit.guard.grace_seconds,
    }


def text(report: Report, ledger: Path, output: str, terminal: Terminal) -> str:
    """For people; *ledger* is where it was looked."""
    lines = []
    shown = report.usages
    if output == "bars" and shown:
        lines.append(picture(shown, terminal, report.mps))
    elif report.records:
        lines.append(_table(report.records, report.mps))
        lines += [server_words(server) for server in report.mps.servers]
    if not report.records:
        lines.append(f"no claim is prepared on this node (ledger: {ledger})")
    lines += [
        f"unreadable: {found.path}: {found.reason}; its claim may hold "
        f"{some(sorted(found.mentions)) or 'any GPU'}"
        for found in report.aside.values()
    ]
    lines += [f"not offered: {gone.what}: {gone.reason}" for gone in report.inventory.withheld]
    if report.mps.told.problem and report.mps.gpus:
        lines.append(f"the clients of MPS are not known: {report.mps.told.problem}")
    return "\n".join(lines)


def _table(records: Sequence[Record], mps: MpsUses) -> str:
    """With a last column for MPS where some claim is under it."""
    head = ("NAMESPACE", "CLAIM", "DEVICES", "STATE", "UID")
    rows = [_row(record) for record in records]
    if not mps.gpus:
        return table(head, rows)
    last = [_mps_cell(record, mps) for record in records]
    return table((*head, "MPS"), [(*row, cell) for row, cell in zip(rows, last, strict=True)])


def _row(record: Record) -> tuple[str, ...]:
    devices = Counter(h.device + (" (admin)" if h.admin else "") for h in record.holdings)
    return (
        record.claim.namespace,
        record.claim.name,
        ",".join(name if times == 1 else f"{name} x{times}" for name, times in devices.items()),
        _state(record),
        record.claim.uid,
    )


def _mps_cell(record: Record, mps: MpsUses) -> str:
    """Each space of the claim; what is the same for all GPUs of a space is told once."""
    told = (
        (use.space.name, ", ".join(filter(None, use_words(use)))) for use in mps.of_claim(record)
    )
    return "; ".join(words for _, words in dict.fromkeys(told))


def _state(record: Record) -> str:
    return "prepared" if record.completed else "started"
