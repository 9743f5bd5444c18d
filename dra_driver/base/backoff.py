"""What failed is not tried again at once, unless something changed."""

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _FailedAttempt:
    facts: Hashable
    why: str
    wait_seconds: float
    until: float


class Backoff:
    """Each thing is one thread's at a time."""

    def __init__(
        self, first_seconds: float, last_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """It waits *first_seconds*, twice that after the next failure, and so on to the last."""
        self._first_seconds = first_seconds
        self._last_seconds = last_seconds
        self._clock = clock
        self._failed: dict[str, _FailedAttempt] = {}

    def failed(self, what: str, facts: Hashable, why: str) -> None:
        """It failed while *facts* were so."""
        before = self._failed.get(what)
        wait = self._first_seconds
        if before is not None and before.facts == facts:
            wait = min(2 * before.wait_seconds, self._last_seconds)
        self._failed[what] = _FailedAttempt(facts, why, wait, self._clock() + wait)

    def worked(self, what: str) -> None:
        self._failed.pop(what, None)

    def why_not(self, what: str, facts: Hashable) -> str:
        """Why it failed, as long as it is not to be tried again; empty: it is."""
        known = self._failed.get(what)
        if known is None or known.facts != facts or self._clock() >= known.until:
            return ""
        return known.why
