"""The files of the ledger: which there are, which are damaged, and what the disk refuses."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from dra_driver.errors import NodeError
from dra_driver.kubeletplugin.claims import ClaimUid
from dra_driver.kubeletplugin.disk_calls import disk_call
from dra_driver.model.devices import DeviceName
from dra_driver.model.holdings import Record
from dra_driver.model.offer import board
from dra_driver.node.records import decode_record
from dra_driver.node.step_records import UnreadableRecord

SUFFIX = ".json"
ENDING = ".ending"  # the record of a claim that is being taken back: a rename needs no room
ASIDE = ".unreadable"
TEMPORARY = ".tmp"


@dataclass(frozen=True, slots=True)
class SetAside:
    """A record whose content this release cannot read."""

    uid: ClaimUid
    path: Path
    reason: str
    mentions: frozenset[DeviceName]  # devices that its text names
    known: bool = False  # they are what the API server says

    def may_hold(self, device: str) -> bool:
        """A text that names no device could be of any; of a GPU it may hold all."""
        boards = {board(name) for name in self.mentions}
        return board(device) in boards or (not self.mentions and not self.known)


def read_directory(directory: Path) -> tuple[dict[ClaimUid, Record], dict[ClaimUid, SetAside]]:
    """The records in a directory of one boot, and those that are damaged. Changes nothing.

    NodeError: what is there cannot be told now. That says nothing of any claim.
    """
    records: dict[ClaimUid, Record] = {}
    aside: dict[ClaimUid, SetAside] = {}
    names = _listed(directory)
    for suffix in (ASIDE, ENDING, SUFFIX):  # a newer record replaces an older one
        for name in names:
            if name.endswith(suffix):
                _read_one(directory / name, records, aside)
    return records, {uid: found for uid, found in aside.items() if uid not in records}


def _listed(directory: Path) -> list[str]:
    """Not by ``Path.glob``, which finds nothing where it may not look."""
    try:
        return sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
    except OSError as e:
        raise _unreadable(f"the ledger in {directory}", e) from e


def read_bytes(path: Path) -> bytes:
    """NodeError: it cannot be read now, which says nothing of what is in it. FileNotFoundError: it
    is gone."""
    try:
        with disk_call(f"read {path}"):
            return path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as e:
        raise _unreadable(f"the record {path}", e) from e


def _unreadable(what: str, error: OSError) -> NodeError:
    mend = _MENDS.get(error.errno or 0, "ask as root, or give another --state-dir")
    return NodeError(f"{what} cannot be read: {error.strerror}; {mend}")


def _read_one(path: Path, records: dict[ClaimUid, Record], aside: dict[ClaimUid, SetAside]) -> None:
    uid = ClaimUid(path.stem)
    try:
        text = read_bytes(path)
    except FileNotFoundError:
        return  # its claim was forgotten since the directory was listed
    try:
        record = decode_record(text)
        if uid != record.claim.uid:
            raise UnreadableRecord(f"it is of claim UID {record.claim.uid}")
    except UnreadableRecord as e:
        aside[uid] = SetAside(uid, path, str(e), frozenset(_device_names(text)))
    else:
        records[uid] = ending(record) if path.suffix == ENDING else without_texts(record)


def without_texts(record: Record) -> Record:
    """What is kept of it in memory."""
    return replace(record, spec=None, documents=())


def ending(record: Record) -> Record:
    """It from the moment on when its claim is taken back: that is not prepared any more."""
    return replace(without_texts(record), prepared=None)


def discard_other_boots(mine: Path) -> None:
    """Remove what earlier boots recorded: their effects are gone with them."""
    for old in sorted(mine.parent.iterdir()):
        if old.is_dir() and old != mine:
            for path in old.iterdir():
                path.unlink(missing_ok=True)
            old.rmdir()


def put_aside(found: SetAside) -> SetAside:
    """Out of the way of the record that will replace it, and kept for whoever wants to look."""
    moved = found.path.with_suffix(ASIDE)
    os.replace(found.path, moved)
    return replace(found, path=moved)


def _device_names(text: bytes) -> Iterator[DeviceName]:
    """The devices that a damaged text still names (``"device": "gpu-0"``)."""
    for name in re.findall(r'"device":\s*"([^"]+)"', text.decode(errors="replace")):
        yield DeviceName(name)


_MENDS = {
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


@contextmanager
def disk_errors(directory: Path) -> Iterator[None]:
    try:
        with disk_call(f"change the ledger in {directory}"):
            yield
    except OSError as e:
        mend = _MENDS.get(e.errno or 0, "let this process write there, or give another --state-dir")
        raise NodeError(f"the ledger in {directory} cannot be changed: {e.strerror}; {mend}") from e
