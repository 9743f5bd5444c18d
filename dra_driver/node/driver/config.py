"""Where the GPUs of a node are looked for, and how programs of its driver are run there."""

from collections.abc import Callable
from pathlib import Path

from dra_driver.base.frozen import frozen
from dra_driver.node.driver.commands import Command, RunCommand, run_command
from dra_driver.node.driver.root import DriverRoot


@frozen
class NodeConfig:
    """Where GPUs are looked for. *driver_root*: a path of the host; None: the usual places."""

    driver_root: str | None = None
    host_root: Path = Path("/")
    runtime_dir: str = ""  # of the container runtime, where it is not at a usual place
    mps_socket: str = ""  # of the MPS agent; empty: this node serves nothing by MPS


def _unchanged(command: Command) -> Command:
    return command


@frozen
class DriverPrograms:
    """The programs of the driver, and what runs them."""

    root: DriverRoot
    run: RunCommand = run_command
    placed: Callable[[Command], Command] = _unchanged  # where a program really is


def find_driver(config: NodeConfig) -> DriverPrograms:
    """The driver of this machine."""
    return DriverPrograms(DriverRoot(config.driver_root, config.host_root))
