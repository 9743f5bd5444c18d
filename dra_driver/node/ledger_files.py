"""The files of the ledger: which there are, which cannot be read, and what the disk refuses."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from dra_driver.errors import NodeError
from dra_driver.kubeletplugin.claims import ClaimUid
from dra_driver.model.devices import DeviceName
from dra_driver.model.holdings import Record
from dra_driver.model.offer import board
from dra_driver.node.records import decode_record
from dra_driver.node.step_records import UnreadableRecord

SUFFIX = ".json"
ASIDE = ".unreadable"
TEMPORARY = ".tmp"


@dataclass(frozen=True, slots=True)
class SetAside:
    """A record that this release cannot read."""

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
    """The records in a directory of one boot, and those that cannot be read. Changes nothing.

    NodeError: it is there, or may be, and cannot be listed.
    """
    records: dict[ClaimUid, Record] = {}
    aside: dict[ClaimUid, SetAside] = {}
    names = _listed(directory)
    for suffix in (ASIDE, SUFFIX):  # a newer record replaces the one that was set aside
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
        mend = _MENDS.get(e.errno or 0, "ask as root, or give another --state-dir")
        raise NodeError(f"the ledger in {directory} cannot be read: {e.strerror}; {mend}") from e


def _read_one(path: Path, records: dict[ClaimUid, Record], aside: dict[ClaimUid, SetAside]) -> None:
    uid = ClaimUid(path.stem)
    try:
        record = decode_record(path.read_bytes())
        if uid != record.claim.uid:
            raise UnreadableRecord(f"it is of claim UID {record.claim.uid}")
    except FileNotFoundError:
        return  # its claim was forgotten since the directory was listed
    except (OSError, UnreadableRecord) as e:
        aside[uid] = SetAside(uid, path, str(e), frozenset(_device_names(path)))
    else:
        records[uid] = replace(record, spec=None)


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


def _device_names(path: Path) -> Iterator[DeviceName]:
    """The devices that a damaged text still names (``"device": "gpu-0"``)."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return
    for name in re.findall(r'"device":\s*"([^"]+)"', text):
        yield DeviceName(name)


_MENDS = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some space there, or raise the quota",
    errno.EROFS: "mount it writable",
    errno.ENOTDIR: "remove the file that stands where the directory should be",
    errno.EEXIST: "remove the file that stands where the directory should be",
}


@contextmanager
def disk_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        mend = _MENDS.get(e.errno or 0, "let this process write there, or give another --state-dir")
        raise NodeError(f"the ledger in {directory} cannot be changed: {e.strerror}; {mend}") from e
