"""Two plugin processes on one node during a rolling update: which is newest, and which may act.

The kubelet may ask either process to prepare, but never two at a time do: the ledger and the
devices belong to the process that holds the lease.
"""

import contextlib
import fcntl
import json
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from dra_driver.base.deadlines import Deadline
from dra_driver.base.errors import TimedOut
from dra_driver.base.files import (
    POLL_SECONDS,
    closing_file,
    disk_errors,
    lock_within,
    open_lock_file,
    try_flock,
    try_lock,
)
from dra_driver.base.frozen import frozen

_START_LOCK_SECONDS = 20.0
_STARTED_MODE = 0o750


class PluginInstances:
    """The plugin processes of this node, each a locked file ``<number>-<pod UID>`` in *directory*.

    A higher number is newer. A file whose lock is free belongs to a dead process; whoever sees it
    removes it. The file of a process that has started is executable: that needs no room on the
    disk.
    """

    def __init__(self, directory: Path, pod_uid: str | None = None) -> None:
        self._directory = directory
        self._started = False
        with disk_errors(f"note this plugin process in {directory}"):
            directory.mkdir(mode=0o750, parents=True, exist_ok=True)
            starting = directory / ".starting"
            with closing_file(
                lock_within(starting, _START_LOCK_SECONDS, "other plugin processes start")
            ):
                _remove_unfinished(directory)
                for _, path in self._listed():
                    _is_alive(path)  # removes it if it is not
                # The clock keeps the order if somebody empties the directory between two starts.
                newest = max((number for number, _ in self._listed()), default=0)
                self._number = max(newest + 1, int(time.time()))
                self._path = directory / f"{self._number}-{pod_uid or os.getpid()}"
                self._file = self._appear()

    def is_newest(self) -> bool:
        """Whether no live process is newer than this one. Cheap: it reads one directory."""
        with disk_errors(f"read {self._directory}"):
            if os.fstat(self._file).st_nlink == 0:  # somebody removed our file
                os.close(self._file)
                self._file = self._appear()
            newer = [path for number, path in self._listed() if number > self._number]
            return not [path for path in newer if _is_alive(path)]

    def note_started(self) -> None:
        """Let the startup probe of our pod succeed. NodeError: the disk fails."""
        self._started = True
        with disk_errors(f"change {self._path}"):
            os.fchmod(self._file, _STARTED_MODE)

    def leave(self) -> None:
        """Be forgotten: the next older process becomes the newest."""
        with contextlib.suppress(OSError):  # a file without a lock is of a dead process
            self._path.unlink(missing_ok=True)
        os.close(self._file)

    def _appear(self) -> int:
        """Make our file, locked before anybody can see it."""
        self._directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        hidden = self._directory / f".{secrets.token_hex(8)}.new"
        file = open_lock_file(hidden)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if self._started:
            os.fchmod(file, _STARTED_MODE)
        os.rename(hidden, self._path)
        return file

    def _listed(self) -> list[tuple[int, Path]]:
        names = (name for name in sorted(os.listdir(self._directory)) if not name.startswith("."))
        split = ((name.partition("-")[0], self._directory / name) for name in names)
        return [(int(number), path) for number, path in split if number.isdecimal()]


