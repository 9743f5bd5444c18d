"""The kubelet plugin as a process: starts its capabilities and serves the kubelet until SIGTERM.

Stopping never touches claims or slices: pods go on, and the next process finds all as it was.
"""

import logging
from contextlib import ExitStack

from dra_driver.base.files import hanging_disk_calls, removed_directory
from dra_driver.base.signals import Shutdown
from dra_driver.node.machine import OpenNode
from dra_driver.plugin import other_drivers
from dra_driver.plugin.claims import device_status
from dra_driver.plugin.claims import start as claims
from dra_driver.plugin.device_plugin import start as device_plugin
from dra_driver.plugin.health import release
from dra_driver.plugin.health import start as health
from dra_driver.plugin.http_port import HttpPort
from dra_driver.plugin.memory import start as memory
from dra_driver.plugin.metrics import Metrics
from dra_driver.plugin.mig import start as mig
from dra_driver.plugin.mps import start as mps
from dra_driver.plugin.node_api import start as node_api
from dra_driver.plugin.node_api.dra import DraServing
from dra_driver.plugin.parts import PluginParts, open_parts
from dra_driver.plugin.publish import start as publish
from dra_driver.settings import PluginSettings

log = logging.getLogger(__name__)

CAPABILITIES = (  # each finds in the parts what those before it have set
    publish.start,
    node_api.start,
    health.start,
    release.start,
    claims.start,
    device_status.start,
    mig.start,
    memory.start,
    mps.start,
    device_plugin.start,
    other_drivers.start,
)


def run(settings: PluginSettings, open_node: OpenNode) -> int:
    """Serve this node. 0: ended by a signal; 1: serving the kubelet broke down."""
    shutdown = Shutdown("cannot serve the kubelet any longer")
    with ExitStack() as stack:
        _start(settings, open_node, shutdown, stack)
        log.info("serving", extra={"driver": settings.driver_name, "node": settings.node_name})
        shutdown.event.wait()
        log.info("stopping")
    return 1 if shutdown.failed else 0


def _start(
    settings: PluginSettings, open_node: OpenNode, shutdown: Shutdown, stack: ExitStack
) -> None:
    """*stack* stops what was started, the last first. What may take long comes last."""
    metrics = Metrics(settings.metrics_claim_names)
    # First of all: the address may be wrong.
    http = HttpPort(settings, metrics.registry) if settings.http_address else None
    parts = open_parts(settings, open_node, metrics, stack)
    parts.on_fatal = shutdown.on_fatal
    for start in CAPABILITIES:
        start(parts, stack)
    _serve_kubelet(parts, shutdown, stack)
    if http is not None:
        http.start(parts.liveness, parts.readiness, parts.note_started)
        stack.callback(http.stop)  # first of all: the next process waits for the port
    for act in parts.before_publishing:
        act()
    parts.publish()
    for act in parts.after_publishing:
        act()


def _serve_kubelet(parts: PluginParts, shutdown: Shutdown, stack: ExitStack) -> None:
    dra = DraServing(parts, shutdown.on_fatal)
    stack.callback(dra.stop)
    dra.start()
    parts.dra_is_awaited = dra.is_awaited
    _add_checks(parts, dra)


def _add_checks(parts: PluginParts, dra: DraServing) -> None:
    """Alive: the kubelet reaches us through our sockets, the host's directories are those that we
    see, and no call to the disk hangs. Where not, a new process can mend it. Ready: a pod with a
    GPU could start here now."""

    def directories() -> str | None:
        return removed_directory(parts.settings.directories)

    parts.liveness |= {
        "disk": hanging_disk_calls,
        "directories": directories,
        "sockets": dra.socket_problem,
    }
    parts.readiness |= {
        "directories": directories,
        "sockets": dra.socket_problem,
        "registration": dra.registration_problem,
    }
