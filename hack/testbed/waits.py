"""Bounded waiting that says what was waited for, with the end of its log."""

import time
from collections.abc import Callable
from pathlib import Path

from hack.testbed.errors import ClusterError

POLL_SECONDS = 0.05
TAIL_LINES = 15


def tail(log: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log, or a note that there are none."""
    try:
        with log.open("rb") as f:
            f.seek(0, 2)
            f.seek(max(0, f.tell() - 64 * 1024))
            text = f.read().decode(errors="replace")
    except OSError:
        return f"(no log at {log})"
    last_lines = text.splitlines()[-lines:]
    return "\n".join(last_lines) or f"({log} is empty)"


def wait_for(
    condition: str, ready: Callable[[], bool], *, timeout_seconds: float, log: Path | None = None
) -> None:
    """Return as soon as `ready` says so; after the timeout, an error with the end of the log."""
    deadline = time.monotonic() + timeout_seconds
    while not ready():
        if time.monotonic() > deadline:
            ending = f"; the end of {log}:\n{tail(log)}" if log else ""
            raise ClusterError(f"waited {timeout_seconds:g} s for {condition}, in vain{ending}")
        time.sleep(POLL_SECONDS)
