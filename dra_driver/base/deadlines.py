"""How long something may take, and how much of that is left.

Somebody waits for a request, and no longer than so long. Whatever is done for it, one thing after
the other, shares that time, and the message of what failed is an answer that is still heard.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from dra_driver.base.errors import TimedOut


class Deadline:
    """The moment when *seconds* from now are over."""

    def __init__(
        self,
        seconds: float,
        doing: str = "",
        within: "Deadline | None" = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """*doing*: what TimedOut says took too long. *within*: it is over with that one too, which
        may run by another clock."""
        self.seconds: Final = seconds if within is None else min(seconds, within.remaining)
        self.end: Final = clock() + self.seconds
        self._doing = doing
        self._within = within
        self._clock = clock

    @property
    def remaining(self) -> float:
        """In seconds; never negative."""
        seconds = max(0.0, self.end - self._clock())
        return seconds if self._within is None else min(seconds, self._within.remaining)

    @property
    def expired(self) -> bool:
        return self.remaining <= 0

    def check(self) -> float:
        """The seconds that remain. TimedOut: none."""
        if (seconds := self.remaining) <= 0:
            raise TimedOut(f"{self._doing} took more than {self.seconds:.3g} s")
        return seconds


# By when the request's work has to be done, and by when what failed has to be undone.
_REQUEST: Final = ContextVar[tuple[Deadline, Deadline] | None]("request", default=None)


@contextmanager
def request_deadline(seconds: float, undoing: float = 0.0) -> Iterator[None]:
    """What this thread does in here is done in so many *seconds*; the last of them, *undoing*, are
    for what has to be undone."""
    before = _REQUEST.set((Deadline(seconds - undoing), Deadline(seconds)))
    try:
        yield
    finally:
        _REQUEST.reset(before)


def within_request(seconds: float, doing: str = "", undoing: bool = False) -> Deadline:
    """In so many *seconds*, or with the request of this thread, if that ends earlier."""
    of_request = _REQUEST.get()
    return Deadline(seconds, doing, of_request and of_request[undoing])


def seconds_within_request(seconds: float, undoing: bool = False) -> float:
    """So many *seconds*, or what is left for the request of this thread, if that is less."""
    return within_request(seconds, undoing=undoing).seconds
