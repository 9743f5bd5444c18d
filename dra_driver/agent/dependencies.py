"""What all servers of the agent share: daemons, files, clock and timeouts."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dra_driver.agent.state import IncidentLog, ServerStateFiles
from dra_driver.model.mps import MpsNamespace, MpsNamespaceName
from dra_driver.node.mps.daemon import ControlDaemon, DaemonStatus


class DaemonManager(Protocol):
    """What carries it out: ``node.mps.daemons``. Every call is bounded."""

    def protocol(self) -> int: ...
    def start(
        self, daemon: ControlDaemon, namespaces: Sequence[MpsNamespace]
    ) -> Mapping[MpsNamespaceName, str]: ...
    def is_running(self, daemon: ControlDaemon) -> bool: ...
    def check(self, daemon: ControlDaemon) -> DaemonStatus: ...
    def is_there(self, directory: str) -> bool: ...
    def add(self, daemon: ControlDaemon, namespace: MpsNamespace) -> str: ...
    def limit(self, daemon: ControlDaemon, namespace: MpsNamespace) -> None: ...
    def remove(self, daemon: ControlDaemon, namespace: MpsNamespaceName) -> None: ...
    def terminate(self, daemon: ControlDaemon, pids: Collection[int]) -> None: ...
    def end(self, daemon: ControlDaemon) -> None: ...
    def stop(self, daemon: ControlDaemon) -> None: ...
    def remove_orphan(self, daemon: ControlDaemon) -> None: ...
    def trim_logs(self, daemon: ControlDaemon) -> None: ...
    def detach(self, daemon: ControlDaemon) -> bool: ...
    def is_detached(self, daemon: ControlDaemon) -> bool: ...
    def unmanaged(self, tokens: Collection[str]) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class AgentClock:
    """Seconds, in two ways."""

    passed: Callable[[], float] = time.monotonic
    since_epoch: Callable[[], float] = time.time


@dataclass(frozen=True, slots=True)
class MpsRequestTimeouts:
    """How long a request may take from when it comes in, in seconds: somewhat less than who asks
    waits (``node.mps.agent_client``), so that it learns what went wrong."""

    serve: float = 18.0
    undoing: float = 3.5  # of these, for what could not be served
    release: float = 8.0
    terminate: float = 8.0


@dataclass(frozen=True, slots=True)
class AgentDependencies:
    """One set for all servers of the node."""

    daemons: DaemonManager
    files: ServerStateFiles
    incidents: IncidentLog
    directory: str  # below which each server has its own
    clock: AgentClock = AgentClock()
    timeouts: MpsRequestTimeouts = MpsRequestTimeouts()
