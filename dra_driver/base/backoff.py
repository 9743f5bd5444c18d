"""What failed is not tried again at once: the wait is twice as long each time, up to a limit.

The one place that knows ``tenacity``.
"""

import random
import threading
import time
from collections.abc import Callable, Hashable
from typing import Final, TypeVar

import tenacity

from dra_driver.base.frozen import frozen

Answer = TypeVar("Answer")

_MAX_ATTEMPTS: Final = 3


class Backoff:
    """The waits between attempts at one thing, in seconds. For one thread."""

    def __init__(
        self, first_seconds: float, last_seconds: float, *, randomized: bool = False
    ) -> None:
        """*randomized*: each wait is between half and all of what it would be, so that many
        processes that failed together do not come back together."""
        self._waits = (first_seconds, last_seconds)
        self._randomized = randomized
        self.reset()

    def reset(self) -> None:
        """An attempt succeeded: begin with the first wait again."""
        self._attempt = 1

    def next_seconds(self) -> float:
        """How long to wait after one more failure."""
        first_seconds, last_seconds = self._waits
        state = tenacity.RetryCallState(tenacity.Retrying(), None, (), {})
        state.attempt_number = self._attempt
        seconds = tenacity.wait_exponential(multiplier=first_seconds, max=last_seconds)(state)
        self._attempt += 1
        return seconds * random.uniform(0.5, 1.0) if self._randomized else seconds


@frozen
class _FailedAttempt:
    inputs: Hashable
    reason: str
    backoff: Backoff
    again_at: float


class FailedAttempts:
    """Which things failed, each by its key, and why. One thread at a time for each key."""

    def __init__(
        self, first_seconds: float, last_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._waits = (first_seconds, last_seconds)
        self._clock = clock
        self._attempts: dict[str, _FailedAttempt] = {}

    def failed(self, key: str, inputs: Hashable, reason: str) -> None:
        """It failed with *inputs*; with others it may succeed."""
        previous = self._attempts.get(key)
        is_same = previous is not None and previous.inputs == inputs
        backoff = previous.backoff if previous is not None and is_same else Backoff(*self._waits)
        again_at = self._clock() + backoff.next_seconds()
        self._attempts[key] = _FailedAttempt(inputs, reason, backoff, again_at)

    def succeeded(self, key: str) -> None:
        self._attempts.pop(key, None)

    def reason_to_wait(self, key: str, inputs: Hashable) -> str:
        """Why it failed, as long as it is not to be tried again; empty: it is."""
        attempt = self._attempts.get(key)
        if attempt is None or attempt.inputs != inputs or self._clock() >= attempt.again_at:
            return ""
        return attempt.reason


class Retrying:
    """Up to three attempts at one call."""

    def __init__(
        self,
        first_wait: float,
        stopping: threading.Event,
        asked_wait: Callable[[BaseException], float | None],
    ) -> None:
        """*first_wait*: at most so many seconds before the second attempt, then twice that; no wait
        goes on once *stopping* is set.
        *asked_wait*: how long an error says to wait; None: it does not."""
        self._first_wait = first_wait
        self._stopping = stopping
        self._asked_wait = asked_wait

    def call(
        self, attempt: Callable[[], Answer], again: Callable[[BaseException], bool], seconds: float
    ) -> Answer:
        """What *attempt* answers. Attempts begin within *seconds*, and after errors that *again*
        accepts; the last error counts."""
        begun = time.monotonic()
        try:
            return attempt()  # not by tenacity, whose setup costs as much as a request to the API
        except Exception as error:
            if not again(error):
                raise
            failed = [error]

        def attempt_again() -> Answer:
            if failed:
                raise failed.pop()
            return attempt()

        return tenacity.Retrying(
            retry=tenacity.retry_if_exception(again),
            stop=tenacity.stop_after_attempt(_MAX_ATTEMPTS)
            | tenacity.stop_before_delay(begun + seconds - time.monotonic()),
            wait=self._wait,
            sleep=tenacity.sleep_using_event(self._stopping),
            reraise=True,
        )(attempt_again)

    def _wait(self, state: tenacity.RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        if error is not None and (seconds := self._asked_wait(error)) is not None:
            return seconds
        return tenacity.wait_random_exponential(self._first_wait)(state)
