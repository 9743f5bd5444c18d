"""Which node is looked at: this machine with its NVML, or a simulated one. Chosen once, here."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dra_driver.node.device_nodes import DeviceNodes, device_number
from dra_driver.node.driver_root import DriverRoot
from dra_driver.node.gpus import Gpus
from dra_driver.node.node import GpuNode
from dra_driver.node.nvml import Nvml, load_nvml
from dra_driver.node.topology import PciTree

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """Where GPUs are looked for. *driver_root*: a path of the host; None: the usual places."""

    driver_root: str | None
    host_root: Path
    sim: str  # the name or file of a simulated node; empty: this machine


@contextmanager
def open_node(place: Place, sim_dir: Path) -> Iterator[GpuNode]:
    """The node at *place*, until it is closed.

    A simulated one puts its host's files (driver, device nodes, sysfs) into *sim_dir*.
    """
    if place.sim:
        node, nvml = _simulated(place, sim_dir)
    else:
        node, nvml = _real(place)
    try:
        yield node
    finally:
        nvml.stop()


def _real(place: Place) -> tuple[GpuNode, Nvml]:
    driver = DriverRoot(place.driver_root, place.host_root)
    nvml = Nvml(lambda: load_nvml(driver.nvml_library()))
    nodes = DeviceNodes(driver)
    return _node(nvml, driver, nodes, place.host_root), nvml


def _simulated(place: Place, sim_dir: Path) -> tuple[GpuNode, Nvml]:
    # Imported here: a node with GPUs has no use for it.
    from dra_driver.node.sim.host import SimulatedHost
    from dra_driver.node.sim.live import LiveNode
    from dra_driver.node.sim.nvml import SimulatedNvml

    live = LiveNode.named(place.sim)
    log.warning("GPUs are simulated", extra={"node": place.sim})
    SimulatedHost(live, sim_dir)
    host = str(sim_dir.absolute())
    driver = DriverRoot(place.driver_root or host, Path("/"), proc=f"{host}/proc")
    nvml = Nvml(lambda: SimulatedNvml(live))
    nodes = DeviceNodes(driver, device_number=simulated_device_number)
    return _node(nvml, driver, nodes, sim_dir), nvml


def _node(nvml: Nvml, driver: DriverRoot, nodes: DeviceNodes, root: Path) -> GpuNode:
    def make_nodes(minors: tuple[int, ...]) -> None:
        nodes.files(minors)

    gpus = Gpus(nvml, PciTree(root / "sys"), root / "dev", make_nodes)
    return GpuNode(gpus, driver, nodes)


def simulated_device_number(path: str) -> tuple[int, int] | None:
    """Where making device nodes is not permitted, links to /dev/null stand for them."""
    return device_number(path) or device_number(os.path.realpath(path))
