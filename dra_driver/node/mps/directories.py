"""What a daemon has on disk: created before it starts, labelled once it runs, removed after it.

::

    <mps-dir>/<server>/            only the host's root writes here
        pipe/                      protocol 2: a small tmpfs, writable in containers
        pipe/gpu/<namespace>/      protocol 3: each read-only in the containers of one claim
        shm/                       protocol 2: a tmpfs, /dev/shm of the daemon and its clients
        log/                       ``control.log`` and ``<server>/server.log``
        config.toml                protocol 3

A daemon that is started again keeps the directories that containers have mounted, and nothing else.

SELinux: without a label that containers may use (``node.selinux``), no client reaches its server.

Logs are read for the error that says why a daemon does not start, and cut when they grow.
"""

import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import Final, Literal, TypeVar

from dra_driver.base.errors import NodeError
from dra_driver.model.mps import MpsNamespaceName
from dra_driver.node.mps import mounts, untrusted_trees
from dra_driver.node.mps.control import ControlProgram
from dra_driver.node.mps.daemon import SERVER, ControlDaemon
from dra_driver.node.mps.formats import DEFAULT_NAMESPACE
from dra_driver.node.selinux import SelinuxLabels

log = logging.getLogger(__name__)

T = TypeVar("T")


# What every client of a server has as /dev/shm. It takes the host's memory, and stays when a tenant
# is gone. MPS itself keeps files of 4 KiB there ("cuda.shm.<user>.<process>.<n>"), some per client.
# The rest is what programs put there: for each of the 60 clients that a server can have, 64 MiB, as
# a container has it without MPS, and 1,024 files, whose inodes take about 1 KiB each.
SHARED_MEMORY_BYTES: Final = 4 << 30
_SHARED_MEMORY_INODES: Final = 1 << 16


def shared_memory_options(size_bytes: int) -> str:
    """As mount(8) has them: for everybody to write, as ``/dev/shm``; never more than half of the
    machine's memory."""
    size = min(size_bytes, _half_of_memory())
    return f"size={size},mode=1777,nr_inodes={_SHARED_MEMORY_INODES}"


def mount_shared_memory(
    directory: str, in_container: bool, labels: SelinuxLabels, options: str
) -> None:
    """Mount a tmpfs at *directory*, unless something is mounted there.

    *options*: as mount(8) has them. NodeError: mounting is not permitted, or the mount is not seen
    outside this container.
    """
    at = os.path.realpath(directory)
    os.makedirs(at, mode=0o755, exist_ok=True)
    if not mounts.is_mounted(at):
        _mount_tmpfs(at, options, labels)
    if in_container and not mounts.is_shared(at):
        mounts.unmount(at)
        raise NodeError(
            f"what is mounted at {directory} stays inside this container: the directory for MPS "
            "must be mounted into it with mountPropagation: Bidirectional"
        )


def unmount_shared_memory(directory: str) -> None:
    """Unmount everything at and below *directory*, however often it was mounted."""
    for at in mounts.mounted_at_or_below(os.path.realpath(directory)):
        mounts.unmount(at)


def with_own_shared_memory(directory: str, root: str, act: Callable[[], T]) -> T:
    """Call *act*; what it starts in *root* has *directory* as ``/dev/shm``."""
    target = root.rstrip("/") + "/dev/shm"
    os.makedirs(target, mode=0o1777, exist_ok=True)
    return mounts.with_own_mounts({target: directory}, act)


def _mount_tmpfs(at: str, options: str, labels: SelinuxLabels) -> None:
    if label := labels.mount_option:
        try:
            return mounts.tmpfs(at, f"{options},{label}")
        except NodeError as e:
            labels.warn(at, str(e))
    mounts.tmpfs(at, options)


def _half_of_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


MAX_LOG_BYTES: Final = 4 << 20  # that a file may take
KEPT_LOG_BYTES: Final = 1 << 20  # of a file that takes more
_SHOWN_LINES: Final = 6  # of each file
_SHOWN_BYTES: Final = 4000  # of each file, in which these lines are looked for
_BLOCK: Final = 512  # bytes, in which the kernel counts what a file takes
_PLAIN: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a named pipe does not block


