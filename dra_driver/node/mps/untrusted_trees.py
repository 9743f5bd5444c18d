"""Directories in which tenants write are emptied and removed, whatever a tenant put there.

A container that has one mounted may run as root in there: it can make links to anywhere, trees of
any depth, and change all of it meanwhile. So a name is only looked up in a directory that is held
open, no link is followed, and what is deep is lifted to the top before it is taken away: neither
paths, nor open files, nor calls grow with the depth.
"""

import errno
import os
import secrets
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from dra_driver.base.deadlines import within_request
from dra_driver.base.errors import NodeError, TimedOut

DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
PASSABLE: Final = 0o755  # clients of any user go through
_SECONDS: Final = 5.0  # in which even a tenant that goes on making files is outrun, or never
# A tenant replaced it meanwhile. What there is now is listed the next time.
_REPLACED: Final = (FileNotFoundError, NotADirectoryError)

TreePath = tuple[str, ...]
"""Names of directories, each inside the one before."""


def make_directory(directory: str) -> None:
    """Make it, for everybody to pass whatever the umask is; it may be there. OSError: something
    else is."""
    os.makedirs(os.path.dirname(directory), mode=PASSABLE, exist_ok=True)
    with suppress(FileExistsError):
        os.mkdir(directory, PASSABLE)
    with open_directory(directory) as at:
        os.fchmod(at, PASSABLE)


def empty_directory(directory: str, keep: Collection[TreePath] = ()) -> None:
    """Remove all that is in it besides the directories *keep* and those that they are in.

    These are the same directories as before, empty, and everybody may pass them. OSError: something
    cannot be removed. TimedOut: somebody makes files as fast as they are removed.
    """
    with open_directory(directory) as top:
        _Emptying(directory).work(top, frozenset(keep))


def remove_directory(directory: str) -> None:
    """Remove it with all that is in it; it may be gone. Errors as of ``empty_directory``."""
    with suppress(FileNotFoundError):
        empty_directory(directory)
        os.rmdir(directory)


@contextmanager
def open_directory(path: str, inside: int | None = None) -> Iterator[int]:
    """A directory, by its last name, which is no link. OSError: it is not there, or is none."""
    at = os.open(path, DIRECTORY, dir_fd=inside)
    try:
        yield at
    finally:
        os.close(at)


class _Emptying:
    """Of one directory; *named* in errors."""

    def __init__(self, named: str) -> None:
        self._named = named
        self._deadline = within_request(_SECONDS, undoing=True)

    def work(self, at: int, keep: Collection[TreePath]) -> None:
        """It calls itself for a level of *keep*, which is ours, and for no other."""
        keep_names = {path[0] for path in keep}
        for name in sorted(keep_names):
            below = frozenset(path[1:] for path in keep if path[0] == name and path[1:])
            try:
                with open_directory(name, at) as inner:
                    os.fchmod(inner, os.fstat(inner).st_mode & 0o7777 | PASSABLE)
                    self.work(inner, below)
            except FileNotFoundError:
                continue
            except NotADirectoryError:
                keep_names.discard(name)  # it is removed with everything else
        while names := [name for name in os.listdir(at) if name not in keep_names]:
            for name in names:
                self._remove(at, name)

    def _remove(self, at: int, name: str) -> None:
        """Remove it, but move the directories in it up into *at*."""
        if self._deadline.expired:
            raise TimedOut(
                f"{self._named} cannot be emptied in {self._deadline.seconds:.3g} s: is somebody "
                "writing in it?"
            )
        if not _is_directory(at, name):
            return
        with suppress(*_REPLACED), open_directory(name, at) as inside:
            self._refuse_mount(at, inside, name)
            for below in os.listdir(inside):
                if _is_directory(inside, below):
                    with suppress(FileNotFoundError):
                        new_name = secrets.token_hex(16)
                        os.rename(below, new_name, src_dir_fd=inside, dst_dir_fd=at)
        try:
            with suppress(*_REPLACED):
                os.rmdir(name, dir_fd=at)
        except OSError as e:
            if e.errno != errno.ENOTEMPTY:  # somebody made more
                raise

    def _refuse_mount(self, at: int, inside: int, name: str) -> None:
        if os.fstat(at).st_dev != os.fstat(inside).st_dev:
            raise NodeError(f"something is mounted in {self._named} at {name}: unmount it")


def _is_directory(at: int, name: str) -> bool:
    """False: it was none, and is removed. A check before that could be out of date."""
    try:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=at)
    except IsADirectoryError:
        return True
    return False
