"""All files of a claim that others read: its CDI spec, and the metadata that it shows."""

from collections.abc import Sequence
from dataclasses import replace

from cdi import Spec
from cdi.encode import to_json
from dra_driver.errors import LostRecord
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

    def restore(self, record: Record) -> None:
        """Write again what is gone of a completed claim."""
        self._metadata.restore(record.documents)
        self._specs.restore(record.claim.uid, record.spec or "")

    def exist(self, record: Record) -> bool:
        """Whether nothing is gone of a completed claim, readable or not."""
        uid, requests = record.claim.uid, {one.request for one in record.holdings}
        return self._specs.exists(uid) and self._metadata.exist(uid, requests)

    def found(self, record: Record) -> Record:
        """*record* with the texts that are there. LostRecord: not all of them are."""
        spec = self._specs.read(record.claim.uid)
        documents = self._metadata.shown(record.claim.uid, spec) if spec else None
        if spec is None or documents is None:
            raise LostRecord(
                f"what was recorded of claim {record.claim} is lost, and so are its files: delete "
                "the pods that use it"
            )
        return replace(record, spec=to_json(spec), documents=documents)

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
