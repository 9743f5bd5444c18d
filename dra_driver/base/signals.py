"""The end of a process, by a signal or a fatal error: within 5 s, whatever its threads do.

A thread may hang in a call of the kernel, or in writing a log that nobody reads.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Final

from dra_driver.base.errors import DriverError

log = logging.getLogger(__name__)

_SHUTDOWN_SECONDS: Final = 4.0  # for stopping in good order; the rest is for a busy machine
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_FATAL_ERROR: Final = 0  # no signal has this number


class Shutdown:
    """Why the process ends: a signal, or an error that a new process may mend."""

    def __init__(
        self,
        broken: str,
        seconds: float = _SHUTDOWN_SECONDS,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        """*broken*: what is logged when an error ends it. *leave*: what ends it, with its exit
        code, where it has not ended by itself after *seconds*."""
        self._broken = broken
        self._seconds = seconds
        self._leave = leave
        self.event = threading.Event()
        self.failed = False
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        threading.Thread(target=self._wait_and_leave, name="shutdown", daemon=True).start()
        # The kernel's signal comes through the pipe: the main thread may hang.
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)

    def on_fatal(self, error: DriverError) -> None:
        self.failed = True
        os.write(self._writer, bytes([_FATAL_ERROR]))
        log.critical(self._broken, extra={"error": str(error)})

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Nothing to do: the number of the signal is in the pipe."""

    def _wait_and_leave(self) -> None:
        while os.read(self._reader, 1)[0] not in (_FATAL_ERROR, *_SIGNALS):
            pass
        self.event.set()
        time.sleep(self._seconds)
        self._leave(1 if self.failed else 0)
