"""Which node is looked at: this machine with its NVML, or a simulated one. Chosen once, here."""

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from dra_driver.node.boot import boot_id
from dra_driver.node.cgroups import Cgroups, cgroup_root
from dra_driver.node.compute_modes import ComputeModes
from dra_driver.node.containers import Containers
from dra_driver.node.device_nodes import DeviceNodes, device_number
from dra_driver.node.driver_root import DriverRoot
from dra_driver.node.gpus import Gpus
from dra_driver.node.memory_limits import MemoryLimits
from dra_driver.node.mig.capabilities import Access
from dra_driver.node.mig.holders import Holders
from dra_driver.node.mig.partitions import Partitions
from dra_driver.node.mps.agent import MpsAgent
from dra_driver.node.node import GpuNode, Parts
from dra_driver.node.nvml import Nvml, load_nvml
from dra_driver.node.place import Place
from dra_driver.node.time_slices import TimeSlices
from dra_driver.node.topology import PciTree

log = logging.getLogger(__name__)

_ROOT = Path("/")  # whose /proc tells the boot: the kernel is the host's


@contextmanager
def open_node(place: Place, sim_dir: Path, state: Path | None = None) -> Iterator[GpuNode]:
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


def _real(place: Place, kept: Path) -> Parts:
    driver = DriverRoot(place.driver_root, place.host_root)
    nvml = Nvml(lambda: load_nvml(driver.nvml_library()))
    nodes = DeviceNodes(driver)
    cgroups = Cgroups(cgroup_root(place.host_root))
    return Parts(
        _gpus(nvml, nodes, place.host_root),
        nvml,
        driver,
        nodes,
        TimeSlices(driver, kept, boot_id(_ROOT)),
        MemoryLimits(nvml, cgroups, Containers(place.host_root, place.runtime_dir).find),
        ComputeModes(nvml),
        _partitions(nvml, driver, nodes),
        _agent(place),
    )


def _simulated(place: Place, sim_dir: Path, kept: Path, stack: ExitStack) -> Parts:
    # Imported here: a node with GPUs has no use for it.
    from dra_driver.node.sim.cgroup_mirror import CgroupMirror
    from dra_driver.node.sim.commands import run_simulated
    from dra_driver.node.sim.compute_modes import SimulatedComputeModes
    from dra_driver.node.sim.host import SimulatedHost
    from dra_driver.node.sim.live import LiveNode
    from dra_driver.node.sim.memory_limits import CgroupTree, SimulatedMemoryLimits
    from dra_driver.node.sim.mig.host_files import kept_on
    from dra_driver.node.sim.nvml import SimulatedNvml

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
    mig = kept_on(sim_dir)
    nvml = Nvml(lambda: SimulatedNvml(live, SimulatedMemoryLimits(tree.root), modes, mig))
    nodes = DeviceNodes(driver, run_simulated, simulated_device_number)
    cgroups = Cgroups(tree.root, tree.make, tree.remove)
    return Parts(
        _gpus(nvml, nodes, sim_dir),
        nvml,
        driver,
        nodes,
        TimeSlices(driver, kept, boot_id(_ROOT), run_simulated),
        MemoryLimits(nvml, cgroups, Containers(place.host_root, place.runtime_dir).find),
        ComputeModes(nvml),
        _partitions(nvml, driver, nodes),
        _agent(place),
    )


def _partitions(nvml: Nvml, driver: DriverRoot, nodes: DeviceNodes) -> Partitions:
    def loaded() -> bool:
        return driver.loaded_version() is not None

    return Partitions(nvml, Holders(nvml), loaded, allow=Access(nodes.make_capability).have)


def _agent(place: Place) -> MpsAgent | None:
    return MpsAgent(Path(place.mps_socket)) if place.mps_socket else None


def _gpus(nvml: Nvml, nodes: DeviceNodes, root: Path) -> Gpus:
    def make_nodes(minors: tuple[int, ...]) -> None:
        nodes.files(minors)

    return Gpus(nvml, PciTree(root / "sys"), root / "dev", make_nodes)


def simulated_device_number(path: str) -> tuple[int, int] | None:
    """Where making device nodes is not permitted, links to /dev/null stand for them."""
    return device_number(path) or device_number(os.path.realpath(path))
