"""The simulated control daemon: its servers, and the requests that it refuses."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from dra_driver.base.frozen import frozen
from dra_driver.sim.mps.command_line import CommandRefused
from dra_driver.sim.mps.host_snapshot import (
    EXCLUSIVE_PROCESS,
    PROHIBITED,
    HostGpu,
    HostSnapshot,
    read_host,
)
from dra_driver.sim.mps.limits import ServerLimits
from dra_driver.sim.mps.paths import DaemonPaths
from dra_driver.sim.mps.processes import ServerProcesses
from dra_driver.sim.mps.servers import (
    FAULT,
    READY,
    STARTING,
    ServedClient,
    SimulatedNamespace,
    SimulatedServer,
    checked_name,
)

_READY_SECONDS: Final = 5.0
DEFAULT_NAMESPACE: Final = "default"  # the namespace that every server has


class NoAnswer(Exception):
    """There will be no answer."""


@frozen
class DaemonOptions:
    """How the daemon was started."""

    root: Path  # of the simulated host
    protocol: int
    multiuser: bool
    uid: int
    devices: tuple[str, ...] | None  # CUDA_VISIBLE_DEVICES; None: all


class LoopCallbacks(Protocol):
    """What the daemon needs of its loop."""

    def listen(self, directory: Path, place: "AdmissionTarget") -> None: ...
    def close(self, directory: Path) -> None: ...
    def watch_server(self, server: SimulatedServer, reading: int) -> None: ...
    def watch_client(self, pid: int) -> None: ...


AdmissionTarget = tuple[str, str] | None
"""Where a client comes in: a namespace of a server, or the daemon's own socket."""


