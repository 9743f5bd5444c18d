"""A node file as it is now, so that GPUs come, go and fail while the driver runs."""

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from dra_driver.base.errors import SettingsError
from dra_driver.sim.node_spec import SimulatedNode, node_file, read_node

log = logging.getLogger(__name__)


class LiveNode:
    """The node in a file, read again when the file changed: one ``stat`` for each question.

    A change that is no good is logged, and the node stays as it was.
    """

    def __init__(self, path: Path) -> None:
        """SettingsError: the file is no good to begin with."""
        self.path = path
        self._stamp = self._look()
        self._node = read_node(path)
        self._watchers: list[Callable[[SimulatedNode], None]] = []
        self._lock = threading.RLock()

    @classmethod
    def named(cls, name: str) -> "LiveNode":
        """The node of ``--sim NAME|FILE``."""
        return cls(node_file(name))

    def current(self) -> SimulatedNode:
        """The node now."""
        if self._look() != self._stamp:
            self._read_again()
        return self._node

    def on_change(self, watcher: Callable[[SimulatedNode], None]) -> None:
        """Have *watcher* told of each new node, before anybody else sees it."""
        self._watchers.append(watcher)

    def _read_again(self) -> None:
        with self._lock:
            stamp = self._look()
            if stamp == self._stamp:
                return  # somebody else did
            try:
                node = read_node(self.path)
                for watcher in self._watchers:
                    watcher(node)
                self._node = node
            except SettingsError as error:
                log.warning("simulated node stays as it was: %s", error)
            self._stamp = stamp

    def _look(self) -> tuple[int, int, int] | None:
        try:
            status = os.stat(self.path)
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino
