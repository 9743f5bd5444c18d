"""What daemons have written: for the error that says why one does not start, and cut when it grows.

Nothing here goes deeper than a log is: ``control.log`` and ``<server>/server.log``.
"""

import logging
import os
import stat
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Final, Literal

log = logging.getLogger(__name__)

MOST: Final = 4 << 20  # bytes that a file may have
KEPT: Final = 1 << 20  # of one that has more

_LINES: Final = 6  # of each file
_SAID: Final = 4000  # characters of each file that are looked at
_BLOCK: Final = 512  # bytes, in which the kernel tells what a file takes
_PLAIN: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # nobody waits at a named pipe


def last_lines(directory: str) -> str:
    """The last lines of each file in *directory* and below, behind a line feed; or nothing."""
    said = []
    for file in _files(directory):
        try:
            with _opened(file, "rb") as opened:
                text = _end(opened, _SAID).decode(errors="replace")
        except OSError:
            continue  # no file, or gone
        lines = [line for line in text.splitlines() if line.strip()][-_LINES:]
        said += [f"{file.name}: {line}" for line in lines]
    return "".join(f"\n{line}" for line in said)


def trim(directory: str) -> None:
    """Cut each file that takes too much to its last lines. A failure is logged.

    It stays the same file, since its writer has it open. What is written while it is cut can be
    lost. One that does not append goes on where it was: the file seems as long as before then, and
    begins with a hole, which takes no memory. So what it takes is what counts.
    """
    for file in _files(directory):
        try:
            with _opened(file, "r+b") as opened:
                found = os.fstat(opened.fileno())
                if stat.S_ISREG(found.st_mode) and found.st_blocks * _BLOCK > MOST:
                    _cut(opened)
        except (FileNotFoundError, IsADirectoryError):
            continue
        except OSError as e:
            extra = {"file": str(file), "error": e.strerror}
            log.warning("the log of an MPS daemon cannot be cut", extra=extra)


def _cut(opened: FileIO) -> None:
    kept = _end(opened, KEPT).lstrip(b"\0")
    whole = kept[kept.find(b"\n") + 1 :]  # the first line is one's end
    opened.seek(0)
    opened.write(whole)
    opened.truncate(len(whole))


def _end(opened: FileIO, size: int) -> bytes:
    opened.seek(max(0, opened.seek(0, os.SEEK_END) - size))
    return opened.read(size)


def _opened(file: Path, mode: Literal["rb", "r+b"]) -> FileIO:
    def opener(path: str, flags: int) -> int:
        return os.open(path, flags | _PLAIN)

    return open(file, mode, buffering=0, opener=opener)


def _files(directory: str) -> Iterator[Path]:
    for pattern in ("*", "*/*"):
        yield from sorted(Path(directory).glob(pattern))
