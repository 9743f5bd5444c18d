"""A fleet of nodes that nobody runs, each with eight H100s."""

import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from api import names
from dra_driver.k8s.client import ApiClient
from dra_driver.kubeletplugin.slices.reconcile import Pool, SliceOwner, plan_writes
from dra_driver.model.gpus import Gpu, GpuUuid, MigInfo, Topology, Version
from dra_driver.sim.mig.geometry import board_geometry
from hack.benchmark.errors import BenchError
from tests.e2e.kube import PATHS, wait

GPUS = 8

_PRODUCT = "H100-80-SXM"
_AT_ONCE = 8
_NODES = "/api/v1/nodes"
_SLICES = PATHS["ResourceSlice"]
_OURS = {"fieldSelector": f"spec.driver={names.DRIVER}"}

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class FleetNode:
    """A node, and what can be published of it. *partitioned*: shapes that know partitions offer its
    GPUs so."""

    name: str
    partitioned: bool = False

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The H100s of a usual board, with everything that NVML and PCI say of them."""
        return tuple(_gpu(self.name, minor) for minor in range(GPUS))


Shape = Callable[[FleetNode], Pool]
"""What is published for the GPUs of one node."""


def nodes(count: int, partitioned: int) -> tuple[FleetNode, ...]:
    """*count* nodes; *partitioned* of them, spread evenly, are offered in partitions."""
    chosen = {index * count // partitioned for index in range(partitioned)}
    return tuple(FleetNode(f"fleet-{index:03}", index in chosen) for index in range(count))


class Fleet:
    """Nodes in the API server, which are published in one shape at a time."""

    def __init__(self, api: ApiClient, fleet_nodes: Sequence[FleetNode]) -> None:
        """Makes the nodes. Without kubelets they stay as they are made."""
        self._api = api
        self._nodes = fleet_nodes
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            made = threads.map(lambda node: api.create(_NODES, _document(node)), fleet_nodes)
            self._uids = {each["metadata"]["name"]: each["metadata"]["uid"] for each in made}

    def publish(self, shape: Shape) -> None:
        """From now on every node has the slices of *shape*, and no others."""
        self._api.delete(_SLICES)
        wait("the slices to go", lambda: not self._api.get(_SLICES, {"limit": "1"})["items"])
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            made = sum(threads.map(lambda node: self._publish(node, shape(node)), self._nodes))
        listed = self._api.list(_SLICES, _OURS)["items"]
        if len(listed) != made:
            raise BenchError(f"{len(listed)} slices are there, not {made}")

    def _publish(self, node: FleetNode, pool: Pool) -> int:
        home = SliceOwner(names.DRIVER, node.name, self._uids[node.name])
        documents = plan_writes(pool, (), home).create
        for document in documents:
            self._api.create(_SLICES, dict(document))
        return len(documents)


def _document(node: FleetNode) -> Document:
    """As a kubelet would describe it; it says itself that it is Ready."""
    amounts = {"cpu": "128", "memory": "1Ti", "pods": "110"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": node.name, "labels": {"kubernetes.io/hostname": node.name}},
        "status": {
            "capacity": amounts,
            "allocatable": amounts,
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
        },
    }


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
        pci_id="0x233010DE",
        mig=_mig(),
    )


def _mig() -> MigInfo | None:
    """How it can be partitioned, in MIG mode as soon as a claim needs that."""
    geometry = board_geometry(_PRODUCT)
    return MigInfo(False, False, True, geometry.profiles) if geometry else None
