"""All files of a claim that others read: its CDI spec, and the metadata that it shows."""

from collections.abc import Sequence

from cdi import Spec
from dra_driver.kubeletplugin.claims import ClaimUid
from dra_driver.kubeletplugin.device_metadata import Document
from dra_driver.model.holdings import Record
from dra_driver.node.metadata_files import MetadataFiles
from dra_driver.node.spec_files import SpecFiles


class ClaimFiles:
    """Written, restored and removed together. Every error is a NodeError."""

    def __init__(self, specs: SpecFiles, metadata: MetadataFiles) -> None:
        self._specs = specs
        self._metadata = metadata

    @property
    def metadata_directory(self) -> str:
        """Where documents have to be."""
        return str(self._metadata.directory)

    def write(self, uid: ClaimUid, spec: Spec, documents: Sequence[Document]) -> str:
        """Write *documents*, and then the spec that shows them; the text of the spec."""
        self._metadata.write(documents)
        return self._specs.write(uid, spec)

    def restore(self, record: Record) -> bool:
        """Write the spec again where it is gone. False: a document is, which nobody can."""
        spec = self._specs.restore(record.claim.uid, record.spec or "")
        return self._metadata.all_shown(spec)

    def exists(self, uid: ClaimUid) -> bool:
        """Whether the claim has a CDI spec, readable or not."""
        return self._specs.exists(uid)

    def remove(self, uid: ClaimUid) -> None:
        """Remove what there is, however little."""
        self._specs.remove(uid)
        self._metadata.remove(uid)

    def claims(self) -> frozenset[ClaimUid]:
        """The claims that have any file."""
        return self._metadata.claims() | frozenset(self._specs.claims())

    def sweep(self) -> None:
        """Remove what a killed writer left half written and no claim's name finds."""
        self._specs.sweep()
