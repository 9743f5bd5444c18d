"""The one door to MPS on this machine: its control daemons are started, asked and stopped."""

import logging
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGKILL, SIGTERM, Signals
from typing import Final

from dra_driver.errors import NodeError, TimedOut
from dra_driver.model.driver_files import DriverFiles
from dra_driver.model.mps import Space, SpaceName
from dra_driver.node.commands import Command, Run, run, run_into
from dra_driver.node.driver_root import DriverRoot
from dra_driver.node.mps import shared_memory
from dra_driver.node.mps.control import PROGRAM, Control, Deadline, Placed
from dra_driver.node.mps.daemon import TOKEN, Daemon, Look, check_directory
from dra_driver.node.mps.logs import last_lines
from dra_driver.node.mps.processes import DaemonProcesses, Running
from dra_driver.node.mps.protocol2 import Protocol2
from dra_driver.node.mps.protocol3 import Protocol3, is_spoken
from dra_driver.node.mps.shelter import Shelter
from dra_driver.node.versions import driver_version

__all__ = ["Daemon", "Daemons", "Look", "check_directory"]

log = logging.getLogger(__name__)

_PROTOCOL_3_FROM: Final = 615
_BETWEEN_LOOKS_SECONDS: Final = 0.01


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a daemon is waited for, in seconds."""

    start: float = 7.0  # which leaves some for undoing it
    unseen: float = 2.0  # in which a server appears in the list, or never will
    ask: float = 3.0
    drain: float = 5.0  # in which clients finish what they have in work
    quit: float = 2.0
    term: float = 1.0
    kill: float = 3.0


_PATIENCE: Final = Patience()


def _as_it_is(command: Command) -> Command:
    return command


class Daemons:
    """Control daemons of the driver in *driver*. Safe to use from several threads, as long as no
    two of them change one daemon."""

    def __init__(
        self,
        driver: DriverRoot,
        run: Run = run,
        placed: Placed = _as_it_is,
        shelter: Shelter | None = None,
        patience: Patience = _PATIENCE,
    ) -> None:
        """*placed*: where a command of the driver really is (a simulated host's is elsewhere)."""
        self._control = Control(driver, run, placed)
        self._processes = DaemonProcesses()
        self._patience = patience
        self._shelter = shelter or Shelter(Path("/sys/fs/cgroup"))
        self._protocols: Mapping[int, Protocol2 | Protocol3] = {
            2: Protocol2(self._control),
            3: Protocol3(self._control),
        }
        self._newest: tuple[DriverFiles, int] | None = None
        self._known: dict[str, Running] = {}  # the control daemon, by token

    def protocol(self) -> int:
        """The newest that this driver has. NodeError: it has no MPS."""
        driver, last = self._control.driver, self._newest
        if last is None or last[0] is not driver:
            self._control.command()
            last = driver, self._look_for_protocol(driver)
            self._newest = last
        return last[1]

    def start(self, daemon: Daemon, spaces: Sequence[Space]) -> Mapping[SpaceName, str]:
        """Start it with these spaces, and give the pipe directory of each.

        For one that does not do its work any more, too: what is left of it is ended at once, and
        the directories that it made are kept, since containers have them mounted.

        NodeError: it does not come up; with the last lines of its log. TimedOut: nor does it fail.
        Then nothing of it runs, and nothing is there that was not there before.
        """
        again = Path(daemon.directory).exists()
        self.end(daemon)
        try:
            return self._bring_up(daemon, spaces)
        except (NodeError, OSError) as e:
            kind = TimedOut if isinstance(e, TimedOut) else NodeError
            said = f"{e}{last_lines(daemon.log)}{self._undo(daemon, again)}"
            raise kind(f"MPS server {daemon.name} does not start: {said}") from e
        except BaseException:
            self._undo(daemon, again)
            raise

    def is_running(self, daemon: Daemon) -> bool:
        """Whether its control daemon is there. No program is run."""
        known = self._known.get(daemon.token)
        if known is not None and self._processes.is_alive(known):
            return True
        return self._find(daemon) is not None

    def look(self, daemon: Daemon) -> Look:
        """NodeError: it answers with an error, or nobody is there. TimedOut: it does not answer."""
        return self._words(daemon).look(daemon, _within(daemon, self._patience.ask))

    def add(self, daemon: Daemon, space: Space) -> str:
        """The pipe directory of *space*, which is made unless it is there with the same limits.

        NodeError: it is there with others, or the daemon refuses. TimedOut: no answer.
        """
        return self._words(daemon).add(daemon, space, _within(daemon, self._patience.ask))

    def remove(self, daemon: Daemon, space: SpaceName) -> None:
        """Whoever is in it is thrown out. Unknown: fine."""
        if self.is_running(daemon):
            self._words(daemon).remove(daemon, space, _within(daemon, self._patience.ask))

    def terminate(self, daemon: Daemon, pids: Collection[int]) -> None:
        """Have these clients finish what they have in work, and take them off. Gone: fine.

        TimedOut: the server is wedged.
        """
        there = [pid for pid in pids if self._processes.exists(pid)]
        if there and self.is_running(daemon):
            self._words(daemon).terminate(daemon, there, _within(daemon, self._patience.drain))

    def end(self, daemon: Daemon) -> None:
        """End its processes without a word, and keep its directory, which containers have mounted:
        a daemon that ends in order would take away what it made in there."""
        self._end(daemon, SIGKILL, self._patience.kill)
        self._forget(daemon)

    def stop(self, daemon: Daemon) -> None:
        """End its processes, and take away its mounts and its directory. Nothing there: fine."""
        processes = self._processes.of(daemon.token)
        if self._processes.control(processes) is not None and self._quits(daemon):
            self._processes.wait(processes, self._patience.term)
        self._end(daemon, SIGTERM, self._patience.term)
        self._end(daemon, SIGKILL, self._patience.kill)
        self._forget(daemon)
        self._remove(daemon)

    def foreign(self, tokens: Collection[str]) -> tuple[str, ...]:
        """Control daemons with none of *tokens*, in words."""
        return tuple(
            f"{PROGRAM} (process {pid}, pipe directory {pipe})"
            for pid, pipe in sorted(self._processes.foreign(frozenset(tokens)))
        )

    def _look_for_protocol(self, driver: DriverFiles) -> int:
        if driver_version(driver.version).major < _PROTOCOL_3_FROM:
            return 2
        return 3 if is_spoken(self._control, Deadline(self._patience.ask, PROGRAM)) else 2

    def _bring_up(self, daemon: Daemon, spaces: Sequence[Space]) -> Mapping[SpaceName, str]:
        deadline = Deadline(self._patience.start, f"starting MPS server {daemon.name}")
        words = self._words(daemon)
        self._make_directories(daemon)
        command = self._control.to(daemon, words.command(daemon, spaces))
        own = (*command.variables, (TOKEN, daemon.token))
        self._launch(daemon, replace(command, variables=own), deadline)
        if self._find(daemon) is None:
            raise NodeError("its control daemon ended at once")
        self._take_in(daemon)
        ready = self._wait(daemon, spaces, deadline)
        self._take_in(daemon)  # its server is there by now
        return ready

    def _undo(self, daemon: Daemon, again: bool) -> str:
        """What could not be undone, in words."""
        try:
            self.end(daemon)
            if not again:
                self._remove(daemon)
        except NodeError as e:
            return f"\n{e}"
        return ""

    def _end(self, daemon: Daemon, number: Signals, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (processes := self._look_twice(daemon)) and time.monotonic() < until:
            self._processes.end(processes, number, max(0.0, until - time.monotonic()))

    def _look_twice(self, daemon: Daemon) -> tuple[Running, ...]:
        """A process has no environment for the moment in which it becomes another program."""
        if not (found := self._processes.of(daemon.token)):
            time.sleep(_BETWEEN_LOOKS_SECONDS)
            found = self._processes.of(daemon.token)
        return found

    def _remove(self, daemon: Daemon) -> None:
        """Take away its mounts and its directory."""
        shared_memory.withdraw(daemon.directory)
        self._control.leave(daemon)
        try:
            shutil.rmtree(daemon.directory)
        except FileNotFoundError:
            return
        except OSError as e:
            raise NodeError(
                f"cannot remove {e.filename or daemon.directory} of an MPS server: {e.strerror}"
            ) from e

    def _forget(self, daemon: Daemon) -> None:
        """TimedOut: there is something of it still."""
        self._known.pop(daemon.token, None)
        self._words(daemon).forget(daemon)
        if left := self._look_twice(daemon):
            pids = ", ".join(str(one.pid) for one in left)
            raise TimedOut(
                f"processes of MPS server {daemon.name} do not end, although they were killed "
                f"({pids}): the GPU's driver holds them; see dmesg, and restart the node if it "
                "stays so"
            )

    def _make_directories(self, daemon: Daemon) -> None:
        for directory in (daemon.directory, daemon.pipe, daemon.log):
            Path(directory).mkdir(parents=True, exist_ok=True)
            Path(directory).chmod(0o755)
        for left in Path(daemon.pipe).rglob("*"):
            if not left.is_dir() or left.is_symlink():
                left.unlink()  # sockets of a daemon that ended
        if daemon.protocol == 2:
            shared_memory.provide(daemon.shm, self._shelter.in_container)

    def _launch(self, daemon: Daemon, command: Command, deadline: Deadline) -> None:
        output = Path(daemon.log) / "start.log"

        def launch() -> None:
            run_into(command, output, deadline.left())

        if daemon.protocol == 2:
            shared_memory.with_own(daemon.shm, command.root, launch)
        else:
            launch()

    def _wait(
        self, daemon: Daemon, spaces: Sequence[Space], deadline: Deadline
    ) -> Mapping[SpaceName, str]:
        words = self._words(daemon)
        unseen = Deadline(self._patience.unseen, "")
        while True:
            try:
                ready = words.when_ready(daemon, spaces, deadline)
            except TimedOut:
                raise
            except NodeError:
                if unseen.over or not self.is_running(daemon):
                    raise
                ready = None  # it is not yet there to be asked
            if ready is not None:
                return ready
            if not self.is_running(daemon):
                raise NodeError("its control daemon has ended")
            deadline.left()
            time.sleep(_BETWEEN_LOOKS_SECONDS)

    def _words(self, daemon: Daemon) -> Protocol2 | Protocol3:
        return self._protocols[daemon.protocol]

    def _find(self, daemon: Daemon) -> Running | None:
        found = self._processes.control(self._processes.of(daemon.token))
        if found is None:
            self._known.pop(daemon.token, None)
        else:
            self._known[daemon.token] = found
        return found

    def _take_in(self, daemon: Daemon) -> None:
        if self._shelter.in_container:
            self._shelter.take_in([one.pid for one in self._processes.of(daemon.token)])

    def _quits(self, daemon: Daemon) -> bool:
        try:
            self._words(daemon).quit(daemon, _within(daemon, self._patience.quit))
        except NodeError as e:
            log.info("an MPS daemon does not quit", extra={"server": daemon.name, "error": str(e)})
            return False
        return True


def _within(daemon: Daemon, seconds: float) -> Deadline:
    return Deadline(seconds, f"an answer of MPS server {daemon.name}")
