"""The kernel's word on what happens in directories: inotify(7)."""

import ctypes
import logging
import os
import select
import struct
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

# linux/inotify.h
MODIFIED, ATTRIBUTES = 0x2, 0x4
MOVED_AWAY, MOVED_THERE, CREATED, DELETED = 0x40, 0x80, 0x100, 0x200
SELF_DELETED, SELF_MOVED = 0x400, 0x800
UNMOUNTED, OVERFLOW, IGNORED = 0x2000, 0x4000, 0x8000
ONLY_DIRECTORIES, DIRECTORY = 0x01000000, 0x40000000

NAMES = CREATED | DELETED | MOVED_AWAY | MOVED_THERE | SELF_DELETED | SELF_MOVED
CONTENTS = MODIFIED | ATTRIBUTES

log = logging.getLogger(__name__)

_EVENT: Final = struct.Struct("iIII")  # watch, what happened, cookie, length of the name
_BUFFER: Final = 65536


class Inotify:
    """One instance. Every method may raise OSError: the kernel has a limit of everything.

    *file* is readable while there are events. After ``close`` nothing may be called.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.file = self._checked(self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))

    def watch(self, directory: str | Path, mask: int) -> int:
        """Report what *mask* says of *directory*; the number of the watch.

        The same directory, by whatever path, has the same number.
        """
        path = os.fsencode(directory)
        return self._checked(self._libc.inotify_add_watch(self.file, path, mask))

    def unwatch(self, watch: int) -> None:
        """Report it no longer; nothing happens where it went by itself."""
        self._libc.inotify_rm_watch(self.file, watch)

    def events(self) -> Iterator[tuple[int, int, str]]:
        """What has happened: watch, what, and the name in the directory. BlockingIOError: nothing
        (more) has."""
        raw, offset = os.read(self.file, _BUFFER), 0
        while offset < len(raw):
            watch, mask, _, length = _EVENT.unpack_from(raw, offset)
            offset += _EVENT.size
            yield watch, mask, os.fsdecode(raw[offset : offset + length].rstrip(b"\0"))
            offset += length

    def close(self) -> None:
        os.close(self.file)

    @staticmethod
    def _checked(result: int) -> int:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return result


class DirectoryChanges:
    """Like a ``threading.Event`` that is also set by what happens in directories.

    One thread waits, any may ``set``.
    """

    def __init__(self, mask: int) -> None:
        """*mask*: what counts. OSError: the process has no file descriptors left."""
        self._mask = mask
        self._lock = threading.Lock()
        self._set: int | None = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._inotify: Inotify | None = None
        self._watches: frozenset[int] = frozenset()
        self._error = ""
        self._poll = select.poll()
        self._poll.register(self._set, select.POLLIN)

    def watch(self, directories: Iterable[str | Path]) -> bool:
        """From now on watch these, and no others. False: not all of them are watched, since one is
        missing, or the kernel has no watches left; somebody has to look from time to time."""
        watches: set[int] = set()
        try:
            if self._inotify is None:
                self._inotify = Inotify()
                self._poll.register(self._inotify.file, select.POLLIN)
            mask = self._mask | ONLY_DIRECTORIES
            for directory in directories:
                watches.add(self._inotify.watch(directory, mask))
        except OSError as e:
            self._watches |= watches
            if str(e) != self._error and not isinstance(e, FileNotFoundError):
                log.warning("directories cannot be watched: looking", extra={"error": str(e)})
            self._error = str(e)
            return False
        for watch in self._watches - watches:
            self._inotify.unwatch(watch)
        self._watches, self._error = frozenset(watches), ""
        return bool(watches)

    def set(self) -> None:
        """Wake who waits, also the one who waits next."""
        with self._lock:
            if self._set is not None:
                os.eventfd_write(self._set, 1)

    def clear(self) -> None:
        """Forget what happened until now."""
        for file, _ in self._poll.poll(0):
            if self._inotify is not None and file == self._inotify.file:
                for _ in self._inotify.events():
                    pass
            else:
                os.eventfd_read(file)

    def wait(self, seconds: float | None, /) -> bool:
        """Whether it is set, or was within so many *seconds*; None: however long it takes."""
        return bool(self._poll.poll(None if seconds is None else seconds * 1000))

    def close(self) -> None:
        """Free what the kernel gave. To be called by the thread that waits, or after its end."""
        with self._lock:
            if self._set is not None:
                os.close(self._set)
            self._set = None
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None
