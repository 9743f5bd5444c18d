"""Profiles as files: one file, a directory, or a mounted ConfigMap; and the last one in force.

``LastProfileFile`` keeps the profile that was in force last, where it outlives a restart: a label
can be mistyped, or a profile broken, while the plugin is restarted, and the node then goes on with
what held before, as it would have without the restart.
"""

import contextlib
import logging
import os
import re
import threading
from dataclasses import field
from pathlib import Path
from typing import Any, Final

from dra_driver.base.codec import Codec
from dra_driver.base.errors import SettingsError
from dra_driver.base.files import read_file, signature_of, write_atomically
from dra_driver.base.frozen import frozen
from dra_driver.base.yaml_documents import load_documents
from dra_driver.model.profiles import Profile

log = logging.getLogger(__name__)

LAST_PROFILES: Final = Codec[Profile](Profile)


class LastProfileFile:
    """The profile in *path*. Where it cannot be written or read, a warning is logged."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Profile | None:
        """What was kept; None: nothing, or by a release that this one does not understand."""
        try:
            return LAST_PROFILES.decode(read_file(self._path))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as e:
            facts = {"path": str(self._path), "error": str(e)}
            log.warning("the last profile cannot be read", extra=facts)
            return None

    def keep(self, profile: Profile) -> None:
        """Keep *profile* instead of what was kept before; a reader sees the one or the other."""
        try:
            self._path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            write_atomically(self._path, LAST_PROFILES.encode(profile))
        except OSError as e:
            facts = {"path": str(self._path), "error": str(e)}
            log.warning("the profile in force is not kept for a restart", extra=facts)


# a ConfigMap's key, unless it is hidden
_CONFIGMAP_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_SUFFIX = re.compile(r"\.ya?ml$")
_MOUNTED = "..data"  # the link by which the kubelet changes all files of a ConfigMap at once

_Fingerprint = tuple[tuple[object, ...], ...]


@frozen
class ProfileDocument:
    """One YAML document; None: its file has none."""

    where: str  # "/etc/profiles/a.yaml", or "/etc/profiles/all.yaml (document 2)"
    stem: str  # what its file is called: "a"
    content: Any
    text: str = field(default="", repr=False, compare=False)  # of its whole file


@frozen
class UnreadableProfileFile:
    """A file whose documents cannot be read."""

    why: str  # "/etc/profiles/a.yaml: while parsing ..."
    stem: str  # what it is called: "a"
    text: str  # what is there instead, as far as it is text


@frozen
class ProfileFileContents:
    """All documents, in order, and the files that cannot be read."""

    documents: tuple[ProfileDocument, ...] = ()
    unreadable: tuple[UnreadableProfileFile, ...] = ()


class ProfileFiles:
    """The files at one path; for many threads."""

    def __init__(self, path: Path) -> None:
        """*path*: a file or a directory."""
        self._path = path
        self._lock = threading.Lock()
        self._print: _Fingerprint | None = None
        self._contents = ProfileFileContents()

    def read(self) -> ProfileFileContents:
        """What is in them now; the same object as long as none of them changed.

        SettingsError: the path itself cannot be read.
        """
        try:
            with self._lock, contextlib.suppress(FileNotFoundError):
                return self._read()
            # A ConfigMap that changed under our hands took its old files away: now for the new.
            with self._lock:
                return self._read()
        except OSError as e:
            raise SettingsError(f"--profiles {self._path} cannot be read: {e}") from e

    def directories(self) -> frozenset[str]:
        """Where something happens when any of the files changes, comes or goes; empty: there is
        nothing at the path."""
        try:
            files = [path for _, path in _files(self._path)]
        except OSError:
            return frozenset()
        lists = {os.path.abspath(self._path)} if self._path.is_dir() else set()
        named = {os.path.dirname(os.path.abspath(file)) for file in files}
        return frozenset({*lists, *named, *(os.path.dirname(os.path.realpath(f)) for f in files)})

    def _read(self) -> ProfileFileContents:
        files = _files(self._path)
        now = tuple(_stat(file) for _, file in files)
        if now != self._print:
            self._contents = _contents(files)
            self._print = now
        return self._contents


def profile_stem(name: str) -> str:
    """What a file is called without the ending of YAML files."""
    return _SUFFIX.sub("", name)


def _files(path: Path) -> list[tuple[str, Path]]:
    """The files at *path*, each with what people call it, in order.

    Those of a mounted ConfigMap are taken from one state of it, never partly from the next.
    """
    if not path.is_dir():
        if path.exists() and not path.is_file():  # a FIFO without a writer would never be read
            raise OSError(f"{path} is neither a file nor a directory")
        return [(str(path), path)]
    directory = Path(os.path.realpath(path / _MOUNTED)) if (path / _MOUNTED).is_dir() else path
    names = sorted(name for name in os.listdir(directory) if _CONFIGMAP_KEY.fullmatch(name))
    return [(str(path / name), directory / name) for name in names if (directory / name).is_file()]


def _stem_of_path(shown: str) -> str:
    return profile_stem(shown.rpartition("/")[2])


def _stat(file: Path) -> tuple[object, ...]:
    return file, *signature_of(file.stat())


def _contents(files: list[tuple[str, Path]]) -> ProfileFileContents:
    documents: list[ProfileDocument] = []
    unreadable: list[UnreadableProfileFile] = []
    for shown, file in files:
        content = file.read_bytes()
        try:
            documents += _documents(shown, content)
        except ValueError as e:
            stem = _stem_of_path(shown)
            unreadable.append(UnreadableProfileFile(f"{shown}: {e}", stem, _text(content)))
    return ProfileFileContents(tuple(documents), tuple(unreadable))


def _documents(shown: str, content: bytes) -> list[ProfileDocument]:
    """The documents of one file, all or none of them."""
    called = _stem_of_path(shown)
    documents = [each for each in load_documents(content) if each is not None]
    text = _text(content)
    if len(documents) < 2:
        return [ProfileDocument(shown, called, documents[0] if documents else None, text)]
    return [
        ProfileDocument(f"{shown} (document {number})", called, each, text)
        for number, each in enumerate(documents, 1)
    ]


def _text(content: bytes) -> str:
    """Whatever the encoding is that YAML takes, names of plain letters can be found in it."""
    return content.decode(errors="replace").replace("\0", "")
