"""MPS daemons on the node that this agent did not start, and leaves alone."""

import logging
from collections.abc import Callable
from typing import Final

from dra_driver.agent.tools import Tools
from dra_driver.errors import DriverError

log = logging.getLogger(__name__)

_SECONDS: Final = 60.0  # between two looks


class Others:
    """*tokens*: what marks our own, as of now."""

    def __init__(self, tools: Tools, tokens: Callable[[], list[str]]) -> None:
        self._tools = tools
        self._tokens = tokens
        self._looked_at = float("-inf")
        self.found: tuple[str, ...] = ()

    def look(self) -> None:
        """Unless that was just done. What cannot be seen now is looked for the next time."""
        now = self._tools.clock.passed()
        if now - self._looked_at < _SECONDS:
            return
        ours = self._tokens()
        try:
            found = self._tools.daemons.foreign(ours)
        except DriverError as e:
            log.info("MPS daemons of others cannot be looked for", extra={"error": str(e)})
            return
        if self._tokens() != ours:
            return  # one of ours was started meanwhile, and may be in there
        if found != self.found:
            log.warning("MPS daemons that are not ours", extra={"daemons": list(found)})
        self.found, self._looked_at = found, now
