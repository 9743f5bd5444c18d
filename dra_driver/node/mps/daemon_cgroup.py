"""The daemon cgroup: MPS daemons run in it, outside the container that started them.

A container runtime ends every process in the cgroup of a container that ends. The daemons of a
node must outlive the agent's container, or each update of the agent would end all MPS clients.
"""

import logging
import os
import threading
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from dra_driver.node.cgroups.procfs import read_proc_file
from dra_driver.node.cgroups.tree import container_of_process

log = logging.getLogger(__name__)

CGROUP_NAME: Final = "dra-driver-gpu-mps"
# A new cgroup of this controller of cgroup v1 takes no process until it has these.
_NEEDED: Final = ("cpuset.cpus", "cpuset.mems")
_ABOVE: Final = "/.."  # outside of the reader's cgroup namespace


class DaemonCgroup:
    """Moves processes out of this process's container.

    *cgroups*: the host's cgroup file system, as this process sees it. On a plain host, nothing is
    moved.
    """

    def __init__(self, cgroups: Path, proc: Path = Path("/proc")) -> None:
        self._cgroups = cgroups
        self._proc = proc
        self._changing = threading.Lock()
        self._warned = False

    @property
    def in_container(self) -> bool:
        """Whether this process is in the container of a pod."""
        return container_of_process(self._cgroup_of("self")) is not None or self._has_namespace()

    def take_in(self, pids: Collection[int]) -> bool:
        """Move *pids* out of the container, if this process is in one.

        False: they will end with it, of which the first time is warned.
        """
        if not self.in_container:
            return True
        problems: list[str] = []
        with self._changing:
            for hierarchy in self._hierarchies():
                try:
                    _move(hierarchy, pids)
                except OSError as e:
                    problems.append(f"{e.filename or hierarchy}: {e.strerror}")
        outside = all(self._is_outside(pid) for pid in pids)
        self._log_change(outside, problems)
        return outside

    def close(self) -> None:
        """Remove the cgroup, unless a process is in it."""
        if not self.in_container:
            return
        with self._changing:
            for hierarchy in self._hierarchies():
                with suppress(OSError):  # it is not empty, or was never made
                    (hierarchy / CGROUP_NAME).rmdir()

    def _log_change(self, outside: bool, problems: list[str]) -> None:
        if not outside and not self._warned:
            log.warning(
                "MPS daemons end with this container, and all their clients with them: they cannot "
                "be moved out of its cgroup; it takes a privileged container that has the host's "
                "/sys/fs/cgroup",
                extra={"cgroups": str(self._cgroups), "problems": problems},
            )
        elif outside and self._warned:
            log.info("MPS daemons can be moved out of this container again")
        self._warned = not outside

    def _is_outside(self, pid: int) -> bool:
        text = self._cgroup_of(str(pid))
        if self._has_namespace():
            return all(path.startswith(_ABOVE) for path in _paths(text))
        return container_of_process(text) is None

    def _has_namespace(self) -> bool:
        """Whether it sees its own cgroup as the root: the host's first process is outside."""
        return any(path.startswith(_ABOVE) for path in _paths(self._cgroup_of("1")))

    def _hierarchies(self) -> Iterator[Path]:
        """The roots: one with cgroup v2, one for each set of controllers with v1."""
        if (self._cgroups / "cgroup.procs").exists():
            yield self._cgroups
            return
        for entry in sorted(self._cgroups.glob("*")):
            if not entry.is_symlink() and (entry / "cgroup.procs").exists():
                yield entry

    def _cgroup_of(self, process: str) -> str:
        try:
            return read_proc_file(self._proc, process, "cgroup").decode(errors="replace")
        except OSError:
            return ""  # it is gone


def _paths(text: str) -> list[str]:
    return [line.split(":", 2)[2] for line in text.split("\n") if line.count(":") > 1]


def _move(hierarchy: Path, pids: Collection[int]) -> None:
    cgroup = hierarchy / CGROUP_NAME
    cgroup.mkdir(exist_ok=True)
    for file in _NEEDED:
        if (cgroup / file).exists() and not (cgroup / file).read_text().strip():
            if (hierarchy / "cgroup.controllers").exists():  # cgroup v2 takes the parent's
                continue
            (cgroup / file).write_text((hierarchy / file).read_text())
    for pid in pids:
        try:
            # Appending: a file of this kind is written, never created or truncated.
            with open(cgroup / "cgroup.procs", "a") as procs:
                procs.write(str(pid))
        except ProcessLookupError:
            log.debug("a process has ended", extra={"pid": pid, "cgroup": os.fspath(cgroup)})
