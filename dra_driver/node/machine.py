"""Builds the node of this machine, or of a simulated one with other parts (``sim.parts``)."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from dra_driver.base.frozen import frozen
from dra_driver.node.cgroups.containers import ContainerBundles
from dra_driver.node.cgroups.procfs import boot_id
from dra_driver.node.cgroups.tree import Cgroups, cgroup_root
from dra_driver.node.driver.config import DriverPrograms, NodeConfig, find_driver
from dra_driver.node.driver.device_nodes import DeviceNodes, DeviceNumberOf, device_number
from dra_driver.node.driver.pci import PciBus
from dra_driver.node.driver.time_slices import TimeSlices
from dra_driver.node.gpu_node import GpuNode
from dra_driver.node.inventory.gpus import GpuDiscovery
from dra_driver.node.kernel_log import KernelLog
from dra_driver.node.memory.limits import NodeMemoryLimits
from dra_driver.node.mig.capabilities import CapabilityAccess
from dra_driver.node.mig.geometry import MigGeometries
from dra_driver.node.mig.gpu_holders import GpuHolders
from dra_driver.node.mig.modes import GpuMigReader
from dra_driver.node.mig.partitions import MigPartitions
from dra_driver.node.mps.agent_client import MpsAgentClient
from dra_driver.node.nvml.api import NvmlFunctions
from dra_driver.node.nvml.client import Nvml
from dra_driver.node.nvml.compute_modes import ComputeModes
from dra_driver.node.nvml.events import GpuEvents
from dra_driver.node.nvml.library import load_nvml

_ROOT = Path("/")  # whose /proc tells the boot: the kernel is the host's

OpenNode = Callable[[], AbstractContextManager[GpuNode]]


@frozen
class MachineParts:
    """What differs between this machine and a simulated one."""

    root: Path  # with the machine's sys and dev
    driver: DriverPrograms
    load_nvml: Callable[[], NvmlFunctions]
    cgroups: Cgroups
    device_number: DeviceNumberOf = device_number


@contextmanager
def open_node(config: NodeConfig, state: Path) -> Iterator[GpuNode]:
    """The node of this machine, until it is closed. *state*: the directory for what outlives this
    process."""
    driver = find_driver(config)
    machine = MachineParts(
        config.host_root,
        driver,
        lambda: load_nvml(driver.root.nvml_library()),
        Cgroups(cgroup_root(config.host_root)),
    )
    with node_of(machine, config, state) as node:
        yield node


@contextmanager
def node_of(machine: MachineParts, config: NodeConfig, state: Path) -> Iterator[GpuNode]:
    """The node of *machine*, until it is closed."""
    root, run = machine.driver.root, machine.driver.run
    geometries = MigGeometries()
    nvml = Nvml(machine.load_nvml, geometries.start_session)
    nodes = DeviceNodes(root, run, machine.device_number)
    containers = ContainerBundles(config.host_root, config.runtime_dir)
    limits = NodeMemoryLimits(nvml, machine.cgroups, containers.find)
    partitions = MigPartitions(
        GpuMigReader(nvml, geometries, GpuHolders(nvml), lambda: root.loaded_version() is not None),
        allow=CapabilityAccess(nodes.make_capability).have,
    )
    node = GpuNode(
        machine.root,
        GpuDiscovery(nvml, PciBus(machine.root / "sys"), machine.root / "dev", nodes.files),
        nvml,
        root,
        nodes,
        TimeSlices(root, state / "time-slices", boot_id(_ROOT), run),
        limits,
        ComputeModes(nvml),
        partitions,
        containers,
        GpuEvents(nvml, KernelLog(machine.root / "dev" / "kmsg")),
        MpsAgentClient(Path(config.mps_socket)) if config.mps_socket else None,
    )
    try:
        yield node
    finally:
        node.events.stop()
        limits.stop()
        nvml.stop()
