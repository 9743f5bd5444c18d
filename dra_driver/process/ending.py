"""When a process ends: a signal asks it to, or an error leaves it no choice."""

import logging
import signal
import threading
from types import FrameType

from dra_driver.errors import DriverError

log = logging.getLogger(__name__)


class Ending:
    """Why the process ends: a signal, or an error that a new process may mend."""

    def __init__(self, broken: str) -> None:
        """*broken*: what is logged when an error ends it."""
        self._broken = broken
        self.event = threading.Event()
        self.failed = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def on_fatal(self, error: DriverError) -> None:
        log.critical(self._broken, extra={"error": str(error)})
        self.failed = True
        self.event.set()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.event.set()
