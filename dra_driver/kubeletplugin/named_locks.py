"""Locks by name, for what one thread at a time may work on: a claim, a device.

The kubelet may ask again while its earlier call runs; claims on different devices go side by side.
"""

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from dra_driver.errors import TimedOut


class NamedLocks:
    """A lock for every name, which exists only while somebody wants it."""

    def __init__(self, busy: str) -> None:
        """*busy*: what TimedOut says, with ``{name}`` and ``{seconds}``."""
        self._busy = busy
        self._guard = threading.Lock()
        self._locks: dict[str, tuple[threading.Lock, int]] = {}  # with how many want it

    @contextmanager
    def hold(self, names: Iterable[str], timeout_seconds: float) -> Iterator[None]:
        """Hold all of *names*, taken in a fixed order. TimedOut: one was not free in time."""
        deadline = time.monotonic() + timeout_seconds
        taken: list[str] = []
        try:
            for name in sorted(set(names)):
                if not self._join(name).acquire(timeout=max(0.0, deadline - time.monotonic())):
                    self._leave(name)
                    raise TimedOut(self._busy.format(name=name, seconds=f"{timeout_seconds:g}"))
                taken.append(name)
            yield
        finally:
            for name in reversed(taken):
                self._locks[name][0].release()
                self._leave(name)

    def __len__(self) -> int:
        return len(self._locks)

    def _join(self, name: str) -> threading.Lock:
        with self._guard:
            lock, wanted = self._locks.get(name) or (threading.Lock(), 0)
            self._locks[name] = (lock, wanted + 1)
            return lock

    def _leave(self, name: str) -> None:
        with self._guard:
            lock, wanted = self._locks.pop(name)
            if wanted > 1:
                self._locks[name] = (lock, wanted - 1)
