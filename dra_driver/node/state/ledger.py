"""Claims that were begun and completed: one file per claim, so that a crash at any moment is found.

Layout: ``<directory>/<boot ID>/<claim UID>.json``. What a claim did to a node does not outlive a
boot, so the records of other boots are void as a whole. For the same reason nothing here is
fsynced: a killed process loses nothing that it wrote, and a power cut ends the boot. What is left
of an allocation of another boot is what it holds: the kubelet asks nothing before its container
starts again.

The record of a claim that is taken back is renamed to ``<claim UID>.ending`` first: that needs no
room on a disk that is full. One that is damaged is set aside as ``<claim UID>.unreadable`` with its
reason; what it may hold is kept from others until its claim is written or forgotten. Its
partitions are known all the same: what a record says of them stands once more in
``<claim UID>.partitions``, as a record that was begun. What damages the one leaves the other, and
nobody takes what is ours for somebody else's.

A record that another release wrote and this one does not understand (``base.codec``) stays as it
is, and its claim as it was prepared, until a release takes it back that does.
"""

import bisect
import os
import re
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path

from dra_driver.base.codec import Undecodable
from dra_driver.base.errors import ClaimError, ClaimRecordLost, NodeError
from dra_driver.base.files import disk_errors, write_atomically
from dra_driver.k8s.claims import ClaimUid
from dra_driver.model.gpus import DeviceName, Gpu, GpuUuid, PartitionKey
from dra_driver.model.records import ClaimRecord, Holding, HoldingsByGpu, holdings_by_gpu
from dra_driver.model.steps import CreatePartition, SetMigMode
from dra_driver.node.state.ledger_files import (
    CHANGE_REMEDIES,
    ENDING_SUFFIX,
    RECORD_SUFFIX,
    UNREADABLE_SUFFIX,
    DamagedRecord,
    allocations_of_other_boots,
    decode_record,
    discard_other_boots,
    encode_record,
    mark_ending,
    read_ledger_directory,
    read_record,
    read_replaced_record,
    remove_record,
    set_aside_record,
    without_texts,
)

PARTITIONS_SUFFIX = ".partitions"

RecordedPartitions = frozenset[tuple[GpuUuid, PartitionKey]]


class PartitionFiles:
    """The ``.partitions`` files of one boot."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._written: dict[ClaimUid, bytes] = {}  # empty: before this process

    def write(self, record: ClaimRecord) -> None:
        """Before a partition is created for *record*, and whenever more is known of it. OSError."""
        uid = record.claim.uid
        if not record.created_partitions:
            self.remove(uid)
            return
        before = read_replaced_record(self._path(uid)) if self._written.get(uid) == b"" else None
        text = encode_record(_partitions_of(record), before)
        if self._written.get(uid) == text:
            return
        write_atomically(self._path(uid), text)
        self._written[uid] = text

    def read(self, uid: ClaimUid) -> ClaimRecord | None:
        """The partitions that were created for the claim; None: none, as far as is known.
        NodeError: it cannot be read now."""
        try:
            text = read_record(self._path(uid))
            record = decode_record(text) if text is not None else None
        except Undecodable:
            return None
        return record if record and record.claim.uid == uid else None

    def remove(self, uid: ClaimUid) -> None:
        """Once nothing of it is left. OSError."""
        if uid in self._written:
            remove_record(self._path(uid))
            del self._written[uid]

    def remove_all_but(self, uids: Iterable[ClaimUid]) -> None:
        """Remove the files of other claims than *uids*: there a crash came after the record was
        removed, or before it was written. OSError."""
        known = set(uids)
        present = {ClaimUid(path.stem) for path in self._directory.glob(f"*{PARTITIONS_SUFFIX}")}
        for uid in present - known:
            remove_record(self._path(uid))
        self._written = dict.fromkeys(present & known, b"")

    def _path(self, uid: ClaimUid) -> Path:
        return self._directory / f"{uid}{PARTITIONS_SUFFIX}"


class PartitionHistory:
    """The partitions that claims had at some time or later. For one thread at a time."""

    def __init__(self) -> None:
        self._changes = 0
        self._last: dict[tuple[GpuUuid, PartitionKey], int] = {}  # when a claim let it go

    @property
    def now(self) -> int:
        """This moment, to be asked about later."""
        return self._changes

    def let_go(self, partitions: Iterable[tuple[GpuUuid, PartitionKey]]) -> None:
        """A claim has these no more. As many are remembered as the node's GPUs can have."""
        self._changes += 1
        self._last |= dict.fromkeys(partitions, self._changes)

    def since(self, moment: int) -> Iterator[tuple[GpuUuid, PartitionKey]]:
        """What claims had at *moment* or later, and do not have any more, as far as is known."""
        return (partition for partition, changes in self._last.items() if changes > moment)


