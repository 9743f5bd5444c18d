"""A host with MPS daemons, and agents that come and go on it."""

import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dra_driver.agent.dependencies import AgentClock, AgentDependencies
from dra_driver.agent.state import ServerState, ServerStateFiles
from dra_driver.agent.supervisor import ForEachServer, MpsSupervisor, sequentially
from dra_driver.k8s.claims import ClaimUid
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.mps import (
    MpsLimits,
    MpsNamespace,
    MpsNamespaceName,
    MpsServer,
    MpsServerName,
    MpsServerRestart,
    mps_server_name,
)
from tests.fakes.mps_daemons import MIB, FakeDaemons, Fate

ONE, TWO = GpuUuid("GPU-1"), GpuUuid("GPU-2")
OVER_ONE = mps_server_name([ONE])
INSTANCE = GpuUuid("MIG-1")


class DyingFiles(ServerStateFiles):
    """Whoever writes can be killed before and after."""

    def __init__(self, directory: Path, fate: Fate) -> None:
        super().__init__(directory)
        self._fate = fate

    def write(self, state: ServerState) -> None:
        self._fate.point()
        super().write(state)
        self._fate.point()

    def remove(self, name: Any) -> None:
        self._fate.point()
        super().remove(name)
        self._fate.point()

    def write_incidents(self, incidents: tuple[MpsServerRestart, ...]) -> None:
        self._fate.point()
        super().write_incidents(incidents)
        self._fate.point()


class Host:
    """What is there, whoever looks after it."""

    def __init__(self, directory: Path, newest: int = 3) -> None:
        self.directory = directory
        self.fate = Fate()
        self.daemons = FakeDaemons(newest, self.fate)
        self.seconds = 1000.0

    def agent(self, each: ForEachServer = sequentially) -> MpsSupervisor:
        """A new agent, after whatever happened to the last."""
        files = DyingFiles(self.directory / "state", self.fate)
        clock = AgentClock(lambda: self.seconds, lambda: self.seconds + 1e9)
        dependencies = AgentDependencies(self.daemons, files, str(self.directory), clock)
        agent = MpsSupervisor(dependencies, each)
        agent.recover()
        return agent

    def pass_time(self, agent: MpsSupervisor, seconds: float) -> None:
        """As the loop does it."""
        self.seconds += seconds
        agent.maintain()

    def settle(self, agent: MpsSupervisor) -> None:
        """Long enough for everything that has to be tried again."""
        for _ in range(6):
            self.pass_time(agent, 61)

    def granted(self, agent: MpsSupervisor, name: MpsServerName = OVER_ONE) -> dict[str, MpsLimits]:
        """The limits that the daemon of a server holds, by namespace; a spare is so called."""
        daemon_names = self.daemon_names(agent)
        namespaces = {daemon_name: namespace for namespace, daemon_name in daemon_names.items()}
        granted = self.daemons.of(name).namespaces
        return {namespaces.get(key, "a spare"): limits for key, limits in granted.items()}

    def daemon_names(self, agent: MpsSupervisor) -> dict[str, str]:
        """What its daemon calls a namespace."""
        served = agent.status().namespaces()
        return {state.namespace.name: Path(state.pipe_directory).name for state in served}

    def connect(self, agent: MpsSupervisor, pid: int, namespace: str) -> None:
        """A client of a namespace of the first server."""
        self.daemons.connect(OVER_ONE, pid, self.daemon_names(agent)[namespace])

    def left(self) -> list[str]:
        """What an MPS server leaves on a node."""
        files = [entry.name for entry in (self.directory / "state").iterdir()]
        directories = [entry.name for entry in self.directory.iterdir() if entry.name != "state"]
        processes = [daemon.daemon.name for daemon in self.daemons.running.values()]
        return sorted([*directories, *processes, *(file for file in files if file[0] == "s")])


def namespace(
    name: str = "c_1", *gpus: GpuUuid, percent: int = 50, mib: int = 0, **more: Any
) -> MpsNamespace:
    """A namespace with the same limit on each GPU."""
    over = gpus or (ONE,)
    memory = (mib * MIB,) * len(over) if mib else ()
    return MpsNamespace(
        MpsNamespaceName(name), ClaimUid(f"uid-{name}"), over, percent, memory, **more
    )


def limits_of(percent: int, mib: int | None = None) -> MpsLimits:
    return MpsLimits(percent, None if mib is None else mib * MIB)


def names(agent: MpsSupervisor) -> list[str]:
    """The namespaces that are served."""
    return [served.namespace.name for served in agent.status().namespaces()]


def the_server(agent: MpsSupervisor) -> MpsServer:
    """The only one."""
    (server,) = agent.status().servers
    return server


def raising(error: Exception) -> Callable[..., Any]:
    """A call that fails."""

    def call(*_: object) -> None:
        raise error

    return call


class Blocking:
    """*call*, which waits until ``go_on`` is set."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, *arguments: Any) -> Any:
        self.begun.set()
        assert self.go_on.wait(60)
        return self._call(*arguments)


@pytest.fixture
def mps_dir() -> Iterator[Path]:
    """With a short name: sockets are in it."""
    with tempfile.TemporaryDirectory(prefix="mps", dir="/tmp") as directory:
        yield Path(directory)


@pytest.fixture
def host(mps_dir: Path) -> Host:
    return Host(mps_dir)


@pytest.fixture
def agent(host: Host) -> MpsSupervisor:
    return host.agent()
