"""The CDI files of our claims: one per claim, where the container runtime looks."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from api.names import CDI_CLASS
from cdi.encode import from_text
from cdi.errors import CdiError
from cdi.spec import Spec
from cdi.store import Store
from dra_driver.errors import NodeError
from dra_driver.kubeletplugin.claims import ClaimUid
from dra_driver.kubeletplugin.disk_calls import disk_call


class SpecFiles:
    """Spec files named ``k8s.<driver>-claim_<claim UID>.json``, as NVIDIA's driver names its own.

    Every error is a NodeError that names the directory and the mend.
    """

    def __init__(self, directory: Path, vendor: str) -> None:
        # Written files do not outlive the boot: see `ledger` on fsync.
        self._store = Store(directory, vendor, CDI_CLASS, fsync=False)

    @property
    def directory(self) -> Path:
        return self._store.directory

    def write(self, uid: ClaimUid, spec: Spec) -> str:
        """Write the spec of a claim; the text that was written."""
        with self._errors():
            return self._store.write(spec, uid).read_text()

    def restore(self, uid: ClaimUid, text: str) -> None:
        """Write what was written before; where it is still there, nothing happens."""
        with self._errors():
            self._store.write(from_text(text), uid)

    def read(self, uid: ClaimUid) -> Spec | None:
        """The spec of a claim; None: there is none."""
        with self._errors():
            return self._store.read(uid)

    def exists(self, uid: ClaimUid) -> bool:
        """Whether the claim has a file, readable or not."""
        path = self._store.path(uid)
        try:
            with disk_call(f"look for {path}"):
                return path.exists()
        except OSError as e:
            raise NodeError(f"CDI file {path} cannot be looked for: {e.strerror}") from e

    def remove(self, uid: ClaimUid) -> None:
        with self._errors():
            self._store.remove(uid)

    def claims(self) -> tuple[ClaimUid, ...]:
        """The claims that have a file."""
        with self._errors():
            return tuple(ClaimUid(uid) for uid in self._store.ids())

    def sweep(self) -> None:
        """Remove what a killed writer left half written."""
        with self._errors():
            self._store.sweep()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with disk_call(f"look after CDI files in {self.directory}"):
                yield
        except CdiError as e:
            raise NodeError(str(e)) from e
