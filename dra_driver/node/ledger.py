"""Claims that were begun and completed: one file per claim, so that a crash at any moment is found.

Layout: ``<directory>/<boot ID>/<claim UID>.json``. What a claim did to a node does not outlive a
boot, so the records of other boots are void as a whole. For the same reason nothing here is
fsynced: a killed process loses nothing that it wrote, and a power cut ends the boot.

A record that cannot be read is set aside as ``<claim UID>.unreadable`` with its reason; what it may
hold is kept from others until its claim is written or forgotten.
"""

import bisect
import errno
import os
import re
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dra_driver.errors import ClaimError, NodeError
from dra_driver.kubeletplugin.claims import ClaimUid
from dra_driver.model.devices import DeviceName
from dra_driver.model.holdings import Held, Holding, Record
from dra_driver.model.offer import board
from dra_driver.node.records import decode_record, encode_record
from dra_driver.node.step_records import UnreadableRecord

_SUFFIX = ".json"
_ASIDE = ".unreadable"
_TEMPORARY = ".tmp"


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


class Ledger:
    """The records of this boot, known after the first ``reload``. Thread safe.

    One process at a time may use it: the one that has the turn (``kubeletplugin.turns``).
    """

    def __init__(self, directory: Path, boot_id: str) -> None:
        self._directory = directory / boot_id
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._index: dict[ClaimUid, Record] = {}  # without the texts of CDI files
        self._held: dict[DeviceName, tuple[Holding, ...]] = {}  # another one after each change
        self._sorted: tuple[Held, tuple[Record, ...]] = (self._held, ())
        self._aside: dict[ClaimUid, SetAside] = {}

    def peek(self) -> None:
        """Look at the disk and leave it as it is: before this process has its first turn."""
        with _disk_errors(self._directory):
            index, aside = read_directory(self._directory)
        with self._lock:
            self._index, self._aside = index, aside
            self._held = _held(index)

    def reload(self) -> None:
        """Look at the disk: before the first use, and after another process had its turn.

        Only while this process has the turn: it clears up what a crash left half written.
        """
        with _disk_errors(self._directory):
            self._directory.mkdir(mode=0o750, parents=True, exist_ok=True)
            _discard_other_boots(self._directory)
            for path in self._directory.glob(f".*{_TEMPORARY}"):
                path.unlink(missing_ok=True)  # a write that a crash cut short
            index, aside = read_directory(self._directory)
            for uid in index:
                if not self._path(uid).exists():  # set aside by a release that could not read it
                    os.replace(self._path(uid).with_suffix(_ASIDE), self._path(uid))
            aside = {uid: _put_aside(found) for uid, found in aside.items()}
        with self._lock:
            self._index, self._aside = index, aside
            self._held = _held(index)

    def records(self) -> tuple[Record, ...]:
        """Every record, without the texts of CDI files, by namespace and name.

        The same tuple as before where nothing changed: many ask again and again.
        """
        with self._lock:
            if self._sorted[0] is not self._held:
                records = sorted(self._index.values(), key=lambda record: record.claim)
                self._sorted = (self._held, tuple(records))
            return self._sorted[1]

    def known(self, uid: ClaimUid) -> Record | None:
        """The record of a claim, without the text of its CDI file."""
        with self._lock:
            return self._index.get(uid)

    def record(self, uid: ClaimUid) -> Record | None:
        """The whole record of a claim, read from its file."""
        known = self.known(uid)
        if known is None or not known.completed:
            return known
        try:
            return decode_record(self._path(uid).read_bytes())
        except (OSError, UnreadableRecord) as e:
            raise NodeError(
                f"the record of claim {known.claim} at {self._path(uid)} cannot be read: {e}"
            ) from e

    def held(self) -> Held:
        """Which claims hold which device. A snapshot that does not change."""
        with self._lock:
            return self._held

    def neighbours(self, uid: ClaimUid, gpus: Collection[str]) -> tuple[Record, ...]:
        """The records of other claims that hold any part of *gpus*, each said by its UUID, by its
        name (``gpu-0``), or by both: a GPU can get another name within a boot."""
        with self._lock:
            uids = {
                holding.claim.uid
                for device, holdings in self._held.items()
                for holding in holdings
                if holding.of_gpu in gpus or board(device) in gpus
            }
            return tuple(self._index[one] for one in sorted(uids - {uid}))

    def set_aside(self) -> tuple[SetAside, ...]:
        with self._lock:
            return tuple(self._aside[uid] for uid in sorted(self._aside))

    def wait_for_change(self, timeout_seconds: float) -> None:
        """Return when this process changed what is held, or when the time is over."""
        with self._changed:
            before = self._held
            self._changed.wait_for(lambda: self._held is not before, timeout_seconds)

    def narrow(self, uid: ClaimUid, devices: Iterable[DeviceName]) -> None:
        """The API server says which devices the claim of an unreadable record holds."""
        with self._lock:
            if (found := self._aside.get(uid)) is not None:
                self._aside[uid] = replace(found, mentions=frozenset(devices), known=True)

    def write(self, record: Record) -> None:
        """Replace the record of a claim, atomically. NodeError: the disk did not take it."""
        uid = record.claim.uid
        text = encode_record(record)
        with _disk_errors(self._directory):
            try:
                self._put(uid, text)
            except FileNotFoundError:  # somebody removed the directory
                self._directory.mkdir(mode=0o750, parents=True, exist_ok=True)
                self._put(uid, text)
        with self._lock:
            self._replace(uid, replace(record, spec=None))
            aside = self._aside.pop(uid, None)
        if aside is not None:
            with _disk_errors(self._directory):
                aside.path.unlink(missing_ok=True)  # it is known again

    def forget(self, uid: ClaimUid) -> None:
        """Remove the record of a claim, if there is one."""
        with _disk_errors(self._directory):
            self._path(uid).unlink(missing_ok=True)
            self._path(uid).with_suffix(_ASIDE).unlink(missing_ok=True)
        with self._lock:
            self._aside.pop(uid, None)
            self._replace(uid, None)

    def _put(self, uid: ClaimUid, text: bytes) -> None:
        path = self._path(uid)
        temporary = self._directory / f".{uid}{_TEMPORARY}"
        try:
            temporary.write_bytes(text)
            os.replace(temporary, path)
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def _replace(self, uid: ClaimUid, record: Record | None) -> None:
        """Only the devices of the one claim are looked at: the cost must not grow with the
        others."""
        before = self._index.pop(uid, None)
        if record is not None:
            self._index[uid] = record
        held = dict(self._held)
        for device in _devices(before) | _devices(record):
            holdings = [h for h in held.get(device, ()) if h.claim.uid != uid]
            for mine in record.holdings if record else ():
                if mine.device == device:
                    bisect.insort(holdings, mine, key=lambda h: (h.claim, h.share or ""))
            held[device] = tuple(holdings)
            if not held[device]:
                del held[device]
        self._held = held
        self._changed.notify_all()

    def _path(self, uid: ClaimUid) -> Path:
        if not re.fullmatch(r"[0-9A-Za-z][0-9A-Za-z-]*", uid):
            raise ClaimError(f"claim UID {uid!r} is no UID: letters, digits and dashes only")
        return self._directory / f"{uid}{_SUFFIX}"


