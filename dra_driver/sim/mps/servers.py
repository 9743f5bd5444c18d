"""The servers of a daemon, the namespaces in them, and their clients."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dra_driver.sim.mps.command_line import CommandRefused
    from dra_driver.sim.mps.host_snapshot import HostGpu
from dra_driver.sim.mps.command_line import CommandRefused
from dra_driver.sim.mps.limits import ClientLimits, ServerLimits

READY = "Ready"
STARTING = "Initializing"
FAULT = "Fault"


@dataclass(slots=True)
class ServedClient:
    """A process that is served."""

    pid: int
    uid: int
    command: str
    gpus: "tuple[HostGpu, ...]"
    granted: "ClientLimits"
    memory_bytes: int = 0  # what it uses of each of its GPUs
    wedged: bool = False


@dataclass(slots=True)
class SimulatedNamespace:
    """A part of a server with limits of its own."""

    name: str
    limits: "ServerLimits"
    clients: dict[int, ServedClient] = field(default_factory=dict)


@dataclass(slots=True)
class SimulatedServer:
    """One server process. Protocol 2 has no namespaces but ``default``."""

    name: str
    uid: int
    devices: tuple[str, ...]  # as asked for; empty: all there are
    gpus: "tuple[HostGpu, ...]" = ()
    pid: int = 0
    status: str = STARTING
    namespaces: dict[str, SimulatedNamespace] = field(default_factory=dict)
    locality_domains: bool = False
    terminating: bool = False  # while a client is terminated nobody else is let in

    @property
    def default(self) -> SimulatedNamespace:
        return self.namespaces["default"]

    def clients(self) -> Iterator[tuple[SimulatedNamespace, ServedClient]]:
        for namespace in self.namespaces.values():
            for client in namespace.clients.values():
                yield namespace, client

    def forget_clients(self) -> None:
        self.terminating = False
        for namespace in self.namespaces.values():
            namespace.clients.clear()


def checked_name(name: str) -> str:
    """A name for a server or a namespace."""
    if not re.fullmatch(r"[a-z0-9_]{1,64}", name):
        raise CommandRefused(f"Invalid name '{name}': 1 to 64 of a-z, 0-9 and _")
    return name
