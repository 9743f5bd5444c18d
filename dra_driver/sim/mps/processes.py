"""The simulated server processes, which have the names of the real ones, and users of processes."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from dra_driver.base.frozen import frozen
from dra_driver.node.cgroups.procfs import read_proc_file
from dra_driver.sim.mig.identifiers import MIG_PREFIX, parse_mig_uuid


@frozen
class ProcessUser:
    """As whom it opens files and connects; numbers of this host."""

    uid: int
    gid: int
    groups: tuple[int, ...]


def user_of(pid: int) -> ProcessUser:
    """FileNotFoundError, ProcessLookupError: there is no such process."""
    lines = read_proc_file("/proc", pid, "status").decode(errors="replace").splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    effective = 1  # of the real, effective, saved and the file system's number
    uid, gid = (int(fields[name].split()[effective]) for name in ("Uid", "Gid"))
    return ProcessUser(uid, gid, tuple(map(int, fields["Groups"].split())))


_PACKAGES: Final = str(Path(__file__).parents[3])
_SERVER: Final = """
import os, signal, sys
open("/proc/self/comm", "w").write("nvidia-cuda-mps-server")
if sys.argv[1] == "works":
    os.write(1, b"+")
    while True:
        signal.pause()
"""


def interpreter_environment(of: Mapping[str, str]) -> dict[str, str]:
    """With what this interpreter needs when it is called by another name than its own."""
    return {**of, "PYTHONPATH": _PACKAGES, "PYTHONHOME": sys.base_prefix}


def interpreter_file() -> str:
    """Python as a file: called by another name it does not find itself."""
    return os.readlink("/proc/self/exe")


def interpreter_arguments(name: str, *arguments: str) -> list[str]:
    """The arguments of the interpreter for a process that is to be called *name*."""
    return [name, "-S", "-s", "-B", *arguments]


class ServerProcesses:
    """The server processes of the simulated host in *root*."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)

    def start(self, works: bool, gpus: Sequence[str]) -> tuple[int, int]:
        """A process: its number, and what can be read from it: a byte once it is ready, then
        nothing until it ends."""
        reading, writing = os.pipe()
        nothing = os.open(os.devnull, os.O_RDWR)
        verb = "works" if works else "fails"
        pid = os.posix_spawn(
            interpreter_file(),
            interpreter_arguments("nvidia-cuda-mps-server", "-c", _SERVER, verb, self._root, *gpus),
            interpreter_environment(os.environ),
            file_actions=[
                (os.POSIX_SPAWN_DUP2, nothing, 0),
                (os.POSIX_SPAWN_DUP2, writing, 1),
                (os.POSIX_SPAWN_DUP2, nothing, 2),
            ],
        )
        os.close(writing)
        os.close(nothing)
        return pid, reading

    def end(self, pid: int) -> None:
        """Have it end, and wait until it has."""
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGTERM)
            os.waitpid(pid, 0)

    def are_on(self, gpu: str) -> bool:
        """Whether there are any on *gpu*, of whatever daemon."""
        return any(gpu in gpus for gpus in self._gpus())

    def are_on_board(self, gpu: str) -> bool:
        """Whether there are any on *gpu* or an instance of it."""
        names = (name for gpus in self._gpus() for name in gpus)
        return any(name == gpu or _is_instance_of(name, gpu) for name in names)

    def _gpus(self) -> Iterator[Sequence[str]]:
        """Of each process."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):
                    words = (
                        read_proc_file("/proc", entry.name, "cmdline")
                        .decode(errors="replace")
                        .split("\0")
                    )
                    if words[0] == "nvidia-cuda-mps-server" and self._root in words:
                        yield words[words.index(self._root) + 1 :]


def _is_instance_of(name: str, gpu: str) -> bool:
    instance = parse_mig_uuid(name) if name.startswith(MIG_PREFIX) else None
    return instance is not None and instance.is_of(gpu)