def read_directory(directory: Path) -> tuple[dict[ClaimUid, Record], dict[ClaimUid, SetAside]]:
    """The records in a directory of one boot, and those that cannot be read. Changes nothing.

    NodeError: it is there, or may be, and cannot be listed.
    """
    records: dict[ClaimUid, Record] = {}
    aside: dict[ClaimUid, SetAside] = {}
    names = _listed(directory)
    for suffix in (_ASIDE, _SUFFIX):  # a newer record replaces the one that was set aside
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


def _discard_other_boots(mine: Path) -> None:
    """Remove what earlier boots recorded: their effects are gone with them."""
    for old in sorted(mine.parent.iterdir()):
        if old.is_dir() and old != mine:
            for path in old.iterdir():
                path.unlink(missing_ok=True)
            old.rmdir()


def _devices(record: Record | None) -> set[DeviceName]:
    return {holding.device for holding in record.holdings} if record else set()


def _held(index: dict[ClaimUid, Record]) -> dict[DeviceName, tuple[Holding, ...]]:
    held: dict[DeviceName, list[Holding]] = defaultdict(list)
    for record in sorted(index.values(), key=lambda record: record.claim):
        for holding in record.holdings:
            held[holding.device].append(holding)
    return {device: tuple(held[device]) for device in sorted(held)}


def _put_aside(found: SetAside) -> SetAside:
    """Out of the way of the record that will replace it, and kept for whoever wants to look."""
    moved = found.path.with_suffix(_ASIDE)
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
def _disk_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        mend = _MENDS.get(e.errno or 0, "let this process write there, or give another --state-dir")
        raise NodeError(f"the ledger in {directory} cannot be changed: {e.strerror}; {mend}") from e
