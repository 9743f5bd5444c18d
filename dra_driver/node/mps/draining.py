"""Ends clients of a server, several at once, each within its own time.

A server lets a client finish its work in flight first, and may do so for one client after the
other. So a slow client is no sign of trouble as long as others end.
"""

from collections.abc import Callable, Mapping
from typing import Final

from dra_driver.base.deadlines import Deadline
from dra_driver.base.errors import MpsClientStuck, NodeError, TimedOut
from dra_driver.base.threads import in_parallel

AT_ONCE: Final = 4  # programs that run

EndClient = Callable[[Deadline], None]
"""Ends one client. TimedOut: it did not end."""


def drain_clients(ends: Mapping[int, EndClient], seconds: float, until: Deadline) -> None:
    """End all clients, by PID.

    MpsClientStuck: one did not end within *seconds*, nor did any other meanwhile. NodeError:
    something else failed, or some clients have not ended yet; ask again.
    """
    draining = _Drain(ends, seconds, until)
    in_parallel(draining.end, sorted(ends), AT_ONCE)
    draining.judge()


class _Drain:
    def __init__(self, ends: Mapping[int, EndClient], seconds: float, until: Deadline) -> None:
        self._ends = ends
        self._seconds = seconds
        self._until = until
        self._ended = 0
        self._stuck: list[int] = []
        self._late: list[int] = []
        self._problems: list[NodeError] = []

    def judge(self) -> None:
        if self._stuck:
            raise MpsClientStuck(f"{_pids(self._stuck)} did not end in {self._seconds:g} s")
        if self._problems:
            raise self._problems[0]
        if self._late:
            raise NodeError(f"{_pids(self._late)} did not end yet, others did: ask again")

    def end(self, pid: int) -> None:
        before = self._ended
        enough = False
        try:
            seconds = min(self._seconds, self._until.check())
            enough = seconds == self._seconds
            self._ends[pid](Deadline(seconds, f"client {pid}"))
        except TimedOut:
            wedged = enough and self._ended == before
            (self._stuck if wedged else self._late).append(pid)
        except NodeError as e:
            self._problems.append(e)
        else:
            self._ended += 1


def _pids(pids: list[int]) -> str:
    return f"MPS client{'s' if len(pids) > 1 else ''} {', '.join(map(str, sorted(pids)))}"
