"""What servers are kept with: the door to daemons, the files, a clock."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dra_driver.agent.state import Incidents, StateFiles
from dra_driver.model.mps import Space, SpaceName
from dra_driver.node.mps.daemon import Daemon, Look


class Daemons(Protocol):
    """What carries it out: ``node.mps.daemons``. Every call is bounded."""

    def protocol(self) -> int: ...
    def start(self, daemon: Daemon, spaces: Sequence[Space]) -> Mapping[SpaceName, str]: ...
    def is_running(self, daemon: Daemon) -> bool: ...
    def look(self, daemon: Daemon) -> Look: ...
    def is_there(self, directory: str) -> bool: ...
    def add(self, daemon: Daemon, space: Space) -> str: ...
    def limit(self, daemon: Daemon, space: Space) -> None: ...
    def remove(self, daemon: Daemon, space: SpaceName) -> None: ...
    def terminate(self, daemon: Daemon, pids: Collection[int]) -> None: ...
    def end(self, daemon: Daemon) -> None: ...
    def stop(self, daemon: Daemon) -> None: ...
    def clear(self, daemon: Daemon) -> None: ...
    def trim(self, daemon: Daemon) -> None: ...
    def shelter(self, daemon: Daemon) -> bool: ...
    def is_sheltered(self, daemon: Daemon) -> bool: ...
    def foreign(self, tokens: Collection[str]) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds, in two ways."""

    passed: Callable[[], float] = time.monotonic
    since_epoch: Callable[[], float] = time.time


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a request may take from when it comes in, in seconds: somewhat less than who asks
    waits (``node.mps.agent``), for then it is told what went wrong."""

    serve: float = 18.0
    undoing: float = 3.5  # of these, for what could not be served
    release: float = 8.0
    terminate: float = 8.0


@dataclass(frozen=True, slots=True)
class Tools:
    """One set for all servers of the node."""

    daemons: Daemons
    files: StateFiles
    incidents: Incidents
    directory: str  # below which each server has its own
    clock: Clock = Clock()
    limits: Limits = Limits()
