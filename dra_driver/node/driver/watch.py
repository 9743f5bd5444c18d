"""Watches what was looked at of the driver: as long as nothing changes, nobody has to look again.

inotify(7) tells of files, and poll(2) of mounts on ``/proc/self/mountinfo`` (proc(5)): the root of
a driver container comes and goes with a mount, of which inotify says nothing. What another machine
does to a file system that it serves is told by neither, and so everything is looked at from time to
time.
"""

import contextlib
import logging
import os
import re
import select
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from dra_driver.base import inotify
from dra_driver.base.inotify import Inotify
from dra_driver.node.driver.root import DriverRoot
from dra_driver.node.driver.rootfs import FileSignatures, files_unchanged

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 30.0

_MOUNTS: Final = "/proc/self/mountinfo"
_ENTRIES: Final = (
    inotify.CREATED | inotify.DELETED | inotify.MOVED_AWAY | inotify.MOVED_THERE
    | inotify.MODIFIED | inotify.ATTRIBUTES
)  # fmt: skip
_DIRECTORY_GONE: Final = inotify.SELF_DELETED | inotify.SELF_MOVED
_WATCH_GONE: Final = _DIRECTORY_GONE | inotify.UNMOUNTED | inotify.IGNORED
_LIBCUDA: Final = re.compile(r".*/libcuda\.so\.[\d.]+")


@contextlib.contextmanager
def watching(driver: DriverRoot) -> Iterator[None]:
    """Meanwhile *driver* looks at its files only when they may have changed."""
    watch = DriverFilesWatch()
    driver.unchanged = watch.unchanged
    try:
        yield
    finally:
        driver.unchanged = files_unchanged
        watch.close()


class DriverFilesWatch:
    """Answers as ``files_unchanged``. Safe to use from several threads.

    What is asked about for the first time is looked at, and watched from then on. Where the kernel
    has no watches left, it is looked at each time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._inotify: Inotify | None = None
        self._mounts: int | None = None
        self._poll = select.poll()
        self._names: dict[int, set[str]] = {}  # by watch, in its directory; "" stands for all
        self._watched: FileSignatures | None = None  # they were so, and are watched since before
        self._libcuda: FileSignatures = {}  # of these
        self._look_at = self._watch_at = 0.0
        self._closed = False

    def unchanged(self, signatures: FileSignatures) -> bool:
        with self._lock:
            now = self._clock()
            if signatures is self._watched and now < self._look_at and not self._reported():
                # What an upgrade replaces first or last, by whatever file system.
                return files_unchanged(self._libcuda)
            self._watched = None
            is_watched = self._watch(signatures, now)  # before looking: none is missed between
            if not files_unchanged(signatures):
                return False
            if is_watched:
                self._watched, self._look_at = signatures, now + LOOK_SECONDS
                self._libcuda = {p: signatures[p] for p in signatures if _LIBCUDA.fullmatch(p)}
            return True

    def close(self) -> None:
        """Watch nothing any more; from now on everything is looked at each time."""
        with self._lock:
            self._closed = True
            self._stop()

    def _reported(self) -> bool:
        """Whether anything of what is watched may have changed."""
        changed = False
        for file, _ in self._poll.poll(0):
            if self._inotify is None or file != self._inotify.file:
                changed = True  # the mounts: the kernel says so once
                continue
            with contextlib.suppress(BlockingIOError):
                while True:
                    for event in self._inotify.events():
                        changed |= self._is_relevant(*event)
        return changed

    def _is_relevant(self, watch: int, mask: int, name: str) -> bool:
        if mask & inotify.OVERFLOW:
            return True
        names = self._names.get(watch)
        return names is not None and bool(mask & _WATCH_GONE or name in names or "" in names)

    def _watch(self, signatures: FileSignatures, now: float) -> bool:
        """Whether all of *signatures* are watched."""
        if self._closed or now < self._watch_at:
            return False
        try:
            self._watch_directories(self._start(), signatures)
        except OSError as e:
            self._stop()
            if not isinstance(e, FileNotFoundError):  # that one went just now, which is seen
                facts = {"error": str(e), "seconds": LOOK_SECONDS}
                log.warning("the driver's files cannot be watched: looking each time", extra=facts)
                self._watch_at = now + LOOK_SECONDS
            return False
        return True

    def _start(self) -> Inotify:
        if self._inotify is None:
            mounts = os.open(_MOUNTS, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._inotify = Inotify()
            except OSError:
                os.close(mounts)
                raise
            self._mounts = mounts
            self._poll = select.poll()
            self._poll.register(mounts, select.POLLPRI)
            self._poll.register(self._inotify.file, select.POLLIN)
        return self._inotify

    def _watch_directories(self, watches: Inotify, signatures: FileSignatures) -> None:
        names_by_directory: dict[str, set[str]] = {}
        for path in signatures:
            directory, _, name = path.rpartition("/")
            names_by_directory.setdefault(directory or "/", set()).add(name)
        before, self._names = self._names, {}
        for directory, names in names_by_directory.items():
            watch = watches.watch(directory, _ENTRIES | _DIRECTORY_GONE | inotify.ONLY_DIRECTORIES)
            self._names.setdefault(watch, set()).update(names)
        for watch in before.keys() - self._names.keys():
            watches.unwatch(watch)

    def _stop(self) -> None:
        if self._inotify is not None and self._mounts is not None:
            self._inotify.close()
            os.close(self._mounts)
        self._inotify = self._mounts = self._watched = None
        self._names = {}
