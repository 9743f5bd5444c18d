"""The plugin processes of one node during a rolling update, and which of them is the newest."""

import contextlib
import fcntl
import os
import secrets
import time
from pathlib import Path

from dra_driver.kubeletplugin.file_locks import (
    closing,
    disk_errors,
    lock_within,
    open_file,
    try_flock,
)

_STARTING_SECONDS = 20.0


class Instances:
    """The plugin processes of this node, each a locked file ``<number>-<pod UID>`` in *directory*.

    A higher number is newer. A file whose lock is free belongs to a dead process; whoever sees it
    removes it.
    """

    def __init__(self, directory: Path, pod_uid: str | None = None) -> None:
        self._directory = directory
        with disk_errors(f"note this plugin process in {directory}"):
            directory.mkdir(mode=0o750, parents=True, exist_ok=True)
            starting = directory / ".starting"
            with closing(lock_within(starting, _STARTING_SECONDS, "other plugin processes start")):
                _remove_leftovers(directory)
                for _, path in self._listed():
                    _is_alive(path)  # removes it if it is not
                # The clock keeps the order if somebody empties the directory between two starts.
                newest = max((number for number, _ in self._listed()), default=0)
                self._number = max(newest + 1, int(time.time()))
                self._path = directory / f"{self._number}-{pod_uid or os.getpid()}"
                self._file = self._appear()

    def is_newest(self) -> bool:
        """Whether no live process is newer than this one. Cheap: it reads one directory."""
        with disk_errors(f"read {self._directory}"):
            if os.fstat(self._file).st_nlink == 0:  # somebody removed our file
                os.close(self._file)
                self._file = self._appear()
            newer = [path for number, path in self._listed() if number > self._number]
            return not [path for path in newer if _is_alive(path)]

    def leave(self) -> None:
        """Be forgotten: the next older process becomes the newest."""
        with contextlib.suppress(OSError):  # a file without a lock is of a dead process
            self._path.unlink(missing_ok=True)
        os.close(self._file)

    def _appear(self) -> int:
        """Make our file, locked before anybody can see it."""
        self._directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        hidden = self._directory / f".{secrets.token_hex(8)}.new"
        file = open_file(hidden)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(hidden, self._path)
        return file

    def _listed(self) -> list[tuple[int, Path]]:
        names = (name for name in sorted(os.listdir(self._directory)) if not name.startswith("."))
        split = ((name.partition("-")[0], self._directory / name) for name in names)
        return [(int(number), path) for number, path in split if number.isdecimal()]


def _is_alive(path: Path) -> bool:
    """Whether the process that made *path* lives; a dead one's file is removed."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    with closing(file):
        if not try_flock(file, fcntl.LOCK_SH):
            return True
        path.unlink(missing_ok=True)
        return False


def _remove_leftovers(directory: Path) -> None:
    """Files of processes that died before theirs had its name. The caller has the starting lock."""
    for leftover in directory.glob(".*.new"):
        leftover.unlink(missing_ok=True)
