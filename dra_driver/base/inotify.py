"""The kernel's word on what happens in directories: inotify(7)."""

import ctypes
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

# linux/inotify.h
MODIFIED, ATTRIBUTES = 0x2, 0x4
MOVED_AWAY, MOVED_THERE, CREATED, DELETED = 0x40, 0x80, 0x100, 0x200
SELF_DELETED, SELF_MOVED = 0x400, 0x800
UNMOUNTED, OVERFLOW, IGNORED = 0x2000, 0x4000, 0x8000
ONLY_DIRECTORIES, DIRECTORY = 0x01000000, 0x40000000

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
