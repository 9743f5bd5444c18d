"""Starts what publishes this node's devices: profile, offers, and the loop that reads the GPUs."""

import logging
from collections.abc import Callable
from contextlib import ExitStack

from api.names import (
    CLEAR_FAULTS_ANNOTATION,
    DEVICE_PLUGIN_ANNOTATION,
    GPUS_CONFIGURED,
    PROFILE_REVISION_ANNOTATION,
    RELEASE_ANNOTATION,
    RELEASED_ANNOTATION,
)
from dra_driver.base.errors import ApiServerError, NodeError
from dra_driver.base.threads import UNTIL_WOKEN, Loop
from dra_driver.k8s.events import Event, NodeRef
from dra_driver.k8s.node_labels import NodeLabels
from dra_driver.kubeletplugin.slices.features import probe_device_features
from dra_driver.kubeletplugin.slices.pool_writer import PoolWriter
from dra_driver.kubeletplugin.slices.publisher import Publisher
from dra_driver.model.gpus import UnavailableGpu
from dra_driver.model.offer import DEVICE_PLUGIN_FEATURES, ApiFeatures
from dra_driver.model.profiles import AllocationApi
from dra_driver.node.cgroups.procfs import boot_id
from dra_driver.node.state.known_gpus import KnownGpusFile
from dra_driver.node.state.profile_files import LastProfileFile
from dra_driver.plan.node_api import ApiState
from dra_driver.plan.node_conditions import NodeCondition
from dra_driver.plan.profiles.report import report_condition
from dra_driver.plugin.node_api.start import resource_names
from dra_driver.plugin.node_condition import ConditionWriter
from dra_driver.plugin.parts import PluginParts
from dra_driver.plugin.publish.condition import UnlistedDevices, node_report, not_offered_so
from dra_driver.plugin.publish.offers import PROBE_SECONDS, ApiFeatureProbe, OfferBuilder
from dra_driver.plugin.publish.profiles import ActiveProfile, EffectiveProfile, ProfileCatalog
from dra_driver.plugin.publish.scanner import DeviceScanner
from dra_driver.plugin.publish.selection import NodeProfileReader, ProfileSelector

log = logging.getLogger(__name__)

_LABELS_SECONDS = 2.0  # to wait for the labels of the Node before the first look
_API_SECONDS = 5.0  # to wait until it is known for the first time by which API GPUs are given out


def start(parts: PluginParts, stack: ExitStack) -> None:
    """Nothing is published before ``parts.publish`` is called."""
    settings = parts.settings
    _start_profile(parts, stack)
    _start_features(parts, stack)
    parts.offers = OfferBuilder(
        parts.node,
        parts.effective_profile.profile,
        parts.api_features,
        parts.ledger,
        mps=parts.node.mps is not None,
        health=lambda inventory: parts.health.faults_for(inventory),
    )
    writer = PoolWriter(parts.resources, settings.driver_name, settings.node_name)
    publisher = Publisher(
        writer, parts.is_newest, parts.metrics, is_withdrawn=lambda: _is_withdrawn(parts)
    )
    parts.slices_withdrawn = lambda: publisher.status().withdrawn
    scanner = _scanner(parts, publisher)
    scan = Loop("scan", _scan(parts, scanner), settings.look_interval)
    scanner.scan_soon = parts.scan_soon = scan.soon
    parts.profile.on_change.append(scan.soon)
    parts.node_api.listeners += [publisher.wake, scan.soon]
    parts.published_since = lambda moment: scanner.scanned_at > moment and publisher.healthy()
    parts.readiness |= {
        "gpus": lambda: scanner.not_ready,
        "slices": lambda: (
            None if publisher.healthy() else publisher.status().error or "not published yet"
        ),
    }
    _start_condition(parts, scanner, stack)

    def publish() -> None:
        scanner.scan()
        publisher.start()
        stack.callback(publisher.stop)
        scan.start()
        stack.callback(scan.stop)

    parts.publish = publish


def _is_withdrawn(parts: PluginParts) -> bool:
    """Whether no slices are published. Before that is known, those of an earlier process stay."""
    return parts.node_api.serving is not None and not _is_published(parts)


def _is_published(parts: PluginParts) -> bool:
    return parts.node_api.state(AllocationApi.DRA) is ApiState.ON and not parts.dra_is_awaited()


def _start_features(parts: PluginParts, stack: ExitStack) -> None:
    """The API server is asked what it keeps of slices only where some may be published."""
    node_api = parts.node_api
    of_slices = ApiFeatureProbe(lambda: _api_features(parts))

    def probe() -> float | None:
        if node_api.serving is AllocationApi.DEVICE_PLUGIN:
            return UNTIL_WOKEN
        return of_slices.probe()

    def features() -> ApiFeatures:
        api = node_api.wait(_API_SECONDS)
        if api is None:
            raise ApiServerError(node_api.refusal(AllocationApi.DRA) or "")
        return DEVICE_PLUGIN_FEATURES if api is AllocationApi.DEVICE_PLUGIN else of_slices()

    parts.api_features = features
    loop = Loop("api-features", probe, PROBE_SECONDS)
    node_api.listeners.append(loop.soon)
    loop.start()
    stack.callback(loop.stop)


