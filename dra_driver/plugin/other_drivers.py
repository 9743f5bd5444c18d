"""Tells of another driver of this name on the node, such as NVIDIA's.

The kubelet asks whichever registered last, and each removes the slices of the other. A second
release of this chart is not told: its process looks like the other one of an update.
"""

import logging
from contextlib import ExitStack

from dra_driver.base.errors import NodeError
from dra_driver.base.threads import Loop
from dra_driver.k8s.events import Event, NodeRef
from dra_driver.kubeletplugin.serve.probes import other_plugins
from dra_driver.plugin.parts import PluginParts

log = logging.getLogger(__name__)

_SOON_SECONDS = 2.0  # between two looks while there is one
_ASK_SECONDS = 2.0


def start(parts: PluginParts, stack: ExitStack) -> None:
    settings, labels = parts.settings, parts.labels
    problem: str | None = None

    def look() -> float | None:
        nonlocal problem
        before, problem = problem, other_driver(parts)
        if problem is not None and problem != before:
            log.warning(problem)
            node = NodeRef(labels.node, labels.uid)
            parts.events.emit(Event(node, "OtherDriverOfThisName", settings.driver_name, problem))
        return None if problem is None else _SOON_SECONDS

    parts.readiness["other-drivers"] = lambda: problem
    loop = Loop("other-drivers", look, settings.reconcile_interval)
    parts.after_publishing.append(loop.start)
    stack.callback(loop.stop)


def other_driver(parts: PluginParts) -> str | None:
    """Who else speaks for our driver here, and what to do about it."""
    settings = parts.settings
    driver = settings.driver_name
    try:
        plugins = other_plugins(settings.registry, settings.plugin_dir, driver, _ASK_SECONDS)
    except NodeError as e:  # readiness has its own check of the directories
        log.info("cannot tell who else serves this node", extra={"error": str(e)})
        return None
    sockets = [str(plugin.socket) for plugin in plugins if plugin.name == driver]
    if not sockets:
        return None
    return (
        f"another driver of the name {driver} serves this node, too ({', '.join(sockets)}), and "
        "either may be asked for a claim: remove one of them from this node (NVIDIA's: its "
        "DaemonSet; nodeSelector of the charts), or give one another driverName"
    )
