"""What all servers of the agent share: daemons, files, clock and timeouts."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from dra_driver.agent.state import ServerStateFiles
from dra_driver.base.errors import NodeError
from dra_driver.base.frozen import frozen
from dra_driver.model.gpus import GpuUuid
from dra_driver.node.mps.daemons import MpsDaemons


@frozen
class AgentClock:
    """Seconds, in two ways."""

    passed: Callable[[], float] = time.monotonic
    since_epoch: Callable[[], float] = time.time


@frozen
class MpsRequestTimeouts:
    """How long a request may take from when it comes in, in seconds: somewhat less than the caller
    waits (``node.mps.agent_client``), so that it learns what went wrong."""

    serve: float = 18.0
    undoing: float = 3.5  # of these, for what could not be served
    release: float = 8.0
    terminate: float = 8.0


@dataclass(slots=True)
class ReleasedGpus:
    """The GPUs and MIG instances of which no server is started, until a time that passes. The next
    agent knows nothing of them: the plugin asks again and again."""

    gpus: frozenset[GpuUuid] = frozenset()
    until: float = 0.0  # seconds since the epoch

    def any_of(self, gpus: Collection[GpuUuid], now: float) -> bool:
        """Whether a server over *gpus* has to wait."""
        return now < self.until and not self.gpus.isdisjoint(gpus)

    def refuse(self, gpus: Collection[GpuUuid], now: float) -> None:
        """NodeError: a server over *gpus* has to wait."""
        if self.any_of(gpus, now):
            raise NodeError(
                f"no MPS server is started over {', '.join(gpus)}: an administrator has the "
                "driver let go of its GPUs (dra-driver health list)"
            )


@frozen
class AgentDependencies:
    """One set for all servers of the node."""

    daemons: MpsDaemons
    files: ServerStateFiles
    directory: str  # below which each server has its own
    clock: AgentClock = AgentClock()
    released: ReleasedGpus = field(default_factory=ReleasedGpus)
    timeouts: MpsRequestTimeouts = MpsRequestTimeouts()
