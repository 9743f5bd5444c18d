"""Changes of one GPU go one after the other, and each has a deadline for all of its steps.

The kubelet waits 45 s for a claim. A claim may take several changes of a GPU, begun at once, and
have them undone. So a change that waits for the lock spends its own time, and all changes wait in
the same seconds for what is in use.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from dra_driver.base.deadlines import Deadline
from dra_driver.base.errors import NodeError
from dra_driver.base.threads import NamedLocks
from dra_driver.model.gpus import GpuUuid

RETRY_SECONDS: Final = 8.0
CHANGE_SECONDS: Final = 15.0  # creating an instance takes tenths of a second, a mode some seconds
_RETRY_AFTER_SECONDS: Final = 0.2
_LEAST_SECONDS: Final = 1.0  # of a call of NVML, however late it is


class DeviceBusy(NodeError):
    """Somebody uses what was to be changed, so it is as it was."""


class ChangeDeadline:
    """One change of a GPU is tried again for *patience* seconds where something is in use, and is
    over in *seconds*."""

    def __init__(self, patience: float, seconds: float) -> None:
        self._retrying = Deadline(patience)
        self._deadline = Deadline(seconds)

    @property
    def seconds(self) -> float:
        """What the next call of NVML may take."""
        return max(_LEAST_SECONDS, self._deadline.remaining)

    def retry(self) -> bool:
        """Whether to try once more, after a moment."""
        if self._retrying.expired:
            return False
        time.sleep(_RETRY_AFTER_SECONDS)
        return True


class GpuLocks:
    """One lock for each GPU. *patience*: of callers that do not say."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._locks = NamedLocks(
            "GPU {name} is being changed for another claim or by a layout, for longer than "
            "{seconds} s: it is tried again",
            DeviceBusy,
        )

    @contextmanager
    def hold(
        self, gpu: GpuUuid, patience: float | None, seconds: float = CHANGE_SECONDS
    ) -> Iterator[ChangeDeadline]:
        """While the lock is the caller's. DeviceBusy: others change the GPU for longer.
        *patience*: 0 is for callers for whom nobody waits, and who do not wait for others."""
        deadline = ChangeDeadline(self._patience if patience is None else patience, seconds)
        with self._locks.hold([gpu], seconds if patience is None else patience):
            yield deadline
