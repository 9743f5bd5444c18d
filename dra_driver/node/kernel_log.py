"""The kernel's log: of which process an Xid is.

NVML's events name no process; the driver's line in the kernel's log does:
"NVRM: Xid (PCI:0000:65:00): 31, pid=1234, name=python, ...", of a GPU instance
"NVRM: Xid (PCI:0000:65:00 GPU-I:02 GPU-CI:00): 31, ...".
"""

import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from dra_driver.base.frozen import frozen
from dra_driver.node.driver.pci import canonical_bus_id

log = logging.getLogger(__name__)

_XID = re.compile(
    rb"NVRM: Xid \(PCI:([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})"
    rb"(?: GPU-I:(\d+))?[^)]*\): (\d+)(.*)"
)
_PID = re.compile(rb"\bpid='?(\d+)")
_CHUNK: Final = 65536  # longer than any record of /dev/kmsg
_MOST_READS: Final = 10_000  # at once: what is written faster than it is read is left for later
_MATCH_SECONDS: Final = 2.0  # between the line and NVML's event
_MOST_LINES: Final = 1000  # that wait for their event


@frozen
class _LoggedXid:
    bus_id: str
    gi: int | None
    number: str
    pid: int
    read_at: float


class KernelLog:
    """What the kernel says from now on. For one thread.

    Best effort: where the log cannot be read, no process is known.
    """

    def __init__(self, file: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """*file*: /dev/kmsg, of which each read gives one record, or a file with such lines."""
        self._file = file
        self._clock = clock
        self._descriptor: int | None = None
        self._incomplete = b""  # the beginning of a line
        self._logged: deque[_LoggedXid] = deque(maxlen=_MOST_LINES)

    def open(self) -> None:
        """Begin at the end of the log."""
        try:
            self._descriptor = os.open(self._file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._descriptor, 0, os.SEEK_END)
        except OSError as error:
            log.info("processes of Xids are not known", extra={"error": str(error)})
            self.close()

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None
        self._logged.clear()

    def read(self) -> None:
        """Read what was written since the last time, and forget what nobody asked for in time.

        To be called every few seconds.
        """
        now = self._clock()
        while self._logged and now - self._logged[0].read_at > _MATCH_SECONDS:
            self._logged.popleft()
        for line in self._lines():
            if (match := _XID.search(line)) and (pid := _PID.search(match[4])):
                bus_id = canonical_bus_id(f"{match[1].decode()}.0")
                gi = None if match[2] is None else int(match[2])
                self._logged.append(_LoggedXid(bus_id, gi, match[3].decode(), int(pid[1]), now))

    def take(self, bus_id: str, gi: int | None, xid: str) -> int | None:
        """The process, by the host's number, of an Xid of the GPU at *bus_id* ("0000:65:00.0"), or
        of this GPU instance; each line of the log answers once. None: it is not known."""
        for logged in self._logged:
            if (logged.bus_id, logged.gi, logged.number) == (bus_id, gi, xid):
                self._logged.remove(logged)
                return logged.pid
        return None

    def _lines(self) -> Iterator[bytes]:
        """Whole lines, of those that Xids can be in."""
        for chunk in self._chunks():
            if not self._incomplete and b"Xid" not in chunk and chunk.endswith(b"\n"):
                continue
            *lines, self._incomplete = (self._incomplete + chunk).split(b"\n")
            yield from lines

    def _chunks(self) -> Iterator[bytes]:
        for _ in range(_MOST_READS):
            if self._descriptor is None:
                return
            try:
                chunk = os.read(self._descriptor, _CHUNK)
            except BlockingIOError:
                return
            except BrokenPipeError:
                continue  # records were overwritten before they were read; the next read goes on
            except OSError as error:
                log.warning("the kernel's log is read no more", extra={"error": str(error)})
                self.close()
                return
            if not chunk:
                return
            yield chunk
