"""Runs ``nvidia-cuda-mps-control`` for a daemon; nothing else does."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Final

from dra_driver.base.deadlines import Deadline
from dra_driver.base.errors import CommandFailed, MpsStateUnknown, NodeError, TimedOut
from dra_driver.base.frozen import frozen
from dra_driver.model.driver_files import DriverFiles
from dra_driver.node.driver.commands import Command, RunCommand
from dra_driver.node.driver.root import DriverRoot
from dra_driver.node.mps import mounts
from dra_driver.node.mps.daemon import LOG_DIRECTORY, PIPE_DIRECTORY, ControlDaemon

PROGRAM: Final = "nvidia-cuda-mps-control"

LocateProgram = Callable[[Command], Command]
"""Where a command of the driver really is; a simulated host's is somewhere else than it says."""


@frozen
class DaemonTimeouts:
    """How long a daemon is waited for, in seconds."""

    start: float = 7.0  # which leaves some for undoing it
    settle: float = 0.2  # after which a daemon that cannot live has died
    appearance: float = 2.0  # in which a server appears in the list, or never will
    ask: float = 3.0
    drain: float = 4.0  # in which a client finishes its work in flight
    drain_all: float = 8.0  # in which all clients do
    quit: float = 2.0
    going: float = 0.3  # in which a daemon ends that did not confirm that it quits
    term: float = 1.0
    kill: float = 3.0


class ControlProgram:
    """Runs the driver's MPS program. Safe to use from several threads."""

    def __init__(self, driver: DriverRoot, run: RunCommand, locate: LocateProgram) -> None:
        self._driver = driver
        self._run = run
        self._locate = locate
        self._last: tuple[DriverFiles, Command] | None = None

    @property
    def driver(self) -> DriverFiles:
        """The driver as it is installed now; the same object as long as it is unchanged."""
        return self._driver.files()

    def command(self, *args: str, stdin: str = "") -> Command:
        """NodeError: the driver has no such program."""
        files, last = self.driver, self._last
        if last is None or last[0] is not files:
            last = files, self._locate(self._driver.command(PROGRAM))
            self._last = last
        return replace(last[1], args=args, stdin=stdin)

    def available(self) -> None:
        """MpsStateUnknown: there is no such program, as while a driver is replaced."""
        with _unknown_unless_asked():
            command = self.command()
            path = command.root.rstrip("/") + command.program
            if not os.path.lexists(path):  # a link leads somewhere in the root
                raise MpsStateUnknown(f"{path} is gone: is the driver being replaced?")

    def run(self, command: Command, deadline: Deadline) -> str:
        """CommandFailed: it failed. MpsStateUnknown: it was not run. TimedOut: it did not end."""
        with _unknown_unless_asked():
            return self._run(command, deadline.check())

    def ask(self, daemon: ControlDaemon, deadline: Deadline, *args: str, stdin: str = "") -> str:
        """The answer of *daemon*. CommandFailed: it refused, or is not there. MpsStateUnknown: it
        was not asked. TimedOut: no answer."""
        with _unknown_unless_asked():
            command = self.prepare_for(daemon, self.command(*args, stdin=stdin))
        return self.run(command, deadline)

    def prepare_for(self, daemon: ControlDaemon, command: Command) -> Command:
        """*command* with the daemon's directories, which are mounted where it runs."""
        _mount_into(command.root, daemon.directory)
        variables = ((PIPE_DIRECTORY, daemon.pipe), (LOG_DIRECTORY, daemon.log))
        return replace(command, variables=(*variables, *command.variables))

    def unmount_from_driver(self, daemon: ControlDaemon) -> None:
        """Undo what ``prepare_for`` mounted: the directory is about to be removed."""
        try:
            root = self.command().root
        except NodeError:
            return  # there is no driver any more
        if root == "/":
            return
        in_root = os.path.realpath(root.rstrip("/") + daemon.directory)
        for mounted in mounts.mounted_at_or_below(in_root):
            mounts.unmount(mounted)
        with suppress(OSError):  # it was never there, or is the directory itself
            os.rmdir(in_root)


@contextmanager
def _unknown_unless_asked() -> Iterator[None]:
    """MpsStateUnknown for what keeps the program from being run."""
    try:
        yield
    except (MpsStateUnknown, CommandFailed, TimedOut):
        raise
    except NodeError as e:
        raise MpsStateUnknown(str(e)) from e
    except OSError as e:
        raise MpsStateUnknown(f"the driver's {PROGRAM} cannot be run: {e}") from e


@contextmanager
def unless_gone(is_there: Callable[[], bool]) -> Iterator[None]:
    """Around a command that ends or removes something: it may fail where that is gone."""
    try:
        yield
    except (MpsStateUnknown, TimedOut):
        raise
    except NodeError:
        if is_there():
            raise


def _mount_into(root: str, directory: str) -> None:
    """Make *directory* visible by the same path to a program that runs in *root*.

    That is so in the host's own root. A driver container has a file system of its own, into which
    the directory is mounted, for this process and those that it starts.
    """
    if root == "/":
        return
    in_root = root.rstrip("/") + directory
    try:
        if os.path.exists(in_root) and os.path.samefile(in_root, directory):
            return
        os.makedirs(in_root, mode=0o755, exist_ok=True)
    except OSError as e:
        raise NodeError(
            f"the driver in {root} cannot use {directory}: {e.strerror}; "
            "the driver root must be writable for this process"
        ) from e
    mounts.bind(directory, in_root)
