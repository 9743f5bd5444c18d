"""How long things may take, within what is left for the request that they are done for.

Somebody waits for a request, and no longer than so long. So whatever is done for it, one thing
after the other, shares that time, and the last words of what failed are an answer that is heard.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from dra_driver.errors import TimedOut

# When its work has to be done, and when what failed has to be undone.
_REQUEST: Final = ContextVar[tuple[float, float] | None]("request", default=None)


@contextmanager
def request(seconds: float, undoing: float = 0.0) -> Iterator[None]:
    """What this thread does in here is done in so many *seconds*; the last of them, *undoing*, are
    for what has to be undone."""
    end = time.monotonic() + seconds
    before = _REQUEST.set((end - undoing, end))
    try:
        yield
    finally:
        _REQUEST.reset(before)


def within(seconds: float, undoing: bool = False) -> float:
    """So many *seconds*, or what is left for the request of this thread, if that is less."""
    of_request = _REQUEST.get()
    if of_request is None:
        return seconds
    return max(0.0, min(seconds, of_request[undoing] - time.monotonic()))


class Deadline:
    """What is left of some seconds."""

    def __init__(self, seconds: float, what: str, undoing: bool = False) -> None:
        self.seconds = within(seconds, undoing)
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
