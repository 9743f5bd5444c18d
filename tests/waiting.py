"""Waiting for what another thread or another process does."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(condition: Callable[[], T], what: str = "it", seconds: float = 60.0) -> T:
    """What *condition* answers once that is true. The time is ample: no test depends on speed."""
    give_up = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < give_up, f"{what} did not come true in {seconds:g} s"
        time.sleep(0.005)
    return answer
