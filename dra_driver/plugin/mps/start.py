"""Starts what watches MPS while claims use it, where this node serves any."""

from contextlib import ExitStack
from typing import Final

from dra_driver.base.threads import Loop
from dra_driver.model.records import ClaimRecord
from dra_driver.plugin.metrics import MpsMetrics
from dra_driver.plugin.mps.watch import MpsWatch
from dra_driver.plugin.parts import PluginParts

_LOOK_SECONDS: Final = 5.0


def start(parts: PluginParts, stack: ExitStack, seconds: float = _LOOK_SECONDS) -> None:
    """*stack* ends the loop. What is served stays served. *seconds*: from one look to the next."""
    if parts.node.mps is None:
        return
    watch = MpsWatch(parts, parts.node.mps, MpsMetrics(parts.metrics))
    loop = Loop("mps-watch", watch.look, seconds)
    watch.drain.on_ending = loop.soon
    loop.start()
    stack.callback(loop.stop)

    def claim_changed(record: ClaimRecord | None) -> None:
        if record is None or record.namespaces:
            loop.soon()

    parts.claim_listeners.append(claim_changed)