def _scanner(parts: PluginParts, publisher: Publisher) -> DeviceScanner:
    """Tells everybody what changed, and hears of claims."""
    scanner = DeviceScanner(parts.offers, parts.settings.node_name, publisher.want, parts.metrics)
    scanner.is_published = lambda: _is_published(parts)
    scanner.report = lambda unavailable: parts.events.emit(_event(parts.labels, unavailable))
    scanner.offer_changed = parts.health_changed
    parts.claim_listeners.append(scanner.claim_changed)
    return scanner


def _scan(parts: PluginParts, scanner: DeviceScanner) -> Callable[[], float | None]:
    """A scan, which is remembered for the next process."""
    gpus = parts.node.gpus
    known_gpus = KnownGpusFile(parts.settings.known_gpus, boot_id(parts.settings.host_root))
    parts.node.remember(known_gpus.read())

    def scan() -> float | None:
        seconds = scanner.scan()
        if parts.is_newest():
            known_gpus.keep(gpus.answered)
        return seconds

    return scan


def _start_condition(parts: PluginParts, scanner: DeviceScanner, stack: ExitStack) -> None:
    """Only where there are NodeProfiles, whose controller reads the condition."""
    if not parts.settings.revision_namespace:
        return

    unlisted = UnlistedDevices(resource_names(parts.settings))

    def not_possible() -> tuple[str, ...]:
        if (offer := scanner.offer) is None:
            return ()
        by_device_plugin = parts.node_api.serving is AllocationApi.DEVICE_PLUGIN
        not_listed = unlisted.problems(offer) if by_device_plugin else ()
        return (*not_offered_so(offer), *not_listed)

    def report() -> NodeCondition | None:
        scanned_at = scanner.scanned_at  # first: what is read next is not older
        state, gpus = parts.profile.state, dict.fromkeys(scanner.pending_gpus)
        if layouts := parts.pending_layouts:
            every = parts.node.inventory().gpus
            gpus |= dict.fromkeys(gpu.name for gpu in every if gpu.uuid in layouts)
        reported = node_report(state, scanned_at, gpus, not_possible())
        return report_condition(reported) if reported else None

    condition = ConditionWriter(parts.api, parts.labels, GPUS_CONFIGURED, report, parts.is_newest)
    scanner.scanned = condition.update
    parts.labels.start(condition.update, 0.0)  # it is gone with a Node that registered again
    condition.loop.start()
    stack.callback(condition.loop.stop)


def _event(labels: NodeLabels, unavailable: UnavailableGpu) -> Event:
    message = f"{unavailable.what}: not offered: {unavailable.reason}"
    return Event(NodeRef(labels.node, labels.uid), "GPUNotOffered", unavailable.what, message)


def _start_profile(parts: PluginParts, stack: ExitStack) -> None:
    try:
        parts.ledger.peek()  # a GPU that a claim holds keeps its shape from the first look on
    except NodeError as e:  # prepare and readiness will say so, too
        log.warning("cannot tell yet what claims hold", extra={"error": str(e)})
    settings = parts.settings
    followed = (
        *(PROFILE_REVISION_ANNOTATION, CLEAR_FAULTS_ANNOTATION),
        *(RELEASE_ANNOTATION, RELEASED_ANNOTATION, DEVICE_PLUGIN_ANNOTATION),
    )
    parts.labels = NodeLabels(parts.api, settings.node_name, annotations=followed)
    parts.labels.start(lambda: None, _LABELS_SECONDS)
    stack.callback(parts.labels.stop)
    files = ProfileCatalog(settings.profiles)
    namespace = settings.revision_namespace
    objects = NodeProfileReader(parts.api, namespace) if namespace else None
    parts.profile = ActiveProfile(
        files,
        ProfileSelector(parts.labels, files.named, settings.profile, objects),
        parts.labels,
        last=LastProfileFile(settings.last_profile),
    )
    parts.profile.start(_LABELS_SECONDS)
    stack.callback(parts.profile.stop)
    parts.effective_profile = EffectiveProfile(parts.profile.current)
    parts.metrics.watch_profile(lambda: parts.profile.error)


def _api_features(parts: PluginParts) -> ApiFeatures:
    settings = parts.settings
    return ApiFeatures(
        *probe_device_features(
            parts.api, parts.resources.version, settings.driver_name, settings.node_name
        )
    )