def _partitions_of(record: ClaimRecord) -> ClaimRecord:
    steps = tuple(step for step in record.steps if isinstance(step, SetMigMode | CreatePartition))
    return ClaimRecord(
        record.claim,
        tuple(holding for holding in record.holdings if holding.created_for_claims),
        steps,
    )


class Ledger:
    """The records of this boot, known after the first ``reload``. Thread safe.

    One process at a time may use it: the one that holds the lease
    (``kubeletplugin.serve.rolling_update``).
    """

    def __init__(self, directory: Path, boot_id: str) -> None:
        self._directory = directory / boot_id
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._index: dict[ClaimUid, ClaimRecord] = {}  # without the texts of CDI files
        self._held: dict[GpuUuid, tuple[Holding, ...]] = {}  # another one after each change
        self._sorted: tuple[HoldingsByGpu, tuple[ClaimRecord, ...]] = (self._held, ())
        self._aside: dict[ClaimUid, DamagedRecord] = {}
        self._has_one_file: set[ClaimUid] = set()  # at most: none was there before this process
        self._served: frozenset[ClaimUid] = frozenset()  # the claims under MPS, in the index
        self._partition_files = PartitionFiles(self._directory)
        self._partition_records: dict[ClaimUid, ClaimRecord] = {}  # by claim that is set aside
        self._history = PartitionHistory()

    def peek(self) -> None:
        """Look at the disk and leave it as it is: before this process has its first lease."""
        with self._disk_errors():
            index, aside = read_ledger_directory(self._directory)
            self._set_index(allocations_of_other_boots(self._directory) | index, aside)

    def reload(self) -> None:
        """Look at the disk: before the first use, and after another process held the lease.

        Only while this process holds the lease: it clears up what a crash left half written.
        """
        with self._disk_errors():
            self._directory.mkdir(mode=0o750, parents=True, exist_ok=True)
            for path in self._directory.glob(".*.tmp"):
                remove_record(path)  # a write that a crash cut short
            for uid, record in allocations_of_other_boots(self._directory).items():
                if not self._path(uid).exists():
                    write_atomically(self._path(uid), encode_record(record))
            discard_other_boots(self._directory)
            index, aside = read_ledger_directory(self._directory)
            for uid in index:
                path = self._path(uid)
                if not path.exists() and not path.with_suffix(ENDING_SUFFIX).exists():
                    # Set aside by a release that could not read it.
                    os.replace(path.with_suffix(UNREADABLE_SUFFIX), path)
            aside = {uid: set_aside_record(damaged) for uid, damaged in aside.items()}
            self._partition_files.remove_all_but((*index, *aside))
            self._set_index(index, aside)

    def _set_index(
        self, index: dict[ClaimUid, ClaimRecord], aside: dict[ClaimUid, DamagedRecord]
    ) -> None:
        read = ((uid, self._partition_files.read(uid)) for uid in aside)
        partitions = {uid: record for uid, record in read if record is not None}
        with self._lock:
            self._history.let_go(self._created())
            self._index, self._aside, self._partition_records = index, aside, partitions
            self._has_one_file.clear()
            self._held = holdings_by_gpu([*index.values(), *partitions.values()])
            self._served = frozenset(uid for uid, record in index.items() if record.namespaces)

    def records(self) -> tuple[ClaimRecord, ...]:
        """Every record, without the texts of CDI files, by namespace and name.

        The same tuple as before where nothing changed: many ask again and again.
        """
        with self._lock:
            if self._sorted[0] is not self._held:
                records = sorted(self._index.values(), key=lambda record: record.claim)
                self._sorted = (self._held, tuple(records))
            return self._sorted[1]

    def known(self, uid: ClaimUid) -> ClaimRecord | None:
        """The record of a claim, without the text of its CDI file."""
        with self._lock:
            return self._index.get(uid)

    def partitions_record(self, uid: ClaimUid) -> ClaimRecord | None:
        """The partitions of a claim whose record cannot be read, as if its preparation had begun.
        None: none was created for it, or its record can be read."""
        with self._lock:
            return self._partition_records.get(uid)

    def record(self, uid: ClaimUid) -> ClaimRecord | None:
        """The whole record of a claim, read from its file. ClaimRecordLost: somebody removed or
        damaged that. NodeError: it cannot be read now."""
        known = self.known(uid)
        if known is None or not known.completed:
            return known
        lost = f"the record of claim {known.claim} at {self._path(uid)} is lost"
        try:
            text = read_record(self._path(uid))
            if text is not None:
                return decode_record(text)
        except Undecodable as e:
            raise ClaimRecordLost(f"{lost}: {e}") from e
        raise ClaimRecordLost(lost)

    def held(self) -> HoldingsByGpu:
        """What claims hold of each GPU. A snapshot that does not change."""
        with self._lock:
            return self._held

    def mark(self) -> int:
        """This moment, for :meth:`partitions_since`."""
        with self._lock:
            return self._history.now

    def partitions_since(self, mark: int) -> RecordedPartitions:
        """The partitions that claims had at any time since *mark*."""
        with self._lock:
            return self._created().union(self._history.since(mark))

    def _created(self) -> RecordedPartitions:
        records = (*self._index.values(), *self._partition_records.values())
        return frozenset(partition for record in records for partition in record.created_partitions)

    def neighbours(self, uid: ClaimUid, gpus: Collection[GpuUuid]) -> tuple[ClaimRecord, ...]:
        """The records of other claims that hold more than admin access to *gpus*. Of a claim whose
        record cannot be read: the partitions that were created for it."""
        with self._lock:
            uids = {
                holding.claim.uid
                for gpu in gpus
                for holding in self._held.get(gpu, ())
                if not holding.admin
            }
            return tuple(
                self._index.get(other) or self._partition_records[other]
                for other in sorted(uids - {uid})
            )

    def served(self) -> tuple[ClaimRecord, ...]:
        """The records of claims that are shared by MPS."""
        with self._lock:
            return tuple(self._index[uid] for uid in sorted(self._served))

    def refuse_other_release(self, uid: ClaimUid) -> None:
        """NodeError: another release wrote the record of this claim, and alone can change it."""
        with self._lock:
            aside = self._aside.get(uid)
        if aside is not None and aside.release:
            raise NodeError(
                f"the claim with UID {uid} was prepared by release {aside.release} of this driver, "
                f"and what was done for it is not known here: install release {aside.release} "
                f"again, or drain the node and reboot it ({aside.reason}; {aside.path})"
            )

    def set_aside(self) -> tuple[DamagedRecord, ...]:
        with self._lock:
            return tuple(self._aside[uid] for uid in sorted(self._aside))

    def wait_for_change(self, timeout_seconds: float) -> None:
        """Return when this process changed what is held, or when the time is over."""
        with self._changed:
            before = self._held
            self._changed.wait_for(lambda: self._held is not before, timeout_seconds)

    def narrow(self, uid: ClaimUid, names: Collection[DeviceName], gpus: Iterable[Gpu]) -> None:
        """The claim of an unreadable record holds something of the GPUs of these names, and of no
        others. *gpus*: those of the node that can be seen now."""
        uuids = frozenset(gpu.uuid for gpu in gpus if gpu.name in names)
        with self._lock:
            if (damaged := self._aside.get(uid)) is not None:
                self._aside[uid] = replace(damaged, gpus=uuids, names=frozenset(names))

    def begin(self, record: ClaimRecord) -> None:
        """From here on its claim holds what it is being given. NodeError as :meth:`write`.

        On the disk only where something is done that has to be undone after a crash: whatever has
        no record is not prepared, and its files are removed.
        """
        uid = record.claim.uid
        with self._lock:
            if not record.steps and uid not in self._index and uid not in self._aside:
                self._has_one_file.add(uid)
                self._replace(uid, record)
                return
        self.write(record)

    def write(self, record: ClaimRecord) -> None:
        """Replace the record of a claim, atomically, after what it says of partitions. NodeError:
        the disk did not take it."""
        uid = record.claim.uid
        text = encode_record(record, self._text_of_others(uid))
        with self._disk_errors():
            try:
                self._put(record, text)
            except FileNotFoundError:  # somebody removed the directory
                self._directory.mkdir(mode=0o750, parents=True, exist_ok=True)
                self._put(record, text)
        with self._lock:
            aside = self._aside.pop(uid, None)
            if uid not in self._index and aside is None:
                self._has_one_file.add(uid)
            self._replace(uid, without_texts(record))
        if aside is not None and aside.path != self._path(uid):
            with self._disk_errors():
                remove_record(aside.path)  # it is known again

    def end(self, record: ClaimRecord) -> None:
        """From here on its claim is being taken back, and not prepared any more. Needs no room on
        the disk. NodeError: the disk did not take it."""
        path = self._path(record.claim.uid)
        self._has_one_file.discard(record.claim.uid)
        with self._disk_errors(), suppress(FileNotFoundError):  # somebody removed it
            os.replace(path, path.with_suffix(ENDING_SUFFIX))
        with self._lock:
            self._replace(record.claim.uid, mark_ending(record))

    def forget(self, uid: ClaimUid) -> None:
        """Remove the record of a claim, if there is one."""
        others = () if uid in self._has_one_file else (ENDING_SUFFIX, UNREADABLE_SUFFIX)
        with self._disk_errors():
            for suffix in (RECORD_SUFFIX, *others):
                remove_record(self._path(uid).with_suffix(suffix))
            self._partition_files.remove(uid)
        with self._lock:
            self._has_one_file.discard(uid)
            self._aside.pop(uid, None)
            self._replace(uid, None)

    def _text_of_others(self, uid: ClaimUid) -> bytes | None:
        """What an earlier process, perhaps of another release, wrote of a claim; None: none did."""
        if uid not in self._index or uid in self._has_one_file:
            return None
        return read_replaced_record(self._path(uid))

    def _put(self, record: ClaimRecord, text: bytes) -> None:
        path = self._path(record.claim.uid)
        self._partition_files.write(record)
        write_atomically(path, text)

    def _replace(self, uid: ClaimUid, record: ClaimRecord | None) -> None:
        """Only the GPUs of the one claim are looked at: the cost must not grow with the others."""
        before = self._index.pop(uid, None) or self._partition_records.pop(uid, None)
        if before is not None:
            self._history.let_go(before.created_partitions)
        if record is not None:
            self._index[uid] = record
        served = record is not None and bool(record.namespaces)
        if served != (uid in self._served):
            self._served ^= {uid}
        held = dict(self._held)
        for gpu in before.gpus if before else ():
            held[gpu] = tuple(holding for holding in held[gpu] if holding.claim.uid != uid)
            if not held[gpu]:
                del held[gpu]
        for holding in record.holdings if record else ():
            others = held.get(holding.gpu, ())
            index = bisect.bisect(others, holding.claim, key=lambda other: other.claim)
            held[holding.gpu] = (*others[:index], holding, *others[index:])
        self._held = held
        self._changed.notify_all()

    def _disk_errors(self) -> AbstractContextManager[None]:
        return disk_errors(f"change the ledger in {self._directory}", CHANGE_REMEDIES)

    def _path(self, uid: ClaimUid) -> Path:
        if not re.fullmatch(r"[0-9A-Za-z][0-9A-Za-z-]*", uid):
            raise ClaimError(f"claim UID {uid!r} is no UID: letters, digits and dashes only")
        return self._directory / f"{uid}{RECORD_SUFFIX}"
