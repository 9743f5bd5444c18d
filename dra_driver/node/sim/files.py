"""Files of a simulated host, as values."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class File:
    """A regular file."""

    content: bytes
    mode: int = 0o644


@dataclass(frozen=True, slots=True)
class Link:
    """A symbolic link, always to a place inside the tree."""

    target: str


@dataclass(frozen=True, slots=True)
class CharacterDevice:
    """A device node."""

    major: int
    minor: int


@dataclass(frozen=True, slots=True)
class Directory:
    """A directory that is there even when nothing is in it."""


Entry = File | Link | CharacterDevice | Directory
Tree = dict[str, Entry]
"""By path, relative to the root of the host."""


def text(content: str, mode: int = 0o644) -> File:
    """A file with *content*."""
    return File(content.encode(), mode)
