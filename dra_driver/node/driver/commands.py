"""The one door to child processes: each ends in time, or is ended with everything it started."""

import logging
import os
import selectors
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from dra_driver.base.deadlines import Deadline
from dra_driver.base.errors import CommandFailed, NodeError, TimedOut
from dra_driver.base.files import closing_file, disk_errors, lock_within
from dra_driver.base.frozen import frozen

log = logging.getLogger(__name__)

_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MAX_ERROR_CHARS: Final = 2000  # characters of a program's last words that go into an error
_UMASK: Final = 0o022  # of what stays: others pass its directories, whatever this process wants
_MAX_OUTPUT_BYTES: Final = 1 << 20  # bytes of all that a program writes
_READ_CHUNK_BYTES: Final = 64 * 1024  # bytes that are read or written
_LOCK_SECONDS: Final = 5.0  # for another to end that has the lock: one of a plugin that was killed
_GRACE_SECONDS: Final = 0.5  # for the program to end, once it is killed
# Of chroot(1) and of what loads a program, before that begins; of the kernel, which lacks memory.
_NOT_STARTED_CODES: Final = (125, 126, 127, -signal.SIGKILL)


@frozen
class Command:
    """A program of the host with its arguments.

    With *root*, a directory as this process sees it, the program runs in there (chroot), and
    *program* and *library_path* (LD_LIBRARY_PATH) are paths inside it.
    """

    program: str
    args: tuple[str, ...] = ()
    root: str = "/"
    library_path: str = ""
    variables: tuple[tuple[str, str], ...] = ()  # of its environment, beside the usual ones
    stdin: str = ""  # what it reads from standard input
    # A file on which it has a lock while it lives, and all that it starts: a program that is stuck
    # in the kernel outlives being killed, and the process that started it. Empty: none.
    lock: str = ""

    @property
    def argv(self) -> tuple[str, ...]:
        """What is executed."""
        own = (self.program, *self.args)
        return own if self.root == "/" else ("chroot", self.root, *own)

    @property
    def env(self) -> dict[str, str]:
        """The whole environment: nothing of this process's own settings leaks into a child."""
        library_path = {"LD_LIBRARY_PATH": self.library_path} if self.library_path else {}
        return {"PATH": _PATH, "LC_ALL": "C", **library_path, **dict(self.variables)}

    def with_neighbours(self) -> "Command":
        """What it starts by name is looked for beside it first: a driver may have a directory that
        is on nobody's PATH."""
        path = f"{os.path.dirname(self.program)}:{self.env['PATH']}"
        return replace(self, variables=(*self.variables, ("PATH", path)))

    def __str__(self) -> str:
        return " ".join((self.program, *self.args))


RunCommand = Callable[[Command, float], str]
"""What runs a command with a timeout in seconds: :func:`run_command`, or what a test puts in its
place.
"""


def in_chroot(
    host_root: str, root: str, program: str, library_path: str, args: Sequence[str]
) -> Command:
    """A command inside *root*, a directory of the host, which this process sees below *host_root*.

    *program* and *library_path* are the host's paths.

    >>> in_chroot("/host", "/run/driver", "/run/driver/bin/x", "/run/driver/lib", ("-c", "0")).argv
    ('chroot', '/host/run/driver', '/bin/x', '-c', '0')
    >>> in_chroot("/", "/", "/usr/bin/x", "/usr/lib64", ()).argv
    ('/usr/bin/x',)
    """
    inside = root.rstrip("/")
    return Command(
        program=program.removeprefix(inside),
        args=tuple(args),
        root=(host_root.rstrip("/") + inside) or "/",
        library_path=library_path.removeprefix(inside),
    )