def _is_alive(path: Path) -> bool:
    """Whether the process that made *path* lives; a dead one's file is removed."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    with closing_file(file):
        if not try_flock(file, fcntl.LOCK_SH):
            return True
        path.unlink(missing_ok=True)
        return False


def _remove_unfinished(directory: Path) -> None:
    """Files of processes that died before theirs had its name. The caller has the starting lock."""
    for path in directory.glob(".*.new"):
        path.unlink(missing_ok=True)


@frozen
class PluginProcess:
    """A live plugin process of ours."""

    number: int  # a higher one is newer
    owner: str  # its pod's UID, or its process ID where it was given none
    started: bool = False  # the startup probe of its pod may succeed

    @property
    def pod_uid(self) -> str | None:
        """What its sockets are named by."""
        return None if self.owner.isdecimal() else self.owner


def plugin_processes(directory: Path) -> tuple[PluginProcess, ...]:
    """The live processes with files in *directory*, oldest first."""
    with disk_errors(f"read {directory}"):
        names = sorted(os.listdir(directory)) if directory.is_dir() else []
        processes = []
        for name in names:
            number, _, owner = name.partition("-")
            if number.isdecimal() and (mode := _mode_if_locked(directory / name)) is not None:
                processes.append(PluginProcess(int(number), owner, bool(mode & stat.S_IXUSR)))
        return tuple(sorted(processes, key=lambda process: process.number))


def _mode_if_locked(path: Path) -> int | None:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with closing_file(file):
        return None if try_flock(file, fcntl.LOCK_SH) else os.fstat(file).st_mode


LEASE_WAIT_SECONDS = 20.0  # the claim's own work has to fit into the kubelet's 45 s as well


class PluginLease:
    """One process at a time holds the lease, for all its threads together.

    A process that waits says so, and the holder then admits no further thread until it has let go:
    neither can starve the other. *on_change* is called before the first thread enters if another
    process held the lease since: what this one remembers of the ledger is stale. If that fails, it
    is called again for the next thread.

    Whoever has the file ``serialize.lock`` locked holds the lease, and writes a line that says who
    it is. Who waits has ``serialize.wanted`` locked meanwhile, and cuts off the end of the line:
    that needs no room on the disk. As long as its own line is whole, a process knows that it held
    the lease last and that nobody waits.
    """

    def __init__(
        self,
        directory: Path,
        owner: str,
        on_change: Callable[[], None],
    ) -> None:
        self._lock = directory / "serialize.lock"
        self._wanted = directory / "serialize.wanted"
        self._token = secrets.token_hex(8)
        names = {"owner": owner, "pid": os.getpid(), "token": self._token}
        self._line = json.dumps(names, sort_keys=True).encode() + _LINE_END
        self._on_change = on_change
        self._changed = threading.Condition()
        self._file: int | None = None  # locked while we hold the lease
        self._inside = 0
        self._taking = False  # one thread takes the lease for all

    @contextlib.contextmanager
    def held(self, wait_seconds: float = LEASE_WAIT_SECONDS) -> Iterator[None]:
        """Hold the lease. TimedOut: another process did not let go in time."""
        deadline = Deadline(wait_seconds)
        if not self._join(deadline):
            self._take(deadline)
        try:
            yield
        finally:
            self._leave()

    def changed_hands(self) -> bool:
        """Whether another process has held the lease since this one did, or waits for it."""
        with disk_errors(f"read {self._lock}"), closing_file(open_lock_file(self._lock)) as file:
            return not self._is_undisputed(file)

    def _join(self, deadline: Deadline) -> bool:
        """Enter if this process holds the lease; False: the caller has to take it."""
        with self._changed:
            while self._taking or self._file is not None:
                if self._file is not None and self._is_undisputed(self._file):
                    self._inside += 1
                    return True
                if not self._changed.wait(min(0.05, deadline.remaining)):
                    self._give_up_after(deadline)
            self._taking = True
            return False

    def _take(self, deadline: Deadline) -> None:
        file = None
        try:
            file = self._taken_again()
            if file is None:
                file = self._taken_in_turn(deadline)
        finally:
            with self._changed:
                self._taking = False
                if file is not None:
                    self._file, self._inside = file, 1
                self._changed.notify_all()

    def _taken_again(self) -> int | None:
        """The locked file if this process held the lease last and nobody waits."""
        with disk_errors(f"lock {self._lock}"):
            file = try_lock(self._lock)
        if file is None:
            return None
        try:
            is_undisputed = self._is_undisputed(file)
        except BaseException:
            os.close(file)
            raise
        if is_undisputed:
            return file
        os.close(file)
        return None

    def _taken_in_turn(self, deadline: Deadline) -> int:
        """The locked file, our line in it. Only one process can wait, and holds the other lock."""
        with contextlib.ExitStack() as undo:
            with disk_errors(f"lock {self._lock}"):
                wanted = self._poll(lambda: try_lock(self._wanted), deadline)
                undo.callback(os.close, wanted)
                file = self._poll(self._locked_or_asked_for, deadline)
                undo.callback(os.close, file)
                line = _read_line(file)
            if _owner_in(line).get("token") != self._token:
                if line:  # from now on it is nobody's, also if this process ends or fails here
                    with disk_errors(f"write {self._lock}"):
                        os.pwrite(file, b"?", 0)
                self._on_change()
            # The lock is the lease. A line that is not whole, since the disk is full, is taken for
            # another holder's by every process. In place of another one it needs no room.
            with contextlib.suppress(OSError):
                os.pwrite(file, self._line, 0)
                os.ftruncate(file, len(self._line))
            undo.pop_all()
        os.close(wanted)
        return file

    def _locked_or_asked_for(self) -> int | None:
        """The locked file; None: its holder is told that we wait."""
        if (file := try_lock(self._lock)) is not None:
            return file
        with closing_file(open_lock_file(self._lock)) as file:
            # Nobody writes a line meanwhile: whoever does has the other lock as well.
            line = _read_line(file)
            if line.endswith(_LINE_END):
                os.ftruncate(file, len(line) - len(_LINE_END))
        return None

    def _poll(self, attempt: Callable[[], int | None], deadline: Deadline) -> int:
        while (file := attempt()) is None:
            self._give_up_after(deadline)
            time.sleep(POLL_SECONDS)
        return file

    def _give_up_after(self, deadline: Deadline) -> None:
        if not deadline.expired:
            return
        with disk_errors(f"read {self._lock}"), closing_file(open_lock_file(self._lock)) as file:
            owner = _owner_in(_read_line(file))
        raise TimedOut(
            "waited for the plugin process of "
            f"{owner.get('owner', 'nobody known')} (pid {owner.get('pid', '?')}), which has not "
            f"finished its calls: {self._lock} is locked"
        )

    def _is_undisputed(self, file: int) -> bool:
        """Whether nobody held the lease since we did, and nobody waits for it."""
        with disk_errors(f"read {self._lock}"):
            return _read_line(file) == self._line

    def _leave(self) -> None:
        with self._changed:
            self._inside -= 1
            if self._inside == 0 and self._file is not None:
                os.close(self._file)
                self._file = None
                self._changed.notify_all()


_LINE_END = b"\n"


def _read_line(file: int) -> bytes:
    """What the last holder wrote; less where it died while writing, or the disk had no room."""
    return os.pread(file, 4096, 0)


def _owner_in(line: bytes) -> dict[str, object]:
    """Empty where it says nobody."""
    try:
        owner = json.loads(line)
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}
