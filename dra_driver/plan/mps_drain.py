"""When the clients of a pod that is being deleted are ended by their MPS server.

A client that is killed with work on the GPU takes the others of its server with it. So those that
did not end by themselves are ended in order, shortly before the kubelet kills them.
"""

from dataclasses import dataclass
from typing import Final

LONGEST_MARGIN_SECONDS: Final = 3.0  # before the pod's end; a server waits for work in flight


@dataclass(frozen=True, slots=True)
class Ending:
    """A pod that is being deleted, in seconds of the epoch."""

    ends_at: float  # the kubelet kills what is left of it
    margin: float

    @property
    def due_at(self) -> float:
        """When its clients are ended."""
        return self.ends_at - self.margin


def ending(ends_at: float | None, now: float, before: Ending | None = None) -> Ending | None:
    """What follows from a look at a pod at *now*. None: it is not deleted.

    Its programs have at least half of the time that was left when that was first seen.
    """
    if ends_at is None:
        return None
    if before is not None and before.ends_at == ends_at:
        return before
    left = max(0.0, ends_at - now)
    return Ending(ends_at, min(LONGEST_MARGIN_SECONDS, left / 2))
