"""What a command learns of this node by looking: its GPUs, and what its MPS agent tells."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dra_driver.base.errors import NodeError
from dra_driver.cli.mps_usage import MpsReport
from dra_driver.k8s.claims import PodUid
from dra_driver.model.gpus import ALL_GPUS, GpuUuid, Inventory, UnavailableGpu
from dra_driver.model.mps import MpsStatus
from dra_driver.node.cgroups.processes import ContainerProcesses
from dra_driver.node.gpu_node import GpuNode
from dra_driver.node.machine import OpenNode
from dra_driver.node.mps.agent_client import MpsAgentClient
from dra_driver.plan.mps.usage import clients_without_namespace

AskAgent = Callable[[Path], MpsStatus]
"""Asks the MPS agent at a socket. NodeError: it does not answer."""


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """What can be seen of the GPUs, and of some the memory that each process uses there."""

    inventory: Inventory = field(default_factory=Inventory)
    used: Mapping[GpuUuid, Mapping[int, int | None]] = field(default_factory=dict)


def take_node_snapshot(open_node: OpenNode, used_of: Collection[GpuUuid] = ()) -> NodeSnapshot:
    """The GPUs that can be seen, and why others cannot. *used_of*: of which the processes are
    listed."""
    try:
        with open_node() as node:
            return NodeSnapshot(node.refresh(), {gpu: _used(node, gpu) for gpu in sorted(used_of)})
    except NodeError as e:
        return NodeSnapshot(Inventory(withheld=(UnavailableGpu(ALL_GPUS, str(e)),)))


def ask_agent(socket: Path) -> MpsStatus:
    return MpsAgentClient(socket).status()


def read_mps_report(ask: AskAgent, socket: str) -> MpsReport:
    """What the agent at *socket* tells, or why it tells nothing."""
    if not socket:
        return MpsReport(problem="--mps-socket is empty: there is no MPS agent to ask")
    try:
        status = ask(Path(socket))
    except NodeError as e:
        return MpsReport(problem=str(e))
    return MpsReport(status, pods=_pods(clients_without_namespace(status)))


def _used(node: GpuNode, gpu: GpuUuid) -> Mapping[int, int | None]:
    try:
        return {process.pid: process.memory_bytes for process in node.processes(gpu)}
    except NodeError:
        return {}  # it is gone, or does not say: then nothing is known of its clients' use


def _pods(pids: Collection[int]) -> Mapping[int, PodUid]:
    processes = ContainerProcesses()
    if not pids or not processes.sees_pods():
        return {}
    return {pid: found.pod for pid in pids if (found := processes.find(pid)) is not None}
