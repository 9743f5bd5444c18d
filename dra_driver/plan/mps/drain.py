"""When pods are read to see whether they end, and when the clients of those that do are ended.

A client that is killed with work on the GPU takes the others of its server with it. So those that
did not end by themselves are ended in order, shortly before the kubelet kills them. That a pod is
deleted is seen by reading it now and then: several times in its grace period, as far as what a node
may ask of the API server allows.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Final, TypeVar

from dra_driver.base.frozen import frozen
from dra_driver.k8s.pods import DEFAULT_GRACE_SECONDS, PodDeletion

LONGEST_MARGIN_SECONDS: Final = 3.0  # before the pod's end; a server waits for work in flight

_SHORTEST_SECONDS, _LONGEST_SECONDS = 2.0, 20.0  # between two reads of a pod
_PARTS: Final = 3  # reads in a grace period

K = TypeVar("K")


@frozen
class TerminatingPod:
    """A pod that is being deleted, by this process's steady clock."""

    deletion: PodDeletion  # of which this is
    ends_at: float  # the kubelet kills what is left of it, no sooner
    margin: float

    @property
    def due_at(self) -> float:
        """When its clients are ended."""
        return self.ends_at - self.margin


def terminating_pod(
    deletion: PodDeletion | None,
    now: float,
    undeleted_at: float | None = None,
    before: TerminatingPod | None = None,
) -> TerminatingPod | None:
    """What follows from a read of a pod at *now*. None: it is not deleted.

    *undeleted_at*: when the last read was that did not show this deletion. Its programs have at
    least half of the time that was left when that was first seen. A deletion cannot be taken back
    and not be put off: what says so was read before it.
    """
    if deletion is None or (before is not None and before.deletion.ends_at <= deletion.ends_at):
        return before
    ends_at = now + _seconds_left(deletion, now, undeleted_at)
    return TerminatingPod(
        deletion, ends_at, min(LONGEST_MARGIN_SECONDS, max(0.0, ends_at - now) / 2)
    )


def _seconds_left(deletion: PodDeletion, now: float, undeleted_at: float | None) -> float:
    """Seconds until the kubelet may kill it: rather too few, since what it kills with work on the
    GPU takes others along.

    Where the API server did not tell its time, the grace period began after the last read at which
    the pod was not deleted; where there was none, it may be over at any moment.
    """
    if deletion.left_seconds is not None:
        return min(deletion.left_seconds, deletion.grace_seconds)
    if undeleted_at is None:
        return 0.0
    return undeleted_at + deletion.grace_seconds - now


@frozen
class ReadBudget:
    """How many reads there may be: so many at once, and so many a second in the long run."""

    a_second: float
    at_once: float
    available: float
    at: float

    def after_read(self, now: float) -> "ReadBudget | None":
        """What is left after a read at *now*; None: there may be none yet."""
        available = min(self.at_once, self.available + max(0.0, now - self.at) * self.a_second)
        if available < 1:
            return None
        return replace(self, available=available - 1, at=max(self.at, now))


@frozen
class PodRead:
    """When a pod was last read, and how long it has once it is deleted."""

    at: float
    grace_seconds: float = DEFAULT_GRACE_SECONDS
    seen: bool = True

    @property
    def interval(self) -> float:
        """Until the next read."""
        return min(_LONGEST_SECONDS, max(_SHORTEST_SECONDS, self.grace_seconds / _PARTS))

    @property
    def patience(self) -> float:
        """Until it is too late for the margin, had it been deleted right after it."""
        return max(self.interval, self.grace_seconds - LONGEST_MARGIN_SECONDS)

    def is_due(self, now: float) -> bool:
        return now - self.at >= self.interval

    def is_late(self, now: float) -> bool:
        """Whether it may have been deleted and ended unseen."""
        return self.seen and now - self.at > max(self.interval, self.grace_seconds)


def never_read(now: float) -> PodRead:
    """Of a pod that was never read: as urgent as one that waits for long."""
    return PodRead(now - PodRead(now).patience, seen=False)


def most_urgent(reads: Mapping[K, PodRead], now: float, a_second: float) -> tuple[K, ...]:
    """The pods that are due: first the one that used up the largest part of its patience.

    Those whose grace period is too short for the budget do not take the turns of those for whom it
    is enough: they share what these leave.
    """
    least = _least_patience([read.patience for read in reads.values()], a_second)
    due = [key for key, read in reads.items() if read.is_due(now)]
    return tuple(
        sorted(due, key=lambda key: (reads[key].at - now) / max(reads[key].patience, least))
    )


def _least_patience(patiences: Collection[float], a_second: float) -> float:
    """How patient everybody has to be at least, so that the budget is enough for all."""
    least = len(patiences) / a_second
    while True:
        patient = [patience for patience in patiences if patience > least]
        reads_a_second = a_second - sum(1 / patience for patience in patient)
        shared = (len(patiences) - len(patient)) / reads_a_second
        if shared >= least:
            return least
        least = shared
