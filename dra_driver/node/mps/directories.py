"""What a daemon has on disk: created before it starts, labelled once it runs, removed after it.

::

    <mps-dir>/<server>/            only the host's root writes here
        pipe/                      protocol 2: a small tmpfs, writable in containers
        pipe/gpu/<namespace>/      protocol 3: each read-only in the containers of one claim
        shm/                       protocol 2: a tmpfs, /dev/shm of the daemon and its clients
        log/                       ``control.log`` and ``<server>/server.log``
        config.toml                protocol 3

A daemon that is started again keeps the directories that containers have mounted, and nothing else.

SELinux: without a label that containers may use, no client reaches its server. Rules for containers
do not allow the label of the host's ``/run``; what is created in a directory gets its label.

Logs are read for the error that says why a daemon does not start, and cut when they grow.
"""

import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final, Literal, Protocol, TypeVar

from dra_driver.base.errors import NodeError
from dra_driver.model.mps import MpsNamespaceName
from dra_driver.node.mps import mounts, untrusted_trees
from dra_driver.node.mps.control import ControlProgram
from dra_driver.node.mps.daemon import SERVER, ControlDaemon
from dra_driver.node.mps.formats import DEFAULT_NAMESPACE
from dra_driver.node.mps.untrusted_trees import open_directory

log = logging.getLogger(__name__)

SELINUX_ATTRIBUTE: Final = "security.selinux"
SELINUX_LABEL: Final = "system_u:object_r:container_file_t:s0"
_LEVELS: Final = 3  # below a pipe directory: servers, namespaces, their sockets


class SetXattr(Protocol):
    """os.setxattr."""

    def __call__(
        self, path: str, attribute: str, value: bytes, *, follow_symlinks: bool
    ) -> None: ...


class SelinuxLabels:
    """*enforce*: the file that is there where the host's kernel has SELinux switched on."""

    def __init__(self, enforce: Path, setxattr: SetXattr = os.setxattr) -> None:
        self._enforce = enforce
        self._setxattr = setxattr
        self._warned = False

    @property
    def mount_option(self) -> str:
        """What gives a tmpfs the label; none where there is no SELinux."""
        return f"context={SELINUX_LABEL}" if self._enforce.exists() else ""

    def put_on(self, directory: str) -> None:
        """Label it and what is in it. It may have come and gone; a failure is logged, once."""
        if not self._enforce.exists():
            return
        try:
            with open_directory(directory) as at:
                self._put_on(at, _LEVELS)
        except OSError as e:
            self.warn(directory, e.strerror or str(e))

    def warn(self, directory: str, why: str) -> None:
        level = logging.DEBUG if self._warned else logging.WARNING
        self._warned = True
        log.log(
            level,
            "a directory cannot be labelled for SELinux: containers may be kept from their MPS "
            "server; it takes the label container_file_t",
            extra={"directory": directory, "label": SELINUX_LABEL, "error": why},
        )

    def _put_on(self, at: int, levels: int) -> None:
        here = f"/proc/self/fd/{at}"  # a socket cannot be opened, and no path is followed to it
        self._set(f"{here}/.")
        for name in os.listdir(at):
            try:
                with open_directory(name, at) as inside:
                    if levels > 1:
                        self._put_on(inside, levels - 1)
            except NotADirectoryError:
                self._set(f"{here}/{name}")
            except FileNotFoundError:
                continue

    def _set(self, path: str) -> None:
        try:
            self._setxattr(path, SELINUX_ATTRIBUTE, SELINUX_LABEL.encode(), follow_symlinks=False)
        except FileNotFoundError:
            log.debug("it is gone", extra={"path": path})


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tmpfs:
    """How much it may hold, and who may write."""

    size_bytes: int
    mode: int = 0o1777  # everybody, as in /dev/shm
    most_files: int | None = None

    @property
    def options(self) -> str:
        """As mount(8) has them."""
        files = "" if self.most_files is None else f",nr_inodes={self.most_files}"
        return f"size={self.size_bytes},mode={self.mode:o}{files}"


def mount_shared_memory(
    directory: str, in_container: bool, labels: SelinuxLabels, tmpfs: Tmpfs | None = None
) -> None:
    """Mount it at *directory*; where it is already, nothing changes.

    *tmpfs*: with half of the machine's memory, if nothing is said. NodeError: mounting is not
    permitted, or the mount is not seen outside this container.
    """
    at = os.path.realpath(directory)
    os.makedirs(at, mode=0o755, exist_ok=True)
    if not mounts.is_mounted(at):
        _mount_tmpfs(at, tmpfs or Tmpfs(_half_of_memory()), labels)
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
    """Do *act*; what it starts in *root* has *directory* as ``/dev/shm``."""
    target = root.rstrip("/") + "/dev/shm"
    os.makedirs(target, mode=0o1777, exist_ok=True)
    return mounts.with_own_mounts({target: directory}, act)


def _mount_tmpfs(at: str, tmpfs: Tmpfs, labels: SelinuxLabels) -> None:
    if label := labels.mount_option:
        try:
            return mounts.tmpfs(at, f"{tmpfs.options},{label}")
        except NodeError as e:
            labels.warn(at, str(e))  # unless it fails without it, too
    mounts.tmpfs(at, tmpfs.options)


