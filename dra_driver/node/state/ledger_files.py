"""The files of the ledger: what a record looks like, what is damaged, what the disk refuses."""

import errno
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from dra_driver.base.codec import Codec, Undecodable
from dra_driver.base.files import NotAFile, disk_errors, read_file
from dra_driver.base.frozen import frozen
from dra_driver.k8s.claims import ClaimUid
from dra_driver.model.gpus import DeviceName, GpuUuid
from dra_driver.model.offer import gpu_name_of
from dra_driver.model.records import ClaimRecord
from dra_driver.model.steps import CreatePartition, Step

CLAIM_RECORDS: Final = Codec[ClaimRecord](ClaimRecord)


def encode_record(record: ClaimRecord, over: bytes | None = None) -> bytes:
    """The document of *record*: the same bytes for the same record. *over*: the one that it
    replaces, which another release may have written (``Codec.encode``)."""
    if any(isinstance(step, CreatePartition) for step in record.steps):
        record = replace(record, steps=tuple(map(_recorded, record.steps)))
    return CLAIM_RECORDS.encode(record, over=over)


def decode_record(content: bytes) -> ClaimRecord:
    """The record in *content*. Undecodable says why it is none."""
    record = CLAIM_RECORDS.decode(content)
    if record.completed and record.spec is None:
        raise Undecodable("ClaimRecord.spec is missing")
    return record


def _recorded(step: Step) -> Step:
    """What was begun before a crash is removed and not gone on with, so it is new to nobody."""
    return replace(step, new=False) if isinstance(step, CreatePartition) else step


_REMEDIES: Final[Mapping[int | None, str]] = {
    errno.EISDIR: "remove the directory that stands where the file should be",
    errno.ENOTEMPTY: "remove the directory that stands where the file should be",
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some space there, or raise the quota",
    errno.EROFS: "mount it writable",
    errno.EMFILE: "this process has too many files open, which should pass",
    errno.ENFILE: "this machine has too many files open",
    errno.ENOMEM: "this machine has no memory left",
    errno.EIO: (
        "look for errors of the disk in the kernel log; if it stays so, drain the node and reboot "
        "it: no record outlives that"
    ),
    errno.ENOTDIR: "remove the file that stands where the directory should be",
    errno.EEXIST: "remove the file that stands where the directory should be",
}
_READ_REMEDIES: Final = {**_REMEDIES, None: "ask as root, or give another --state-dir"}
CHANGE_REMEDIES: Final = {
    **_REMEDIES,
    None: "let this process write there, or give another --state-dir",
}

RECORD_SUFFIX = ".json"
ENDING_SUFFIX = ".ending"  # the record of a claim that is being taken back: a rename needs no room
UNREADABLE_SUFFIX = ".unreadable"


@frozen
class DamagedRecord:
    """A record whose content this release cannot read.

    With a *release*, which wrote it, it is not damaged: only such a release can take back what was
    done for its claim, so it stays as it is.
    """

    uid: ClaimUid
    path: Path
    reason: str
    gpus: frozenset[GpuUuid] = frozenset()  # those that it may hold, each all of it
    names: frozenset[DeviceName] = frozenset()  # what they are called; empty: it may hold any GPU
    release: str = ""

    def may_hold(self, gpu: GpuUuid | None, name: DeviceName) -> bool:
        """Whether it may hold the GPU of that name. One that was not seen when the record was read,
        or whose UUID is damaged, is known by its name only."""
        return not self.names or gpu in self.gpus or name in self.names


def read_ledger_directory(
    directory: Path,
) -> tuple[dict[ClaimUid, ClaimRecord], dict[ClaimUid, DamagedRecord]]:
    """The records in a directory of one boot, and those that are damaged. Changes nothing.

    NodeError: the directory cannot be read now. That says nothing of any claim.
    """
    records: dict[ClaimUid, ClaimRecord] = {}
    aside: dict[ClaimUid, DamagedRecord] = {}
    names = _listed(directory)
    # A newer record replaces an older one.
    for suffix in (UNREADABLE_SUFFIX, ENDING_SUFFIX, RECORD_SUFFIX):
        for name in names:
            if name.endswith(suffix) and _UID.fullmatch(name.removesuffix(suffix)):
                _read_one(directory / name, records, aside)
    return records, {uid: damaged for uid, damaged in aside.items() if uid not in records}


def _listed(directory: Path) -> list[str]:
    """Not by ``Path.glob``, which finds nothing where it may not look."""
    with disk_errors(f"read the ledger in {directory}", _READ_REMEDIES):
        try:
            return sorted(os.listdir(directory))
        except FileNotFoundError:
            return []


