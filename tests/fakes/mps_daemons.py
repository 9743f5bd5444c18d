"""MPS daemons in memory, with directories on disk. They outlive whoever started them.

They refuse what the real ones refuse, and whoever uses them can be killed before and after each
effect: see ``Fate``.
"""

import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dra_driver.base.errors import MpsClientStuck, MpsStateUnknown, NodeError, TimedOut
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.mps import MpsClient, MpsLimits, MpsNamespace, MpsNamespaceName
from dra_driver.node.mps.daemon import ControlDaemon, DaemonStatus
from dra_driver.node.mps.daemons import MpsDaemons

MIB = 1 << 20
KINDS = ("unanswering", "hanging", "faulty")


class Killed(BaseException):
    """What kill -9 is to a process: nothing is caught, nothing cleaned up."""


class Fate:
    """Says when the process dies: at one of the points that it passes."""

    def __init__(self) -> None:
        self.dies_in: int | None = None

    def point(self) -> None:
        if self.dies_in is None:
            return
        self.dies_in -= 1
        if self.dies_in < 0:
            self.dies_in = None
            raise Killed


@dataclass
class Running:
    """One control daemon with its server."""

    daemon: ControlDaemon
    namespaces: dict[MpsNamespaceName, MpsLimits] = field(default_factory=dict)
    clients: set[MpsClient] = field(default_factory=set)
    unanswering: bool = False  # to anything
    hanging: bool = False  # when a client is to be ended
    faulty: bool = False  # its server, which says so
    detached: bool = True


