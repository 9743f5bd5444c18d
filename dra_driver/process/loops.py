"""Something done again and again on a thread of its own, which no error ends."""

import logging
import threading
from collections.abc import Callable

from dra_driver.errors import DriverError

log = logging.getLogger(__name__)


class Loop:
    """Does *step* every so many *seconds*, and at once when asked to.

    A step that answers with a number of seconds is done again sooner than usual.
    """

    def __init__(self, name: str, step: Callable[[], float | None], seconds: float) -> None:
        self._step = step
        self._seconds = seconds
        self._stopping = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """The first time at once."""
        self._thread.start()

    def soon(self) -> None:
        """Do it without waiting for the time to be over."""
        self._wake.set()

    def stop(self) -> None:
        """Not once more; what runs is not waited for."""
        self._stopping = True
        self._wake.set()

    def join(self, timeout_seconds: float) -> None:
        """Wait for the end of what runs."""
        self._thread.join(timeout_seconds)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping:
            self._wake.clear()
            seconds = self._do()
            if not self._stopping:
                self._wake.wait(seconds)

    def _do(self) -> float:
        """One time; the seconds until the next."""
        try:
            return min(self._seconds, self._step() or self._seconds)
        except DriverError as e:
            log.warning("will try again", extra={"error": str(e), "seconds": self._seconds})
        except Exception:  # the next time may go better; the process must not lose its loops
            log.exception("a regular look failed")
        return self._seconds
