"""How long things may take, within what is left for the request that they are done for.

Somebody waits for a request, and no longer than so long. So whatever is done for it, one thing
after the other, shares that time, and the last words of what failed are an answer that is heard.

How long one call of the kubelet may wait, and for what.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from dra_driver.base.errors import TimedOut


@dataclass(frozen=True, slots=True)
class CallTimeouts:
    """How long one call may wait, in seconds, so that it ends within the kubelet's 45."""

    all: float = 20.0  # for the turn, for locks and for the holder together
    hand_over: float = 10.0  # of these for the holder's unprepare, after a force-deleted pod


class CallDeadline:
    """How long one call may still wait, for whatever it is."""

    def __init__(self, waits: CallTimeouts) -> None:
        now = time.monotonic()
        self._until = now + waits.all
        self._hand_over_until = now + min(waits.hand_over, waits.all)

    def left(self) -> float:
        return max(0.0, self._until - time.monotonic())

    def hands_over(self) -> bool:
        """Whether the holder of a device may still be waited for."""
        return time.monotonic() < self._hand_over_until


# When its work has to be done, and when what failed has to be undone.
_REQUEST_DEADLINES: Final = ContextVar[tuple[float, float] | None]("request", default=None)


@contextmanager
def request_deadline(seconds: float, undoing: float = 0.0) -> Iterator[None]:
    """What this thread does in here is done in so many *seconds*; the last of them, *undoing*, are
    for what has to be undone."""
    end = time.monotonic() + seconds
    before = _REQUEST_DEADLINES.set((end - undoing, end))
    try:
        yield
    finally:
        _REQUEST_DEADLINES.reset(before)


def seconds_within_request(seconds: float, undoing: bool = False) -> float:
    """So many *seconds*, or what is left for the request of this thread, if that is less."""
    of_request = _REQUEST_DEADLINES.get()
    if of_request is None:
        return seconds
    return max(0.0, min(seconds, of_request[undoing] - time.monotonic()))


class Deadline:
    """What is left of some seconds."""

    def __init__(self, seconds: float, what: str, undoing: bool = False) -> None:
        self.seconds = seconds_within_request(seconds, undoing)
        self._end = time.monotonic() + self.seconds
        self._what = what

    def left(self) -> float:
        """TimedOut: nothing."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimedOut(f"{self._what} took more than {self.seconds:.3g} s")
        return left

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._end
