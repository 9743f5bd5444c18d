"""The kubelet plugin as a process: picks the parts, connects them, serves until SIGTERM.

Stopping never touches claims or slices: pods go on, and the next process finds all as it was.
"""

import logging
import signal
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType

from dra_driver.cluster.access import in_cluster, kubeconfig
from dra_driver.cluster.client import ApiServer
from dra_driver.errors import DriverError
from dra_driver.kubeletplugin.claim_reader import ClaimReader
from dra_driver.kubeletplugin.instances import Instances
from dra_driver.kubeletplugin.plugin import Plugin
from dra_driver.kubeletplugin.pool_writer import PoolWriter
from dra_driver.kubeletplugin.publisher import Publisher
from dra_driver.kubeletplugin.resource_api import ResourceApi
from dra_driver.kubeletplugin.service import Service
from dra_driver.kubeletplugin.sockets import SocketPaths, socket_paths, sweep
from dra_driver.kubeletplugin.turns import Turn
from dra_driver.node.boot import boot_id
from dra_driver.node.ledger import Ledger
from dra_driver.node.machine import open_node
from dra_driver.node.node import GpuNode
from dra_driver.node.spec_files import SpecFiles
from dra_driver.plan.edits import vendor
from dra_driver.plugin.checks import live_checks, ready_checks
from dra_driver.plugin.http import HttpServer
from dra_driver.plugin.metrics import Metrics
from dra_driver.plugin.prepare import Names, Preparer, Tools
from dra_driver.plugin.reconcile import Reconciler
from dra_driver.plugin.rounds import Rounds, Watcher
from dra_driver.settings import PluginSettings

log = logging.getLogger(__name__)


def run(settings: PluginSettings) -> int:
    """Serve this node. 0: ended by a signal; 1: serving the kubelet broke down."""
    ending = _Ending()
    with ExitStack() as stack:
        _start(settings, ending, stack)
        log.info("serving", extra={"driver": settings.driver_name, "node": settings.node_name})
        ending.event.wait()
        log.info("stopping")
    return 1 if ending.failed else 0


class _Ending:
    """Why the process ends: a signal, or an error that a new process may mend."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.failed = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def on_fatal(self, error: DriverError) -> None:
        log.critical("cannot serve the kubelet any longer", extra={"error": str(error)})
        self.failed = True
        self.event.set()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.event.set()


@dataclass(frozen=True, slots=True)
class _Parts:
    """What the others are built from."""

    settings: PluginSettings
    node: GpuNode
    resources: ResourceApi
    metrics: Metrics

    @property
    def claims(self) -> ClaimReader:
        return ClaimReader(self.resources, self.settings.driver_name, self.settings.node_name)


def _start(settings: PluginSettings, ending: _Ending, stack: ExitStack) -> None:
    """Start every part; *stack* stops them, the last one first."""
    api = ApiServer(kubeconfig(settings.kubeconfig) if settings.kubeconfig else in_cluster())
    stack.callback(api.close)
    node = stack.enter_context(open_node(settings.place, settings.state / "sim"))
    parts = _Parts(settings, node, ResourceApi(api), Metrics())
    server = _http_server(parts, stack)  # before anybody hears of us: it may not be to be had
    instances = Instances(settings.plugin_dir / "instances", settings.pod_uid or None)
    stack.callback(instances.leave)
    watcher, publisher = _publish(parts, instances, stack)
    ledger = Ledger(settings.ledger_dir, boot_id(settings.host_root))
    parts.metrics.count(ledger.records, ledger.set_aside)
    preparer = _preparer(parts, ledger)
    reconciler = Reconciler(ledger, parts.claims, preparer, settings.node_name)
    rounds = Rounds(watcher, reconciler, preparer, instances.is_newest, parts.metrics)
    rounds.start(settings.look_interval, settings.reconcile_interval)
    stack.callback(rounds.stop)
    service = Service(preparer, parts.metrics)
    sockets = _sockets(settings)
    plugin = Plugin(sockets, service, ending.on_fatal, on_round=lambda: sweep(sockets))
    plugin.start()
    stack.callback(plugin.stop)
    if server is not None:
        server.start(
            live_checks(plugin),
            ready_checks(plugin, publisher, (watcher, rounds), settings.cdi_dir),
        )


def _http_server(parts: _Parts, stack: ExitStack) -> HttpServer | None:
    if not parts.settings.http_address:
        return None
    server = HttpServer(parts.settings.http_address, parts.metrics.registry)
    stack.callback(server.stop)
    return server


def _publish(parts: _Parts, instances: Instances, stack: ExitStack) -> tuple[Watcher, Publisher]:
    """Publish what the first look finds, as long as this process is the newest."""
    settings = parts.settings
    writer = PoolWriter(parts.resources, settings.driver_name, settings.node_name)
    publisher = Publisher(writer, instances.is_newest, parts.metrics)
    watcher = Watcher(parts.node, settings.node_name, publisher.want, parts.metrics)
    watcher.look()
    publisher.start()
    stack.callback(publisher.stop)
    return watcher, publisher


def _preparer(parts: _Parts, ledger: Ledger) -> Preparer:
    """What prepares claims; its first turn makes it look at the disk."""
    settings = parts.settings
    specs = SpecFiles(settings.cdi_dir, vendor(settings.driver_name))
    owner = settings.pod_uid or "this node"
    turn = Turn(settings.plugin_dir, owner, lambda: preparer.recover())
    names = Names(settings.driver_name, settings.node_name, settings.nvidia_cdi_hook or None)
    preparer = Preparer(names, Tools(parts.node, parts.claims, ledger, specs, turn.held))
    return preparer


def _sockets(settings: PluginSettings) -> SocketPaths:
    registry = settings.kubelet_dir / "plugins_registry"
    return socket_paths(
        settings.driver_name, settings.plugin_dir, registry, settings.pod_uid or None
    )
