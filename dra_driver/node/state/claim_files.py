"""Files that others read: the CDI specs of claims and of the driver, and claims' metadata.

The container runtime finds the CDI specs (``CdiSpecFiles``, ``DriverSpecFile``), containers the
metadata (``<plugin data>/metadata/<claim UID>_<request>.json``). A metadata file is there before a
spec names it and goes after it, so nobody sees it half written, and what a killed writer left is
found by its claim's UID. Without fsync: a power cut ends the boot, and with it the claim (see
`ledger`).
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from api.names import CDI_CLASS, CDI_DRIVER_CLASS, CDI_DRIVER_DEVICE
from cdi.encoding import from_text, to_json
from cdi.errors import CdiError
from cdi.spec import Spec
from cdi.store import SpecStore
from dra_driver.base.errors import ClaimRecordLost, NodeError
from dra_driver.base.files import (
    FileSignature,
    closing_file,
    disk_call,
    disk_errors,
    signature_of,
    write_all,
)
from dra_driver.k8s.claims import ClaimUid
from dra_driver.kubeletplugin.device_metadata import (
    MetadataDocument,
    claim_uid_of_file,
    metadata_file_name,
)
from dra_driver.model.records import ClaimRecord


@contextmanager
def _cdi_errors(directory: Path) -> Iterator[None]:
    try:
        with disk_call(f"look after CDI files in {directory}"):
            yield
    except CdiError as e:
        raise NodeError(str(e)) from e


class DriverSpecFile:
    """The spec of the driver's files, ``k8s.<driver>-driver_files.json``.

    Every error is a NodeError that names the directory and the mend.
    """

    def __init__(self, directory: Path, vendor: str) -> None:
        self._store = SpecStore(directory, vendor, CDI_DRIVER_CLASS, fsync=False)
        self._path = self._store.path(CDI_DRIVER_DEVICE)

    def write(self, spec: Spec) -> None:
        """Write it; where the same is there, nothing happens."""
        with _cdi_errors(self._store.directory):
            self._store.write(spec, CDI_DRIVER_DEVICE)

    def signature(self) -> FileSignature | None:
        """What it is now, whoever wrote it. None: there is no file."""
        with disk_errors(f"look for CDI file {self._path}"):
            try:
                return signature_of(os.lstat(self._path))
            except (FileNotFoundError, NotADirectoryError):
                return None

    def remove(self) -> None:
        """That there is none is success."""
        with _cdi_errors(self._store.directory):
            self._store.remove(CDI_DRIVER_DEVICE)

    def sweep(self) -> None:
        """Remove what a killed writer left half written."""
        with _cdi_errors(self._store.directory):
            self._store.sweep()


class CdiSpecFiles:
    """Spec files named ``k8s.<driver>-claim_<claim UID>.json``, as NVIDIA's driver names its own.

    Every error is a NodeError that names the directory and the mend.
    """

    def __init__(self, directory: Path, vendor: str) -> None:
        # Written files do not outlive the boot: see `ledger` on fsync.
        self._store = SpecStore(directory, vendor, CDI_CLASS, fsync=False)
        self.driver = DriverSpecFile(directory, vendor)  # what all of them rely on

    @property
    def directory(self) -> Path:
        return self._store.directory

    def write(self, uid: ClaimUid, spec: Spec) -> str:
        """Write the spec of a claim; the text that was written."""
        with _cdi_errors(self.directory):
            return self._store.write(spec, uid)

    def restore(self, uid: ClaimUid, text: str) -> None:
        """Write what was written before; where it is still there, nothing happens."""
        with _cdi_errors(self.directory):
            self._store.write(from_text(text), uid)

    def read(self, uid: ClaimUid) -> Spec | None:
        """The spec of a claim; None: there is none."""
        with _cdi_errors(self.directory):
            return self._store.read(uid)

    def exists(self, uid: ClaimUid) -> bool:
        """Whether the claim has a file, readable or not."""
        path = self._store.path(uid)
        with disk_errors(f"look for CDI file {path}"):
            return path.exists()

    def remove(self, uid: ClaimUid) -> None:
        with _cdi_errors(self.directory):
            self._store.remove(uid)

    def claims(self) -> tuple[ClaimUid, ...]:
        """The claims that have a file."""
        with _cdi_errors(self.directory):
            return tuple(ClaimUid(uid) for uid in self._store.ids())

    def sweep(self) -> None:
        """Remove what a killed writer left half written."""
        with _cdi_errors(self.directory):
            self._store.sweep()


_SUBDIRECTORY: Final = "metadata"


class MetadataFiles:
    """The documents of one driver's claims, below *data*.

    That is a path of the host, and this process sees it there too, as the kubelet wants it of
    everything below its plugin directory. Every error is a NodeError that names the directory and
    the mend. One call at a time for each claim.
    """

    def __init__(
        self, data: Path, share_with_containers: Callable[[str], None] = lambda directory: None
    ) -> None:
        """*share_with_containers* is called with a directory that was just made: what is in it is
        mounted into containers."""
        self.directory = data.absolute() / _SUBDIRECTORY
        self._share_with_containers = share_with_containers

    def write(self, documents: Sequence[MetadataDocument]) -> None:
        """Write every document, whatever is there of it. A container that runs keeps its own."""
        with self._errors():
            for document in documents:
                try:
                    _create(document)
                except FileNotFoundError:
                    self.directory.mkdir(parents=True, exist_ok=True)
                    self.directory.chmod(0o755)  # whatever the umask, as with the files
                    self._share_with_containers(str(self.directory))
                    _create(document)

    def restore(self, documents: Sequence[MetadataDocument]) -> None:
        """Write those that are gone, or not whole."""
        with self._errors():
            gone = [file for file in documents if _text(Path(file.host_path)) != file.text]
        self.write(gone)

    def exist(self, uid: ClaimUid, requests: Iterable[str]) -> bool:
        """Whether the claim has a document for each of *requests*."""
        with self._errors():
            names = [metadata_file_name(uid, request) for request in requests]
            return all((self.directory / name).exists() for name in names)

    def shown(self, uid: ClaimUid, spec: Spec) -> tuple[MetadataDocument, ...] | None:
        """The documents that *spec* shows of a claim. None: one of them is gone."""
        mounts = {mount for device in spec.devices for mount in device.container_edits.mounts}
        documents = []
        with self._errors():
            for mount in sorted(mounts, key=lambda mount: mount.host_path):
                path = Path(mount.host_path)
                if path.parent == self.directory:
                    request = path.stem.removeprefix(f"{uid}_")
                    if (text := _text(path)) is None:
                        return None
                    documents.append(
                        MetadataDocument(request, mount.host_path, mount.container_path, text)
                    )
        return tuple(documents)

    def remove(self, uid: ClaimUid, requests: Collection[str] = ()) -> None:
        """Remove what is there of a claim, however little; that there is nothing is success.

        *requests*: those that it has documents for; none: that is not known.
        """
        with self._errors():
            names = [metadata_file_name(uid, request) for request in requests] or [
                name for name in self._names() if claim_uid_of_file(name) == uid
            ]
            for name in names:
                with suppress(FileNotFoundError):
                    os.unlink(f"{self.directory}/{name}")

    def claims(self) -> frozenset[ClaimUid]:
        """The claims of which anything is there."""
        with self._errors():
            return frozenset(uid for name in self._names() if (uid := claim_uid_of_file(name)))

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.directory)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _errors(self) -> AbstractContextManager[None]:
        remedy = "let this process write there, and keep some space free"
        return disk_errors(f"look after device metadata in {self.directory}", {None: remedy})


def _create(document: MetadataDocument) -> None:
    """Make the file, instead of one that is there: that one may be mounted in a container."""
    path = document.host_path
    try:
        opened = _open_new(path)
    except FileExistsError:
        with suppress(FileNotFoundError):
            os.unlink(path)
        opened = _open_new(path)
    try:
        with closing_file(opened) as file:
            write_all(file, document.text.encode())
            os.fchmod(file, 0o644)  # containers' users may not be root
    except OSError:
        with suppress(OSError):
            os.unlink(path)  # half of it
        raise


def _open_new(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def _text(path: Path) -> str | None:
    """None: it is gone."""
    try:
        return path.read_bytes().decode(errors="replace")
    except FileNotFoundError:
        return None


class ClaimFiles:
    """Written, restored and removed together. Every error is a NodeError."""

    def __init__(self, specs: CdiSpecFiles, metadata: MetadataFiles) -> None:
        self._specs = specs
        self._metadata = metadata
        self.driver_spec: Final = specs.driver

    @property
    def metadata_directory(self) -> str:
        """Where documents have to be."""
        return str(self._metadata.directory)

    def write(self, uid: ClaimUid, spec: Spec, documents: Sequence[MetadataDocument]) -> str:
        """Write *documents*, and then the spec that shows them; the text of the spec."""
        self._metadata.write(documents)
        return self._specs.write(uid, spec)

    def restore(self, record: ClaimRecord) -> None:
        """Write again what is gone of a completed claim."""
        self._metadata.restore(record.documents)
        self._specs.restore(record.claim.uid, record.spec or "")

    def exist(self, record: ClaimRecord) -> bool:
        """Whether nothing is gone of a completed claim, readable or not."""
        uid = record.claim.uid
        return self._specs.exists(uid) and self._metadata.exist(uid, _requests(record))

    def with_texts(self, record: ClaimRecord) -> ClaimRecord:
        """*record* with the texts that are there. ClaimRecordLost: not all of them are."""
        spec = self._specs.read(record.claim.uid)
        documents = self._metadata.shown(record.claim.uid, spec) if spec else None
        if spec is None or documents is None:
            raise ClaimRecordLost(
                f"what was recorded of claim {record.claim} is lost, and so are its files: delete "
                "the pods that use it"
            )
        return replace(record, spec=to_json(spec), documents=documents)

    def remove(self, uid: ClaimUid, record: ClaimRecord | None = None) -> None:
        """Remove what there is of a claim, however little; where its whole *record* is not known,
        its files are looked for."""
        self._specs.remove(uid)
        self._metadata.remove(uid, _requests(record) if record else ())

    def claims(self) -> frozenset[ClaimUid]:
        """The claims that have any file."""
        return self._metadata.claims() | frozenset(self._specs.claims())

    def sweep(self) -> None:
        """Remove what a killed writer left half written and no claim's name finds."""
        self._specs.sweep()
        self.driver_spec.sweep()


def _requests(record: ClaimRecord) -> list[str]:
    return sorted({holding.request for holding in record.holdings})
