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

TerminateClient = Callable[[Deadline], None]
"""Ends one client. TimedOut: it did not end."""


def drain_clients(
    terminators: Mapping[int, TerminateClient], seconds: float, until: Deadline
) -> None:
    """End all clients, by PID.

    MpsClientStuck: one did not end within *seconds*, nor did any other meanwhile. NodeError:
    something else failed, or some clients have not ended yet; ask again.
    """
    ended: list[int] = []
    stuck: list[int] = []
    late: list[int] = []
    problems: list[NodeError] = []

    def end(pid: int) -> None:
        ended_before, allowed = len(ended), 0.0
        try:
            allowed = min(seconds, until.check())
            terminators[pid](Deadline(allowed, f"client {pid}"))
        except TimedOut:
            is_stuck = allowed == seconds and len(ended) == ended_before
            (stuck if is_stuck else late).append(pid)
        except NodeError as e:
            problems.append(e)
        else:
            ended.append(pid)

    in_parallel(end, sorted(terminators), AT_ONCE)
    if stuck:
        raise MpsClientStuck(f"{_pids(stuck)} did not end in {seconds:g} s")
    if problems:
        raise problems[0]
    if late:
        raise NodeError(f"{_pids(late)} did not end yet, others did: ask again")


def _pids(pids: list[int]) -> str:
    return f"MPS client{'s' if len(pids) > 1 else ''} {', '.join(map(str, sorted(pids)))}"
