"""Files that are written whole, locked within a time, and watched for a disk that hangs."""

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from dra_driver.base.deadlines import Deadline
from dra_driver.base.errors import NodeError, TimedOut


def removed_directory(directories: Iterable[Path]) -> str | None:
    """Which of *directories* was removed on the host; None: none. One that is missing is not made
    yet.

    A container goes on seeing a directory that was removed on the host and made anew: nobody reads
    what it writes there.
    """
    for directory in directories:
        try:
            links = os.stat(directory).st_nlink
        except FileNotFoundError:
            continue
        except OSError as e:
            return f"{directory} cannot be looked at: {e.strerror}"
        if links == 0:
            return (
                f"{directory} was removed on the host, and this process sees the removed one: it "
                "has to be started again"
            )
    return None


FileSignature = tuple[int, int, int, int, int]
"""Device, inode, bytes, and when content and status changed (ns)."""


def signature_of(status: os.stat_result) -> FileSignature:
    """Another one once the file was written to or replaced."""
    return (
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )


HANGING_AFTER_SECONDS: Final = 60.0

_running_calls: Final[dict[object, tuple[float, str]]] = {}  # of all threads


# On the way of every claim: a generator as context manager takes three times as many instructions.
class disk_call:  # noqa: N801 - called like a function
    """Around what waits for the disk and for nothing else that takes long.

    Nothing can end a call that hangs, and it keeps whatever its thread holds: the process has to be
    started again.
    """

    __slots__ = ("_doing",)

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None:
        _running_calls[self] = (time.monotonic(), self._doing)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        del _running_calls[self]


def hanging_disk_calls(seconds: float = HANGING_AFTER_SECONDS) -> str | None:
    """Which calls have waited for the disk for longer than *seconds*; None: none."""
    now = time.monotonic()
    running = [(now - since, doing) for since, doing in list(_running_calls.values())]
    hanging = [f"{doing} ({passed:.0f} s)" for passed, doing in running if passed > seconds]
    return f"the disk does not answer: {', '.join(hanging)}" if hanging else None


class NotAFile(OSError):
    """Something else stands where a file should be."""


_READ_BYTES: Final = 1 << 16


def read_file(path: str | os.PathLike[str]) -> bytes:
    """The content of the file at *path*. OSError: NotAFile for a directory, a socket, a device or a
    FIFO, which could keep its reader waiting for ever.

    Like ``write_all``, it makes no more system calls than it has to: on the way of a claim each
    lets another thread in.
    """
    try:
        with closing_file(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)) as file:
            status = os.fstat(file)
            if stat.S_ISREG(status.st_mode):
                return _read_to_end(file, status.st_size)
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.ENXIO):  # a directory, a socket
            raise
    raise NotAFile(errno.EINVAL, "it is no file; remove what stands in its place", str(path))


def _read_to_end(file: int, size: int) -> bytes:
    """*size*: what the kernel says; of its own files it says 0."""
    content = chunk = os.read(file, max(size, _READ_BYTES))
    while chunk and len(content) != size:
        content += (chunk := os.read(file, _READ_BYTES))
    return content


def write_all(file: int, content: bytes) -> None:
    """Write all of *content* to an open file. OSError."""
    remaining = memoryview(content)
    while remaining:
        remaining = remaining[os.write(file, remaining) :]


def write_atomically(
    path: Path,
    content: bytes,
    *,
    mode: int | None = None,
    durable: bool = False,
    temporary: Path | None = None,
) -> None:
    """Write *content* to *path*: a reader sees the file as it was before, or all of it. OSError.

    *mode*: None leaves it to the umask. *durable*: also after a power cut. *temporary*: where it is
    written first; by default the hidden file ``.<name>.tmp`` beside it, which one writer at a time
    may use. If the process is killed meanwhile, that file stays until the next write.

    Every writer of such files uses this one, except ``cdi.store``: that package stands below this
    one, and another driver can use it as it is.
    """
    hidden = str(temporary) if temporary else _hidden(path)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        with closing_file(os.open(hidden, flags, 0o666)) as file:
            write_all(file, content)
            if mode is not None:
                os.fchmod(file, mode)
            if durable:
                os.fsync(file)
        os.replace(hidden, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(hidden)
        raise
    if durable:
        _sync_directory(path.parent)


def _hidden(path: Path) -> str:
    directory, slash, name = str(path).rpartition("/")
    return f"{directory}{slash}.{name}.tmp"


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


POLL_SECONDS = 0.01


def open_lock_file(path: Path) -> int:
    """Open *path* for locking and writing, made if missing; children do not inherit it."""
    return os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o640)


def try_flock(file: int, kind: int) -> bool:
    """Lock *file* (LOCK_EX or LOCK_SH) unless that means waiting; whether it is locked now.

    flock(2): the kernel frees a lock when its process dies, however it died.
    """
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EWOULDBLOCK:
            return False
        raise
    return True


def try_lock(path: Path) -> int | None:
    """The open file, locked; None: another has it, or the file was removed or replaced while we
    opened it."""
    file = open_lock_file(path)
    try:
        is_ours = try_flock(file, fcntl.LOCK_EX) and bool(os.fstat(file).st_nlink)
    except BaseException:
        os.close(file)
        raise
    if is_ours:
        return file
    os.close(file)
    return None


def lock_within(path: Path, seconds: float, until: str) -> int:
    """The open file, locked. TimedOut: it was not free in time; *until*: what it waited for."""
    deadline = Deadline(seconds)
    while (file := try_lock(path)) is None:
        if deadline.expired:
            raise TimedOut(f"waited {seconds:g} s until {until}: {path} is locked")
        time.sleep(POLL_SECONDS)
    return file


class closing_file:  # noqa: N801 - as disk_call
    """Close the file in the end, which frees its lock."""

    __slots__ = ("_file",)

    def __init__(self, file: int) -> None:
        self._file = file

    def __enter__(self) -> int:
        return self._file

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        os.close(self._file)


class disk_errors(disk_call):  # noqa: N801 - as above
    """A disk call whose OSError becomes a NodeError that says what the process was *doing*, and
    what to do about it: *remedies* by errno, that of None for every other."""

    __slots__ = ("_remedies",)

    def __init__(self, doing: str, remedies: Mapping[int | None, str] | None = None) -> None:
        super().__init__(doing)
        self._remedies = remedies or {}

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        super().__exit__(kind, error, trace)
        if isinstance(error, OSError):
            remedy = self._remedies.get(error.errno, self._remedies.get(None))
            problem = f"cannot {self._doing}: {error}"
            raise NodeError(f"{problem}; {remedy}" if remedy else problem) from error