@dataclass(slots=True)
class SimulatedControlDaemon:
    """One daemon. Its lock is held by whoever calls."""

    options: DaemonOptions
    places: DaemonPaths
    wakes: LoopCallbacks
    processes: ServerProcesses
    servers: dict[str, SimulatedServer] = field(default_factory=dict)
    # protocol 2: of servers that start later
    defaults: ServerLimits = field(default_factory=ServerLimits)
    wedged: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)

    def facts(self) -> HostSnapshot:
        return read_host(self.options.root)

    def server(self, name: str) -> SimulatedServer:
        if name not in self.servers:
            raise CommandRefused(f"Server '{name}' does not exist")
        return self.servers[name]

    def namespace(self, server: str, name: str) -> SimulatedNamespace:
        namespace = self.server(server).namespaces.get(name)
        if namespace is None:
            raise CommandRefused(f"Namespace '{name}' does not exist in server '{server}'")
        return namespace

    def create_server(self, name: str, uid: int, devices: tuple[str, ...]) -> SimulatedServer:
        checked_name(name)
        if name in self.servers:
            raise CommandRefused(f"Server '{name}' exists already")
        if self.options.multiuser and uid != 0:
            raise CommandRefused("A server of a multi-user daemon has UID 0")
        if not self.options.multiuser and self.options.protocol == 3 and uid != self.options.uid:
            raise CommandRefused(
                f"A single-user daemon of UID {self.options.uid} has no other servers"
            )
        server = SimulatedServer(name, uid, devices)
        self.servers[name] = server
        if self.options.protocol == 3:
            self.wakes.listen(self.places.pipe / name, (name, DEFAULT_NAMESPACE))
            self.create_namespace(name, DEFAULT_NAMESPACE)
        else:
            server.namespaces[DEFAULT_NAMESPACE] = SimulatedNamespace(
                DEFAULT_NAMESPACE, self.defaults.copy()
            )
        self.start(server)
        return server

    def start(self, server: SimulatedServer) -> None:
        """Start its process."""
        facts = self.facts()
        names = server.devices or tuple(gpu.uuid for gpu in facts.gpus)
        gpus = [facts.find(name) for name in names]
        server.gpus = tuple(gpu for gpu in gpus if gpu is not None)
        why = self._barred(server) if len(server.gpus) == len(names) > 0 else "no such device"
        self.places.write(server.name, f"Failed to initialize: {why}" if why else "Start")
        server.status = STARTING
        server.pid, reading = self.processes.start(not why, [gpu.uuid for gpu in server.gpus])
        self.wakes.watch_server(server, reading)

    def _barred(self, server: SimulatedServer) -> str:
        """Why a server cannot be on these GPUs."""
        instances = [gpu for gpu in server.gpus if gpu.instance]
        if instances and self.options.protocol == 3:
            return f"{instances[0].uuid}: MIG is served by protocol 2 alone"
        if instances and len(server.gpus) > 1:
            return f"{instances[0].uuid}: a MIG device is served alone"
        for gpu in server.gpus:
            if gpu.mode == PROHIBITED:
                return f"{gpu.uuid}: compute mode is PROHIBITED"
            if gpu.mode == EXCLUSIVE_PROCESS and self.processes.are_on(gpu.uuid):
                return f"{gpu.uuid}: all CUDA-capable devices are busy or unavailable"
        return ""

    def status(self, server: SimulatedServer) -> str:
        """In its own word: a server whose GPU is lost is faulty."""
        facts = self.facts()
        whole = all(facts.find(gpu.uuid) for gpu in server.gpus)
        return server.status if whole or server.status != READY else FAULT

    def started(self, server: SimulatedServer) -> None:
        server.status = READY
        self.changed.notify_all()

    def ended(self, server: SimulatedServer) -> None:
        """Its process is gone: one that served starts again, with protocol 2 for the next client.

        One that never was ready vanishes.
        """
        was_ready = server.status == READY
        server.forget_clients()
        if self.servers.get(server.name) is server:
            self.places.write("Control", f"Server {server.pid} exited with status 1")
            if was_ready and self.options.protocol == 3:
                self.start(server)
            else:
                self.forget(server)
        self.changed.notify_all()

    def forget(self, server: SimulatedServer) -> None:
        """Take it off the list, with its directories."""
        del self.servers[server.name]
        if self.options.protocol == 3:
            for name in sorted(server.namespaces):
                self.wakes.close(self.places.pipe / server.name / name)
            self.wakes.close(self.places.pipe / server.name)

    def delete_server(self, name: str, force: bool) -> None:
        server = self.server(name)
        self._refuse_clients(any(server.clients()) and not force, f"Server '{name}'")
        for _, client in list(server.clients()):
            self.terminate(client.pid)
        self.forget(server)
        self.processes.end(server.pid)

    def create_namespace(self, server: str, name: str) -> SimulatedNamespace:
        holder = self.server(server)
        checked_name(name)
        if name in holder.namespaces:
            raise CommandRefused(f"Namespace '{name}' exists already in server '{server}'")
        holder.namespaces[name] = SimulatedNamespace(name, ServerLimits())
        self.wakes.listen(self.places.pipe / server / name, (server, name))
        return holder.namespaces[name]

    def delete_namespace(self, server: str, name: str, force: bool) -> None:
        namespace = self.namespace(server, name)
        if name == DEFAULT_NAMESPACE:
            raise CommandRefused("The default namespace cannot be deleted")
        self._refuse_clients(bool(namespace.clients) and not force, f"Namespace '{name}'")
        for pid in list(namespace.clients):
            self.terminate(pid)
        del self.server(server).namespaces[name]
        self.wakes.close(self.places.pipe / server / name)

    def set_limits(self, server: str, name: str, change: Callable[[ServerLimits], None]) -> None:
        namespace = self.namespace(server, name)
        self._refuse_clients(bool(namespace.clients), f"Namespace '{name}'")
        change(namespace.limits)

    def _refuse_clients(self, there_are: bool, owner: str) -> None:
        if there_are:
            raise CommandRefused(f"{owner} has active clients")

    def find(self, pid: int) -> tuple[SimulatedServer, SimulatedNamespace, ServedClient]:
        for server in self.servers.values():
            for namespace, client in server.clients():
                if client.pid == pid:
                    return server, namespace, client
        raise CommandRefused(f"Client {pid} does not exist")

    def terminate(self, pid: int) -> None:
        """End a client: it drains. Never: what it has under way does not end."""
        server, namespace, client = self.find(pid)
        if client.wedged:
            server.terminating = True
            raise NoAnswer
        del namespace.clients[pid]

    def gone(self, pid: int) -> None:
        """The process ended."""
        for server in self.servers.values():
            for namespace in server.namespaces.values():
                namespace.clients.pop(pid, None)
        self.changed.notify_all()

    def wait_until_ready(self, server: SimulatedServer) -> None:
        """Or until it is gone."""
        self.changed.wait_for(
            lambda: server.status == READY or not self.has(server), _READY_SECONDS
        )

    def has(self, server: SimulatedServer) -> bool:
        return self.servers.get(server.name) is server

    def launch(self, uid: int) -> SimulatedServer:
        """The server of a user, for clients that name none."""
        return self.create_server(f"uid_{uid}", uid, self.visible())

    def visible(self) -> tuple[str, ...]:
        """The GPUs that the daemon sees, in its order."""
        if self.options.devices is not None:
            return self.options.devices
        return tuple(gpu.uuid for gpu in self.facts().gpus)

    def on(self, gpu: HostGpu, besides: int = 0) -> list[ServedClient]:
        """The clients on *gpu*."""
        return [
            client
            for server in self.servers.values()
            for _, client in server.clients()
            if client.pid != besides and any(used.uuid == gpu.uuid for used in client.gpus)
        ]
