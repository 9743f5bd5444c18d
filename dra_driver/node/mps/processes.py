"""The processes of control daemons, recognised by a token in their environment.

A process is identified by its PID and start time, and signalled through a pidfd, as in
:mod:`dra_driver.node.cgroups.processes`. Daemons without a token of ours are unmanaged: they
are described in as few lines as a tenant cannot multiply.
"""

import errno
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from dra_driver.base.deadlines import Deadline
from dra_driver.base.errors import MpsStateUnknown, NodeError
from dra_driver.base.frozen import ordered
from dra_driver.node.cgroups.procfs import nul_separated, printable, read_proc_file
from dra_driver.node.cgroups.tree import container_of_process
from dra_driver.node.mps.control import PROGRAM
from dra_driver.node.mps.daemon import PIPE_DIRECTORY, TOKEN_VARIABLE

MAX_UNMANAGED_LINES: Final = 16
_SUM_LINES: Final = 2  # that give a number of others


@ordered
class UnmanagedDaemon:
    """A control daemon by its PID. A tenant can give any process that name."""

    pid: int
    pipe_directory: str
    in_pod: bool = False


def describe_unmanaged(daemons: Iterable[UnmanagedDaemon]) -> tuple[str, ...]:
    """A line for each on the host itself, as far as they are few, and the number of others."""
    by_pid = sorted(daemons)
    on_host = [daemon for daemon in by_pid if not daemon.in_pod]
    lines = [
        f"{PROGRAM} (process {daemon.pid}, pipe directory {printable(daemon.pipe_directory)})"
        for daemon in on_host[: MAX_UNMANAGED_LINES - _SUM_LINES]
    ]
    if more := len(on_host) - len(lines):
        lines.append(f"{PROGRAM} ({more} more on this host)")
    if in_pods := len(by_pid) - len(on_host):
        number = "1 process" if in_pods == 1 else f"{in_pods} processes"
        lines.append(f"{PROGRAM} ({number} in pods)")
    return tuple(lines)


def is_in_pod(proc_cgroup: bytes) -> bool:
    """By what ``/proc/<pid>/cgroup`` says. With cgroup v1 a tenant can leave the tree of one
    controller; the others still tell."""
    text = proc_cgroup.decode(errors="replace")
    return "kubepods" in text or container_of_process(text) is not None


_AFTER_NAME: Final = ") "  # the name of a program can hold anything, also this
_STATE, _PARENT, _STARTED = 0, 1, 19  # proc_pid_stat(5), from behind the name
_ENDED: Final = ("Z", "X")
_BETWEEN_LOOKS_SECONDS: Final = 0.01
_AS_DAEMON: Final = re.compile(r"-[a-z]*[df][a-z]*|--(daemon|foreground)", re.IGNORECASE)
_LACKING: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # this process cannot look
# As root, where nothing is said; protocol 3 has another place for it.
_USUAL_PIPES: Final = {2: "/tmp/nvidia-mps", 3: "/run/nvidia-mps"}


@ordered
class DaemonProcess:
    """A process, by its number and its start in clock ticks since boot."""

    pid: int
    started: int


