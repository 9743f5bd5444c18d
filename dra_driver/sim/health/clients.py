"""Who has simulated GPUs open: a GPU is not reset meanwhile.

Each GPU has a file on the simulated host, on which every process that has NVML open holds a shared
lock for as long as it has.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dra_driver.sim.host.tools import SETTINGS_DIRECTORY

_SUFFIX: Final = ".open"


@dataclass(slots=True)
class OpenGpus:
    """The GPUs that one session of NVML has open on the host in *host*; None: nobody shares it."""

    host: Path | None = None
    _files: list[int] = field(default_factory=list)

    def open(self, uuids: Iterable[str]) -> None:
        """Until they are closed. It waits while one is reset."""
        if self.host is None:
            return
        for uuid in uuids:
            with contextlib.suppress(PermissionError):  # who may not write resets nothing either
                file = _open(self.host, uuid)
                self._files.append(file)
                fcntl.flock(file, fcntl.LOCK_SH)

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop())


@contextlib.contextmanager
def alone_on(host: Path, uuid: str) -> Iterator[bool]:
    """Whether nobody has the GPU open; as long as this lasts, nobody can open it then."""
    file = _open(host, uuid)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(file)


def _open(host: Path, uuid: str) -> int:
    file = host / SETTINGS_DIRECTORY / f"{uuid}{_SUFFIX}"
    file.parent.mkdir(parents=True, exist_ok=True)
    return os.open(file, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
