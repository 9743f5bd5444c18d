"""Calls to the disk that are under way: one that hangs holds whatever its thread holds.

Nothing can end such a call, so a process with one has to be started again. Everything else that may
take long has a timeout of its own.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

HANGS_SECONDS: Final = 60.0

_under_way: Final[dict[object, tuple[float, str]]] = {}  # of all threads


@contextmanager
def disk_call(doing: str) -> Iterator[None]:
    """Something is done that waits for the disk, and for nothing else that takes long."""
    key = object()
    _under_way[key] = (time.monotonic(), doing)
    try:
        yield
    finally:
        del _under_way[key]


def hanging(seconds: float = HANGS_SECONDS) -> str | None:
    """What has been waiting for the disk for longer than *seconds*; None: nothing."""
    now = time.monotonic()
    late = [(now - since, doing) for since, doing in list(_under_way.values())]
    said = [f"{doing} ({passed:.0f} s)" for passed, doing in late if passed > seconds]
    return f"the disk does not answer: {', '.join(said)}" if said else None