def read_record(path: Path) -> bytes | None:
    """None: it is gone. NodeError: it cannot be read now, which says nothing of what is in it.
    Undecodable: it is no file. A FIFO would block; a link that leads nowhere is no record that was
    removed."""
    with disk_errors(f"read the record {path}", _READ_REMEDIES):
        try:
            return read_file(path)
        except NotAFile:
            raise Undecodable("it is no file") from None
        except OSError as e:
            if e.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP) and path.is_symlink():
                raise Undecodable("it is a link that leads nowhere") from None
            if e.errno == errno.ENOENT:
                return None
            raise


def read_replaced_record(path: Path) -> bytes | None:
    """What is there of a record that is about to be replaced. None: nothing, or no file. NodeError:
    it cannot be read now."""
    try:
        return read_record(path)
    except Undecodable:
        return None


def remove_record(path: Path) -> None:
    """Whatever is there, if anything. OSError: among others where it is a directory with files."""
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        path.rmdir()


def _read_one(
    path: Path, records: dict[ClaimUid, ClaimRecord], aside: dict[ClaimUid, DamagedRecord]
) -> None:
    uid, text = ClaimUid(path.stem), b""
    try:
        content = read_record(path)
        if content is None:
            return  # its claim was forgotten since the directory was listed
        text = content
        record = decode_record(text)
        if uid != record.claim.uid:
            raise Undecodable(f"it is of claim UID {record.claim.uid}")
    except Undecodable as e:
        named = _named_gpus(text)
        gpus, names = frozenset(named), frozenset(named.values())
        aside[uid] = DamagedRecord(uid, path, str(e), gpus, names, e.release)
    else:
        records[uid] = (
            mark_ending(record) if path.suffix == ENDING_SUFFIX else without_texts(record)
        )


def without_texts(record: ClaimRecord) -> ClaimRecord:
    """What is kept of it in memory."""
    if record.spec is None and not record.documents:
        return record
    return replace(record, spec=None, documents=())


def mark_ending(record: ClaimRecord) -> ClaimRecord:
    """It from the moment on when its claim is taken back: that is not prepared any more."""
    return replace(without_texts(record), prepared=None)


def discard_other_boots(mine: Path) -> None:
    """Remove what earlier boots recorded: their effects are gone with them."""
    for old in _other_boots(mine):
        shutil.rmtree(old)  # it follows no link


def allocations_of_other_boots(mine: Path) -> dict[ClaimUid, ClaimRecord]:
    """What containers had when the node went down, as if its preparation had begun: the kubelet
    gives it to them again, and until then its GPUs stay as they were offered. NodeError: that
    cannot be read now."""
    return {
        uid: replace(mark_ending(record), steps=())
        for old in _other_boots(mine)
        for uid, record in read_ledger_directory(old)[0].items()
        if record.allocation is not None
    }


def _other_boots(mine: Path) -> list[Path]:
    """The directories of earlier boots."""
    if not mine.parent.is_dir():
        return []
    directories = sorted(mine.parent.iterdir())
    return [old for old in directories if old.is_dir() and not old.is_symlink() and old != mine]


def set_aside_record(damaged: DamagedRecord) -> DamagedRecord:
    """Out of the way of the record that will replace it, and kept for whoever wants to look. Where
    a directory is in the way of that, it stays where it is, and so does one of another release."""
    if damaged.release:
        return damaged
    moved = damaged.path.with_suffix(UNREADABLE_SUFFIX)
    try:
        os.replace(damaged.path, moved)
    except OSError as e:
        if e.errno not in (errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST):
            raise
        return damaged
    return replace(damaged, path=moved)


def _named_gpus(text: bytes) -> Mapping[GpuUuid, DeviceName]:
    """The GPUs that a damaged record still names, and what they were called. None at all where the
    list of its holdings is damaged itself: what is missing may have named others."""
    record = text.decode(errors="replace")
    try:
        holdings, _ = json.JSONDecoder().raw_decode(record.partition('"holdings":')[2].lstrip())
        return {
            GpuUuid(_text(holding["gpu"])): gpu_name_of(_text(holding["device"]))
            for holding in holdings
        }
    except (ValueError, TypeError, KeyError):
        return {}


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    raise TypeError


_UID = re.compile(r"[0-9A-Za-z]([\w.:-]*[0-9A-Za-z])?", re.ASCII)  # another file is not ours
