"""Where a daemon is found: its directories with sockets, the named pipe for commands, its log.

Assumed of the real one: directories that it makes have the mode 0755 less its umask, and it does
not change those that are there; sockets have 0666 whatever its umask, since users are told apart
only once they have connected (seen: another user than a single-user daemon's is refused by name).
"""

import contextlib
import os
import shutil
import socket
import time
from pathlib import Path
from typing import Final

PID_FILE: Final = "nvidia-cuda-mps-control.pid"
REQUESTS: Final = ".requests"
REPLIES: Final = ".replies"  # named pipes, made by commands of whatever user
_DIRECTORY: Final = 0o755
_PUBLIC_FILE_MODE: Final = 0o666
_PUBLIC_DIRECTORY_MODE: Final = 0o1777


class PathTooLong(Exception):
    """A socket's path has at most 107 bytes."""


class DaemonPaths:
    """The pipe directory *pipe* and the log directory *log* of one daemon."""

    def __init__(self, pipe: Path, log: Path) -> None:
        self.pipe = pipe
        self.log = log
        self._sockets: dict[Path, socket.socket] = {}

    def write(self, who: str, text: str) -> None:
        """A line of the log."""
        name = "control.log" if who == "Control" else f"{who}/server.log"
        path = self.log / name
        path.parent.mkdir(parents=True, exist_ok=True)
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        kind = "Control" if who == "Control" else "Server"
        with path.open("a") as file:
            file.write(f"[{stamp}.000 {kind} {os.getpid():5}] {text}\n")

    def listen(self, directory: Path) -> socket.socket:
        """A socket in *directory*, which is made."""
        directory.mkdir(_DIRECTORY, parents=True, exist_ok=True)
        path = directory / "control"
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(str(path))
        except OSError as error:
            listener.close()
            raise PathTooLong(str(path)) from error
        path.chmod(_PUBLIC_FILE_MODE)
        listener.listen(64)
        self._sockets[directory] = listener
        return listener

    def close(self, directory: Path) -> socket.socket:
        """Take a directory away with its socket, which is given back to be forgotten."""
        (directory / "control").unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            directory.rmdir()
        return self._sockets.pop(directory)

    def open_requests(self) -> int:
        """The named pipe through which commands come; the real one has no such things."""
        replies = self.pipe / REPLIES
        replies.mkdir(exist_ok=True)
        replies.chmod(_PUBLIC_DIRECTORY_MODE)
        path = self.pipe / REQUESTS
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        path.chmod(_PUBLIC_FILE_MODE)
        return os.open(path, os.O_RDWR)  # so that it has no end when nobody writes

    def remember(self, protocol: int) -> None:
        """Let commands find the daemon."""
        (self.pipe / PID_FILE).write_text(f"{os.getpid()} {protocol}\n")

    def running(self) -> bool:
        """Whether a daemon is there already."""
        try:
            pid = (self.pipe / PID_FILE).read_text().split()[0]
            ended = Path(f"/proc/{pid}/statm").read_text().startswith("0 ")  # not waited for yet
            return not ended and Path(f"/proc/{pid}/comm").read_text() == f"{COMM}\n"
        except (OSError, IndexError):
            return False

    def remove(self) -> None:
        """What a daemon takes away when it ends in order."""
        for directory in sorted(self._sockets, reverse=True):
            self.close(directory).close()
        for name in (REQUESTS, PID_FILE):
            (self.pipe / name).unlink(missing_ok=True)
        shutil.rmtree(self.pipe / REPLIES, ignore_errors=True)


COMM: Final = "nvidia-cuda-mps"  # the kernel keeps 15 characters of a program's name
