"""A program that would use CUDA: what it sees, and how it gets to the daemon by itself."""

import os
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dra_driver.node.proc_files import entries, read_of
from dra_driver.node.sim.mps.users import User, user_of

_USUAL: Final = "/tmp/nvidia-mps"
_STARTS_SECONDS: Final = 0.2
_ROOT: Final = 0
_NOT_ENTERED: Final = b"?"
_NOT_CONNECTED: Final = b"!"
_SAID_BYTES: Final = 4096


class NoMps(Exception):
    """The program gets to no daemon where it looks."""


@dataclass(frozen=True, slots=True)
class Program:
    """A process, as CUDA in it would see the world."""

    pid: int
    user: User
    command: str
    root: Path
    environ: Mapping[str, str]

    @property
    def pipe(self) -> str:
        """Its pipe directory: a path of its own root."""
        return os.path.join("/", self.environ.get("CUDA_MPS_PIPE_DIRECTORY") or _USUAL)

    def minors(self) -> list[int] | None:
        """The GPUs whose device nodes it has; None: it has none at all, and is no container."""
        names = [path.name for path in (self.root / "dev").glob("nvidia[0-9]*")]
        numbers = sorted(int(name[6:]) for name in names if name[6:].isdecimal())
        return numbers or None

    def capabilities(self) -> list[int]:
        """The instances of MIG whose device nodes it has, by minor number."""
        names = [path.name for path in (self.root / "dev/nvidia-caps").glob("nvidia-cap[0-9]*")]
        return sorted(int(name[10:]) for name in names if name[10:].isdecimal())

    def shared_memory(self) -> list[str]:
        return sorted(path.name for path in (self.root / "dev/shm").glob("cuda.shm.*"))

    def connect(self, pipe: str, seconds: float) -> socket.socket:
        """To the daemon in *pipe*, through its mounts and as its user: of another process with
        those, which the daemon sees as the one that connected.

        NoMps; OSError: it cannot be entered; TimeoutError.
        """
        ours, theirs = socket.socketpair()
        with ours, theirs:
            child = os.fork()
            if child == 0:
                try:
                    _tell(theirs, self, pipe)
                finally:
                    os._exit(0)
            try:
                ours.settimeout(seconds)
                theirs.close()
                cloexec = socket.MSG_CMSG_CLOEXEC
                said, handles, *_ = socket.recv_fds(ours, _SAID_BYTES, 1, cloexec)
            finally:
                os.kill(child, signal.SIGKILL)  # it has said everything, or never will
                os.waitpid(child, 0)
        if handles:
            return socket.socket(fileno=handles[0])
        why = said[1:].decode(errors="replace")
        if said[:1] == _NOT_CONNECTED:
            raise NoMps(f"{pipe}/control: {why}")
        raise OSError(f"it cannot be entered: {why}")

    def enter(self) -> None:
        """Have this process see what it sees, as its user. Nobody but root can.

        Its mounts come with its root: a path below that leads through them. Of its capabilities
        nothing is taken over: where its user is root, it may go everywhere.
        """
        os.chroot(f"/proc/{self.pid}/root")
        os.chdir("/")
        os.setgroups(self.user.groups)
        os.setresgid(self.user.gid, self.user.gid, self.user.gid)
        os.setresuid(self.user.uid, self.user.uid, self.user.uid)


def connected(pipe: str) -> socket.socket:
    """To the daemon in *pipe*, as this process. OSError."""
    made = socket.socket(socket.AF_UNIX)
    try:
        made.connect(f"{pipe}/control")
    except BaseException:
        made.close()
        raise
    return made


def _tell(asker: socket.socket, program: Program, pipe: str) -> None:
    """Connect, and hand the connection over, or say why not."""
    step = _NOT_ENTERED
    try:
        if os.geteuid() == _ROOT:
            program.enter()
        step = _NOT_CONNECTED
        with connected(pipe) as made:
            socket.send_fds(asker, [b"+"], [made.fileno()])
    except OSError as error:
        asker.send(step + (error.strerror or str(error)).encode())


def program(pid: int) -> Program:
    """The process *pid*. OSError: there is none."""
    found = [one.decode(errors="replace") for one in entries(_environ(pid), "environ")]
    environ = dict(entry.split("=", 1) for entry in found if "=" in entry)
    # As CUDA's own variables: whatever else is in there is nobody's business.
    own = {name: value for name, value in environ.items() if name.startswith("CUDA_")}
    words = read_of("/proc", pid, "cmdline").decode(errors="replace").split("\0")
    # Assumed the worst: a list of clients has the lines that a program's name has.
    command = "".join(letter for letter in words[0] if letter.isprintable() or letter == "\n")
    return Program(pid, user_of(pid), command or "?", Path(f"/proc/{pid}/root"), own)


def _environ(pid: int) -> bytes:
    """For a moment after a program was started the kernel shows none."""
    end = time.monotonic() + _STARTS_SECONDS
    while not (found := read_of("/proc", pid, "environ")) and time.monotonic() < end:
        time.sleep(0.002)
    return found
