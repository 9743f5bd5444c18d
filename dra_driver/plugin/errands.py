"""Calls that may take long, done beside a loop so that it goes on with what is urgent."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from dra_driver.errors import DriverError

log = logging.getLogger(__name__)

_REMEMBERED_SECONDS: Final = 600.0  # what was last wrong, so that it is not logged again and again

Start = Callable[[Callable[[], None]], None]


@dataclass(frozen=True, slots=True)
class Errand:
    """One such call. Its name says what fails, and the same name is not tried again too soon."""

    name: str
    act: Callable[[], object]
    again_seconds: float  # after it failed


@dataclass(frozen=True, slots=True)
class _Failure:
    at: float
    error: str
    again_at: float


def in_thread(work: Callable[[], None]) -> None:
    """On a thread that does not keep the process from ending."""
    threading.Thread(target=work, name="errand", daemon=True).start()


class Errands:
    """Lanes of errands: those of one lane go one after another, lanes go side by side."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, start: Start = in_thread):
        self._clock = clock
        self._start = start
        self._busy: set[str] = set()
        self._failures: dict[str, _Failure] = {}
        self._lock = threading.Lock()

    def go(self, lane: str, errands: Sequence[Errand]) -> bool:
        """Begin with them. False: the lane is busy, or none of them is to be tried now."""
        now = self._clock()
        with self._lock:
            self._failures = {
                name: one
                for name, one in self._failures.items()
                if now - one.at < _REMEMBERED_SECONDS
            }
            due = [one for one in errands if self._is_due(one.name, now)]
            if lane in self._busy or not due:
                return False
            self._busy.add(lane)
        self._start(lambda: self._do(lane, due))
        return True

    def _is_due(self, name: str, now: float) -> bool:
        return name not in self._failures or now >= self._failures[name].again_at

    def _do(self, lane: str, errands: Sequence[Errand]) -> None:
        try:
            for errand in errands:
                self._try(errand)
        finally:
            with self._lock:
                self._busy.discard(lane)

    def _try(self, errand: Errand) -> None:
        try:
            errand.act()
        except DriverError as error:
            self._failed(errand, str(error))
            return
        with self._lock:
            self._failures.pop(errand.name, None)

    def _failed(self, errand: Errand, error: str) -> None:
        now = self._clock()
        with self._lock:
            before = self._failures.get(errand.name)
            self._failures[errand.name] = _Failure(now, error, now + errand.again_seconds)
        if before is None or before.error != error:
            facts = {"errand": errand.name, "error": error, "seconds": errand.again_seconds}
            log.warning("will try again", extra=facts)
