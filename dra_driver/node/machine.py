"""Which node is looked at: this machine with its NVML, or a simulated one. Chosen once, here."""

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from dra_driver.node.cgroups.containers import ContainerBundles
from dra_driver.node.cgroups.procfs import boot_id
from dra_driver.node.cgroups.tree import Cgroups, cgroup_root
from dra_driver.node.driver.config import NodeConfig
from dra_driver.node.driver.device_nodes import DeviceNodes, device_number
from dra_driver.node.driver.pci import PciBus
from dra_driver.node.driver.root import DriverRoot
from dra_driver.node.driver.time_slices import TimeSlices
from dra_driver.node.gpu_node import GpuNode, NodeParts
from dra_driver.node.inventory.gpus import GpuDiscovery
from dra_driver.node.memory.limits import NodeMemoryLimits
from dra_driver.node.mig.capabilities import CapabilityAccess
from dra_driver.node.mig.gpu_holders import GpuHolders
from dra_driver.node.mig.partitions import MigPartitions
from dra_driver.node.mps.agent_client import MpsAgentClient
from dra_driver.node.nvml.client import Nvml, load_nvml
from dra_driver.node.nvml.compute_modes import ComputeModes

log = logging.getLogger(__name__)

_ROOT = Path("/")  # whose /proc tells the boot: the kernel is the host's


@contextmanager
def open_node(place: NodeConfig, sim_dir: Path, state: Path | None = None) -> Iterator[GpuNode]:
    """The node at *place*, until it is closed.

    A simulated one puts its host's files (driver, device nodes, sysfs, cgroups) into *sim_dir*.
    *state*: where it is kept what outlives this process; None: in *sim_dir*.
    """
    kept = (state or sim_dir) / "time-slices"
    with ExitStack() as stack:
        parts = _simulated(place, sim_dir, kept, stack) if place.sim else _real(place, kept)
        stack.callback(parts.nvml.stop)
        stack.callback(parts.limits.stop)
        yield GpuNode(parts)


def _real(place: NodeConfig, kept: Path) -> NodeParts:
    driver = DriverRoot(place.driver_root, place.host_root)
    nvml = Nvml(lambda: load_nvml(driver.nvml_library()))
    nodes = DeviceNodes(driver)
    cgroups = Cgroups(cgroup_root(place.host_root))
    return NodeParts(
        _gpus(nvml, nodes, place.host_root),
        nvml,
        driver,
        nodes,
        TimeSlices(driver, kept, boot_id(_ROOT)),
        NodeMemoryLimits(nvml, cgroups, ContainerBundles(place.host_root, place.runtime_dir).find),
        ComputeModes(nvml),
        _partitions(nvml, driver, nodes),
        _agent(place),
    )


def _simulated(place: NodeConfig, sim_dir: Path, kept: Path, stack: ExitStack) -> NodeParts:
    # Imported here: a node with GPUs has no use for it.
    from dra_driver.sim.cgroup_mirror import CgroupMirror
    from dra_driver.sim.host.directory import SimulatedHost, run_on_simulated_host
    from dra_driver.sim.live_node import LiveNode
    from dra_driver.sim.memory_limits import CgroupTree, SimulatedMemoryLimits
    from dra_driver.sim.mig.host_files import open_mig_states
    from dra_driver.sim.nvml import SimulatedComputeModes, SimulatedNvml

    live = LiveNode.named(place.sim)
    log.warning("GPUs are simulated", extra={"node": place.sim})
    SimulatedHost(live, sim_dir)
    host = str(sim_dir.absolute())
    driver = DriverRoot(place.driver_root or host, Path("/"), proc=f"{host}/proc")
    tree = CgroupTree(sim_dir / "sys/fs/cgroup")
    if live.current().limits_memory:
        mirror = CgroupMirror(Cgroups(cgroup_root(place.host_root)), tree)
        stack.callback(mirror.stop)
    modes = SimulatedComputeModes(sim_dir)
    mig = open_mig_states(sim_dir)
    nvml = Nvml(lambda: SimulatedNvml(live, SimulatedMemoryLimits(tree.root), modes, mig))
    nodes = DeviceNodes(driver, run_on_simulated_host, simulated_device_number)
    cgroups = Cgroups(tree.root, tree.make, tree.remove)
    return NodeParts(
        _gpus(nvml, nodes, sim_dir),
        nvml,
        driver,
        nodes,
        TimeSlices(driver, kept, boot_id(_ROOT), run_on_simulated_host),
        NodeMemoryLimits(nvml, cgroups, ContainerBundles(place.host_root, place.runtime_dir).find),
        ComputeModes(nvml),
        _partitions(nvml, driver, nodes),
        _agent(place),
    )


def _partitions(nvml: Nvml, driver: DriverRoot, nodes: DeviceNodes) -> MigPartitions:
    def loaded() -> bool:
        return driver.loaded_version() is not None

    return MigPartitions(
        nvml, GpuHolders(nvml), loaded, allow=CapabilityAccess(nodes.make_capability).have
    )


def _agent(place: NodeConfig) -> MpsAgentClient | None:
    return MpsAgentClient(Path(place.mps_socket)) if place.mps_socket else None


def _gpus(nvml: Nvml, nodes: DeviceNodes, root: Path) -> GpuDiscovery:
    def make_nodes(minors: tuple[int, ...]) -> None:
        nodes.files(minors)

    return GpuDiscovery(nvml, PciBus(root / "sys"), root / "dev", make_nodes)


def simulated_device_number(path: str) -> tuple[int, int] | None:
    """Where making device nodes is not permitted, links to /dev/null stand for them."""
    return device_number(path) or device_number(os.path.realpath(path))
