"""The servers of a daemon, the namespaces in them, and their clients."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dra_driver.node.sim.mps.facts import Gpu
    from dra_driver.node.sim.mps.refusals import Refused
from dra_driver.node.sim.mps.limits import Granted, Limits
from dra_driver.node.sim.mps.refusals import Refused

READY = "Ready"
STARTING = "Initializing"
FAULT = "Fault"


@dataclass(slots=True)
class Client:
    """A process that is served."""

    pid: int
    uid: int
    command: str
    gpus: "tuple[Gpu, ...]"
    granted: "Granted"
    memory_bytes: int = 0  # what it uses of each of its GPUs
    wedged: bool = False


@dataclass(slots=True)
class Namespace:
    """A part of a server with limits of its own."""

    name: str
    limits: "Limits"
    clients: dict[int, Client] = field(default_factory=dict)


@dataclass(slots=True)
class Server:
    """One server process. Protocol 2 has no namespaces but ``default``."""

    name: str
    uid: int
    devices: tuple[str, ...]  # as asked for; empty: all there are
    gpus: "tuple[Gpu, ...]" = ()
    pid: int = 0
    status: str = STARTING
    namespaces: dict[str, Namespace] = field(default_factory=dict)
    locality_domains: bool = False
    terminating: bool = False  # while a client is terminated nobody else is let in

    @property
    def default(self) -> Namespace:
        return self.namespaces["default"]

    def clients(self) -> Iterator[tuple[Namespace, Client]]:
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
        raise Refused(f"Invalid name '{name}': 1 to 64 of a-z, 0-9 and _")
    return name