def run_command(command: Command, timeout_seconds: float) -> str:
    """Run it to its end and give what it wrote to standard output.

    CommandFailed: it failed; with its last words. Another NodeError: it could not be started,
    somebody killed it, or it wrote more than 1 MiB and was killed. TimedOut: it was still running
    after *timeout_seconds*, and was killed with its process group; or it was not started, since an
    earlier one with its lock does not end.
    """
    with _locked(command) as files:
        child = _start(
            command,
            pass_fds=files,
            stdin=subprocess.PIPE if command.stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    late = f"{command} was still running after {timeout_seconds:.3g} s and was killed"
    with _ended_on_error(child, lambda: late):
        out, err = _communicate(child, command, Deadline(timeout_seconds))
    if child.returncode != 0:
        raise _failed(command, child.returncode, err or out)
    return out


@contextmanager
def _locked(command: Command) -> Iterator[tuple[int, ...]]:
    """The file that the program is to hold, if any."""
    if not command.lock:
        yield ()
        return
    with disk_errors(f"lock {command.lock} for {command}"):
        before = (
            f"an earlier {os.path.basename(command.program)} has ended, which may hang in the "
            "driver (look for Xid and NVRM in the kernel log, drain and reboot the node)"
        )
        file = lock_within(Path(command.lock), _LOCK_SECONDS, before)
    with closing_file(file):
        yield (file,)


def _start(command: Command, **options: Any) -> subprocess.Popen[bytes]:
    try:
        # A session of its own: killing the group reaches what the program itself has started.
        return subprocess.Popen(command.argv, env=command.env, start_new_session=True, **options)
    except OSError as e:
        raise NodeError(f"cannot run {command} (in {command.root}): {e.strerror}") from e


@contextmanager
def _ended_on_error(child: subprocess.Popen[bytes], late: Callable[[], str]) -> Iterator[None]:
    """*child* is killed after any error. TimedOut, with what *late* says: it took too long."""
    try:
        yield
    except subprocess.TimeoutExpired as e:
        _end(child)
        raise TimedOut(late()) from e
    except BaseException:
        _end(child)
        raise


def _communicate(
    child: subprocess.Popen[bytes], command: Command, deadline: Deadline
) -> tuple[str, str]:
    """Give it its input, and what it wrote once it has ended. subprocess.TimeoutExpired: it had not
    by *deadline*. As ``communicate``, but that keeps whatever a program writes."""
    assert child.stdout and child.stderr
    output = {child.stdout: bytearray(), child.stderr: bytearray()}
    to_write = memoryview(command.stdin.encode())
    with selectors.DefaultSelector() as pipes:
        for pipe in output:
            pipes.register(pipe, selectors.EVENT_READ, pipe)
        if child.stdin:
            os.set_blocking(child.stdin.fileno(), False)
            pipes.register(child.stdin, selectors.EVENT_WRITE, child.stdin)
        while pipes.get_map():
            for key, _ in pipes.select(_seconds_left(deadline)):
                if key.data is child.stdin:
                    to_write = _written(key.fd, to_write)
                    is_open = len(to_write) > 0
                else:
                    is_open = _read_on(key.fd, output[key.data])
                if not is_open:
                    pipes.unregister(key.data)
                    key.data.close()
            if sum(map(len, output.values())) > _MAX_OUTPUT_BYTES:
                raise NodeError(
                    f"{command} wrote more than {_MAX_OUTPUT_BYTES >> 20} MiB and was killed"
                )
    child.wait(_seconds_left(deadline))
    out, err = (bytes(pipe_output).decode(errors="replace") for pipe_output in output.values())
    return out, err


def run_daemon(command: Command, output: Path, timeout_seconds: float) -> None:
    """Run what puts itself into the background, and come back when it has: when the program that
    was started ends, whatever it leaves running. All of them write into the file *output*.

    NodeError: it could not be started, or failed; with its last words. TimedOut: it did not go
    into the background in *timeout_seconds*, and was killed with its process group.
    """
    try:
        output.unlink(missing_ok=True)
        with open(output, "ab") as file:  # which somebody may truncate meanwhile
            # What stays would hold any other working directory.
            child = _start(
                command, cwd="/", stdin=subprocess.DEVNULL, stdout=file, stderr=file, umask=_UMASK
            )
    except OSError as e:
        raise NodeError(f"cannot run {command} (in {command.root}): {e.strerror}") from e
    late = (
        f"{command} had not gone into the background after {timeout_seconds:.3g} s and was killed"
    )
    with _ended_on_error(child, lambda: f"{late}: {_error_output(_read(output))}"):
        child.wait(timeout_seconds)
    if child.returncode != 0:
        raise _failed(command, child.returncode, _read(output))


def _seconds_left(deadline: Deadline) -> float:
    if (seconds := deadline.remaining) <= 0:
        raise subprocess.TimeoutExpired("", 0)
    return seconds


def _written(fd: int, data: memoryview) -> memoryview:
    """What is left of *data*: nothing, where nobody reads it."""
    try:
        return data[os.write(fd, data[:_READ_CHUNK_BYTES]) :]
    except BrokenPipeError:
        return data[:0]


def _read_on(fd: int, output: bytearray) -> bool:
    """False: that was the end."""
    data = os.read(fd, _READ_CHUNK_BYTES)
    output += data
    return bool(data)


def _read(path: Path) -> str:
    try:
        with open(path, "rb") as output:
            output.seek(max(0, output.seek(0, os.SEEK_END) - _READ_CHUNK_BYTES))
            return output.read(_READ_CHUNK_BYTES).decode(errors="replace")
    except OSError as e:
        return f"{path} cannot be read: {e.strerror}"


def _end(child: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        log.debug("process group is gone already", extra={"pid": child.pid})
    _close(child)
    try:
        child.wait(timeout=_GRACE_SECONDS)
    except subprocess.TimeoutExpired:  # it is stuck in the kernel, as a dying GPU makes it
        log.warning("a killed process does not end", extra={"pid": child.pid})


def _close(child: subprocess.Popen[bytes]) -> None:
    """Close its pipes once the killed processes have closed theirs, or after a moment: a descendant
    that left the group may keep them. What is still written is lost."""
    deadline = Deadline(_GRACE_SECONDS)
    for pipe in (child.stdin, child.stdout, child.stderr):
        if pipe is None or pipe.closed:
            continue
        with pipe, selectors.DefaultSelector() as selector:
            if pipe is not child.stdin:
                selector.register(pipe, selectors.EVENT_READ)
                while (seconds := deadline.remaining) > 0 and selector.select(seconds):
                    if not os.read(pipe.fileno(), _READ_CHUNK_BYTES):
                        break


def _failed(command: Command, code: int, output: str) -> NodeError:
    reason = _error_output(output)
    message = f"{command} {_how_it_ended(code)}: {reason}"
    return NodeError(message) if code in _NOT_STARTED_CODES else CommandFailed(message, reason)


def _how_it_ended(code: int) -> str:
    return f"failed with code {code}" if code > 0 else f"was ended by signal {-code}"


def _error_output(text: str) -> str:
    words = text.strip()
    return (
        "…" + words[-_MAX_ERROR_CHARS:] if len(words) > _MAX_ERROR_CHARS else words
    ) or "it said nothing"
