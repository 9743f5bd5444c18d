"""Starts what chooses the API by which this node gives its GPUs out, and tells of the choice."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Final

from api.names import DEVICE_PLUGIN_ANNOTATION, GPUS_ALLOCATED_BY
from dra_driver.base import inotify
from dra_driver.base.errors import NodeError
from dra_driver.base.inotify import DirectoryChanges
from dra_driver.base.threads import Loop
from dra_driver.k8s.node_labels import NodeLabels
from dra_driver.kubeletplugin.device_plugin.registration import KubeletSocket
from dra_driver.kubeletplugin.device_plugin.resources import AllocatedContainer
from dra_driver.kubeletplugin.serve.pod_resources import PodResourcesClient
from dra_driver.model.profiles import AllocationApi
from dra_driver.model.records import ClaimRecord, DeviceAllocation
from dra_driver.node.cgroups.procfs import boot_id
from dra_driver.node.state.ledger_files import read_ledger_directory
from dra_driver.node.state.node_api_file import ServedApiFile
from dra_driver.plan.device_plugin.resources import ResourceNames
from dra_driver.plan.device_plugin.users import held_allocations
from dra_driver.plan.node_annotation import DEVICE_PLUGIN_USES
from dra_driver.plan.node_api import (
    ApiState,
    KubeletVersion,
    api_condition,
    device_plugin_use,
    held_api,
    kubelet_version,
)
from dra_driver.plugin.node_api.annotation import AnnotationWriter
from dra_driver.plugin.node_api.chooser import ApiChooser, ChoiceInputs
from dra_driver.plugin.node_api.facts import ClusterFactsReader, Holders
from dra_driver.plugin.node_api.other_plugin import (
    OtherDevicePlugin,
    PodsOfOthers,
    nvidia_sockets,
    registered_devices,
)
from dra_driver.plugin.node_api.pods import LONGEST_SECONDS, PodSources, PodsWithoutGpus
from dra_driver.plugin.node_condition import ConditionWriter
from dra_driver.plugin.parts import PluginParts
from dra_driver.settings import PluginSettings

_LOOK_SECONDS: Final = 30.0  # between looks at this machine, of which the kernel tells us as well
_STOP_SECONDS: Final = 1.0


def start(parts: PluginParts, stack: ExitStack) -> None:
    """What was served before is known when this returns; else it will be soon."""
    settings = parts.settings
    chooser = ApiChooser(parts.node_api, _inputs(parts), ServedApiFile(settings.served_api))
    chooser.begin(held_api(parts.ledger.records(), _given_by_kubelet(parts)))
    changes = DirectoryChanges(inotify.NAMES)

    def look() -> float:
        changes.watch([settings.device_plugin_dir])  # before looking: no change is missed
        return chooser.step()

    loop = Loop("node-api", look, _LOOK_SECONDS, changes)
    parts.kubelet_version = lambda: _kubelet_version(parts.labels)
    parts.readiness["api"] = lambda: _not_ready(parts)
    _look_on_changes(parts, chooser, loop.soon)
    parts.choose_soon = loop.soon
    _tell(parts, chooser, stack)
    _tell_pods(parts, chooser, stack)
    loop.start()
    stack.callback(_stop, loop, changes)


def _given_by_kubelet(parts: PluginParts) -> frozenset[DeviceAllocation]:
    """What pods have of our resources, by whatever device plugin; of some that have ended, too."""
    try:
        containers = parts.checkpoint.containers()
    except NodeError:  # who needs to know what containers have tells of it
        return frozenset()
    return held_allocations(containers or (), None, resource_names(parts.settings))


def _tell(parts: PluginParts, chooser: ApiChooser, stack: ExitStack) -> None:
    """The Node says which API it is, and so do metrics."""
    node_api = parts.node_api
    condition = ConditionWriter(
        parts.api,
        parts.labels,
        GPUS_ALLOCATED_BY,
        lambda: api_condition(node_api.choice),
        parts.is_newest,
    )
    annotation = _annotation(parts)

    def changed() -> None:
        condition.update()
        annotation.loop.soon()

    chooser.changed = changed
    parts.labels.start(changed, 0.0)  # both are gone with a Node that registered again
    parts.metrics.watch_api(lambda api: node_api.state(api) is ApiState.ON)
    for loop in (condition.loop, annotation.loop):
        loop.start()
        stack.callback(loop.stop)


def _annotation(parts: PluginParts) -> AnnotationWriter:
    node_api, names = parts.node_api, resource_names(parts.settings)

    def text() -> str | None:
        use = device_plugin_use(node_api.choice, names)
        return DEVICE_PLUGIN_USES.encode(use).decode() if use else None

    return AnnotationWriter(
        parts.api,
        parts.labels,
        DEVICE_PLUGIN_ANNOTATION,
        text,
        lambda: node_api.serving is not None and parts.is_newest(),
    )


def _tell_pods(parts: PluginParts, chooser: ApiChooser, stack: ExitStack) -> None:
    settings = parts.settings
    sources = PodSources(
        PodResourcesClient(settings.kubelet_dir).pods,
        lambda: parts.pods.on_node(settings.node_name),
        parts.checkpoint.containers,
        parts.ledger.records,
    )
    pods = PodsWithoutGpus(parts.node_api, resource_names(settings), sources, parts.events)
    loop = Loop("pods-without-gpus", parts.while_newest(pods.look), LONGEST_SECONDS)

    def kubelet_changed() -> None:
        pods.kubelet_changed()
        loop.soon()

    chooser.kubelet_changed = kubelet_changed
    parts.node_api.listeners.append(loop.soon)
    parts.after_publishing.append(loop.start)
    stack.callback(loop.stop)


def _look_on_changes(
    parts: PluginParts, chooser: ApiChooser, look_soon: Callable[[], None]
) -> None:
    labels = parts.labels
    node = labels.uid

    def node_changed() -> None:
        """Of a Node that registered again all may be another one; labels say nothing here."""
        nonlocal node
        if labels.uid != node:
            node = labels.uid
            chooser.ask_again()
            look_soon()

    def claim_changed(record: ClaimRecord | None) -> None:
        if chooser.waiting:
            chooser.given_back()
            look_soon()

    parts.profile.on_change.append(look_soon)
    parts.claim_listeners.append(claim_changed)
    labels.start(node_changed, 0.0)


def _inputs(parts: PluginParts) -> ChoiceInputs:
    settings, profile = parts.settings, parts.profile
    names = resource_names(settings)
    ledger_directory = settings.ledger_dir / boot_id(settings.host_root)
    holders = Holders(
        parts.ledger.records,
        lambda: read_ledger_directory(ledger_directory),
        parts.claims,
        lambda since: parts.allocations_known(since),
        lambda: parts.pods_of_others(),
    )

    def asked() -> AllocationApi | None:
        in_force = profile.state.profile
        return in_force.api if in_force else None

    return ChoiceInputs(
        resource=names.gpu,
        asked=asked,
        cluster=ClusterFactsReader(parts.resources, parts.labels, names, settings.driver_name).read,
        holder_names=holders.names,
        device_plugin_holders=holders.of_device_plugin,
        other_plugin=_other_plugin(parts, names),
        slices_withdrawn=parts.slices_withdrawn,
        kubelet_start=KubeletSocket(settings.device_plugin_dir).identity,
        is_newest=parts.is_newest,
    )


def _other_plugin(parts: PluginParts, names: ResourceNames) -> OtherDevicePlugin:
    kubelet = PodResourcesClient(parts.settings.kubelet_dir)

    def containers() -> tuple[AllocatedContainer, ...]:
        try:
            return parts.allocated_pods.containers()
        except NodeError:
            if not kubelet.is_there() and parts.checkpoint.containers() is None:
                return ()  # no kubelet tells of devices here
            raise

    pods = PodsOfOthers(
        parts.checkpoint.containers,
        containers,
        parts.allocated_pods.pods,
        parts.in_use.has_processes,
        parts.ledger.records,
        names,
    )
    directory = parts.settings.device_plugin_dir
    return OtherDevicePlugin(
        lambda: nvidia_sockets(directory),
        partial(registered_devices, parts.checkpoint, names),
        pods,
    )


def resource_names(settings: PluginSettings) -> ResourceNames:
    """What pods ask for by the device-plugin API."""
    return ResourceNames(
        settings.extended_resource_name,
        settings.shared_extended_resource_name,
        settings.mig_extended_resource_prefix,
    )


def _kubelet_version(labels: NodeLabels) -> KubeletVersion | None:
    status = labels.status
    return kubelet_version(status.kubelet_version) if status else None


def _not_ready(parts: PluginParts) -> str | None:
    """Why this node gives no GPUs out. One that goes to another API does so in seconds."""
    choice = parts.node_api.choice
    if choice.serving is None:
        return parts.node_api.refusal(AllocationApi.DRA)
    return choice.other_plugin or None


def _stop(loop: Loop, changes: DirectoryChanges) -> None:
    loop.stop()
    loop.join(_STOP_SECONDS)
    if not loop.alive:
        changes.close()
