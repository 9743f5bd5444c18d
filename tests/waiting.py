"""Waiting for what another thread or another process does."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(condition: Callable[[], T], what: str = "it", seconds: float = 60.0) -> T:
    """What *condition* answers once that is true. The time is ample: no test depends on speed. It
    is asked the less often the longer that takes."""
    begun = time.monotonic()
    while not (answer := condition()):
        waited = time.monotonic() - begun
        assert waited < seconds, f"{what} did not come true in {seconds:g} s"
        time.sleep(max(0.005, min(waited / 10, 0.1)))
    return answer
