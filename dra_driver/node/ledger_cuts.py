"""Which partitions were cut for claims, and for those whose records cannot be read.

What a record says of them stands once more in ``<claim UID>.cuts``, as a record that was begun:
what damages the one leaves the other, and nobody takes what is ours for somebody else's.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from dra_driver.kubeletplugin.claims import ClaimUid
from dra_driver.model.devices import GpuUuid
from dra_driver.model.holdings import Record
from dra_driver.model.mig import PartitionKey
from dra_driver.model.steps import CutPartition, SetMigMode
from dra_driver.node.ledger_files import read_bytes
from dra_driver.node.records import decode_record, encode_record
from dra_driver.node.step_records import UnreadableRecord

SUFFIX = ".cuts"
_TEMPORARY = ".tmp"

Cuts = frozenset[tuple[GpuUuid, PartitionKey]]


class CutFiles:
    """The ``.cuts`` files of one boot."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._written: dict[ClaimUid, bytes] = {}  # empty: before this process

    def write(self, record: Record) -> None:
        """Before anything is cut for *record*, and whenever more is known of it. OSError."""
        uid = record.claim.uid
        if not record.cut:
            if uid in self._written:
                self.remove(uid)
            return
        text = encode_record(_of_cuts(record))
        if self._written.get(uid) == text:
            return
        temporary = self._directory / f".{uid}{SUFFIX}{_TEMPORARY}"
        try:
            temporary.write_bytes(text)
            os.replace(temporary, self._path(uid))
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        self._written[uid] = text

    def read(self, uid: ClaimUid) -> Record | None:
        """What was cut for the claim; None: nothing, as far as it can be known. NodeError: it
        cannot be read now."""
        try:
            record = decode_record(read_bytes(self._path(uid)))
        except (FileNotFoundError, UnreadableRecord):
            return None
        return record if record.claim.uid == uid else None

    def remove(self, uid: ClaimUid) -> None:
        """Once nothing of it is left. OSError."""
        self._written.pop(uid, None)
        self._path(uid).unlink(missing_ok=True)

    def keep(self, uids: Iterable[ClaimUid]) -> None:
        """Remove those of other claims: a crash came after the record was removed, or before it was
        written. OSError."""
        known = set(uids)
        there = {ClaimUid(path.stem) for path in self._directory.glob(f"*{SUFFIX}")}
        for uid in there - known:
            self._path(uid).unlink(missing_ok=True)
        self._written = dict.fromkeys(there & known, b"")

    def _path(self, uid: ClaimUid) -> Path:
        return self._directory / f"{uid}{SUFFIX}"


class CutHistory:
    """What claims had cut at some time or later. Not safe to use from several threads."""

    def __init__(self) -> None:
        self._changes = 0
        self._last: dict[tuple[GpuUuid, PartitionKey], int] = {}  # when a claim let it go

    @property
    def now(self) -> int:
        """This moment, to be asked about later."""
        return self._changes

    def let_go(self, cuts: Iterable[tuple[GpuUuid, PartitionKey]]) -> None:
        """A claim has these no more. As many are remembered as can be cut of the node's GPUs."""
        self._changes += 1
        self._last |= dict.fromkeys(cuts, self._changes)

    def since(self, moment: int) -> Iterator[tuple[GpuUuid, PartitionKey]]:
        """What claims had at *moment* or later, and do not have any more, as far as is known."""
        return (one for one, changes in self._last.items() if changes > moment)


def _of_cuts(record: Record) -> Record:
    steps = tuple(step for step in record.steps if isinstance(step, SetMigMode | CutPartition))
    return Record(record.claim, tuple(one for one in record.holdings if one.cut), steps)
