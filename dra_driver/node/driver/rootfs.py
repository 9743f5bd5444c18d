"""A root file system of the host, as this process sees it: symbolic links are followed inside it.

A driver may be installed into a directory that is a root of its own (a driver container's, say),
and the host's own root may be mounted below a directory of this process. In both, an absolute link
such as ``/etc/alternatives/x`` means a file below that root; the kernel would look elsewhere.
"""

import errno
import os
from typing import Final

from dra_driver.base.files import FileSignature, signature_of

FileSignatures = dict[str, FileSignature | None]
"""What was looked at, by path as this process sees it, and what was found; None: nothing. Of a
directory whose path ends in a slash, every name counted."""

_MAX_SYMLINKS: Final = 40  # as the kernel (path_resolution(7))
_ABSENT: Final = (errno.ENOENT, errno.ENOTDIR)


class RootFs:
    """The host's directory *root*, which this process sees below *host_root*.

    Paths given and returned are absolute with *root* as ``/``. Every method may raise OSError
    for what is there but cannot be looked at. What an answer depended on is kept in ``signatures``.
    """

    def __init__(self, host_root: str, root: str = "/") -> None:
        self.signatures: FileSignatures = {}
        self._listed: set[str] = set()
        self._host_root = host_root.rstrip("/")
        self._base = self._host_root
        within = self.resolve(root)
        self.exists = within is not None
        self.root = within or root  # a path of the host without links
        self._base = self._host_root + self.root.rstrip("/")

    def local_path(self, path: str) -> str:
        """*path* as this process sees it."""
        return self._base + path

    def on_host(self, path: str) -> str:
        """*path* as the host calls it."""
        return self.root.rstrip("/") + path

    def resolve(self, path: str) -> str | None:
        """*path* without links, or None where it does not exist."""
        todo = path.split("/")[::-1]
        at, links = "", 0
        while todo:
            part = todo.pop()
            if part in ("", "."):
                continue
            if part == "..":
                at = at.rpartition("/")[0]
                continue
            target = self._link(at, part)
            if target is None:
                return None
            if not target:
                at = f"{at}/{part}"
                continue
            links += 1
            if links > _MAX_SYMLINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            at = "" if target.startswith("/") else at
            todo.extend(target.split("/")[::-1])
        return at or "/"

    def names(self, directory: str) -> list[str]:
        """What is in *directory*, which is resolved, sorted; nothing where it is none."""
        self._note(f"{directory}/")
        self._listed.add(directory)
        try:
            return sorted(os.listdir(self.local_path(directory)))
        except OSError as e:
            if e.errno in _ABSENT:
                return []
            raise

    def find(self, path: str) -> str | None:
        """As ``resolve``, and from now on a change of that very file counts, too."""
        real_path = self.resolve(path)
        if real_path is not None:
            self._note(real_path)
        return real_path

    def _link(self, directory: str, name: str) -> str | None:
        """Where a link leads; empty: it is no link; None: it is not there."""
        path = f"{directory}/{name}"
        try:
            target = os.readlink(self._base + path)
        except OSError as e:
            if e.errno == errno.EINVAL:
                return ""
            if e.errno not in _ABSENT:
                raise
            target = None
        if directory not in self._listed:  # there, the directory changes with its entries
            self._note(path)
        return target

    def _note(self, path: str) -> None:
        seen_path = self._base + path
        self.signatures.setdefault(seen_path, file_signature(seen_path))


def file_signature(path: str) -> FileSignature | None:
    """What *path* is right now, as this process sees it; None: it is not there."""
    try:
        status = os.lstat(path)
    except OSError as e:
        if e.errno in _ABSENT:
            return None
        raise
    return signature_of(status)


def files_unchanged(signatures: FileSignatures) -> bool:
    """Whether everything that was looked at is as it was. Takes some 2 µs for each."""
    return all(file_signature(path) == signature for path, signature in signatures.items())
