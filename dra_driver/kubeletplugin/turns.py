"""Whose turn it is when two plugin processes serve one node during a rolling update.

Whichever process the kubelet asks prepares, but never two at a time: the ledger and the devices
belong to the process that has the turn.
"""

import contextlib
import fcntl
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from dra_driver.errors import TimedOut
from dra_driver.kubeletplugin.file_locks import (
    POLL_SECONDS,
    closing,
    disk_errors,
    open_file,
    try_flock,
    try_lock,
)

WAIT_SECONDS = 20.0  # the claim's own work has to fit into the kubelet's 45 s as well


class Turn:
    """One process at a time, all its threads together: it has the turn while any of them is inside.

    A process that waits says so, and the one inside then admits nobody new until it is out: neither
    can starve the other. *on_change* is called before the first thread enters if another process
    had the turn since this one: what it remembers of the ledger is stale. A call that fails there
    is called again for the next thread.
    """

    def __init__(
        self,
        directory: Path,
        owner: str,
        on_change: Callable[[], None],
    ) -> None:
        self._lock = directory / "serialize.lock"
        self._wanted = directory / "serialize.wanted"
        self._owner = {"owner": owner, "pid": os.getpid(), "token": secrets.token_hex(8)}
        self._on_change = on_change
        self._changed = threading.Condition()
        self._file: int | None = None  # locked while we have the turn
        self._inside = 0
        self._taking = False  # one thread takes the turn for all

    @contextlib.contextmanager
    def held(self, wait_seconds: float = WAIT_SECONDS) -> Iterator[None]:
        """Be inside. TimedOut: another process did not get out in time."""
        deadline = time.monotonic() + wait_seconds
        if not self._join(deadline):
            self._take(deadline)
        try:
            yield
        finally:
            self._leave()

    def _join(self, deadline: float) -> bool:
        """Enter if this process has the turn; False: the caller has to take it for the process."""
        with self._changed:
            while self._taking or self._file is not None:
                if self._file is not None and not self._is_wanted():
                    self._inside += 1
                    return True
                if not self._changed.wait(min(0.05, deadline - time.monotonic())):
                    self._give_up_after(deadline)
            self._taking = True
            return False

    def _take(self, deadline: float) -> None:
        file = None
        try:
            file = self._locked(deadline)
        finally:
            with self._changed:
                self._taking = False
                if file is not None:
                    self._file, self._inside = file, 1
                self._changed.notify_all()

    def _locked(self, deadline: float) -> int:
        """The locked file, our name in it. Who waits holds the mark, which only one can."""
        with disk_errors(f"lock {self._lock}"), closing(self._poll(self._wanted, deadline)):
            file = self._poll(self._lock, deadline)
        try:
            if _read(file).get("token") != self._owner["token"]:
                self._on_change()
                with disk_errors(f"write {self._lock}"):
                    os.ftruncate(file, 0)
                # The lock is the turn. A disk that is full leaves the file empty, and whoever comes
                # next takes it that another one had the turn.
                with contextlib.suppress(OSError):
                    os.pwrite(file, json.dumps(self._owner, sort_keys=True).encode(), 0)
        except BaseException:
            os.close(file)
            raise
        return file

    def _poll(self, path: Path, deadline: float) -> int:
        while (file := try_lock(path)) is None:
            self._give_up_after(deadline)
            time.sleep(POLL_SECONDS)
        return file

    def _give_up_after(self, deadline: float) -> None:
        if time.monotonic() < deadline:
            return
        with disk_errors(f"read {self._lock}"), closing(open_file(self._lock)) as file:
            last = _read(file)
        raise TimedOut(
            "waited for the plugin process of "
            f"{last.get('owner', 'nobody known')} (pid {last.get('pid', '?')}), which has not "
            f"finished its calls: {self._lock} is locked"
        )

    def _is_wanted(self) -> bool:
        """Whether another process waits. Shared, so that looking never looks like waiting."""
        with disk_errors(f"lock {self._wanted}"), closing(open_file(self._wanted)) as file:
            return not try_flock(file, fcntl.LOCK_SH)

    def _leave(self) -> None:
        with self._changed:
            self._inside -= 1
            if self._inside == 0 and self._file is not None:
                os.close(self._file)
                self._file = None
                self._changed.notify_all()


def _read(file: int) -> dict[str, object]:
    """What the last owner wrote; empty where nobody did, it died while writing, or the disk had no
    room."""
    try:
        with disk_errors("read whose turn it was"):
            found = json.loads(os.pread(file, 4096, 0))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
