"""What a daemon has on disk: made before it starts, labelled when it is up, removed behind it.

::

    <mps-dir>/<server>/            nobody but the host's root writes here
        pipe/                      protocol 2: a small tmpfs that containers have mounted, to write
        pipe/gpu/<namespace>/      protocol 3: each in the containers of one claim, to read
        shm/                       protocol 2: a tmpfs, /dev/shm of the daemon and its clients
        log/
        config.toml                protocol 3

A daemon that is started again finds the directories that containers have mounted, and nothing else.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from dra_driver.errors import NodeError
from dra_driver.model.mps import SpaceName
from dra_driver.node.mps import shared_memory, trees
from dra_driver.node.mps.config import DEFAULT
from dra_driver.node.mps.control import Control
from dra_driver.node.mps.daemon import SERVER, Daemon
from dra_driver.node.mps.labels import Labels
from dra_driver.node.mps.shared_memory import Tmpfs

# What tenants write there is the host's memory: files as well as what the kernel knows of them.
_PIPE: Final = Tmpfs(16 << 20, mode=trees.PASSABLE, most_files=4096)


class Directories:
    """*in_container*: what is mounted has to be seen outside."""

    def __init__(self, control: Control, labels: Labels, in_container: bool) -> None:
        self._control = control
        self._labels = labels
        self._in_container = in_container

    def make(self, daemon: Daemon, spaces: Iterable[SpaceName]) -> None:
        """For a start with these spaces, whatever is left of an earlier one.

        NodeError: mounting is not permitted. OSError: something else cannot be done.
        """
        for directory in (daemon.directory, daemon.pipe, daemon.log):
            trees.make(directory)
        if daemon.protocol == 2:
            shared_memory.provide(daemon.shm, self._in_container, self._labels)
            shared_memory.provide(daemon.pipe, self._in_container, self._labels, _PIPE)
            trees.empty(daemon.pipe)
        else:
            trees.empty(daemon.pipe, frozenset(_mounted(spaces)))
            self._labels.put_on(daemon.pipe)  # what the daemon makes in there gets it from there

    def began(self, daemon: Daemon) -> None:
        """It is up: its directories are all there."""
        if daemon.protocol > 2:
            self._labels.put_on(daemon.pipe)

    def added(self, daemon: Daemon, directory: str) -> str:
        """It has another pipe directory."""
        if daemon.protocol > 2:
            self._labels.put_on(directory)
        return directory

    def remove(self, daemon: Daemon) -> None:
        """With all that is mounted there. Nothing there: fine. NodeError: it cannot be done."""
        shared_memory.withdraw(daemon.directory)
        self._control.leave(daemon)
        try:
            trees.remove(daemon.directory)
        except OSError as e:
            raise NodeError(
                f"cannot remove {daemon.directory} of an MPS server ({e.filename}): {e.strerror}"
            ) from e


def _mounted(spaces: Iterable[SpaceName]) -> Iterator[trees.Path]:
    yield (SERVER,)
    for name in (DEFAULT, *spaces):
        yield SERVER, name
