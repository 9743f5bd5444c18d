"""Things made once and kept outside the checkout: whole or not there, however many make them."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from hack.testbed.errors import ClusterError
from hack.testbed.waits import wait_for

WAIT_FOR_OTHER_SECONDS = 3600

Progress = Callable[[str], None]


def silent(_line: str) -> None:
    """Progress for those who do not want to hear of it."""


def cache_dir() -> Path:
    """$DRA_CACHE, else dra-driver in the user's cache directory."""
    if directory := os.environ.get("DRA_CACHE"):
        return Path(directory).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).absolute() / "dra-driver"


def made(target: Path, make: Callable[[Path], None], progress: Progress) -> Path:
    """The directory `target`, made by `make` unless it is there already.

    It is made under another name and renamed when complete, so an interrupted making leaves
    nothing that looks finished. A complete one needs no lock: the cache may be read-only.
    """
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(target.with_name(f"{target.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as e:
        raise ClusterError(f"cannot write the cache: {e}; set DRA_CACHE to another place") from e
    try:
        _wait_for_turn(lock, target, progress)
        if not target.is_dir():
            partial = target.with_name(f".{target.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            make(partial)
            partial.rename(target)
    finally:
        os.close(lock)
    return target


def _wait_for_turn(lock: int, target: Path, progress: Progress) -> None:
    if _try_lock(lock):
        return
    progress(f"another process is making {target}: waiting for it")
    wait_for(
        f"another process to finish {target}",
        lambda: _try_lock(lock),
        timeout_seconds=WAIT_FOR_OTHER_SECONDS,
    )


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
