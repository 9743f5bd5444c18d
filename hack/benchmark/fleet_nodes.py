"""A fleet of nodes that nobody runs, and what our own code publishes for their GPUs."""

import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from api import names
from dra_driver.cluster.client import ApiServer
from dra_driver.kubeletplugin.slice_limits import check
from dra_driver.kubeletplugin.slices import Home, reconcile, split
from dra_driver.model.devices import Gpu, GpuUuid, Topology, Version
from hack.benchmark.errors import BenchError
from tests.e2e.kube import PATHS, wait

NODES = 200
GPUS = 8

_AT_ONCE = 8
_NODES = "/api/v1/nodes"
_SLICES = PATHS["ResourceSlice"]
_OURS = {"fieldSelector": f"spec.driver={names.DRIVER}"}

Document = dict[str, Any]
Shape = Callable[[tuple[Gpu, ...]], Sequence[Mapping[str, Any]]]
"""What is published for the GPUs of one node."""


class Fleet:
    """Nodes with H100s, which are published in one shape at a time."""

    def __init__(self, api: ApiServer, count: int = NODES) -> None:
        """Makes the nodes. Without kubelets they stay as they are made."""
        self._api = api
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            made = threads.map(lambda i: api.create(_NODES, _node(i)), range(count))
            self._uids = {each["metadata"]["name"]: each["metadata"]["uid"] for each in made}

    def publish(self, shape: Shape) -> None:
        """From now on every node has the slices of *shape*, and no others."""
        self._api.delete(_SLICES)
        wait("the slices to go", lambda: not self._api.get(_SLICES, {"limit": "1"})["items"])
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            for _ in threads.map(lambda node: self._publish(node, shape), self._uids):
                pass
        there = self._api.list(_SLICES, _OURS)["items"]
        if len(there) < len(self._uids):
            raise BenchError(f"{len(there)} slices are there for {len(self._uids)} nodes")

    def _publish(self, node: str, shape: Shape) -> None:
        pool = split(node, shape(gpus_of(node)))
        if problems := check(pool, names.DRIVER):
            raise BenchError("; ".join(problems))
        home = Home(names.DRIVER, node, self._uids[node])
        for document in reconcile(pool, (), home).create:
            self._api.create(_SLICES, dict(document))


def _node(index: int) -> Document:
    """As a kubelet would describe it; it says itself that it is Ready."""
    amounts = {"cpu": "128", "memory": "1Ti", "pods": "110"}
    name = f"fleet-{index:03}"
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
        "status": {
            "capacity": amounts,
            "allocatable": amounts,
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
        },
    }


def gpus_of(node: str) -> tuple[Gpu, ...]:
    """The eight H100s of a usual board, with everything that NVML and PCI say of them."""
    return tuple(_gpu(node, minor) for minor in range(GPUS))


def _gpu(node: str, minor: int) -> Gpu:
    bus = 0x1B + 0x14 * minor
    return Gpu(
        minor=minor,
        uuid=GpuUuid(f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{minor}.{node}')}"),
        pci_bus_id=f"0000:{bus:02x}:00.0",
        product_name="NVIDIA H100 80GB HBM3",
        brand="Nvidia",
        architecture="Hopper",
        compute_capability=Version(9),
        driver_version=Version(580, 95, 5),
        cuda_driver_version=Version(13),
        memory_bytes=81559 * 2**20,
        addressing_mode="HMM",
        topology=Topology(
            pcie_root=f"pci0000:{bus - 6:02x}",
            pcie_switch=f"0000:{bus - 5:02x}:00.0",
            numa_node=minor // 4,
            nvlink_clique=f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, node)}",
            nvlink_peers=GPUS - 1,
        ),
    )
