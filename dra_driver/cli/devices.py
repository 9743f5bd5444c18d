"""``dra-driver devices``: what this node would publish; nothing is published or changed."""

import json
import tempfile
from pathlib import Path
from typing import Any

import yaml

from dra_driver.cli.table import table
from dra_driver.kubeletplugin.slices import Home, Pool, reconcile, split
from dra_driver.model.devices import Device
from dra_driver.model.inventory import Inventory
from dra_driver.node.machine import open_node
from dra_driver.plan.publish import published
from dra_driver.settings import DevicesSettings

_GIB = 1024**3


def devices(settings: DevicesSettings, output: str) -> str:
    """As a table for people, or as a Kubernetes List of ResourceSlices (``json``, ``yaml``)."""
    with tempfile.TemporaryDirectory() as sim_dir, open_node(settings.place, Path(sim_dir)) as node:
        inventory = node.refresh()
    if output == "table":
        return _text(inventory)
    document = slices_list(inventory, settings)
    if output == "yaml":
        return yaml.safe_dump(document, sort_keys=True).rstrip()
    return json.dumps(document, indent=2, sort_keys=True)


def slices_list(inventory: Inventory, settings: DevicesSettings) -> dict[str, Any]:
    """The ResourceSlices, in API version v1, that a first publication would create."""
    pool: Pool = split(settings.node_name, published(inventory))
    home = Home(settings.driver_name, settings.node_name, node_uid="")
    items = []
    for document in reconcile(pool, (), home).create:
        metadata = {k: v for k, v in document["metadata"].items() if k != "ownerReferences"}
        items.append({**document, "metadata": metadata})
    return {"apiVersion": "v1", "kind": "List", "metadata": {}, "items": items}


def _text(inventory: Inventory) -> str:
    head = ("DEVICE", "PRODUCT", "MEMORY", "UUID", "PCI BUS", "NUMA", "PCIE SWITCH", "NVLINK")
    rows = [_row(device) for device in inventory.devices]
    lines = [table(head, rows)] if rows else ["this node has no GPU to offer"]
    lines += [f"not offered: {found.what}: {found.reason}" for found in inventory.withheld]
    return "\n".join(lines)


def _row(gpu: Device) -> tuple[str, ...]:
    topology = gpu.topology
    memory = "?" if gpu.memory_bytes is None else f"{gpu.memory_bytes / _GIB:.1f} GiB"
    peers = f"{topology.nvlink_clique} ({topology.nvlink_peers} peers)"
    return (
        gpu.name,
        gpu.product_name,
        memory,
        gpu.uuid,
        gpu.pci_bus_id,
        "-" if topology.numa_node is None else str(topology.numa_node),
        topology.pcie_switch or "-",
        peers if topology.nvlink_clique else "-",
    )