def last_log_lines(directory: str) -> str:
    """The last lines of each file in *directory* and below, behind a line feed; or nothing."""
    shown = []
    for path in _log_files(directory):
        try:
            with _open_log(path, "rb") as file:
                text = _log_end(file, _SHOWN_BYTES).decode(errors="replace")
        except OSError:
            continue  # no regular file, or removed
        lines = [line for line in text.splitlines() if line.strip()]
        shown += [f"\n{path.name}: {line}" for line in lines[-_SHOWN_LINES:]]
    return "".join(shown)


def trim_logs(directory: str) -> None:
    """Cut each file that takes too much to its last lines. A failure is logged.

    It stays the same file, since its writer has it open. What is written meanwhile can be lost. A
    writer that does not append goes on at its old position: the file seems as long as before, and
    begins with a hole, which takes no memory. So what it takes is what counts.
    """
    for path in _log_files(directory):
        try:
            with _open_log(path, "r+b") as file:
                status = os.fstat(file.fileno())
                if stat.S_ISREG(status.st_mode) and status.st_blocks * _BLOCK > MAX_LOG_BYTES:
                    _cut_log(file)
        except (FileNotFoundError, IsADirectoryError):
            continue
        except OSError as e:
            extra = {"file": str(path), "error": e.strerror}
            log.warning("the log of an MPS daemon cannot be cut", extra=extra)


def _cut_log(file: FileIO) -> None:
    end = _log_end(file, KEPT_LOG_BYTES).lstrip(b"\0")
    lines = end[end.find(b"\n") + 1 :]  # the first line is not whole
    file.seek(0)
    file.write(lines)
    file.truncate(len(lines))


def _log_end(file: FileIO, size: int) -> bytes:
    file.seek(max(0, file.seek(0, os.SEEK_END) - size))
    return file.read(size)


def _open_log(path: Path, mode: Literal["rb", "r+b"]) -> FileIO:
    return open(path, mode, buffering=0, opener=lambda name, flags: os.open(name, flags | _PLAIN))


def _log_files(directory: str) -> Iterator[Path]:
    for pattern in ("*", "*/*"):
        yield from sorted(Path(directory).glob(pattern))


# What tenants write there takes the host's memory, for files as well as for their inodes.
_PIPE_OPTIONS: Final = f"size={16 << 20},mode={untrusted_trees.PASSABLE:o},nr_inodes=4096"


class DaemonDirectories:
    """*in_container*: what is mounted has to be seen outside it."""

    def __init__(
        self,
        control: ControlProgram,
        labels: SelinuxLabels,
        in_container: bool,
        shared_memory_bytes: int,
    ) -> None:
        self._control = control
        self._labels = labels
        self._in_container = in_container
        self._shared_memory = shared_memory_options(shared_memory_bytes)

    def make(self, daemon: ControlDaemon, namespaces: Iterable[MpsNamespaceName]) -> None:
        """Prepare a start with these namespaces, whatever an earlier one left.

        NodeError: mounting is not permitted. OSError: something else cannot be done.
        """
        for directory in (daemon.directory, daemon.pipe, daemon.log):
            untrusted_trees.make_directory(directory)
        if daemon.protocol == 2:
            for directory, options in (
                (daemon.shm, self._shared_memory),
                (daemon.pipe, _PIPE_OPTIONS),
            ):
                mount_shared_memory(directory, self._in_container, self._labels, options)
            untrusted_trees.empty_directory(daemon.pipe)
        else:
            kept = {(SERVER, name) for name in (DEFAULT_NAMESPACE, *namespaces)}
            untrusted_trees.empty_directory(daemon.pipe, {(SERVER,), *kept})
            self.label(daemon, daemon.pipe)  # what the daemon makes in it inherits the label

    def label(self, daemon: ControlDaemon, directory: str) -> None:
        """Label a pipe directory that the daemon has made; a tmpfs has its label already."""
        if daemon.protocol > 2:
            self._labels.put_on(directory)

    def remove(self, daemon: ControlDaemon) -> None:
        """Remove them with all mounts; they may be gone. NodeError: that is not possible."""
        unmount_shared_memory(daemon.directory)
        self._control.unmount_from_driver(daemon)
        try:
            untrusted_trees.remove_directory(daemon.directory)
        except OSError as e:
            raise NodeError(
                f"cannot remove {daemon.directory} of an MPS server ({e.filename}): {e.strerror}"
            ) from e
