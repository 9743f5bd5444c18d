"""The threads on which NVML is called: one for the system, and one for each GPU."""

import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from dra_driver.node.nvml_changes import Changes
from dra_driver.node.worker import Pending, Worker

T = TypeVar("T")

Submit = Callable[[int, str, Callable[[], Any]], Pending[Any]]
"""Has something run on the thread of the GPU at an index."""

_FOR_EACH_BOARD: Final = 0.2  # of the deadline
_BEHIND_SECONDS: Final = 1.0  # for so long a look waits for GPUs that others' changes may keep


class Threads:
    """A GPU that hangs keeps its own thread. *deadline_seconds*: what reading may take, besides the
    time that changes of GPUs take meanwhile."""

    def __init__(self, deadline_seconds: float) -> None:
        self._deadline_seconds = deadline_seconds
        self._system = Worker("nvml-system")
        self._gpus: list[Worker] = []
        self.changes: Final = Changes()

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing waits to run."""
        return all(worker.idle for worker in (self._system, *self._gpus))

    def read_system(self, doing: str, call: Callable[[], T]) -> Pending[T]:
        """Have *call* run on the system's thread."""
        return self._system.submit(doing, call, self._deadline_seconds, self.changes.clock)

    def run_system(self, doing: str, call: Callable[[], T], seconds: float | None = None) -> T:
        """What *call* answers on the system's thread, in time whatever else goes on."""
        return self._system.submit(doing, call, seconds or self._deadline_seconds).result()

    def read(self, index: int, doing: str, call: Callable[[], T], boards: int = 0) -> Pending[T]:
        """Have *call* run on the thread of the GPU at *index*. *boards*: that are asked at the same
        time for what the driver tells of one after the other."""
        seconds = self._deadline_seconds * (1 + _FOR_EACH_BOARD * boards)
        return self._gpu(index).submit(doing, call, seconds, self.changes.clock)

    def change(self, index: int, doing: str, call: Callable[[], T], seconds: float) -> Pending[T]:
        """Like :meth:`read`, for what changes the GPU, within *seconds*."""
        pending = self._gpu(index).submit(doing, call, seconds)
        self.changes.begins(index, pending)
        return pending

    def behind(self) -> Callable[[], bool]:
        """Says when what is known has to do: a change is under way, and a moment has passed."""
        until = time.monotonic() + _BEHIND_SECONDS
        return lambda: time.monotonic() >= until and self.changes.under_way()

    def stop(self) -> None:
        """End the threads once what was submitted is done, and begin with new ones."""
        for worker in (self._system, *self._gpus):
            worker.stop()
        self._system, self._gpus = Worker("nvml-system"), []

    def _gpu(self, index: int) -> Worker:
        while len(self._gpus) <= index:
            self._gpus.append(Worker(f"nvml-gpu-{len(self._gpus)}"))
        return self._gpus[index]
