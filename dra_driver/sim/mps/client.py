"""Has processes use a simulated MPS as CUDA programs would: ``python -m`` this, as root.

``--help`` lists the calls. ``CudaProgram`` is such a process: what it sees, and how it gets to the
daemon by itself.
"""

import argparse
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from dra_driver.base.deadlines import Deadline
from dra_driver.base.frozen import frozen
from dra_driver.node.cgroups.procfs import nul_separated, read_proc_file
from dra_driver.sim.mps.processes import ProcessUser, user_of

_USUAL: Final = "/tmp/nvidia-mps"
_STARTS_SECONDS: Final = 0.2
_ROOT: Final = 0
_NOT_ENTERED: Final = b"?"
_NOT_CONNECTED: Final = b"!"
_SAID_BYTES: Final = 4096

_DESCRIPTION: Final = """\
Has processes use a simulated MPS as CUDA programs would. Run it as root.

    attach PID [--memory 5Gi] [--priority 0|1]     it becomes a client, as its environment says
    show PID [-o json]                             what holds for it: server, namespace, limits
    detach PID                                     it is a client no longer
    wedge PID                                      to terminate it takes for ever
    wedge-server PID                               the daemon answers nobody any more
    kill-server PID                                the server ends, and is started again
    raise PID [--percent 100]                      it asks for more compute, as tenants may who are
                                                   root: of its namespace, or of protocol 2's server

What the process would see is looked at: its environment, its root with /dev/shm and the device
nodes. Where its pipe directory is, is connected to as it would be: through its mounts, from its
root, as its user and in its groups, so that modes, read-only mounts and paths that are too long
count. --pipe-directory DIR says where instead, as the process sees it; for wedge-server and
kill-server without a process that is enough. Exit status: 1 it is refused, 3 it runs without
MPS, without limits and without a word of that, as CUDA has it; 4 the daemon does not answer.
"""


class DaemonUnreachable(Exception):
    """The program gets to no daemon where it looks."""


@frozen
class CudaProgram:
    """A process, as CUDA in it would see the world."""

    pid: int
    user: ProcessUser
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

        DaemonUnreachable; OSError: it cannot be entered; TimeoutError.
        """
        ours, theirs = socket.socketpair()
        with ours, theirs:
            child = os.fork()
            if child == 0:
                try:
                    _report(theirs, self, pipe)
                finally:
                    os._exit(0)
            try:
                ours.settimeout(seconds)
                theirs.close()
                cloexec = socket.MSG_CMSG_CLOEXEC
                message, handles, *_ = socket.recv_fds(ours, _SAID_BYTES, 1, cloexec)
            finally:
                os.kill(child, signal.SIGKILL)  # it has said everything, or never will
                os.waitpid(child, 0)
        if handles:
            return socket.socket(fileno=handles[0])
        why = message[1:].decode(errors="replace")
        if message[:1] == _NOT_CONNECTED:
            raise DaemonUnreachable(f"{pipe}/control: {why}")
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


def connect_as_program(pipe: str) -> socket.socket:
    """To the daemon in *pipe*, as this process. OSError."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(f"{pipe}/control")
    except BaseException:
        connection.close()
        raise
    return connection


def _report(asker: socket.socket, program: CudaProgram, pipe: str) -> None:
    """Connect, and hand the connection over, or say why not."""
    step = _NOT_ENTERED
    try:
        if os.geteuid() == _ROOT:
            program.enter()
        step = _NOT_CONNECTED
        with connect_as_program(pipe) as connection:
            socket.send_fds(asker, [b"+"], [connection.fileno()])
    except OSError as error:
        asker.send(step + (error.strerror or str(error)).encode())


def read_program(pid: int) -> CudaProgram:
    """The process *pid*. OSError: there is none."""
    entries = [entry.decode(errors="replace") for entry in nul_separated(_environ(pid), "environ")]
    environ = dict(entry.split("=", 1) for entry in entries if "=" in entry)
    # As CUDA's own variables: whatever else is in there is nobody's business.
    own = {name: value for name, value in environ.items() if name.startswith("CUDA_")}
    words = read_proc_file("/proc", pid, "cmdline").decode(errors="replace").split("\0")
    # Assumed the worst: a list of clients has the lines that a program's name has.
    command = "".join(letter for letter in words[0] if letter.isprintable() or letter == "\n")
    return CudaProgram(pid, user_of(pid), command or "?", Path(f"/proc/{pid}/root"), own)


