"""A small real file system, to be filled and made read-only; and disks that fail for a moment."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


class Disk:
    """A tmpfs of its own, mounted at *path*."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "ballast"

    def fill(self) -> None:
        """To the last byte."""
        with self._ballast.open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))
        assert os.statvfs(self.path).f_bfree == 0

    def free(self) -> None:
        self._ballast.unlink()

    def make(self, mode: str) -> None:
        """``ro`` or ``rw``."""
        _run("mount", "-o", f"remount,{mode}", str(self.path))


@contextmanager
def small_disk(path: Path, size: str = "1m") -> Iterator[Disk]:
    """One at *path*, for as long as this lasts."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    path.mkdir(parents=True, exist_ok=True)
    try:
        _run("mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(path))
    except subprocess.CalledProcessError as e:
        pytest.skip(f"no file system can be mounted here: {e.stderr.decode().strip()}")
    try:
        yield Disk(path)
    finally:
        _run("umount", "--lazy", str(path))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=30, capture_output=True)


_CALLS = {"open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove", "os.chmod"}
_failing: list["FailingCalls"] = []  # there is no way to take an audit hook back


class FailingCalls:
    """The call to the disk with the number *at* (from 0) fails, of those that name something below
    *directory*."""

    def __init__(self, directory: Path, at: int, number: int = errno.EIO) -> None:
        self._directory = os.fspath(directory)
        self._at = at
        self._number = number
        self.calls = 0

    def __enter__(self) -> "FailingCalls":
        _failing[:] = [self]
        return self

    def __exit__(self, *_: object) -> None:
        _failing.clear()

    def before(self, event: str, path: object) -> None:
        if event in _CALLS and isinstance(path, str) and path.startswith(self._directory):
            self.calls += 1
            if self.calls == self._at + 1:
                raise OSError(self._number, os.strerror(self._number), path)


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    for failing in tuple(_failing):
        path = arguments[0] if arguments else None
        failing.before(event, os.fspath(path) if isinstance(path, os.PathLike) else path)


sys.addaudithook(_hook)
