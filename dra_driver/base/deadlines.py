"""How long something may take, and how much of that is left.

Whoever sends a request waits for a limited time. All steps that serve it share that time, so that
the error of one that takes too long still arrives as the answer.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from dra_driver.base.errors import TimedOut


class Deadline:
    """A moment, so many *seconds* from now."""

    def __init__(
        self,
        seconds: float,
        doing: str = "",
        within: "Deadline | None" = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """*doing*: what took too long, for TimedOut. *within*: another deadline, maybe of another
        clock; when that one expires, this one has expired too."""
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
    """A request of this thread that has to be served in so many *seconds*. The last of them,
    *undoing*, are reserved for undoing what failed."""
    before = _REQUEST.set((Deadline(seconds - undoing), Deadline(seconds)))
    try:
        yield
    finally:
        _REQUEST.reset(before)


def within_request(seconds: float, doing: str = "", undoing: bool = False) -> Deadline:
    """The deadline after *seconds*, or that of this thread's request if it is earlier."""
    of_request = _REQUEST.get()
    return Deadline(seconds, doing, of_request and of_request[undoing])


def seconds_within_request(seconds: float, undoing: bool = False) -> float:
    """*seconds*, or what remains for this thread's request if that is less."""
    return within_request(seconds, undoing=undoing).seconds