def _half_of_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


MAX_LOG_BYTES: Final = 4 << 20  # bytes that a file may have
KEPT_LOG_BYTES: Final = 1 << 20  # of one that has more

_MAX_LINES: Final = 6  # of each file
_MAX_CHARACTERS: Final = 4000  # characters of each file that are looked at
_BLOCK: Final = 512  # bytes, in which the kernel tells what a file takes
_PLAIN: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # nobody waits at a named pipe


def last_log_lines(directory: str) -> str:
    """The last lines of each file in *directory* and below, behind a line feed; or nothing."""
    said = []
    for file in _log_files(directory):
        try:
            with _open_log(file, "rb") as opened:
                text = _log_end(opened, _MAX_CHARACTERS).decode(errors="replace")
        except OSError:
            continue  # no file, or gone
        lines = [line for line in text.splitlines() if line.strip()][-_MAX_LINES:]
        said += [f"{file.name}: {line}" for line in lines]
    return "".join(f"\n{line}" for line in said)


def trim_logs(directory: str) -> None:
    """Cut each file that takes too much to its last lines. A failure is logged.

    It stays the same file, since its writer has it open. What is written while it is cut can be
    lost. One that does not append goes on where it was: the file seems as long as before then, and
    begins with a hole, which takes no memory. So what it takes is what counts.
    """
    for file in _log_files(directory):
        try:
            with _open_log(file, "r+b") as opened:
                found = os.fstat(opened.fileno())
                if stat.S_ISREG(found.st_mode) and found.st_blocks * _BLOCK > MAX_LOG_BYTES:
                    _cut_log(opened)
        except (FileNotFoundError, IsADirectoryError):
            continue
        except OSError as e:
            extra = {"file": str(file), "error": e.strerror}
            log.warning("the log of an MPS daemon cannot be cut", extra=extra)


def _cut_log(opened: FileIO) -> None:
    kept = _log_end(opened, KEPT_LOG_BYTES).lstrip(b"\0")
    whole = kept[kept.find(b"\n") + 1 :]  # the first line is one's end
    opened.seek(0)
    opened.write(whole)
    opened.truncate(len(whole))


def _log_end(opened: FileIO, size: int) -> bytes:
    opened.seek(max(0, opened.seek(0, os.SEEK_END) - size))
    return opened.read(size)


def _open_log(file: Path, mode: Literal["rb", "r+b"]) -> FileIO:
    def opener(path: str, flags: int) -> int:
        return os.open(path, flags | _PLAIN)

    return open(file, mode, buffering=0, opener=opener)


def _log_files(directory: str) -> Iterator[Path]:
    for pattern in ("*", "*/*"):
        yield from sorted(Path(directory).glob(pattern))


# What tenants write there is the host's memory: files as well as what the kernel knows of them.
_PIPE: Final = Tmpfs(16 << 20, mode=untrusted_trees.PASSABLE, most_files=4096)


class DaemonDirectories:
    """*in_container*: what is mounted has to be seen outside."""

    def __init__(self, control: ControlProgram, labels: SelinuxLabels, in_container: bool) -> None:
        self._control = control
        self._labels = labels
        self._in_container = in_container

    def make(self, daemon: ControlDaemon, namespaces: Iterable[MpsNamespaceName]) -> None:
        """For a start with these namespaces, whatever is left of an earlier one.

        NodeError: mounting is not permitted. OSError: something else cannot be done.
        """
        for directory in (daemon.directory, daemon.pipe, daemon.log):
            untrusted_trees.make_directory(directory)
        if daemon.protocol == 2:
            mount_shared_memory(daemon.shm, self._in_container, self._labels)
            mount_shared_memory(daemon.pipe, self._in_container, self._labels, _PIPE)
            untrusted_trees.empty_directory(daemon.pipe)
        else:
            untrusted_trees.empty_directory(daemon.pipe, frozenset(_mounted(namespaces)))
            self._labels.put_on(daemon.pipe)  # what the daemon makes in there gets it from there

    def began(self, daemon: ControlDaemon) -> None:
        """It is up: its directories are all there."""
        if daemon.protocol > 2:
            self._labels.put_on(daemon.pipe)

    def added(self, daemon: ControlDaemon, directory: str) -> str:
        """It has another pipe directory."""
        if daemon.protocol > 2:
            self._labels.put_on(directory)
        return directory

    def remove(self, daemon: ControlDaemon) -> None:
        """With all that is mounted there. Nothing there: fine. NodeError: it cannot be done."""
        unmount_shared_memory(daemon.directory)
        self._control.leave(daemon)
        try:
            untrusted_trees.remove_directory(daemon.directory)
        except OSError as e:
            raise NodeError(
                f"cannot remove {daemon.directory} of an MPS server ({e.filename}): {e.strerror}"
            ) from e


def _mounted(namespaces: Iterable[MpsNamespaceName]) -> Iterator[untrusted_trees.TreePath]:
    yield (SERVER,)
    for name in (DEFAULT_NAMESPACE, *namespaces):
        yield SERVER, name
