"""Where the GPUs of a node are looked for, and how programs of its driver are run there."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dra_driver.node.commands import Command, Run, run
from dra_driver.node.driver_root import DriverRoot


@dataclass(frozen=True, slots=True)
class Place:
    """Where GPUs are looked for. *driver_root*: a path of the host; None: the usual places."""

    driver_root: str | None = None
    host_root: Path = Path("/")
    sim: str = ""  # the name or file of a simulated node; empty: this machine
    runtime_dir: str = ""  # of the container runtime, where it is not at a usual place
    mps_socket: str = ""  # of the MPS agent; empty: this node serves nothing by MPS


def _as_it_is(command: Command) -> Command:
    return command


@dataclass(frozen=True, slots=True)
class Driver:
    """The programs of the driver, and what runs them."""

    root: DriverRoot
    run: Run
    placed: Callable[[Command], Command] = _as_it_is  # where a program really is


@contextmanager
def open_driver(place: Place, sim_dir: Path) -> Iterator[Driver]:
    """The driver at *place*, until it is closed; a simulated one has its host in *sim_dir*."""
    if not place.sim:
        yield Driver(DriverRoot(place.driver_root, place.host_root), run)
        return
    # Imported here: a node with GPUs has no use for it.
    from dra_driver.node.sim.commands import on_this_machine, run_on
    from dra_driver.node.sim.host import SimulatedHost
    from dra_driver.node.sim.live import LiveNode

    live = LiveNode.named(place.sim)
    SimulatedHost(live, sim_dir)
    host = str(sim_dir.absolute())
    root = DriverRoot(place.driver_root or host, Path("/"), proc=f"{host}/proc")
    yield Driver(root, run_on(live), on_this_machine)
