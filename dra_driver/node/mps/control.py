"""The one door to ``nvidia-cuda-mps-control``: how it is run for which daemon."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from dra_driver.errors import NodeError, TimedOut
from dra_driver.model.driver_files import DriverFiles
from dra_driver.node.commands import Command, Run
from dra_driver.node.driver_root import DriverRoot
from dra_driver.node.mps import mounts
from dra_driver.node.mps.daemon import LOG_DIRECTORY, PIPE_DIRECTORY, Daemon

PROGRAM: Final = "nvidia-cuda-mps-control"

Placed = Callable[[Command], Command]
"""Where a command of the driver really is; a simulated host's is somewhere else than it says."""


class Deadline:
    """What is left of some seconds."""

    def __init__(self, seconds: float, what: str) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds
        self._what = what

    def left(self) -> float:
        """TimedOut: nothing."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimedOut(f"{self._what} took more than {self.seconds:g} s")
        return left

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._end


class Control:
    """Runs the driver's MPS program. Safe to use from several threads."""

    def __init__(self, driver: DriverRoot, run: Run, placed: Placed) -> None:
        self._driver = driver
        self._run = run
        self._placed = placed
        self._last: tuple[DriverFiles, Command] | None = None

    @property
    def driver(self) -> DriverFiles:
        """The driver as it is installed now; the same object as long as it is unchanged."""
        return self._driver.files()

    def command(self, *args: str, stdin: str = "") -> Command:
        """NodeError: the driver has no such program."""
        files, last = self.driver, self._last
        if last is None or last[0] is not files:
            last = files, self._placed(self._driver.command(PROGRAM))
            self._last = last
        return replace(last[1], args=args, stdin=stdin)

    def run(self, command: Command, deadline: Deadline) -> str:
        return self._run(command, deadline.left())

    def ask(self, daemon: Daemon, deadline: Deadline, *args: str, stdin: str = "") -> str:
        """What *daemon* says. NodeError: it refused, or is not there. TimedOut: no answer."""
        return self.run(self.to(daemon, self.command(*args, stdin=stdin)), deadline)

    def to(self, daemon: Daemon, command: Command) -> Command:
        """*command*, for this daemon."""
        _reach(command.root, daemon.directory)
        own = ((PIPE_DIRECTORY, daemon.pipe), (LOG_DIRECTORY, daemon.log))
        return replace(command, variables=(*own, *command.variables))

    def leave(self, daemon: Daemon) -> None:
        """Forget its directory, which is about to go."""
        try:
            root = self.command().root
        except NodeError:
            return  # there is no driver any more
        _leave(root, daemon.directory)


def _reach(root: str, directory: str) -> None:
    """Have what runs in *root* (a directory of this process) find *directory* by the same path.

    That is so in the host's own root. A driver container has a file system of its own, into which
    it is mounted, for this process and those that it starts.
    """
    if root == "/":
        return
    inside = root.rstrip("/") + directory
    try:
        if os.path.exists(inside) and os.path.samefile(inside, directory):
            return
        os.makedirs(inside, mode=0o755, exist_ok=True)
    except OSError as e:
        raise NodeError(
            f"the driver in {root} cannot use {directory}: {e.strerror}; "
            "the driver root must be writable for this process"
        ) from e
    mounts.bind(directory, inside)


def _leave(root: str, directory: str) -> None:
    """Undo :func:`_reach`."""
    inside = os.path.realpath(root.rstrip("/") + directory)
    if root == "/":
        return
    for mounted in mounts.mounted_at_or_below(inside):
        mounts.unmount(mounted)
    try:
        os.rmdir(inside)
    except OSError:
        return  # it was never there, or is the directory itself
