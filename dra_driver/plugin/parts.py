"""What the capabilities of the plugin are started with, and what they hand to those after them."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from dra_driver.base.errors import DriverError
from dra_driver.base.http import HealthCheck
from dra_driver.k8s.access import load_access
from dra_driver.k8s.claims import ClaimReader, ClaimUid
from dra_driver.k8s.client import ApiClient
from dra_driver.k8s.events import EventRecorder
from dra_driver.k8s.node_labels import NodeLabels
from dra_driver.k8s.pods import PodReader
from dra_driver.k8s.resource_api import ResourceApi
from dra_driver.kubeletplugin.device_plugin.checkpoint import KubeletCheckpoint
from dra_driver.kubeletplugin.serve.pod_resources import PodResourcesClient
from dra_driver.kubeletplugin.serve.rolling_update import PluginInstances, PluginLease
from dra_driver.kubeletplugin.serve.services import ClaimHandler
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.offer import ApiFeatures
from dra_driver.model.records import ClaimRecord
from dra_driver.node.cgroups.processes import open_pod_processes
from dra_driver.node.cgroups.procfs import boot_id
from dra_driver.node.driver.watch import watching
from dra_driver.node.gpu_node import GpuNode
from dra_driver.node.machine import OpenNode
from dra_driver.node.state.ledger import Ledger
from dra_driver.plan.node_api import KubeletVersion
from dra_driver.plugin.claims.dependencies import ClaimChanged
from dra_driver.plugin.claims.in_use import InUseCheck
from dra_driver.plugin.claims.prepared_claims import PreparedClaims
from dra_driver.plugin.claims.preparer import Preparer
from dra_driver.plugin.device_health import NodeDevices
from dra_driver.plugin.device_plugin.pods import AllocatedPods, NodePods
from dra_driver.plugin.health.monitor import HealthMonitor
from dra_driver.plugin.metrics import Metrics
from dra_driver.plugin.node_api.current import NodeApi
from dra_driver.plugin.publish.offers import OfferBuilder
from dra_driver.plugin.publish.profiles import ActiveProfile, EffectiveProfile
from dra_driver.settings import PluginSettings


@dataclass(slots=True)
class PluginParts:
    """A capability is a function ``start(parts, stack)``: it starts what belongs to it and has
    *stack* stop that. ``run`` lists the capabilities in their order."""

    settings: PluginSettings
    api: ApiClient
    node: GpuNode
    ledger: Ledger
    is_newest: Callable[[], bool]  # whether no newer process of this plugin runs
    note_started: Callable[[], None]  # lets the startup probe succeed
    metrics: Metrics
    events: EventRecorder
    in_use: InUseCheck
    node_api: NodeApi = field(default_factory=NodeApi)  # by which API GPUs are given out
    # Set by ``node_api.start``; None, as long as the Node was not read.
    kubelet_version: Callable[[], KubeletVersion | None] = field(default=lambda: None)
    resources: ResourceApi = field(init=False)
    claims: ClaimReader = field(init=False)
    pods: PodReader = field(init=False)
    checkpoint: KubeletCheckpoint = field(init=False)
    allocated_pods: AllocatedPods = field(init=False)
    on_fatal: Callable[[DriverError], None] = field(default=lambda error: None)  # set by ``run``
    dra_is_awaited: Callable[[], bool] = field(default=lambda: False)  # by the kubelet; as above

    # What capabilities add to.
    claim_listeners: list[ClaimChanged] = field(default_factory=list)
    readiness: dict[str, HealthCheck] = field(default_factory=dict)
    liveness: dict[str, HealthCheck] = field(default_factory=dict)
    # What may take seconds is called once the kubelet is served.
    before_publishing: list[Callable[[], None]] = field(default_factory=list)
    after_publishing: list[Callable[[], None]] = field(default_factory=list)

    # Called when what is offered has changed, and with it maybe the health of devices, and when an
    # MPS server failed or works again.
    health_listeners: list[Callable[[], None]] = field(default_factory=list)

    # Set by ``publish.start``.
    labels: NodeLabels = field(init=False)
    profile: ActiveProfile = field(init=False)
    effective_profile: EffectiveProfile = field(init=False)
    api_features: Callable[[], ApiFeatures] = field(init=False)  # what can be told of devices
    offers: OfferBuilder = field(init=False)
    scan_soon: Callable[[], None] = field(init=False)  # the offer may have changed
    published_since: Callable[[float], bool] = field(init=False)  # a monotonic time
    slices_withdrawn: Callable[[], bool] = field(init=False)  # there are none, and will be none
    publish: Callable[[], None] = field(init=False)  # for the first time; later by itself

    # Set by what serves the device-plugin API: whether the ledger has a record of each
    # container with devices of ours, also of those that came before this process, by a look that
    # began at a monotonic time or later; and the pods that have devices of another device plugin.
    allocations_known: Callable[[float], bool] = field(default=lambda since: False)
    pods_of_others: Callable[[], tuple[str, ...]] = field(default=tuple)

    # Set by ``node_api.start``: the API may be another one now.
    choose_soon: Callable[[], None] = field(default=lambda: None)

    # Set by ``health.start``.
    health: HealthMonitor = field(init=False)

    # Set by ``mig.start`` as layouts come: GPUs that get theirs when nothing uses them any more.
    pending_layouts: frozenset[GpuUuid] = frozenset()

    # Set by ``mps.start`` as that changes: claims whose MPS server does not serve them, and why.
    mps_failures: Mapping[ClaimUid, str] = field(default_factory=dict)

    # Set by ``claims.start``.
    preparer: Preparer = field(init=False)
    claim_handler: ClaimHandler = field(init=False)
    prepared_claims: PreparedClaims = field(init=False)
    lease: PluginLease = field(init=False)
    devices: NodeDevices = field(init=False)  # how they are

    def __post_init__(self) -> None:
        settings = self.settings
        self.resources = ResourceApi(self.api)
        self.claims = ClaimReader(self.resources, settings.driver_name, settings.node_name)
        self.pods = PodReader(self.api)
        self.checkpoint = KubeletCheckpoint(settings.device_plugin_dir)
        self.allocated_pods = AllocatedPods(
            self.checkpoint.containers,
            PodResourcesClient(settings.kubelet_dir).pods,
            NodePods(lambda: self.pods.on_node(settings.node_name)),
        )

    def while_newest(self, act: Callable[[], float | None]) -> Callable[[], float | None]:
        """*act*, which does nothing where a newer process of this plugin runs."""
        return lambda: act() if self.is_newest() else None

    def health_changed(self) -> None:
        """The health of devices may be another one: tell every listener."""
        for listener in self.health_listeners:
            listener()

    def claim_changed(self, record: ClaimRecord | None) -> None:
        """A claim was prepared or unprepared: tell every listener."""
        for listener in self.claim_listeners:
            listener(record)


def open_parts(
    settings: PluginSettings, open_node: OpenNode, metrics: Metrics, stack: ExitStack
) -> PluginParts:
    api = ApiClient(load_access(settings.kubeconfig))
    stack.callback(api.close)
    ledger = Ledger(settings.ledger_dir, boot_id(settings.host_root))
    metrics.count(ledger.records, ledger.set_aside)
    node = stack.enter_context(open_node())
    stack.enter_context(watching(node.driver))
    instances = PluginInstances(settings.plugin_dir / "instances", settings.pod_uid or None)
    stack.callback(instances.leave)
    events = EventRecorder(api, settings.driver_name, settings.node_name)
    stack.callback(events.stop)
    processes = open_pod_processes(settings.host_root, node.containers)
    return PluginParts(
        settings=settings,
        api=api,
        node=node,
        ledger=ledger,
        is_newest=instances.is_newest,
        note_started=instances.note_started,
        metrics=metrics,
        events=events,
        in_use=InUseCheck(processes, node.processes, ledger.neighbours),
    )