class FakeDaemons(MpsDaemons):
    """The daemons of a host. *newest*: the protocol of its driver; 0: it has no MPS."""

    def __init__(self, newest: int = 3, fate: Fate | None = None) -> None:
        self.newest = newest
        self.fate = fate or Fate()
        self.running: dict[str, Running] = {}  # by token
        self.absent: set[GpuUuid] = set()  # a server over one of them does not start
        self.others: tuple[str, ...] = ()
        self.calls: list[str] = []
        self.trimmed: list[str] = []  # servers whose logs were cut
        self.detachable = True  # daemons can be moved out of the agent's container
        self.unaskable = ""  # why no program can be run
        self.stuck: set[GpuUuid] = set()  # what runs on one of them does not end

    # As tests see them

    def of(self, name: str) -> Running:
        """The one daemon of a server."""
        (running,) = (daemon for daemon in self.running.values() if daemon.daemon.name == name)
        return running

    def connect(self, name: str, pid: int, namespace: str) -> None:
        """A client of a namespace."""
        running = self.of(name)
        tenant = MpsNamespaceName(namespace) if running.daemon.protocol > 2 else None
        running.clients.add(MpsClient(pid, tenant))

    def crash(self, name: str) -> None:
        del self.running[self.of(name).daemon.token]

    # As the agent uses them

    def protocol(self) -> int:
        if self.unaskable:
            raise MpsStateUnknown(self.unaskable)
        if not self.newest:
            raise NodeError("the driver has no nvidia-cuda-mps-control")
        return self.newest

    def start(
        self, daemon: ControlDaemon, namespaces: Sequence[MpsNamespace]
    ) -> Mapping[MpsNamespaceName, str]:
        self._begin("start", daemon)
        if daemon.protocol > self.newest:
            raise NodeError(f"protocol {daemon.protocol} is unknown")
        if any(existing.daemon.directory == daemon.directory for existing in self.running.values()):
            raise NodeError(f"another daemon lives in {daemon.directory}")
        existed = Path(daemon.directory).exists()
        Path(daemon.pipe).mkdir(parents=True, exist_ok=True)
        self.fate.point()
        if self.absent & set(daemon.gpus):
            if not existed:
                shutil.rmtree(daemon.directory)
            raise NodeError(f"MPS server {daemon.name} does not start: no such GPU")
        running = self.running[daemon.token] = Running(daemon, detached=self.detachable)
        self.fate.point()
        if daemon.protocol > 2:
            running.namespaces = {namespace.name: namespace.limits for namespace in namespaces}
        self.fate.point()
        return {namespace.name: self._directory(daemon, namespace.name) for namespace in namespaces}

    def is_running(self, daemon: ControlDaemon) -> bool:
        return daemon.token in self.running

    def check(self, daemon: ControlDaemon) -> DaemonStatus:
        running = self._answering("check", daemon)
        state = "Fault" if running.faulty else "Ready"
        clients = tuple(sorted(running.clients))
        return DaemonStatus(not running.faulty, state, clients, dict(running.namespaces))

    def is_there(self, directory: str) -> bool:
        names = {
            self._directory(daemon.daemon, name)
            for daemon in self.running.values()
            for name in daemon.namespaces
        }
        return directory in names

    def add_namespace(self, daemon: ControlDaemon, namespace: MpsNamespace) -> str:
        running = self._answering("add_namespace", daemon)
        if daemon.protocol > 2:
            limits = running.namespaces.get(namespace.name)
            if limits not in (None, MpsLimits(), namespace.limits):
                raise NodeError(f"namespace {namespace.name} has other limits")
            running.namespaces.setdefault(namespace.name, MpsLimits())
            self.fate.point()
            running.namespaces[namespace.name] = namespace.limits
        self.fate.point()
        return self._directory(daemon, namespace.name)

    def limit_namespace(self, daemon: ControlDaemon, namespace: MpsNamespace) -> None:
        running = self._answering("limit_namespace", daemon)
        if namespace.name not in running.namespaces:
            raise NodeError(f"namespace {namespace.name} does not exist")
        if any(client.namespace == namespace.name for client in running.clients):
            raise NodeError(f"namespace {namespace.name} has active clients")
        memory = namespace.limits.memory_bytes or running.namespaces[namespace.name].memory_bytes
        running.namespaces[namespace.name] = replace(namespace.limits, memory_bytes=memory)
        self.fate.point()

    def remove_namespace(self, daemon: ControlDaemon, namespace: MpsNamespaceName) -> None:
        if daemon.token not in self.running:
            return
        running = self._answering("remove_namespace", daemon)
        if running.namespaces.pop(namespace, None) is not None:
            running.clients = {
                client for client in running.clients if client.namespace != namespace
            }
        self.fate.point()

    def terminate(self, daemon: ControlDaemon, pids: Collection[int]) -> None:
        if daemon.token not in self.running:
            return
        running = self._answering("terminate", daemon)
        if running.hanging and {client.pid for client in running.clients} & set(pids):
            raise MpsClientStuck("client 71 did not end in 4 s")
        running.clients = {client for client in running.clients if client.pid not in pids}

    def kill(self, daemon: ControlDaemon) -> None:
        self._begin("kill", daemon)
        if daemon.token in self.running and self.stuck & set(daemon.gpus):
            raise TimedOut(f"processes of MPS server {daemon.name} do not end")
        self.running.pop(daemon.token, None)
        self.fate.point()

    def stop_and_remove(self, daemon: ControlDaemon) -> None:
        self.kill(daemon)
        shutil.rmtree(daemon.directory, ignore_errors=True)
        self.fate.point()

    def remove_orphan(self, daemon: ControlDaemon) -> None:
        self._begin("remove_orphan", daemon)
        for token, running in list(self.running.items()):
            if running.daemon.directory == daemon.directory:
                del self.running[token]
        self.fate.point()
        shutil.rmtree(daemon.directory, ignore_errors=True)
        self.fate.point()

    def trim_logs(self, daemon: ControlDaemon) -> None:
        self.trimmed.append(daemon.name)

    def detach(self, daemon: ControlDaemon) -> bool:
        if daemon.token in self.running:
            self.running[daemon.token].detached = self.detachable
        return self.detachable

    def is_detached(self, daemon: ControlDaemon) -> bool:
        return daemon.token not in self.running or self.running[daemon.token].detached

    def unmanaged(self, tokens: Collection[str]) -> tuple[str, ...]:
        unknown = self.running.keys() - set(tokens)
        return tuple(
            sorted((*self.others, *(self.running[process].daemon.name for process in unknown)))
        )

    def _begin(self, call: str, daemon: ControlDaemon) -> None:
        self.calls.append(f"{call} {daemon.name}")
        self.fate.point()

    def _answering(self, call: str, daemon: ControlDaemon) -> Running:
        self._begin(call, daemon)
        if self.unaskable:
            raise MpsStateUnknown(self.unaskable)
        running = self.running.get(daemon.token)
        if running is None:
            raise NodeError(f"nobody answers in {daemon.directory}")
        if running.unanswering:
            raise TimedOut(f"{daemon.name} did not answer in 3 s")
        return running

    @staticmethod
    def _directory(daemon: ControlDaemon, namespace: MpsNamespaceName) -> str:
        inside = f"/gpu/{namespace}" if daemon.protocol > 2 else ""
        return f"{daemon.pipe}{inside}"
