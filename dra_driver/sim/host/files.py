"""Files of a simulated host, as values."""

from dra_driver.base.frozen import frozen


@frozen
class SimulatedFile:
    """A regular file."""

    content: bytes
    mode: int = 0o644


@frozen
class SimulatedLink:
    """A symbolic link, always to a place inside the tree."""

    target: str


@frozen
class CharacterDevice:
    """A device node."""

    major: int
    minor: int


@frozen
class SimulatedDirectory:
    """A directory that is there even when nothing is in it."""


SimulatedEntry = SimulatedFile | SimulatedLink | CharacterDevice | SimulatedDirectory
FileTree = dict[str, SimulatedEntry]
"""By path, relative to the root of the host."""


def text_file(content: str, mode: int = 0o644) -> SimulatedFile:
    """A file with *content*."""
    return SimulatedFile(content.encode(), mode)
