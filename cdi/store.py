"""Spec files of one vendor and class in one directory; a reader sees the old file or the new one.

>>> import tempfile
>>> from cdi.spec import ContainerEdits, CdiDevice, Spec
>>> edits = ContainerEdits(env=("A=1",))
>>> spec = Spec("vendor.example/gpu", devices=(CdiDevice("gpu-0", (), edits),))
>>> with tempfile.TemporaryDirectory() as directory:
...     store = SpecStore(directory, "vendor.example", "gpu")
...     text = store.write(spec, "5b0f")
...     print(store.path("5b0f").name)
...     print(store.ids(), store.read("5b0f") == spec)
...     store.remove("5b0f")
...     print(store.ids())
vendor.example-gpu_5b0f.json
('5b0f',) True
()
"""

import errno
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from cdi.encoding import from_text, parse_text, to_json
from cdi.errors import CdiNameError, CdiSpecError, CdiStoreError
from cdi.spec import Spec, spec_file_name, spec_file_prefix

_MENDS: Final = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some space there, or raise the quota",
    errno.EACCES: "let this user write there",
    errno.EPERM: "let this user write there",
    errno.EROFS: "mount it writable",
    errno.ENOTDIR: "remove the file that stands where the directory should be",
    errno.EEXIST: "remove the file that stands where the directory should be",
    errno.EISDIR: "remove the directory that stands where the file should be",
}


