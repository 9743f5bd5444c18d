"""What failed is not tried again at once, unless something changed."""

import time
from collections.abc import Callable, Hashable


class Tries:
    """For one thread."""

    def __init__(self, again_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._again_seconds = again_seconds
        self._clock = clock
        self._failed: dict[str, tuple[object, float, str]] = {}

    def failed(self, what: str, facts: Hashable, why: str) -> None:
        """It failed while *facts* were so."""
        self._failed[what] = (facts, self._clock() + self._again_seconds, why)

    def why_not(self, what: str, facts: Hashable) -> str:
        """Why it failed, as long as it is not to be tried again; empty: it is."""
        known, until, why = self._failed.get(what, (None, 0.0, ""))
        if known == facts and self._clock() < until:
            return why
        self._failed.pop(what, None)
        return ""
