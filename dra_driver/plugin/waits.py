"""How long one call of the kubelet may wait, and for what."""

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Waits:
    """How long one call may wait, in seconds, so that it ends within the kubelet's 45."""

    all: float = 20.0  # for the turn, for locks and for the holder together
    hand_over: float = 10.0  # of these for the holder's unprepare, after a force-deleted pod


class Wait:
    """How long one call may still wait, for whatever it is."""

    def __init__(self, waits: Waits) -> None:
        now = time.monotonic()
        self._until = now + waits.all
        self._hand_over_until = now + min(waits.hand_over, waits.all)

    def left(self) -> float:
        return max(0.0, self._until - time.monotonic())

    def hands_over(self) -> bool:
        """Whether the holder of a device may still be waited for."""
        return time.monotonic() < self._hand_over_until
