"""One call at a time for each claim: the kubelet may ask again while its earlier call runs."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dra_driver.errors import TimedOut
from dra_driver.kubeletplugin.claims import ClaimRef, ClaimUid


class OneAtATime:
    """A lock per claim UID that exists only while somebody wants it."""

    def __init__(self, patience_seconds: float) -> None:
        self._patience_seconds = patience_seconds
        self._guard = threading.Lock()
        self._locks: dict[ClaimUid, tuple[threading.Lock, int]] = {}  # with how many want it

    @contextmanager
    def turn(self, ref: ClaimRef) -> Iterator[None]:
        """Be the only one with this claim. TimedOut: an earlier call was busy all the time."""
        lock = self._join(ref.uid)
        try:
            if not lock.acquire(timeout=self._patience_seconds):
                raise TimedOut(
                    f"claim {ref} is still being served for an earlier call, "
                    f"{self._patience_seconds:g} s later; the kubelet will ask again"
                )
            try:
                yield
            finally:
                lock.release()
        finally:
            self._leave(ref.uid)

    def __len__(self) -> int:
        return len(self._locks)

    def _join(self, uid: ClaimUid) -> threading.Lock:
        with self._guard:
            lock, wanted = self._locks.get(uid) or (threading.Lock(), 0)
            self._locks[uid] = (lock, wanted + 1)
            return lock

    def _leave(self, uid: ClaimUid) -> None:
        with self._guard:
            lock, wanted = self._locks.pop(uid)
            if wanted > 1:
                self._locks[uid] = (lock, wanted - 1)
