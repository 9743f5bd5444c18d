"""File locks, waited for within bounds.

flock(2): the kernel frees a lock when its process dies, however it died.
"""

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from dra_driver.errors import NodeError, TimedOut
from dra_driver.kubeletplugin.disk_calls import disk_call

POLL_SECONDS = 0.01


def open_file(path: Path) -> int:
    """Open *path* for locking and writing, made if missing; children do not inherit it."""
    return os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o640)


def try_flock(file: int, kind: int) -> bool:
    """Lock *file* (LOCK_EX or LOCK_SH) unless that means waiting; whether it is locked now."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EWOULDBLOCK:
            return False
        raise
    return True


def try_lock(path: Path) -> int | None:
    """The open file, locked; None: another has it, or the file was replaced while we opened it."""
    file = open_file(path)
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, file)
        if try_flock(file, fcntl.LOCK_EX) and _is_at(file, path):
            undo.pop_all()
            return file
    return None


def lock_within(path: Path, seconds: float, what: str) -> int:
    """The open file, locked. TimedOut: not within *seconds*, while waiting until *what*."""
    deadline = time.monotonic() + seconds
    while (file := try_lock(path)) is None:
        if time.monotonic() >= deadline:
            raise TimedOut(f"waited {seconds:g} s until {what}: {path} is locked")
        time.sleep(POLL_SECONDS)
    return file


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def closing(file: int) -> Iterator[int]:
    """Close the file in the end, which frees its lock."""
    try:
        yield file
    finally:
        os.close(file)


@contextlib.contextmanager
def disk_errors(doing: str) -> Iterator[None]:
    """What the disk refuses becomes a NodeError that says what we were *doing*."""
    try:
        with disk_call(doing):
            yield
    except OSError as error:
        raise NodeError(f"cannot {doing}: {error}") from error
