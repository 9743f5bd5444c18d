"""What all servers of the agent share: daemons, files, clock and timeouts."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from dra_driver.agent.state import ServerStateFiles
from dra_driver.node.mps.daemons import MpsDaemons


@dataclass(frozen=True, slots=True)
class AgentClock:
    """Seconds, in two ways."""

    passed: Callable[[], float] = time.monotonic
    since_epoch: Callable[[], float] = time.time


@dataclass(frozen=True, slots=True)
class MpsRequestTimeouts:
    """How long a request may take from when it comes in, in seconds: somewhat less than the caller
    waits (``node.mps.agent_client``), so that it learns what went wrong."""

    serve: float = 18.0
    undoing: float = 3.5  # of these, for what could not be served
    release: float = 8.0
    terminate: float = 8.0


@dataclass(frozen=True, slots=True)
class AgentDependencies:
    """One set for all servers of the node."""

    daemons: MpsDaemons
    files: ServerStateFiles
    directory: str  # below which each server has its own
    clock: AgentClock = AgentClock()
    timeouts: MpsRequestTimeouts = MpsRequestTimeouts()
