"""Directories of servers of which nothing is written, and who lives in them: both are taken away.

An agent leaves none. They are there when a file of its state was lost, or cannot be read.
"""

import logging
import re
from collections.abc import Collection
from pathlib import Path
from typing import Final

from dra_driver.agent.state import new_token
from dra_driver.agent.tools import Tools
from dra_driver.errors import DriverError
from dra_driver.kubeletplugin.file_locks import disk_errors
from dra_driver.model.mps import ServerName
from dra_driver.node.mps.daemon import Daemon

log = logging.getLogger(__name__)

_NAME: Final = re.compile(r"s[0-9a-f]{12}")


class Leftovers:
    """Whoever takes one away holds the lock of that server."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._left: frozenset[ServerName] = frozenset()

    @property
    def names(self) -> tuple[ServerName, ...]:
        """Those that are still there."""
        return tuple(sorted(self._left))

    def find(self, known: Collection[ServerName]) -> None:
        """Look for them. *known*: of these something is written."""
        directory = Path(self._tools.directory)
        with disk_errors(f"look for what was left in {directory}"):
            found = [one.name for one in directory.iterdir() if one.is_dir()]
        names = (ServerName(name) for name in found if _NAME.fullmatch(name))
        self._left = frozenset(names) - frozenset(known)

    def take_away(self, name: ServerName) -> None:
        """One of them, if it is one. NodeError: it cannot be done."""
        if name not in self._left:
            return
        log.warning("removing what nobody wrote of", extra={"server": name})
        directory = f"{self._tools.directory}/{name}"
        self._tools.daemons.clear(Daemon(name, (), 2, directory, new_token()))
        self._left -= {name}

    def try_to(self, name: ServerName) -> None:
        """As ``take_away``; if it fails, it is done later."""
        try:
            self.take_away(name)
        except DriverError as e:
            extra = {"server": name, "error": str(e)}
            log.warning("what an MPS server left cannot be removed, will try again", extra=extra)
