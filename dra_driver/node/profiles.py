"""Profiles as files: one file, a directory, or a mounted ConfigMap."""

import contextlib
import os
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dra_driver.errors import SettingsError
from dra_driver.yaml_documents import documents

_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")  # a ConfigMap's key, unless it is hidden
_SUFFIX = re.compile(r"\.ya?ml$")
_MOUNTED = "..data"  # the link by which the kubelet changes all files of a ConfigMap at once

_Print = tuple[tuple[object, ...], ...]


@dataclass(frozen=True, slots=True)
class Document:
    """One YAML document; None: its file has none."""

    where: str  # "/etc/profiles/a.yaml", or "/etc/profiles/all.yaml (document 2)"
    stem: str  # what its file is called: "a"
    content: Any
    text: str = field(default="", repr=False, compare=False)  # of its whole file


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A file whose documents cannot be told."""

    why: str  # "/etc/profiles/a.yaml: while parsing ..."
    text: str  # what is there instead, as far as it is text


@dataclass(frozen=True, slots=True)
class Contents:
    """All documents, in order, and the files that have none that could be told."""

    documents: tuple[Document, ...] = ()
    unreadable: tuple[Unreadable, ...] = ()


class ProfileFiles:
    """The files at one path; for many threads."""

    def __init__(self, path: Path) -> None:
        """*path*: a file or a directory."""
        self._path = path
        self._lock = threading.Lock()
        self._print: _Print | None = None
        self._contents = Contents()

    def read(self) -> Contents:
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

    def _read(self) -> Contents:
        files = _files(self._path)
        now = tuple(_stat(file) for _, file in files)
        if now != self._print:
            self._contents = _contents(files)
            self._print = now
        return self._contents


def stem(name: str) -> str:
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
    names = sorted(name for name in os.listdir(directory) if _KEY.fullmatch(name))
    return [(str(path / name), directory / name) for name in names if (directory / name).is_file()]


def _stat(file: Path) -> tuple[object, ...]:
    found = file.stat()
    return (file, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _contents(files: list[tuple[str, Path]]) -> Contents:
    found: list[Document] = []
    unreadable: list[Unreadable] = []
    for shown, file in files:
        content = file.read_bytes()
        try:
            found += _documents(shown, content)
        except ValueError as e:
            unreadable.append(Unreadable(f"{shown}: {e}", _text(content)))
    return Contents(tuple(found), tuple(unreadable))


def _documents(shown: str, content: bytes) -> list[Document]:
    """The documents of one file, all or none of them."""
    called = stem(shown.rpartition("/")[2])
    found = [each for each in documents(content) if each is not None]
    text = _text(content)
    if len(found) < 2:
        return [Document(shown, called, found[0] if found else None, text)]
    return [
        Document(f"{shown} (document {number})", called, each, text)
        for number, each in enumerate(found, 1)
    ]


def _text(content: bytes) -> str:
    """Whatever the encoding is that YAML takes, names of plain letters can be found in it."""
    return content.decode(errors="replace").replace("\0", "")