class SpecStore:
    """The transient specs of one vendor and class in one directory, each under an id of its own.

    Everything else there is left alone, even a file whose name would be ours but whose ``kind`` is
    not: the naming of the CDI library gives ``a-b/c`` and ``a/b-c`` the same file names.

    ``fsync`` waits on each write until the disk has the file. Without it a power cut can leave an
    empty file under the final name, which every runtime on the node then reports on every read.
    The usual directory, ``/var/run/cdi``, is in memory, where waiting costs nothing.
    Say ``False`` for a directory on disk that is emptied at boot.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        vendor: str,
        device_class: str,
        *,
        fsync: bool = True,
    ) -> None:
        self.directory = Path(directory)
        self._vendor = vendor
        self._device_class = device_class
        self._prefix = spec_file_prefix(vendor, device_class)
        self._fsync = fsync
        self._random = random.Random()
        self._whole: set[Path] = set()  # written by this store, and nothing is half written of it

    @property
    def kind(self) -> str:
        """The only kind of spec this store takes."""
        return f"{self._vendor}/{self._device_class}"

    def path(self, transient_id: str) -> Path:
        """Say where the spec with this id is, or would be."""
        name = spec_file_name(self._vendor, self._device_class, transient_id)
        return self.directory / name

    def write(self, spec: Spec, transient_id: str) -> str:
        """Write a spec, replacing the one with the same id; writing the same again is nothing.
        Give the text of the file."""
        if spec.kind != self.kind:
            raise CdiSpecError([f"kind: must be {self.kind!r} in this store, not {spec.kind!r}"])
        path, text = self.path(transient_id), to_json(spec)
        with self._errors(f"write {path.name}"):
            # Every write makes every runtime on the node read the whole directory again.
            if self._own_text(path) != text:
                self._replace(path, text)
        return text

    def read(self, transient_id: str) -> Spec | None:
        """Give the spec with this id, or ``None`` if there is none."""
        path = self.path(transient_id)
        with self._errors(f"read {path.name}"):
            text = self._own_text(path)
        return None if text is None else from_text(text)

    def remove(self, transient_id: str) -> None:
        """Remove the spec with this id, and what killed writers left of it; that there is none is
        success."""
        path = self.path(transient_id)
        with self._errors(f"remove {path.name}"):
            if path not in self._whole:
                exists = self._own_text(path) is not None
                for name in self._half_written(path):
                    (self.directory / name).unlink(missing_ok=True)
                if not exists:
                    return
            path.unlink(missing_ok=True)
            self._whole.discard(path)
            self._sync_directory()

    def ids(self) -> tuple[str, ...]:
        """Give the ids of all specs here, sorted; unreadable files with our name are ours too."""
        with self._errors("list it"):
            return tuple(sorted(self._ids()))

    def sweep(self, older_than_seconds: float = 60.0) -> tuple[str, ...]:
        """Remove what a killed writer left half written; give the names, sorted.

        No runtime reads these files, they only take space.
        The age spares a writer in another process, which needs them for milliseconds.
        """
        before = time.time() - older_than_seconds
        with self._errors("sweep it"):
            names = [
                entry.name
                for entry in self._entries()
                if entry.name.startswith(f".{self._prefix}")
                and entry.name.endswith(".tmp")
                and entry.stat(follow_symlinks=False).st_mtime <= before
            ]
            for name in names:
                (self.directory / name).unlink(missing_ok=True)
        return tuple(sorted(names))

    def _ids(self) -> Iterator[str]:
        for entry in self._entries():
            transient_id = entry.name.removeprefix(self._prefix).removesuffix(".json")
            with suppress(CdiNameError, _UnmanagedFileError):
                path = self.path(transient_id)
                if entry.name == path.name and self._own_text(path) is not None:
                    yield transient_id

    def _half_written(self, path: Path) -> Iterator[str]:
        """The temporary files of *path*; not of one whose name begins like its name."""
        before, after = f".{path.name}.", ".tmp"
        for name in (entry.name for entry in self._entries()):
            middle = name.removeprefix(before).removesuffix(after)
            if name == f"{before}{middle}{after}" and "." not in middle:
                yield name

    def _entries(self) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self.directory) as entries:
                return list(entries)
        except FileNotFoundError:
            return []

    def _own_text(self, path: Path) -> str | None:
        """Read a file that may be ours, or raise because it is another's."""
        try:
            text = path.read_bytes().decode(errors="replace")
        except FileNotFoundError:
            return None
        kind = _kind(text)
        if kind not in (None, self.kind):
            raise _UnmanagedFileError(
                f"{path} holds devices of {kind!r}, which is not ours ({self.kind!r}):"
                " give one of the two a directory of its own",
                self.directory,
            )
        return text

    def _replace(self, path: Path, text: str) -> None:
        self._whole.discard(path)
        try:
            fd, temporary = self._open_temporary(path)
        except FileNotFoundError:
            self.directory.mkdir(parents=True, exist_ok=True)
            self.directory.chmod(0o755)  # whatever the umask: runtimes may run as another user
            fd, temporary = self._open_temporary(path)
        try:
            try:
                content = memoryview(text.encode())
                while content:
                    content = content[os.write(fd, content) :]
                os.fchmod(fd, 0o644)  # a runtime may not be root
                if self._fsync:
                    os.fsync(fd)
            finally:
                os.close(fd)
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        self._whole.add(path)
        self._sync_directory()

    def _open_temporary(self, path: Path) -> tuple[int, str]:
        """A new file beside *path*: open, and where it is. Other processes may write there, too."""
        while True:
            middle = f"{self._random.getrandbits(32):08x}"
            temporary = f"{self.directory}/.{path.name}.{middle}.tmp"
            with suppress(FileExistsError):
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                return os.open(temporary, flags, 0o600), temporary

    def _sync_directory(self) -> None:
        if not self._fsync:
            return
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    @contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            mend = _MENDS.get(e.errno or 0, "look at the directory on this node")
            raise CdiStoreError(
                f"CDI directory {self.directory}: cannot {doing}: {e.strerror}: {mend}",
                self.directory,
            ) from e


class _UnmanagedFileError(CdiStoreError):
    """A file has our name and another's content."""


def _kind(text: str) -> object:
    """Say what kind a file declares; ``None`` for one that is no spec, say one cut short."""
    try:
        document = parse_text(text)
    except CdiSpecError:
        return None
    return document.get("kind") if isinstance(document, dict) else None
