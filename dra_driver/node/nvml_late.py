"""GPUs that do not answer in time: once can be the driver's work for others, twice is a fault."""

import logging
from collections.abc import Container

from dra_driver.errors import NodeError, TimedOut
from dra_driver.node.nvml_changes import UnderChange

log = logging.getLogger(__name__)


class Late:
    """Those of one session of NVML, by index, at the last look and at this one."""

    def __init__(self) -> None:
        self._before: set[int] = set()
        self._now: set[int] = set()

    def looks(self) -> None:
        """Another look begins. Who told all in time that it was asked for at the last one is as
        good as any other."""
        self._before, self._now = self._now, set()

    def excused(self, index: int, error: NodeError, known: Container[int]) -> NodeError:
        """*error*, unless that is the first look at which a *known* GPU is late: then what is known
        of it does until the next one."""
        late = isinstance(error, TimedOut)
        if index not in known or not (late or isinstance(error, UnderChange)):
            return error
        if index in self._before:  # one that is not asked, since it is changed, is not in time
            self._now.add(index)
            return error
        if not late:
            return error
        if index not in self._now:
            log.warning("a GPU is late, and is what it was at the last look: %s", error)
        self._now.add(index)
        return UnderChange(f"{error}; it is late for the first time")
