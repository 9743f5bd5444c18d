"""Where the GPUs of a node are looked for, and how programs of its driver are run there."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dra_driver.node.driver.commands import Command, RunCommand, run_command
from dra_driver.node.driver.root import DriverRoot


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Where GPUs are looked for. *driver_root*: a path of the host; None: the usual places."""

    driver_root: str | None = None
    host_root: Path = Path("/")
    sim: str = ""  # the name or file of a simulated node; empty: this machine
    runtime_dir: str = ""  # of the container runtime, where it is not at a usual place
    mps_socket: str = ""  # of the MPS agent; empty: this node serves nothing by MPS


def _unchanged(command: Command) -> Command:
    return command


@dataclass(frozen=True, slots=True)
class DriverPrograms:
    """The programs of the driver, and what runs them."""

    root: DriverRoot
    run: RunCommand
    placed: Callable[[Command], Command] = _unchanged  # where a program really is


@contextmanager
def open_driver(place: NodeConfig, sim_dir: Path) -> Iterator[DriverPrograms]:
    """The driver at *place*, until it is closed; a simulated one has its host in *sim_dir*."""
    if not place.sim:
        yield DriverPrograms(DriverRoot(place.driver_root, place.host_root), run_command)
        return
    # Imported here: a node with GPUs has no use for it.
    from dra_driver.sim.host.directory import SimulatedHost, program_path, run_on_live_node
    from dra_driver.sim.live_node import LiveNode

    live = LiveNode.named(place.sim)
    SimulatedHost(live, sim_dir)
    host = str(sim_dir.absolute())
    root = DriverRoot(place.driver_root or host, Path("/"), proc=f"{host}/proc")
    yield DriverPrograms(root, run_on_live_node(live), program_path)
