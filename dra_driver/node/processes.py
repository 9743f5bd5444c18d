"""The processes of containers, told apart from all others, and signals to exactly one of them.

A number of a process is used again when it ended. So a process is known by its number, when it
started and which container it is in, and a signal goes through a handle of the kernel's (a pidfd):
the handle is taken, then the process behind it is looked at again, then it is signalled.
"""

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dra_driver.errors import NodeError
from dra_driver.model.processes import Process
from dra_driver.node.cgroups import place_of
from dra_driver.node.proc_files import read_of

_AFTER_NAME: Final = ") "  # the name of a program can hold anything, also this
# proc(5) counts from 1, and two fields are before the name's end.
_STATE: Final = 3 - 3
_THREADS: Final = 20 - 3
_START_TIME: Final = 22 - 3
_ENDED: Final = ("Z", "X")
_INIT_OF_A_POD: Final = "pause"  # of a pod whose containers see each other's processes


class Processes:
    """The processes that this process sees. *proc*: where it sees them, /proc."""

    def __init__(self, proc: Path = Path("/proc"), own_pid: Callable[[], int] = os.getpid) -> None:
        self._proc = str(proc)
        self._own_pid = own_pid
        self._ticks_per_second = os.sysconf("SC_CLK_TCK")

    def now(self) -> int:
        """Clock ticks since boot: what starts from here on has no smaller start time."""
        return int(time.clock_gettime(time.CLOCK_BOOTTIME) * self._ticks_per_second)

    def find(self, pid: int) -> Process | None:
        """The process with that number, if it is in a container of a pod and not this process.

        NodeError: it cannot be told now.
        """
        if pid <= 1 or pid == self._own_pid():
            return None
        stat, cgroup = self._read(pid, "stat"), self._read(pid, "cgroup")
        place = place_of(cgroup) if stat and cgroup else None
        if place is None:
            return None
        started = int(stat.rpartition(_AFTER_NAME)[2].split()[_START_TIME])
        return Process(pid, started, place.pod, place.container)

    def lives(self, pid: int) -> bool:
        """Whether that process has not ended. A zombie has, unless some thread of it goes on.

        NodeError: it cannot be told now.
        """
        if not (stat := self._read(pid, "stat")):
            return False
        fields = stat.rpartition(_AFTER_NAME)[2].split()
        return fields[_STATE] not in _ENDED or int(fields[_THREADS]) > 1

    def signal(self, process: Process, number: signal.Signals) -> bool:
        """Send a signal to *process*. False: it is gone, or no more in its container.

        NodeError: it could not be signalled. A kernel that gives no handle is no reason to signal
        by number.
        """
        try:
            handle = os.pidfd_open(process.pid)
        except OSError as error:
            return _gone(error, process)
        try:
            if self.find(process.pid) != process:
                return False
            signal.pidfd_send_signal(handle, number)
        except OSError as error:
            return _gone(error, process)
        finally:
            os.close(handle)
        return True

    def sees_pods(self) -> bool:
        """Whether processes of other pods can be seen from here at all."""
        return self._own_pid() != 1 and self._read(1, "comm").strip() != _INIT_OF_A_POD

    def _read(self, pid: int, file: str) -> str:
        """Empty: the process is gone. NodeError: it may be there, and cannot be looked at now."""
        try:
            return read_of(self._proc, pid, file).decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            return ""
        except OSError as error:
            raise NodeError(
                f"process {pid} cannot be looked at now ({file}): {error.strerror}; it is tried "
                "again"
            ) from error


def _gone(error: OSError, process: Process) -> bool:
    """False for a process that ended; every other error is raised."""
    if error.errno == errno.ESRCH:
        return False
    mends = {
        errno.EPERM: "run this as root of the host, with the right to signal (CAP_KILL)",
        errno.ENOSYS: "handles of processes need Linux 5.3",
    }
    mend = mends.get(error.errno or 0)
    raise NodeError(
        f"process {process.pid} cannot be signalled: {error.strerror}"
        + (f"; {mend}" if mend else "")
    ) from error
