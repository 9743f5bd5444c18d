"""The kubelet plugin as a process: picks the parts, connects them, serves until SIGTERM.

Stopping never touches claims or slices: pods go on, and the next process finds all as it was.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from dra_driver.cluster.access import in_cluster, kubeconfig
from dra_driver.cluster.client import ApiServer
from dra_driver.cluster.events import EventWriter, NodeRef
from dra_driver.errors import NodeError
from dra_driver.kubeletplugin.claim_reader import ClaimReader
from dra_driver.kubeletplugin.features import probe_devices
from dra_driver.kubeletplugin.instances import Instances
from dra_driver.kubeletplugin.plugin import Plugin
from dra_driver.kubeletplugin.pod_reader import PodReader
from dra_driver.kubeletplugin.pod_resources import PodResources
from dra_driver.kubeletplugin.pool_writer import PoolWriter
from dra_driver.kubeletplugin.publisher import Publisher
from dra_driver.kubeletplugin.resource_api import ResourceApi
from dra_driver.kubeletplugin.service import Service
from dra_driver.kubeletplugin.sockets import socket_paths, sweep
from dra_driver.kubeletplugin.turns import Turn
from dra_driver.model.holdings import Record
from dra_driver.model.offer import Keeps
from dra_driver.node.boot import boot_id
from dra_driver.node.claim_files import ClaimFiles
from dra_driver.node.containers import Containers
from dra_driver.node.last_profile import LastProfile
from dra_driver.node.ledger import Ledger
from dra_driver.node.machine import open_node
from dra_driver.node.metadata_files import MetadataFiles
from dra_driver.node.mig_book import MigBook
from dra_driver.node.node import GpuNode
from dra_driver.node.pod_processes import open_pod_processes
from dra_driver.node.spec_files import SpecFiles
from dra_driver.plan.edits import vendor
from dra_driver.plugin.checks import live_checks, ready_checks
from dra_driver.plugin.claim_users import ClaimUsers
from dra_driver.plugin.ended_claims import EndedClaims
from dra_driver.plugin.enforcement import Enforced, Pace, enforce
from dra_driver.plugin.layout_files import Layouts
from dra_driver.plugin.metrics import Metrics
from dra_driver.plugin.mig.governed import Governed
from dra_driver.plugin.mig.keeper import Apart
from dra_driver.plugin.mig.start import Around, MigLoop, connect
from dra_driver.plugin.mps_metrics import MpsMetrics
from dra_driver.plugin.mps_watch import Watched, watch_mps
from dra_driver.plugin.node_labels import NodeLabels
from dra_driver.plugin.offers import ASK_AGAIN_SECONDS, Keeping, Offers
from dra_driver.plugin.prepare import Preparer
from dra_driver.plugin.profile_choice import ProfileChoice
from dra_driver.plugin.profiles import Profiles
from dra_driver.plugin.reconcile import Reconciler
from dra_driver.plugin.rounds import Rounds, Watcher
from dra_driver.plugin.stuck_claims import Listeners, StuckClaims
from dra_driver.plugin.tools import Changed, Names, Tools
from dra_driver.process.ending import Ending
from dra_driver.process.http import HttpServer
from dra_driver.process.loops import Loop
from dra_driver.settings import PluginSettings

log = logging.getLogger(__name__)

_LABELS_SECONDS = 2.0  # to wait for the labels of the Node before the first look
_ENDED_SECONDS = 60.0  # between looks at nothing: it is woken
_MIG_SECONDS = 5.0  # to wait until GPUs are cut; then they are published as they are


def run(settings: PluginSettings) -> int:
    """Serve this node. 0: ended by a signal; 1: serving the kubelet broke down."""
    ending = Ending("cannot serve the kubelet any longer")
    with ExitStack() as stack:
        _start(settings, ending, stack)
        log.info("serving", extra={"driver": settings.driver_name, "node": settings.node_name})
        ending.event.wait()
        log.info("stopping")
    return 1 if ending.failed else 0


@dataclass(frozen=True, slots=True)
class _Parts:
    """What the others are built from."""

    settings: PluginSettings
    api: ApiServer
    resources: ResourceApi
    node: GpuNode
    ledger: Ledger
    in_charge: Callable[[], bool]  # whether no newer process of this plugin runs
    metrics: Metrics
    events: EventWriter
    users: ClaimUsers

    @property
    def claims(self) -> ClaimReader:
        return ClaimReader(self.resources, self.settings.driver_name, self.settings.node_name)


def _start(settings: PluginSettings, ending: Ending, stack: ExitStack) -> None:
    """Start every part; *stack* stops them, the last one first. What may take long comes last."""
    metrics = Metrics()
    server = _http_server(settings, metrics, stack)  # it may not be to be had: first of all
    parts = _parts(settings, metrics, stack)
    publishing = _publish(parts, stack)
    listeners: list[Changed] = []
    preparer, turn = _preparer(parts, publishing.offers, listeners)
    claims = _stuck_claims(parts, preparer, publishing.labels, stack)
    rounds = _rounds(parts, publishing, preparer, claims)
    mig = _mig(parts, publishing, Apart(preparer.upkeep.while_free, turn.held), rounds, stack)
    listeners += [rounds.claim_changed, mig.claim_changed]
    listeners += _look_after(parts, preparer, stack)
    plugin = _serve(parts, claims, ending, stack)
    if server is not None:
        looks, directories = (publishing.watcher, rounds), settings.directories
        ready = (plugin, publishing.publisher, looks, settings.cdi_dir, directories)
        server.start(live_checks(plugin, directories), ready_checks(*ready))
    mig.start(_MIG_SECONDS)
    _look_on(publishing, rounds, settings, stack)


def _parts(settings: PluginSettings, metrics: Metrics, stack: ExitStack) -> _Parts:
    api = ApiServer(kubeconfig(settings.kubeconfig) if settings.kubeconfig else in_cluster())
    stack.callback(api.close)
    ledger = Ledger(settings.ledger_dir, boot_id(settings.host_root))
    metrics.count(ledger.records, ledger.set_aside)
    node = stack.enter_context(open_node(settings.place, settings.state / "sim", settings.state))
    metrics.judge_limits(lambda: node.limits.status().backend is not None)
    plugins = Instances(settings.plugin_dir / "instances", settings.pod_uid or None)
    stack.callback(plugins.leave)
    events = EventWriter(api, settings.driver_name, settings.node_name)
    stack.callback(events.stop)
    processes = open_pod_processes(settings.host_root, settings.runtime_dir)
    users = ClaimUsers(processes, node.processes, ledger.neighbours)
    resources, in_charge = ResourceApi(api), plugins.is_newest
    return _Parts(settings, api, resources, node, ledger, in_charge, metrics, events, users)


def _http_server(settings: PluginSettings, metrics: Metrics, stack: ExitStack) -> HttpServer | None:
    if not settings.http_address:
        return None
    server = HttpServer(settings.http_address, metrics.registry)
    stack.callback(server.stop)
    return server


@dataclass(frozen=True, slots=True)
class _Publishing:
    offers: Offers
    watcher: Watcher
    publisher: Publisher
    profile: ProfileChoice
    governed: Governed
    labels: NodeLabels
    keeps: Keeping

    def since(self, moment: float) -> bool:
        """Whether what a look found that began later than *moment* is published."""
        return self.watcher.looked > moment and self.publisher.healthy()


def _publish(parts: _Parts, stack: ExitStack) -> _Publishing:
    """What publishes what looks find, as long as this process is the newest."""
    settings = parts.settings
    try:
        parts.ledger.peek()  # a GPU that a claim holds keeps its shape from the first look on
    except NodeError as e:  # prepare and readiness will say so, too
        log.warning("cannot tell yet what claims hold", extra={"error": str(e)})
    labels = NodeLabels(parts.api, settings.node_name)
    labels.start(lambda: None, _LABELS_SECONDS)
    stack.callback(labels.stop)
    last = LastProfile(settings.state / "profile.json")
    profile = ProfileChoice(Profiles(settings.profiles), settings.profile or labels, last=last)
    profile.start(_LABELS_SECONDS)
    stack.callback(profile.stop)
    parts.metrics.judge_profile(lambda: profile.error)
    keeps = Keeping(partial(_keeps, parts))
    asking = Loop("api-features", keeps.look, ASK_AGAIN_SECONDS)
    asking.start()
    stack.callback(asking.stop)
    by_mps = parts.node.mps is not None
    governed = Governed(profile.current)
    offers = Offers(parts.node, governed.profile, keeps, parts.ledger, mps=by_mps)
    writer = PoolWriter(parts.resources, settings.driver_name, settings.node_name)
    publisher = Publisher(writer, parts.in_charge, parts.metrics)
    watcher = Watcher(offers, settings.node_name, publisher.want, parts.metrics)
    return _Publishing(offers, watcher, publisher, profile, governed, labels, keeps)


def _keeps(parts: _Parts) -> Keeps:
    settings, version = parts.settings, parts.resources.version
    return Keeps(*probe_devices(parts.api, version, settings.driver_name, settings.node_name))


def _preparer(parts: _Parts, offers: Offers, listeners: Sequence[Changed]) -> tuple[Preparer, Turn]:
    """What prepares claims; its first turn makes it look at the disk."""

    def changed(record: Record | None) -> None:
        for listener in listeners:
            listener(record)

    settings = parts.settings
    specs = SpecFiles(settings.cdi_dir, vendor(settings.driver_name))
    files = ClaimFiles(specs, MetadataFiles(settings.plugin_dir))
    turn = Turn(settings.plugin_dir, settings.pod_uid or "this node", lambda: preparer.recover())
    names = Names(settings.driver_name, settings.node_name, settings.nvidia_cdi_hook or None)
    pods = PodReader(parts.api)
    tools = Tools(
        parts.node,
        offers,
        parts.claims,
        pods,
        parts.ledger,
        files,
        turn.held,
        changed,
        parts.users,
    )
    preparer = Preparer(names, tools)
    return preparer, turn


def _mig(
    parts: _Parts, publishing: _Publishing, apart: Apart, rounds: Rounds, stack: ExitStack
) -> MigLoop:
    """What cuts GPUs as layouts say, and switches boards."""
    settings = parts.settings
    around = Around(
        node=parts.node,
        ledger=parts.ledger,
        book=MigBook(settings.mig_book, boot_id(settings.host_root)),
        apart=apart,
        api=parts.api,
        labels=publishing.labels,
        profile=publishing.profile.current,
        layouts=Layouts(settings.profiles),
        keeps=publishing.keeps,
        allocated=parts.claims.allocated,
        in_charge=parts.in_charge,
        governed=publishing.governed,
        changed=rounds.look_soon,
        published=publishing.since,
        count=parts.metrics.mig_problems.set,
        events=parts.events,
    )
    mig = connect(around, settings.look_interval, stack)

    def other_profile() -> None:
        rounds.look_soon()
        mig.soon()

    publishing.profile.on_change = other_profile
    return mig


def _stuck_claims(
    parts: _Parts, preparer: Preparer, labels: NodeLabels, stack: ExitStack
) -> StuckClaims:
    """What gives claims back, tells of those that are still used, and sees to their end."""
    ended = EndedClaims(preparer, parts.users, parts.claims, parts.ledger.known)
    loop = Loop("ended-claims", ended.look, _ENDED_SECONDS)
    ended.look_soon = loop.soon
    loop.start()
    stack.callback(loop.stop)
    listeners = Listeners(parts.events, lambda: NodeRef(labels.node, labels.uid), ended.refused)
    return StuckClaims(preparer, parts.ledger.known, listeners)


def _rounds(
    parts: _Parts, publishing: _Publishing, preparer: Preparer, claims: StuckClaims
) -> Rounds:
    """The loops that look at the node and at its claims."""
    reconciler = Reconciler(parts.ledger, parts.claims, claims, parts.settings.node_name)
    return Rounds(publishing.watcher, reconciler, preparer, parts.in_charge, parts.metrics)


def _look_on(
    publishing: _Publishing, rounds: Rounds, settings: PluginSettings, stack: ExitStack
) -> None:
    """Publish what is there, and look again and again."""
    publishing.watcher.look()
    publishing.publisher.start()
    stack.callback(publishing.publisher.stop)
    rounds.start(settings.look_interval, settings.reconcile_interval)
    stack.callback(rounds.stop)


def _look_after(parts: _Parts, preparer: Preparer, stack: ExitStack) -> Iterator[Changed]:
    """The loops that see to it that claims use what they were given; what wakes each."""
    settings = parts.settings
    enforced = Enforced(
        parts.node,
        parts.ledger,
        parts.claims,
        preparer.upkeep,
        PodResources(settings.kubelet_dir),
        PodReader(parts.api),
        parts.events,
        parts.metrics,
        parts.in_charge,
    )
    containers = Containers(settings.host_root, settings.runtime_dir)
    yield enforce(enforced, containers, Pace(settings.guard_interval), stack)
    if parts.node.mps is None:
        return
    watched = Watched(
        parts.node.mps,
        parts.ledger,
        preparer.upkeep,
        parts.node,
        PodReader(parts.api),
        parts.events,
        MpsMetrics(parts.metrics.registry),
        parts.in_charge,
    )
    yield watch_mps(watched, containers, stack)


def _serve(parts: _Parts, claims: StuckClaims, ending: Ending, stack: ExitStack) -> Plugin:
    settings = parts.settings
    sockets = socket_paths(
        settings.driver_name, settings.plugin_dir, settings.registry, settings.pod_uid or None
    )
    service = Service(claims, parts.metrics)
    plugin = Plugin(sockets, service, ending.on_fatal, on_round=lambda: sweep(sockets))
    plugin.start()
    stack.callback(plugin.stop)
    return plugin
