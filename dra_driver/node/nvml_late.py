"""GPUs that do not answer in time: once can be the driver's work for others, twice is a fault."""

import logging
from collections.abc import Container

from dra_driver.errors import NodeError, TimedOut
from dra_driver.node.nvml_changes import UnderChange

log = logging.getLogger(__name__)


class Late:
    """Those of one session of NVML, by index, since which look they are late."""

    def __init__(self) -> None:
        self._look = 0
        self._since: dict[int, int] = {}

    def looks(self) -> None:
        """Another look begins."""
        self._look += 1

    def in_time(self, index: int) -> None:
        """It told all that it was asked for."""
        self._since.pop(index, None)

    def excused(self, index: int, error: NodeError, known: Container[int]) -> NodeError:
        """*error*, unless that is the first look at which a *known* GPU is late: then what is known
        of it does until the next one."""
        if not isinstance(error, TimedOut) or index not in known:
            return error
        new = index not in self._since
        if self._since.setdefault(index, self._look) != self._look:
            return error
        if new:
            log.warning("a GPU is late, and is what it was at the last look: %s", error)
        return UnderChange(f"{error}; it is late for the first time")
