"""Background processes known by a record on disk, never by a name or a bare number."""

import os
import select
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hack.testbed.errors import ClusterError
from hack.testbed.waits import tail, wait_for

SPAWN_SECONDS = 10
KILL_SECONDS = 20

# The process writes down who it is before it becomes the program: whenever we are interrupted,
# what runs is on record. Its boot, number and start time together are never given out twice.
_RECORD_THEN_BECOME = 'cat /proc/sys/kernel/random/boot_id /proc/$$/stat > "$0" && exec "$@"'


@dataclass(frozen=True, slots=True)
class Process:
    """A program that outlives us: its record and its log."""

    name: str
    record: Path
    log: Path

    def pid(self) -> int | None:
        """The number of the running process, or None when it is not running."""
        try:
            boot, stat = self.record.read_text().split("\n", 1)
        except (FileNotFoundError, ValueError):
            return None
        if boot != boot_id() or not stat.strip():
            return None
        pid = int(stat.split(" ", 1)[0])
        return pid if _start_time(stat) == _running_since(pid) else None

    def spawn(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it in a session of its own; return when it is on record."""
        self.record.unlink(missing_ok=True)
        child = os.posix_spawn(
            "/bin/sh",
            ["sh", "-c", _RECORD_THEN_BECOME, str(self.record), *argv],
            dict(environment),
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                (
                    os.POSIX_SPAWN_OPEN,
                    1,
                    str(self.log),
                    os.O_WRONLY | os.O_CREAT | os.O_APPEND,
                    0o644,
                ),
                (os.POSIX_SPAWN_DUP2, 1, 2),
                *((os.POSIX_SPAWN_CLOSE, fd) for fd in _inheritable()),
            ],
            setsid=True,
        )
        wait_for(
            f"{self.name} to start",
            lambda: self.pid() == child or _exited(child),
            timeout_seconds=SPAWN_SECONDS,
            log=self.log,
        )

    def check_alive(self) -> None:
        """An error with the end of the log when it is not running."""
        if self.pid() is None:
            raise ClusterError(f"{self.name} has stopped; the end of {self.log}:\n{tail(self.log)}")

    def stop(self, how: signal.Signals = signal.SIGTERM, *, grace_seconds: float = 10) -> None:
        """End it; with SIGKILL when it does not go by itself. Not running is success."""
        pid = self.pid()
        if pid is None:
            self.record.unlink(missing_ok=True)
            return
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            # The handle keeps meaning this process; so look once more whether it is ours.
            if self.pid() == pid:
                _end(self.name, handle, how, grace_seconds)
        finally:
            os.close(handle)
        _exited(pid)
        self.record.unlink(missing_ok=True)


def _inheritable() -> list[int]:
    """What a program would have open that we start, beside standard input and output: a lock that
    flock(1) holds around us, say, which would be held for as long as the program lives."""
    descriptors = []
    for fd in (int(name) for name in os.listdir("/proc/self/fd")):
        with suppress(OSError):  # that of the directory itself, which is closed
            if fd > 2 and os.get_inheritable(fd):
                descriptors.append(fd)
    return descriptors


def _end(name: str, handle: int, how: signal.Signals, grace_seconds: float) -> None:
    signal.pidfd_send_signal(handle, how)
    if _gone(handle, grace_seconds):
        return
    signal.pidfd_send_signal(handle, signal.SIGKILL)
    if not _gone(handle, KILL_SECONDS):
        raise ClusterError(f"{name} is still there {KILL_SECONDS} s after SIGKILL")


def _gone(handle: int, seconds: float) -> bool:
    waiting = select.poll()
    waiting.register(handle, select.POLLIN)
    return bool(waiting.poll(seconds * 1000))


def _exited(pid: int) -> bool:
    """Whether it is no longer running. Takes note of its end, if it is a child of ours."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return _running_since(pid) is None


def boot_id() -> str:
    """Changes with every start of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _running_since(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    dead = stat.rsplit(")", 1)[1].split()[0] in "ZX"
    return None if dead else _start_time(stat)


def _start_time(stat: str) -> int:
    # Field 22 of proc(5), counted from behind the command, which may contain blanks.
    return int(stat.rsplit(")", 1)[1].split()[19])
