"""Device metadata on this machine: the files that CDI specs of claims show to containers.

``<plugin data>/metadata/<claim UID>_<request>.json``

A file is there before a spec names it and goes after it, so nobody sees it half written, and what
a killed writer left is found by its claim's UID. Without fsync: a power cut ends the boot, and with
it the claim (see `ledger`).
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from cdi import Spec
from dra_driver.errors import NodeError
from dra_driver.kubeletplugin.claims import ClaimUid
from dra_driver.kubeletplugin.device_metadata import Document, file_name, uid_in
from dra_driver.kubeletplugin.disk_calls import disk_call

_SUBDIRECTORY: Final = "metadata"


class MetadataFiles:
    """The documents of one driver's claims, below *data*.

    That is a path of the host, and this process sees it there too, as the kubelet wants it of
    everything below its plugin directory. Every error is a NodeError that names the directory and
    the mend. One call at a time for each claim.
    """

    def __init__(self, data: Path) -> None:
        self.directory = data.absolute() / _SUBDIRECTORY

    def write(self, documents: Sequence[Document]) -> None:
        """Write every document, whatever is there of it. A container that runs keeps its own."""
        with self._errors():
            for document in documents:
                try:
                    _create(document)
                except FileNotFoundError:
                    self.directory.mkdir(parents=True, exist_ok=True)
                    self.directory.chmod(0o755)  # whatever the umask, as with the files
                    _create(document)

    def restore(self, documents: Sequence[Document]) -> None:
        """Write those that are gone, or not whole."""
        with self._errors():
            gone = [one for one in documents if _text(Path(one.host_path)) != one.text]
        self.write(gone)

    def exist(self, uid: ClaimUid, requests: Iterable[str]) -> bool:
        """Whether the claim has a document for each of *requests*."""
        with self._errors():
            return all((self.directory / file_name(uid, one)).exists() for one in requests)

    def shown(self, uid: ClaimUid, spec: Spec) -> tuple[Document, ...] | None:
        """The documents that *spec* shows of a claim. None: one of them is gone."""
        mounts = {mount for device in spec.devices for mount in device.container_edits.mounts}
        found = []
        with self._errors():
            for mount in sorted(mounts, key=lambda one: one.host_path):
                path = Path(mount.host_path)
                if path.parent == self.directory:
                    request = path.stem.removeprefix(f"{uid}_")
                    if (text := _text(path)) is None:
                        return None
                    found.append(Document(request, mount.host_path, mount.container_path, text))
        return tuple(found)

    def remove(self, uid: ClaimUid) -> None:
        """Remove what is there of a claim, however little; that there is nothing is success."""
        with self._errors():
            for name in self._names():
                if uid_in(name) == uid:
                    (self.directory / name).unlink(missing_ok=True)

    def claims(self) -> frozenset[ClaimUid]:
        """The claims of which anything is there."""
        with self._errors():
            return frozenset(uid for name in self._names() if (uid := uid_in(name)))

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.directory)
        except (FileNotFoundError, NotADirectoryError):
            return []

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with disk_call(f"look after device metadata in {self.directory}"):
                yield
        except OSError as e:
            raise NodeError(
                f"device metadata in {self.directory} cannot be kept: {e.filename}: {e.strerror}; "
                "let this process write there, and keep some space free"
            ) from e


def _create(document: Document) -> None:
    """Make the file, instead of the one that is there: that one may be mounted in a container."""
    path = Path(document.host_path)
    path.unlink(missing_ok=True)
    try:
        with path.open("xb") as file:
            file.write(document.text.encode())
            os.fchmod(file.fileno(), 0o644)  # containers' users may not be root
    except OSError:
        with suppress(OSError):
            path.unlink(missing_ok=True)  # half of it
        raise


def _text(path: Path) -> str | None:
    """None: it is gone."""
    try:
        return path.read_bytes().decode(errors="replace")
    except FileNotFoundError:
        return None