class DaemonProcesses:
    """Those that this process sees. *proc*: where it sees them, /proc."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = str(proc)

    def of(self, token: str) -> tuple[DaemonProcess, ...]:
        """All with that token, and what they have started. It looks at every process."""
        mark = f"{TOKEN_VARIABLE}={token}".encode()
        return self._with(lambda environ: mark in environ)

    def living_in(self, directory: str) -> tuple[DaemonProcess, ...]:
        """All with any token and a pipe directory in *directory*, and what they have started."""
        pipe = f"{PIPE_DIRECTORY}={directory}/".encode()
        token = f"{TOKEN_VARIABLE}=".encode()

        def lives(environ: list[bytes]) -> bool:
            in_directory = any((variable + b"/").startswith(pipe) for variable in environ)
            return in_directory and any(variable.startswith(token) for variable in environ)

        return self._with(lives)

    def _with(self, matches: Callable[[list[bytes]], bool]) -> tuple[DaemonProcess, ...]:
        stats = {pid: stat for pid in self._pids() if (stat := self._stat(pid))}
        pids = {pid for pid in stats if matches(self._entries(pid, "environ"))}
        while more := {
            pid for pid, stat in stats.items() if int(stat[_PARENT]) in pids and pid not in pids
        }:
            pids |= more
        return tuple(DaemonProcess(pid, int(stats[pid][_STARTED])) for pid in sorted(pids))

    def control(self, processes: Iterable[DaemonProcess]) -> DaemonProcess | None:
        """The control daemon among *processes*."""
        return next(
            (process for process in processes if self._is_control(self._words(process.pid))), None
        )

    def exists(self, pid: int) -> bool:
        """Whether any process has that number."""
        return bool(self._stat(pid))

    def is_alive(self, process: DaemonProcess) -> bool:
        stat = self._stat(process.pid)
        return bool(stat) and int(stat[_STARTED]) == process.started

    def end(
        self, processes: Iterable[DaemonProcess], number: signal.Signals, seconds: float
    ) -> bool:
        """Send a signal to each and wait for their end. False: some are still there."""
        signalled = [process for process in processes if self._signal(process, number)]
        return self.wait(signalled, seconds)

    def end_all(
        self, find: Callable[[], tuple[DaemonProcess, ...]], number: signal.Signals, seconds: float
    ) -> tuple[DaemonProcess, ...]:
        """End what *find* finds, until it finds nothing; what it still finds in the end."""
        deadline = Deadline(seconds)
        while processes := _look_twice(find):
            self.end(processes, number, deadline.remaining)
            if deadline.expired:
                return _look_twice(find)
        return ()

    def wait(self, processes: Iterable[DaemonProcess], seconds: float) -> bool:
        """Wait for their end. False: some are still there."""
        deadline = Deadline(seconds)
        running = list(processes)
        while running := [process for process in running if self.is_alive(process)]:
            if deadline.expired:
                return False
            time.sleep(_BETWEEN_LOOKS_SECONDS)
        return True

    def unmanaged(self, tokens: frozenset[str]) -> Iterator[UnmanagedDaemon]:
        """Control daemons with none of these tokens."""
        for pid in self._pids():
            words = self._words(pid)
            if not self._is_control(words) or not any(map(_AS_DAEMON.fullmatch, words)):
                continue
            environ = (entry.decode(errors="replace") for entry in self._entries(pid, "environ"))
            variables = dict(entry.partition("=")[::2] for entry in environ)
            if variables.get(TOKEN_VARIABLE) not in tokens and self._stat(pid):
                usual = _USUAL_PIPES[3 if "3" in words else 2]
                pipe = variables.get(PIPE_DIRECTORY) or usual
                yield UnmanagedDaemon(pid, pipe, is_in_pod(self._read(pid, "cgroup")))

    @staticmethod
    def _is_control(words: list[str]) -> bool:
        # A script has its interpreter in front.
        return any(word.rpartition("/")[2] == PROGRAM for word in words[:3])

    def _words(self, pid: int) -> list[str]:
        return [entry.decode(errors="replace") for entry in self._entries(pid, "cmdline")]

    def _signal(self, process: DaemonProcess, number: signal.Signals) -> bool:
        """False: it is gone."""
        try:
            handle = os.pidfd_open(process.pid)
        except OSError:
            return self.is_alive(process)
        try:
            if not self.is_alive(process):
                return False
            signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            return False
        except OSError as e:
            raise NodeError(
                f"process {process.pid} of an MPS daemon cannot be ended: {e.strerror}; "
                "run this as root of the host, with the right to signal (CAP_KILL)"
            ) from e
        finally:
            os.close(handle)
        return True

    def _pids(self) -> Iterator[int]:
        try:
            return (int(name) for name in os.listdir(self._proc) if name.isdigit())
        except OSError as e:
            raise MpsStateUnknown(f"the processes in {self._proc} cannot be looked at: {e}") from e

    def _stat(self, pid: int) -> list[str]:
        """Empty: the process has ended."""
        text = self._read(pid, "stat").decode(errors="replace")
        fields = text.rpartition(_AFTER_NAME)[2].split()
        return [] if len(fields) <= _STARTED or fields[_STATE] in _ENDED else fields

    def _entries(self, pid: int, file: str) -> list[bytes]:
        return nul_separated(self._read(pid, file), file)

    def _read(self, pid: int, file: str) -> bytes:
        """Empty: the process has ended, or is none of ours to look at."""
        try:
            return read_proc_file(self._proc, pid, file)
        except OSError as e:
            if e.errno in _LACKING:  # whether it is there cannot be said
                raise MpsStateUnknown(f"process {pid} cannot be looked at: {e}") from e
            return b""


def _look_twice(find: Callable[[], tuple[DaemonProcess, ...]]) -> tuple[DaemonProcess, ...]:
    """A process has no environment for the moment in which it becomes another program."""
    if processes := find():
        return processes
    time.sleep(_BETWEEN_LOOKS_SECONDS)
    return find()
