"""Changes of one GPU go one after the other, and each has its time, all of its steps together.

The kubelet waits 45 s for a claim, which may take several changes of a GPU, asked for at once, and
have them undone. So the wait for the turn counts as well, and what is in use is waited for in the
same seconds by all of them.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from dra_driver.base.deadlines import Deadline
from dra_driver.base.errors import NodeError
from dra_driver.model.gpus import GpuUuid

RETRY_SECONDS: Final = 8.0
CHANGE_SECONDS: Final = 15.0  # cutting takes tenths of a second, a mode some seconds
_AGAIN_SECONDS: Final = 0.2
_LEAST_SECONDS: Final = 1.0  # of a call of NVML, however late it is


class DeviceBusy(NodeError):
    """Somebody uses what was to be changed, so it is as it was."""


class GpuLock:
    """The time of one change: for *patience* seconds it is tried again where something is in use,
    and in *seconds* it is over."""

    def __init__(self, patience: float, seconds: float) -> None:
        self._retrying = Deadline(patience)
        self._deadline = Deadline(seconds)

    @property
    def seconds(self) -> float:
        """What the next call of NVML may take."""
        return max(_LEAST_SECONDS, self._deadline.remaining)

    def again(self) -> bool:
        """Whether to try once more, after a moment."""
        if self._retrying.expired:
            return False
        time.sleep(_AGAIN_SECONDS)
        return True


class GpuLocks:
    """Of all GPUs. *patience*: of whoever does not say."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._locks: dict[GpuUuid, threading.Lock] = {}
        self._lock = threading.Lock()

    @contextmanager
    def of(
        self, gpu: GpuUuid, patience: float | None, seconds: float = CHANGE_SECONDS
    ) -> Iterator[GpuLock]:
        """While it is the caller's. Held: others change the GPU for longer than that. *patience*:
        0 is for whom nobody waits, who does not wait for others."""
        turn = GpuLock(self._patience if patience is None else patience, seconds)
        with self._lock:
            lock = self._locks.setdefault(gpu, threading.Lock())
        wait = seconds if patience is None else patience
        if not lock.acquire(timeout=wait):
            raise DeviceBusy(
                f"GPU {gpu} is being changed for another claim or by a layout, for longer than "
                f"{wait:g} s: it is tried again"
            )
        try:
            yield turn
        finally:
            lock.release()
