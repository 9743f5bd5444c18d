"""A simulated machine in the place of this one: its node, and its driver. ``__main__`` chooses."""

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dra_driver.node.cgroups.tree import Cgroups, cgroup_root
from dra_driver.node.driver.commands import Command
from dra_driver.node.driver.config import DriverPrograms, NodeConfig
from dra_driver.node.driver.device_nodes import device_number
from dra_driver.node.driver.root import DriverRoot
from dra_driver.node.gpu_node import GpuNode
from dra_driver.node.machine import MachineParts, node_of
from dra_driver.node.nvml.api import NvmlFunctions
from dra_driver.sim.cgroup_mirror import CgroupMirror
from dra_driver.sim.host.directory import MARKER, SimulatedHost, program_path, run_on_live_node
from dra_driver.sim.host.tools import SETTINGS_DIRECTORY
from dra_driver.sim.live_node import LiveNode
from dra_driver.sim.memory_limits import CgroupTree, SimulatedMemoryLimits
from dra_driver.sim.mig.host_files import open_mig_states
from dra_driver.sim.nvml import SimulatedComputeModes, SimulatedNvml

log = logging.getLogger(__name__)


@contextmanager
def open_simulated_node(
    name: str, config: NodeConfig, state: Path, host: Path | None = None
) -> Iterator[GpuNode]:
    """The simulated node *name*, until it is closed. Its host's files (driver, device nodes, sysfs,
    cgroups) are put into *host*, which is a directory in *state* unless it is named."""
    host = host or state / "sim"
    live = LiveNode.named(name)
    log.warning("GPUs are simulated", extra={"node": name})
    driver = _driver_on(live, config, host)
    tree = CgroupTree(host / "sys/fs/cgroup")
    modes, mig = SimulatedComputeModes(host), open_mig_states(host)

    def load_nvml() -> NvmlFunctions:
        driver.root.nvml_library()  # without it, nothing could be loaded
        return SimulatedNvml(live, SimulatedMemoryLimits(tree.root), modes, mig)

    machine = MachineParts(
        host,
        driver,
        load_nvml,
        Cgroups(tree.root, tree.make, tree.remove),
        simulated_device_number,
    )
    with contextlib.ExitStack() as stack:
        if live.current().limits_memory:
            mirror = CgroupMirror(Cgroups(cgroup_root(config.host_root)), tree)
            stack.callback(mirror.stop)
        yield stack.enter_context(node_of(machine, config, state))


@contextmanager
def open_copied_node(name: str, config: NodeConfig, state: Path) -> Iterator[GpuNode]:
    """The simulated node for a command that looks at it, and goes again.

    What the plugin with this *state* did to the GPUs (their partitions and compute modes) is there,
    as it is on GPUs that several processes look at. The plugin's own files are left alone: they may
    be of another node.
    """
    with tempfile.TemporaryDirectory() as directory:
        _copy_settings(state / "sim", Path(directory))
        with open_simulated_node(name, config, state, Path(directory)) as node:
            yield node


def simulated_driver(name: str, config: NodeConfig, host: Path) -> DriverPrograms:
    """The driver of the simulated node *name*, whose host's files are put into *host*."""
    return _driver_on(LiveNode.named(name), config, host)


def _driver_on(live: LiveNode, config: NodeConfig, host: Path) -> DriverPrograms:
    SimulatedHost(live, host)
    path = str(host.absolute())
    root = DriverRoot(config.driver_root or path, Path("/"), proc=f"{path}/proc")

    def placed(command: Command) -> Command:
        """Where it is, on a host that is first made what the node file says now."""
        live.current()
        return program_path(command, config.host_root)

    return DriverPrograms(root, run_on_live_node(live, config.host_root), placed)


def _copy_settings(source: Path, host: Path) -> None:
    with contextlib.suppress(OSError):  # there is none, or it is not for us to read
        if (source / SETTINGS_DIRECTORY).is_dir():
            (host / MARKER).write_text("[]")  # of what is copied nothing is the host's own
            shutil.copytree(source / SETTINGS_DIRECTORY, host / SETTINGS_DIRECTORY)


def simulated_device_number(path: str) -> tuple[int, int] | None:
    """Where making device nodes is not permitted, links to /dev/null stand for them."""
    return device_number(path) or device_number(os.path.realpath(path))
