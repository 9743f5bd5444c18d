"""One lock per device: claims on different GPUs are prepared side by side."""

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from dra_driver.errors import TimedOut


class DeviceLocks:
    """Locks by name, made when first asked for and dropped when nobody wants them."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self._wanted: Counter[str] = Counter()

    @contextmanager
    def hold(self, names: Iterable[str], timeout_seconds: float) -> Iterator[None]:
        """Hold all of *names*, taken in a fixed order. TimedOut names the one that was not free."""
        deadline = time.monotonic() + timeout_seconds
        taken: list[str] = []
        try:
            for name in sorted(set(names)):
                self._take(name, deadline)
                taken.append(name)
            yield
        finally:
            for name in reversed(taken):
                self._give(name)

    def _take(self, name: str, deadline: float) -> None:
        with self._guard:
            lock = self._locks.setdefault(name, threading.Lock())
            self._wanted[name] += 1
        if lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return
        self._unwant(name)
        raise TimedOut(
            f"another claim is being prepared or unprepared on {name} and did not finish"
        )

    def _give(self, name: str) -> None:
        self._locks[name].release()
        self._unwant(name)

    def _unwant(self, name: str) -> None:
        with self._guard:
            self._wanted[name] -= 1
            if not self._wanted[name]:
                del self._wanted[name], self._locks[name]