def _environ(pid: int) -> bytes:
    """For a moment after a program was started the kernel shows none."""
    deadline = Deadline(_STARTS_SECONDS)
    while not (environ := read_proc_file("/proc", pid, "environ")) and not deadline.expired:
        time.sleep(0.002)
    return environ


REFUSED: Final = 1
WITHOUT_MPS: Final = 3
NO_ANSWER: Final = 4
_SECONDS: Final = 8.0
_UNITS: Final = {"": 0, "Ki": 10, "Mi": 20, "Gi": 30, "K": 10, "M": 20, "G": 30}
_CALLS: Final = ("attach", "show", "detach", "wedge", "wedge-server", "kill-server", "raise")


def ask_daemon(connection: socket.socket, question: Mapping[str, Any]) -> dict[str, Any]:
    """What the daemon at the other end of *connection* answers. TimeoutError."""
    with connection:
        connection.settimeout(_SECONDS)
        try:
            connection.sendall(json.dumps(question).encode() + b"\n")
            line = connection.makefile().readline()
        except ConnectionError:
            line = ""  # as one that hangs up: there is no answer
    if not line:
        raise TimeoutError
    return dict(json.loads(line))


def connect_to_daemon(options: argparse.Namespace, program: CudaProgram | None) -> socket.socket:
    """To the daemon that is meant. DaemonUnreachable, OSError, TimeoutError."""
    if program is not None:
        return program.connect(options.pipe_directory or program.pipe, _SECONDS)
    try:
        return connect_as_program(options.pipe_directory)
    except OSError as error:
        raise DaemonUnreachable(
            f"{options.pipe_directory}/control: {error.strerror or error}"
        ) from error


def question(options: argparse.Namespace, program: CudaProgram | None) -> dict[str, Any]:
    """What is asked, and for whom."""
    if program is None:
        return {"call": options.call, "pid": 0, "shm": None}
    environ = dict(program.environ)
    if options.priority is not None:
        environ["CUDA_MPS_CLIENT_PRIORITY"] = options.priority
    return {
        "call": options.call,
        "pid": program.pid,
        "command": program.command,
        "environ": environ,
        "minors": program.minors(),
        "capabilities": program.capabilities(),
        "shm": program.shared_memory(),
        "memory": options.memory,
        "percent": options.percent,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The program."""
    options = _options(arguments)
    try:
        program = None if options.pid is None else read_program(options.pid)
        answer = ask_daemon(connect_to_daemon(options, program), question(options, program))
    except DaemonUnreachable as error:
        return _print_answer(f"no MPS: {error}", WITHOUT_MPS)
    except TimeoutError:
        return _print_answer("the daemon does not answer", NO_ANSWER)
    except OSError as error:
        return _print_answer(f"process {options.pid}: {error.strerror or error}", REFUSED)
    if "refused" in answer:
        return _print_answer(answer["refused"], REFUSED)
    if options.output == "json":
        sys.stdout.write(json.dumps(answer["done"], indent=2) + "\n")
    elif options.call in ("show", "attach"):
        for key, value in answer["done"].items():
            sys.stdout.write(f"{key}: {value}\n")
    return 0


def _print_answer(text: str, code: int) -> int:
    sys.stderr.write(f"{text}\n")
    return code


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m dra_driver.sim.mps.client",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("call", choices=_CALLS)
    parser.add_argument("pid", type=int, nargs="?")
    parser.add_argument("--pipe-directory", default="")
    parser.add_argument("--memory", type=_size, default=0)
    parser.add_argument("--percent", default="100")
    parser.add_argument("--priority", choices=("0", "1"))
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    options = parser.parse_args(arguments)
    if options.pid is None and not (options.pipe_directory and options.call.endswith("-server")):
        parser.error("name a process")
    return options


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]i?|)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; one is 5Gi")
    return int(match[1]) << _UNITS[match[2]]


if __name__ == "__main__":
    raise SystemExit(main())
