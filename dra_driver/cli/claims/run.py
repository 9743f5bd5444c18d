"""``dra-driver claims``: who holds how much of what on this node, and what is free.

The ledger says what is held, the GPUs how much there is, and the node's MPS agent who runs under
MPS. Where one of them does not answer, the output says so and shows the rest. No API server is
asked. Nothing is changed, but for device files of the driver that are missing: reading the GPUs
makes them (``--ledger-only`` and ``-o table`` do not read them, and ``--ledger-only`` asks no
agent).

``-o json`` prints one object::

    {"gpus": [{"name", "uuid", "product",             of every GPU; null where it is not known
               "memoryBytes", "heldBytes",            held: by claims, also of its partitions
               "freeBytes",                           not held, nor in a partition; both null
                                                      where an unreadable record may hold it
               "coresHeld",                           percent, of 100
               "sharesHeld", "shares",                claims at once; shares null: it is not divided
               "claims": ["namespace/name", ...],     also those on its partitions
               "partitions": [{"name", "uuid",        those that are there or held; uuid null: not
                               "profile",             created yet; profile null: not known
                               "start", "size",       in memory units
                               ...}]}],               ...: from memoryBytes to claims, as above
     "claims": [{"namespace", "name", "uid",
                 "state",                             "started" or "prepared"
                 "pods": ["name", ...],
                 "allocation",                        null, or {"resource", "ids": [id, ...]}: it
                                                      is no claim, but what the kubelet gave to a
                                                      container by the device-plugin API
                 "devices": [{"name", "gpu", "share", "adminAccess",
                              "shape",                "exclusive", "sliceable", "4 replicas", ...
                              "whole",                true: no other claim can be on that GPU
                              "memoryBytes", "cores", "shares",  of a part; else null
                              "partition",            null, or {"start", "size", "uuid", "created"};
                                                      created: for claims, removed with the last
                              "interval",             "Long", ...; null: it asked for none
                              "limit",                null, or {"memoryBytes", "strict",
                                                      "guard", "graceSeconds"}
                              "mps"}],                null, or {"percent", "memoryLimitBytes",
                                                      "memoryUsedBytes", "clients": [number, ...],
                                                      "protocol", "pipeDirectory", "server"};
                                                      null in it: no limit, or not known; null
                                                      where mpsNamespaces has several for that GPU,
                                                      and it is not known which has the device
                 "mpsNamespaces": [{"name", "gpu",    of each of its namespaces on each GPU: two
                                    ...}],            containers can have two; ...: as in mps
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
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from dra_driver.base.frozen import frozen
from dra_driver.cli.claims.bars import usage_bars
from dra_driver.cli.findings import abbreviated
from dra_driver.cli.mps_usage import (
    AskAgent,
    ClaimsMpsUsage,
    MpsNamespaceUsage,
    MpsReport,
    ask_agent,
    read_gpus,
    read_mps_report,
    server_message,
    usage_messages,
)
from dra_driver.cli.terminal import Terminal, format_table
from dra_driver.cli.usage import GpuUsage, HeldDevice, gpu_usages
from dra_driver.k8s.claims import ClaimUid
from dra_driver.model.gpus import Inventory, PartitionKey
from dra_driver.model.mps import MpsServer
from dra_driver.model.records import ClaimMemoryLimit, ClaimRecord
from dra_driver.node.cgroups.procfs import boot_id
from dra_driver.node.machine import OpenNode
from dra_driver.node.state.ledger_files import DamagedRecord, read_ledger_directory
from dra_driver.plan.offer.shapes import describe_shape
from dra_driver.settings import ClaimsSettings


@frozen
class ClaimsReport:
    """What the command reports; claims by namespace and name."""

    records: tuple[ClaimRecord, ...]
    unreadable: Mapping[ClaimUid, DamagedRecord]
    inventory: Inventory
    mps: ClaimsMpsUsage = field(default_factory=ClaimsMpsUsage)

    @property
    def usages(self) -> tuple[GpuUsage, ...]:
        return gpu_usages(self.records, self.inventory.gpus, self.unreadable.values())


def claims(
    settings: ClaimsSettings,
    open_node: OpenNode | None,
    output: str,
    terminal: Terminal,
    ask: AskAgent = ask_agent,
) -> str:
    """As *bars*, as a *table*, or as *json*. *open_node*: None where the ledger alone counts:
    neither the GPUs are read, nor is the MPS agent asked."""
    records, unreadable = read_ledger_directory(settings.ledger_dir / boot_id(settings.host_root))
    ordered = tuple(sorted(records.values(), key=lambda record: record.claim))
    inventory, mps = Inventory(), MpsReport()
    if open_node is not None:
        mps = read_mps_report(ask, settings.mps_socket)
        if output != "table":  # which tells nothing of the GPUs
            inventory, used = read_gpus(open_node, ClaimsMpsUsage(ordered).gpus)
            mps = replace(mps, used=used)
    report = ClaimsReport(ordered, unreadable, inventory, ClaimsMpsUsage(ordered, mps))
    if output == "json":
        return json.dumps(report_document(report), indent=2, sort_keys=True)
    return report_text(report, settings.ledger_dir, output, terminal)


def report_document(report: ClaimsReport) -> dict[str, Any]:
    """The answer for programs; the module says what is in it."""
    return {
        "gpus": [_gpu(usage) for usage in report.usages],
        "claims": [_claim(record, report.mps) for record in report.records],
        "unreadable": [
            {
                "uid": unavailable.uid,
                "path": str(unavailable.path),
                "reason": unavailable.reason,
                "mayHold": sorted(unavailable.names),
            }
            for unavailable in report.unreadable.values()
        ],
        "notOffered": [
            {"what": unavailable.what, "reason": unavailable.reason}
            for unavailable in report.inventory.unavailable
        ],
        "mpsServers": [_mps_server(server, report.mps) for server in report.mps.servers],
        "mpsAgent": {"answers": report.mps.report.answers, "problem": report.mps.report.problem},
    }


def _gpu(usage: GpuUsage) -> dict[str, Any]:
    return {
        "name": usage.name,
        "uuid": usage.uuid,
        "product": usage.gpu.product_name if usage.gpu else None,
        **_held(usage),
        "partitions": [_partition(part, part.key) for part in usage.parts if part.key],
    }


def _partition(usage: GpuUsage, key: PartitionKey) -> dict[str, Any]:
    partition = usage.partition
    return {
        "name": usage.name,
        "uuid": usage.uuid,
        "profile": partition.profile.name if partition else None,
        "start": key.start,
        "size": key.size,
        **_held(usage),
    }


def _held(usage: GpuUsage) -> dict[str, Any]:
    return {
        "memoryBytes": usage.memory_bytes,
        "heldBytes": usage.held_bytes,
        "freeBytes": usage.free_bytes,
        "coresHeld": 100 if usage.held.whole else usage.held.cores,
        "sharesHeld": usage.held.shares,
        "shares": usage.shares,
        "claims": [str(record.claim) for record in usage.claims],
    }


def _claim(record: ClaimRecord, mps: ClaimsMpsUsage) -> dict[str, Any]:
    return {
        "namespace": record.claim.namespace,
        "name": record.claim.name,
        "uid": record.claim.uid,
        "state": _state(record),
        "pods": [pod.name for pod in record.pods],
        "allocation": record.allocation
        and {"resource": record.allocation.resource, "ids": list(record.allocation.ids)},
        "devices": [_device(HeldDevice(record, holding), mps) for holding in record.holdings],
        "mpsNamespaces": [
            {"name": use.namespace.name, "gpu": use.gpu, **_mps(use)}
            for use in mps.of_claim(record)
        ],
        "cdiDevices": [i for device in record.prepared or () for i in device.cdi_ids],
    }


def _device(use: HeldDevice, mps: ClaimsMpsUsage) -> dict[str, Any]:
    holding, amount = use.holding, use.amount
    part = not amount.whole and not holding.admin
    namespaces = mps.of(use.record, holding)
    return {
        "name": holding.device,
        "gpu": holding.gpu,
        "share": holding.share,
        "adminAccess": holding.admin,
        "shape": describe_shape(holding.shape),
        "whole": amount.whole,
        "memoryBytes": amount.memory_bytes or None if part else None,
        "cores": amount.cores if part else None,
        "shares": amount.shares if part else None,
        "partition": holding.partition
        and {
            "start": holding.partition.start,
            "size": holding.partition.size,
            "uuid": holding.memory_of,
            "created": holding.created_for_claims,
        },
        "interval": None if use.interval is None else str(use.interval),
        "limit": None if holding.limit is None else _limit(holding.limit),
        "mps": _mps(namespaces[0]) if len(namespaces) == 1 else None,
    }


def _limit(limit: ClaimMemoryLimit) -> dict[str, Any]:
    return {
        "memoryBytes": limit.memory_bytes,
        "strict": limit.strict,
        "guard": str(limit.guard.policy),
        "graceSeconds": limit.guard.grace_seconds,
    }


def _mps(use: MpsNamespaceUsage) -> dict[str, Any]:
    served = use.served
    return {
        "percent": use.namespace.percent,
        "memoryLimitBytes": use.memory_bytes,
        "memoryUsedBytes": use.used_bytes,
        "clients": None if use.clients is None else list(use.clients),
        "protocol": served.protocol if served else None,
        "pipeDirectory": served.pipe_directory if served else None,
        "server": use.server,
    }


def _mps_server(server: MpsServer, uses: ClaimsMpsUsage) -> dict[str, Any]:
    return {
        "name": server.name,
        "gpus": list(server.gpus),
        "protocol": server.protocol,
        "namespace": server.tenant or None,
        "ready": server.ready,
        "reason": server.reason,
        "restarts": server.restarts,
        "clients": sorted(client.pid for client in server.clients),
        "claims": list(uses.claims_of(server)),
    }


def report_text(report: ClaimsReport, ledger: Path, output: str, terminal: Terminal) -> str:
    """For people; *ledger* is where it was looked."""
    lines = []
    usages = report.usages
    if output == "bars" and usages:
        lines.append(usage_bars(usages, terminal, report.mps))
    elif report.records:
        lines.append(_table(report.records, report.mps))
        lines += [server_message(server) for server in report.mps.servers]
    if not report.records:
        lines.append(f"no claim is prepared on this node (ledger: {ledger})")
    lines += [
        f"unreadable: {damaged.path}: {damaged.reason}; its claim may hold "
        f"{abbreviated(sorted(damaged.names)) or 'any GPU'}"
        for damaged in report.unreadable.values()
    ]
    lines += [
        f"not offered: {unavailable.what}: {unavailable.reason}"
        for unavailable in report.inventory.unavailable
    ]
    if report.mps.report.problem and report.mps.gpus:
        lines.append(f"the clients of MPS are not known: {report.mps.report.problem}")
    return "\n".join(lines)


def _table(records: Sequence[ClaimRecord], mps: ClaimsMpsUsage) -> str:
    """With a last column for MPS where some claim is under it."""
    head = ("NAMESPACE", "CLAIM", "DEVICES", "STATE", "UID")
    rows = [_row(record) for record in records]
    if not mps.gpus:
        return format_table(head, rows)
    last = [_mps_cell(record, mps) for record in records]
    return format_table(
        (*head, "MPS"), [(*row, cell) for row, cell in zip(rows, last, strict=True)]
    )


def _row(record: ClaimRecord) -> tuple[str, ...]:
    devices = Counter(h.device + (" (admin)" if h.admin else "") for h in record.holdings)
    return (
        record.claim.namespace,
        record.allocation.resource if record.allocation else record.claim.name,
        ",".join(name if times == 1 else f"{name} x{times}" for name, times in devices.items()),
        _state(record),
        record.claim.uid,
    )


def _mps_cell(record: ClaimRecord, mps: ClaimsMpsUsage) -> str:
    """Each namespace of the claim; what is the same for all its GPUs stands there once."""
    texts = (
        (use.namespace.name, ", ".join(filter(None, usage_messages(use))))
        for use in mps.of_claim(record)
    )
    return "; ".join(text for _, text in dict.fromkeys(texts))


def _state(record: ClaimRecord) -> str:
    return "prepared" if record.completed else "started"
