"""What a command learns of this node by looking: its GPUs, and what its MPS agent tells."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dra_driver.cli.mps_usage import Told
from dra_driver.cli.simulated_host import host_directory
from dra_driver.errors import NodeError
from dra_driver.kubeletplugin.claims import PodUid
from dra_driver.model.devices import ALL_GPUS, GpuUuid, Withheld
from dra_driver.model.inventory import Inventory
from dra_driver.model.mps import MpsStatus
from dra_driver.node.machine import open_node
from dra_driver.node.mps.agent import MpsAgent
from dra_driver.node.node import GpuNode
from dra_driver.node.processes import Processes
from dra_driver.plan.mps_clients import untold
from dra_driver.settings import ClaimsSettings

Ask = Callable[[Path], MpsStatus]
"""Asks the MPS agent at a socket. NodeError: it does not answer."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What can be seen of the GPUs, and of some the memory that each process uses there."""

    inventory: Inventory = field(default_factory=Inventory)
    used: Mapping[GpuUuid, Mapping[int, int | None]] = field(default_factory=dict)


def look(settings: ClaimsSettings, used_of: Collection[GpuUuid] = ()) -> Sight:
    """The GPUs that can be seen, and why others cannot. *used_of*: of which the processes are
    listed."""
    try:
        with (
            host_directory(settings) as sim_dir,
            open_node(settings.place, sim_dir, state=settings.state) as node,
        ):
            return Sight(node.refresh(), {gpu: _used(node, gpu) for gpu in sorted(used_of)})
    except NodeError as e:
        return Sight(Inventory(withheld=(Withheld(ALL_GPUS, str(e)),)))


def ask_agent(socket: Path) -> MpsStatus:
    return MpsAgent(socket).status()


def told_by(ask: Ask, socket: str) -> Told:
    """What the agent at *socket* tells, or why it tells nothing."""
    if not socket:
        return Told(problem="--mps-socket is empty: there is no MPS agent to ask")
    try:
        status = ask(Path(socket))
    except NodeError as e:
        return Told(problem=str(e))
    return Told(status, pods=_pods(untold(status)))


def _used(node: GpuNode, gpu: GpuUuid) -> Mapping[int, int | None]:
    try:
        return {process.pid: process.memory_bytes for process in node.processes(gpu)}
    except NodeError:
        return {}  # it is gone, or does not say: then nothing is known of its clients' use


def _pods(pids: Collection[int]) -> Mapping[int, PodUid]:
    processes = Processes()
    if not pids or not processes.sees_pods():
        return {}
    return {pid: found.pod for pid in pids if (found := processes.find(pid)) is not None}
