"""Finds MPS servers over MIG instances that are not there any more, and ends them.

A daemon of protocol 2 does not notice: it goes on, and every program that comes to it fails. The
pods are told by ``plugin.gone_instances``.
"""

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final, Protocol

from dra_driver.errors import NodeError
from dra_driver.model.mps import MpsStatus, SpaceName
from dra_driver.plan.mps_watch import ClaimSpace, server_of
from dra_driver.plugin.errands import Errand, Errands
from dra_driver.plugin.instance_at import Node, instance_at

log = logging.getLogger(__name__)

_AGAIN_SECONDS: Final = 30.0  # after a space could not be ended


class Agent(Protocol):
    """Who serves; ``dra_driver.node.mps.agent``."""

    def release(self, name: SpaceName) -> None: ...


class MpsInstances:
    """Remembers whose instance is gone. One thread at a time may ``look``."""

    def __init__(self, node: Node, agent: Agent, errands: Errands) -> None:
        self._node = node
        self._agent = agent
        self._errands = errands
        self._gone: frozenset[SpaceName] = frozenset()

    def look(self, spaces: Iterable[ClaimSpace], status: MpsStatus) -> frozenset[SpaceName]:
        """The spaces of prepared claims whose instance is gone; what is served of them is ended."""
        gone = [one for one in spaces if one.completed and self._is_gone(one)]
        self._gone = frozenset(one.space.name for one in gone)
        self._end([one for one in gone if server_of(one.space.name, status) is not None])
        return self._gone

    def _is_gone(self, one: ClaimSpace) -> bool:
        """Of a GPU that does not answer, what was seen the last time stands."""
        if one.over is None:
            return False
        gpu, instance = one.over
        try:
            found = instance_at(self._node, gpu, instance.key)
        except NodeError as e:
            log.debug("an instance cannot be looked for", extra={"gpu": gpu, "error": str(e)})
            return one.space.name in self._gone
        return found is None or found.uuid != instance.uuid

    def _end(self, served: Sequence[ClaimSpace]) -> None:
        if served:
            errands = [self._ending(one.space.name) for one in served]
            self._errands.go("instances that are gone", errands)

    def _ending(self, name: SpaceName) -> Errand:
        release = partial(self._agent.release, name)
        return Errand(f"end space {name}, whose instance is gone", release, _AGAIN_SECONDS)
