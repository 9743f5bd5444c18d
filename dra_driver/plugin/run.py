"""The kubelet plugin as a process: picks the parts, connects them, serves until SIGTERM.

Stopping never touches claims or slices: pods go on, and the next process finds all as it was.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from dra_driver.base.errors import NodeError
from dra_driver.base.http import HttpServer
from dra_driver.base.signals import Shutdown
from dra_driver.base.threads import Loop
from dra_driver.k8s.access import load_in_cluster, load_kubeconfig
from dra_driver.k8s.claims import ClaimReader
from dra_driver.k8s.client import ApiClient
from dra_driver.k8s.events import EventRecorder, NodeRef
from dra_driver.k8s.node_labels import NodeLabels
from dra_driver.k8s.pods import PodReader
from dra_driver.k8s.resource_api import ResourceApi
from dra_driver.kubeletplugin.serve.plugin import KubeletPlugin
from dra_driver.kubeletplugin.serve.pod_resources import PodResourcesClient
from dra_driver.kubeletplugin.serve.rolling_update import PluginInstances, PluginLease
from dra_driver.kubeletplugin.serve.services import DraService
from dra_driver.kubeletplugin.serve.sockets import remove_dead_sockets, socket_paths
from dra_driver.kubeletplugin.slices.features import probe_device_features
from dra_driver.kubeletplugin.slices.pool_writer import PoolWriter
from dra_driver.kubeletplugin.slices.publisher import Publisher
from dra_driver.model.offer import ApiFeatures
from dra_driver.model.records import ClaimRecord
from dra_driver.node.cgroups.containers import ContainerBundles
from dra_driver.node.cgroups.processes import open_pod_processes
from dra_driver.node.cgroups.procfs import boot_id
from dra_driver.node.gpu_node import GpuNode
from dra_driver.node.machine import OpenNode
from dra_driver.node.state.claim_files import CdiSpecFiles, ClaimFiles, MetadataFiles
from dra_driver.node.state.ledger import Ledger
from dra_driver.node.state.mig_state import MigStateFile
from dra_driver.node.state.profile_files import LastProfileFile
from dra_driver.plan.prepare.cdi_spec import cdi_vendor
from dra_driver.plugin.claims.dependencies import ClaimChanged, DriverIdentity, PrepareDependencies
from dra_driver.plugin.claims.in_use import (
    DeferredUnprepare,
    InUseCheck,
    InUseListeners,
    StuckClaims,
)
from dra_driver.plugin.claims.preparer import Preparer
from dra_driver.plugin.claims.reconciler import ClaimReconciler
from dra_driver.plugin.memory.start import MemoryDependencies, MemoryIntervals, enforce
from dra_driver.plugin.metrics import Metrics, MpsMetrics
from dra_driver.plugin.mig.desired_layouts import LayoutCatalog
from dra_driver.plugin.mig.reconciler import MigLocks
from dra_driver.plugin.mig.start import MigDependencies, MigLoop, connect
from dra_driver.plugin.mps.watch import MpsDependencies, watch_mps
from dra_driver.plugin.probes import liveness_checks, readiness_checks
from dra_driver.plugin.publish.loops import DeviceScanner, Loops
from dra_driver.plugin.publish.offers import PROBE_SECONDS, ApiFeatureProbe, Offers
from dra_driver.plugin.publish.profiles import ActiveProfile, EffectiveProfile, ProfileCatalog
from dra_driver.settings import PluginSettings

log = logging.getLogger(__name__)

_LABELS_SECONDS = 2.0  # to wait for the labels of the Node before the first look
_ENDED_SECONDS = 60.0  # between looks at nothing: it is woken
_MIG_SECONDS = 5.0  # to wait until GPUs are cut; then they are published as they are


def run(settings: PluginSettings, open_node: OpenNode) -> int:
    """Serve this node. 0: ended by a signal; 1: serving the kubelet broke down."""
    ending = Shutdown("cannot serve the kubelet any longer")
    with ExitStack() as stack:
        _start(settings, open_node, ending, stack)
        log.info("serving", extra={"driver": settings.driver_name, "node": settings.node_name})
        ending.event.wait()
        log.info("stopping")
    return 1 if ending.failed else 0


@dataclass(frozen=True, slots=True)
class PluginParts:
    """What the others are built from."""

    settings: PluginSettings
    api: ApiClient
    resources: ResourceApi
    node: GpuNode
    ledger: Ledger
    in_charge: Callable[[], bool]  # whether no newer process of this plugin runs
    metrics: Metrics
    events: EventRecorder
    users: InUseCheck

    @property
    def claims(self) -> ClaimReader:
        return ClaimReader(self.resources, self.settings.driver_name, self.settings.node_name)


def _start(
    settings: PluginSettings, open_node: OpenNode, ending: Shutdown, stack: ExitStack
) -> None:
    """Start every part; *stack* stops them, the last one first. What may take long comes last."""
    metrics = Metrics()
    server = _http_server(settings, metrics, stack)  # it may not be to be had: first of all
    parts = _parts(settings, open_node, metrics, stack)
    publishing = _publish(parts, stack)
    listeners: list[ClaimChanged] = []
    preparer, turn = _preparer(parts, publishing.offers, listeners)
    claims = _stuck_claims(parts, preparer, publishing.labels, stack)
    rounds = _rounds(parts, publishing, preparer, claims)
    mig = _mig(parts, publishing, MigLocks(preparer.upkeep.while_free, turn.held), rounds, stack)
    listeners += [rounds.claim_changed, mig.claim_changed]
    listeners += _look_after(parts, preparer, stack)
    plugin = _serve(parts, claims, ending, stack)
    if server is not None:
        looks, directories = (publishing.watcher, rounds), settings.directories
        ready = (plugin, publishing.publisher, looks, settings.cdi_dir, directories)
        server.start(liveness_checks(plugin, directories), readiness_checks(*ready))
    mig.start(_MIG_SECONDS)
    _look_on(publishing, rounds, settings, stack)


def _parts(
    settings: PluginSettings, open_node: OpenNode, metrics: Metrics, stack: ExitStack
) -> PluginParts:
    api = ApiClient(
        load_kubeconfig(settings.kubeconfig) if settings.kubeconfig else load_in_cluster()
    )
    stack.callback(api.close)
    ledger = Ledger(settings.ledger_dir, boot_id(settings.host_root))
    metrics.count(ledger.records, ledger.set_aside)
    node = stack.enter_context(open_node())
    metrics.judge_limits(lambda: node.limits.status().backend is not None)
    plugins = PluginInstances(settings.plugin_dir / "instances", settings.pod_uid or None)
    stack.callback(plugins.leave)
    events = EventRecorder(api, settings.driver_name, settings.node_name)
    stack.callback(events.stop)
    processes = open_pod_processes(settings.host_root, settings.runtime_dir)
    users = InUseCheck(processes, node.processes, ledger.neighbours)
    resources, in_charge = ResourceApi(api), plugins.is_newest
    return PluginParts(settings, api, resources, node, ledger, in_charge, metrics, events, users)


def _http_server(settings: PluginSettings, metrics: Metrics, stack: ExitStack) -> HttpServer | None:
    if not settings.http_address:
        return None
    server = HttpServer(settings.http_address, metrics.registry)
    stack.callback(server.stop)
    return server


@dataclass(frozen=True, slots=True)
class _PublishParts:
    offers: Offers
    watcher: DeviceScanner
    publisher: Publisher
    profile: ActiveProfile
    governed: EffectiveProfile
    labels: NodeLabels
    keeps: ApiFeatureProbe

    def since(self, moment: float) -> bool:
        """Whether what a look found that began later than *moment* is published."""
        return self.watcher.looked > moment and self.publisher.healthy()


def _publish(parts: PluginParts, stack: ExitStack) -> _PublishParts:
    """What publishes what looks find, as long as this process is the newest."""
    settings = parts.settings
    try:
        parts.ledger.peek()  # a GPU that a claim holds keeps its shape from the first look on
    except NodeError as e:  # prepare and readiness will say so, too
        log.warning("cannot tell yet what claims hold", extra={"error": str(e)})
    labels = NodeLabels(parts.api, settings.node_name)
    labels.start(lambda: None, _LABELS_SECONDS)
    stack.callback(labels.stop)
    last = LastProfileFile(settings.state / "profile.json")
    profile = ActiveProfile(
        ProfileCatalog(settings.profiles), settings.profile or labels, last=last
    )
    profile.start(_LABELS_SECONDS)
    stack.callback(profile.stop)
    parts.metrics.judge_profile(lambda: profile.error)
    keeps = ApiFeatureProbe(partial(_keeps, parts))
    asking = Loop("api-features", keeps.look, PROBE_SECONDS)
    asking.start()
    stack.callback(asking.stop)
    by_mps = parts.node.mps is not None
    governed = EffectiveProfile(profile.current)
    offers = Offers(parts.node, governed.profile, keeps, parts.ledger, mps=by_mps)
    writer = PoolWriter(parts.resources, settings.driver_name, settings.node_name)
    publisher = Publisher(writer, parts.in_charge, parts.metrics)
    watcher = DeviceScanner(offers, settings.node_name, publisher.want, parts.metrics)
    return _PublishParts(offers, watcher, publisher, profile, governed, labels, keeps)


def _keeps(parts: PluginParts) -> ApiFeatures:
    settings, version = parts.settings, parts.resources.version
    return ApiFeatures(
        *probe_device_features(parts.api, version, settings.driver_name, settings.node_name)
    )


def _preparer(
    parts: PluginParts, offers: Offers, listeners: Sequence[ClaimChanged]
) -> tuple[Preparer, PluginLease]:
    """What prepares claims; its first turn makes it look at the disk."""

    def changed(record: ClaimRecord | None) -> None:
        for listener in listeners:
            listener(record)

    settings = parts.settings
    specs = CdiSpecFiles(settings.cdi_dir, cdi_vendor(settings.driver_name))
    files = ClaimFiles(specs, MetadataFiles(settings.plugin_dir))
    turn = PluginLease(
        settings.plugin_dir, settings.pod_uid or "this node", lambda: preparer.recover()
    )
    names = DriverIdentity(
        settings.driver_name, settings.node_name, settings.nvidia_cdi_hook or None
    )
    pods = PodReader(parts.api)
    tools = PrepareDependencies(
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
    parts: PluginParts, publishing: _PublishParts, apart: MigLocks, rounds: Loops, stack: ExitStack
) -> MigLoop:
    """What cuts GPUs as layouts say, and switches boards."""
    settings = parts.settings
    around = MigDependencies(
        node=parts.node,
        ledger=parts.ledger,
        book=MigStateFile(settings.mig_book, boot_id(settings.host_root)),
        apart=apart,
        api=parts.api,
        labels=publishing.labels,
        profile=publishing.profile.current,
        layouts=LayoutCatalog(settings.profiles),
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
    parts: PluginParts, preparer: Preparer, labels: NodeLabels, stack: ExitStack
) -> StuckClaims:
    """What gives claims back, tells of those that are still used, and sees to their end."""
    ended = DeferredUnprepare(preparer, parts.users, parts.claims, parts.ledger.known)
    loop = Loop("ended-claims", ended.look, _ENDED_SECONDS)
    ended.look_soon = loop.soon
    loop.start()
    stack.callback(loop.stop)
    listeners = InUseListeners(
        parts.events, lambda: NodeRef(labels.node, labels.uid), ended.refused
    )
    return StuckClaims(preparer, parts.ledger.known, listeners)


def _rounds(
    parts: PluginParts, publishing: _PublishParts, preparer: Preparer, claims: StuckClaims
) -> Loops:
    """The loops that look at the node and at its claims."""
    reconciler = ClaimReconciler(parts.ledger, parts.claims, claims, parts.settings.node_name)
    return Loops(publishing.watcher, reconciler, preparer, parts.in_charge, parts.metrics)


def _look_on(
    publishing: _PublishParts, rounds: Loops, settings: PluginSettings, stack: ExitStack
) -> None:
    """Publish what is there, and look again and again."""
    publishing.watcher.look()
    publishing.publisher.start()
    stack.callback(publishing.publisher.stop)
    rounds.start(settings.look_interval, settings.reconcile_interval)
    stack.callback(rounds.stop)


def _look_after(parts: PluginParts, preparer: Preparer, stack: ExitStack) -> Iterator[ClaimChanged]:
    """The loops that see to it that claims use what they were given; what wakes each."""
    settings = parts.settings
    enforced = MemoryDependencies(
        parts.node,
        parts.ledger,
        parts.claims,
        preparer.upkeep,
        PodResourcesClient(settings.kubelet_dir),
        PodReader(parts.api),
        parts.events,
        parts.metrics,
        parts.in_charge,
    )
    containers = ContainerBundles(settings.host_root, settings.runtime_dir)
    yield enforce(enforced, containers, MemoryIntervals(settings.guard_interval), stack)
    if parts.node.mps is None:
        return
    watched = MpsDependencies(
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


def _serve(
    parts: PluginParts, claims: StuckClaims, ending: Shutdown, stack: ExitStack
) -> KubeletPlugin:
    settings = parts.settings
    sockets = socket_paths(
        settings.driver_name, settings.plugin_dir, settings.registry, settings.pod_uid or None
    )
    service = DraService(claims, parts.metrics)
    plugin = KubeletPlugin(
        sockets, service, ending.on_fatal, on_round=lambda: remove_dead_sockets(sockets)
    )
    plugin.start()
    stack.callback(plugin.stop)
    return plugin
