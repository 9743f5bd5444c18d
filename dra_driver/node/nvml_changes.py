"""Changes of GPUs that are under way: meanwhile the driver may serve nobody else, on any GPU."""

import threading
import time
from concurrent.futures import Future
from typing import Any

from dra_driver.errors import NodeError
from dra_driver.node.worker import Pending


class UnderChange(NodeError):
    """It is not known now, since a GPU is being changed or is late for the first time: what was
    known before holds until then."""


class Changes:
    """Those of one driver, and a clock that stands still as long as there are any: by it nothing is
    late that only waits for them. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[Future[Any], tuple[int, float]] = {}  # index of the GPU, until when
        self._settled = time.monotonic()
        self._stood = 0.0

    def begins(self, index: int, change: Pending[Any]) -> None:
        """A change of the GPU at *index* is under way, until it ends or is late."""
        with self._lock:
            self._settle()
            self._running[change.future] = (index, change.deadline.until)
        change.future.add_done_callback(self._ends)

    def under_way(self, index: int | None = None) -> bool:
        """Whether there are any; *index*: of this GPU."""
        now = time.monotonic()
        with self._lock:
            return any(
                until > now and index in (None, its) for its, until in self._running.values()
            )

    def clock(self) -> float:
        """Seconds, without those in which a change was under way."""
        with self._lock:
            return self._settle() - self._stood

    def _ends(self, change: Future[Any]) -> None:
        with self._lock:
            self._settle()
            del self._running[change]

    def _settle(self) -> float:
        """Count the time since this was done last, in which nothing began or ended."""
        now = time.monotonic()
        end = min(now, max((until for _, until in self._running.values()), default=self._settled))
        self._stood += max(0.0, end - self._settled)
        self._settled = now
        return now
