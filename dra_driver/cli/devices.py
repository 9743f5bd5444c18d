"""``dra-driver devices``: what this node would publish; nothing is published.

Nothing is changed, but for device files of the driver that are missing: a GPU without its own
cannot be offered, so looking at the GPUs makes them.

That is what its GPUs, the profile (``--profile``, else ``default``) and the ledger make of it: a
GPU that a claim holds keeps its shape. A ledger that cannot be read is no reason to say nothing
(anyone may ask about a simulated node): a warning says so, and every GPU counts as free. The label
of the Node is not looked at, no API server is asked; what one would get that lacks a feature is
told with ``--without``.

``-o json`` and ``-o yaml`` print a Kubernetes ``List`` of ResourceSlices in API version v1, as a
first publication would create them. What is said beside them in a table (GPUs that are not offered,
changes that wait, notes on the profile) has no place in it.
"""

import json
import logging
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, assert_never

import yaml

from dra_driver.cli.sizes import gib
from dra_driver.cli.table import table
from dra_driver.cli.usage import held_by
from dra_driver.errors import NodeError
from dra_driver.kubeletplugin.slices import Home, Pool, reconcile, split
from dra_driver.model.devices import Gpu
from dra_driver.model.holdings import Held
from dra_driver.model.mps import ALL_CORES
from dra_driver.model.offer import (
    Device,
    Exclusive,
    Keeps,
    Monitor,
    Offer,
    Pending,
    Replica,
    Shape,
    Sliceable,
)
from dra_driver.model.profiles import DEFAULT_PROFILE, Profile, Rules
from dra_driver.node.boot import boot_id
from dra_driver.node.ledger_files import read_directory
from dra_driver.node.machine import open_node
from dra_driver.plan.offer import described, offer
from dra_driver.plan.publish import published
from dra_driver.plugin.profiles import Profiles
from dra_driver.settings import DevicesSettings

log = logging.getLogger(__name__)

FEATURES = ("consumable-capacity", "taints")  # that an API server can be without

_MIB = 1024**2
_HEAD = ("DEVICE", "PRODUCT", "SHAPE", "MEMORY", "DEFAULT", "LEAST", "STEP", "SHARES", "CORES")
_WIDE_HEAD = ("SHARED BY", "PCI BUS", "NUMA", "PCIE SWITCH", "NVLINK")


def devices(settings: DevicesSettings, output: str, without: Collection[str] = ()) -> str:
    """As a *table* or a *wide* one for people, or as *json* or *yaml*. *without*: FEATURES that the
    API server is taken to lack."""
    profile = profile_of(settings)  # a wrong one is told before the GPUs are looked at
    with tempfile.TemporaryDirectory() as sim_dir, open_node(settings.place, Path(sim_dir)) as node:
        inventory = node.refresh()
    keeps = Keeps(capacity=FEATURES[0] not in without, taints=FEATURES[1] not in without)
    mps = bool(settings.mps_socket)
    offered = offer(inventory, profile, keeps, _held(settings), mps=mps)
    if output in ("table", "wide"):
        return _text(offered, profile, wide=output == "wide")
    document = slices_list(offered, settings)
    if output == "yaml":
        return yaml.safe_dump(document, sort_keys=True).rstrip()
    return json.dumps(document, indent=2, sort_keys=True)


def _held(settings: DevicesSettings) -> Held:
    try:
        records, _ = read_directory(settings.ledger_dir / boot_id(settings.host_root))
    except NodeError as e:
        log.warning("every GPU counts as free: %s", e)
        return {}
    return held_by(records.values())


def profile_of(settings: DevicesSettings) -> Profile:
    """The one that is named, else the one called default. SettingsError: there is none, or it is
    wrong."""
    return Profiles(settings.profiles).named(settings.profile or DEFAULT_PROFILE.name)


def slices_list(offered: Offer, settings: DevicesSettings) -> dict[str, Any]:
    """The ResourceSlices, in API version v1, that a first publication would create."""
    pool: Pool = split(settings.node_name, published(offered))
    home = Home(settings.driver_name, settings.node_name, node_uid="")
    items = []
    for document in reconcile(pool, (), home).create:
        metadata = {k: v for k, v in document["metadata"].items() if k != "ownerReferences"}
        items.append({**document, "metadata": metadata})
    return {"apiVersion": "v1", "kind": "List", "metadata": {}, "items": items}


def _text(offered: Offer, profile: Profile, wide: bool) -> str:
    head = (*_HEAD, "UUID", *(_WIDE_HEAD if wide else ()))
    rows = [_row(device, wide) for device in offered.devices]
    lines = [table(head, rows)] if rows else ["this node has no GPU to offer"]
    lines += [f"not offered: {found.what}: {found.reason}" for found in offered.withheld]
    lines += [_pending(change) for change in offered.pending]
    lines += [f"profile {profile.name}: {note}" for note in profile.notes]
    lines += offered.notes[len(profile.notes) :]
    lines.append(f"profile: {profile.name}")
    return "\n".join(lines)


def _pending(change: Pending) -> str:
    if change.reason:
        return f"not as the profile says: {change.device}: {change.change}: {change.reason}"
    return f"pending: {change.device} keeps its shape while a claim holds it, then: {change.change}"


def _row(device: Device, wide: bool) -> tuple[str, ...]:
    gpu = device.gpu
    row = (
        device.name,
        gpu.product_name,
        _shape(device.shape),
        "?" if gpu.memory_bytes is None else gib(gpu.memory_bytes),
        *_amounts(device.shape),
        gpu.uuid,
    )
    return (*row, _shared_by(device.rules), *_place(gpu)) if wide else row


def _shared_by(rules: Rules) -> str:
    """The strategies that are possible, the default one first."""
    others = [each for each in rules.strategies if each is not rules.default_strategy]
    return ", ".join([rules.default_strategy, *others]) if rules.strategies else "-"


def _shape(shape: Shape) -> str:
    match shape:
        case Replica(place=place):
            return f"{place + 1} of {described(shape)}"
        case Monitor():
            return f"{described(shape)} (admin access)"
        case _:
            return described(shape)


def _amounts(shape: Shape) -> Iterator[str]:
    """Memory by default, least and step; the most shares; the most cores, or those of each."""
    match shape:
        case Sliceable(memory_default=default, memory_least=least, memory_step=step):
            yield from (f"{amount // _MIB}Mi" for amount in (default, least, step))
            yield str(shape.shares)
            yield _cores(shape)
        case Replica(memory_bytes=memory, cores=cores):
            yield from ("-" if memory is None else f"{memory // _MIB}Mi", "-", "-", "1")
            yield f"{cores} %" if cores else "-"
        case Exclusive() | Monitor():
            yield from "-----"
        case _:
            assert_never(shape)


def _cores(shape: Sliceable) -> str:
    if not shape.cores:
        return "-"
    each = shape.cores_default
    return f"{ALL_CORES} % ({each} % each)" if each else f"{ALL_CORES} %"


def _place(gpu: Gpu) -> tuple[str, ...]:
    topology = gpu.topology
    peers = f"{topology.nvlink_clique} ({topology.nvlink_peers} peers)"
    return (
        gpu.pci_bus_id,
        "-" if topology.numa_node is None else str(topology.numa_node),
        topology.pcie_switch or "-",
        peers if topology.nvlink_clique else "-",
    )
