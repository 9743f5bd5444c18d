"""Starts what watches MPS while claims use it, where this node serves any."""

from contextlib import ExitStack

from dra_driver.plugin.metrics import MpsMetrics
from dra_driver.plugin.mps.watch import MpsDependencies, watch_mps
from dra_driver.plugin.parts import PluginParts


def start(parts: PluginParts, stack: ExitStack) -> None:
    if parts.node.mps is None:
        return
    dependencies = MpsDependencies(
        parts.node.mps,
        parts.ledger,
        parts.prepared_claims,
        parts.node,
        parts.pods,
        parts.events,
        MpsMetrics(parts.metrics.registry),
        parts.is_newest,
    )
    parts.claim_listeners.append(watch_mps(dependencies, parts.containers, stack))
