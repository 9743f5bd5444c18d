"""``doctor``'s check of the API by which the node gives its GPUs out."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from api.names import GPUS_ALLOCATED_BY
from dra_driver.base.errors import ApiServerError, Forbidden, NodeError
from dra_driver.cli.doctor.cluster_checks import CheckedCluster
from dra_driver.cli.findings import Finding, abbreviated, fail, ok, skip, warn
from dra_driver.k8s.claims import ClaimReader
from dra_driver.k8s.node_labels import NodeLabels
from dra_driver.k8s.pods import NodePod, PodReader
from dra_driver.kubeletplugin.device_plugin.checkpoint import KubeletCheckpoint
from dra_driver.kubeletplugin.device_plugin.resources import AllocatedContainer
from dra_driver.model.profiles import AllocationApi
from dra_driver.model.records import ClaimRecord
from dra_driver.node.cgroups.procfs import boot_id
from dra_driver.node.state.ledger_files import read_ledger_directory
from dra_driver.node.state.node_api_file import ServedApi, ServedApiFile
from dra_driver.node.state.profile_files import LastProfileFile
from dra_driver.plan.device_plugin.resources import ResourceNames
from dra_driver.plan.device_plugin.users import Giver, by_giver, foreign_devices, holding_pods
from dra_driver.plan.node_api import (
    DEVICE_MEND,
    FORGOTTEN_MEND,
    OTHER_DEVICE_PLUGIN,
    POD_MEND,
    ApiChoice,
    NodeApiFacts,
    choice_text,
    choose_api,
    forgotten_pods,
    other_device_plugin,
    pods_without_devices,
    pods_without_gpus,
)
from dra_driver.plan.node_conditions import condition_of
from dra_driver.plugin.node_api.facts import ClusterFactsReader, Holders
from dra_driver.plugin.node_api.other_plugin import nvidia_sockets, registered_devices
from dra_driver.settings import DoctorSettings

API: Final = "allocation API"
PODS: Final = "pods without GPUs"
_ROOM: Final = 500  # characters


def check_api(settings: DoctorSettings, cluster: CheckedCluster) -> Iterator[Finding]:
    """Everything is asked anew, as the plugin asks it."""
    served = ServedApiFile(settings.served_api).inspect()
    if served is None:
        yield warn(
            API,
            "the plugin has not chosen yet by which API this node gives its GPUs out",
            "look at the log of the plugin, and whether it is ready",
        )
        return
    choice = choose_api(_facts(settings, cluster, served))
    yield from api_findings(choice)


def api_findings(choice: ApiChoice) -> Iterator[Finding]:
    """What there is to say of what the node serves."""
    text = f"GPUs are given out by {choice.serving}: {choice_text(choice, _ROOM)}"
    if choice.other_plugin:
        yield fail(
            API,
            f"nothing is offered: {choice.other_plugin}",
            "remove the other device plugin from this node, and have the pods end that have GPUs "
            "by it; this driver needs no restart then",
        )
    if choice.wanted not in (None, choice.serving):
        yield warn(API, text, "to have it change now, drain the node, and allow pods again then")
    elif choice.problem:
        yield warn(API, f"GPUs are given out by {choice.serving}: {choice.problem}", "as it says")
    elif not choice.other_plugin:
        yield ok(API, text)


def resource_names(settings: DoctorSettings) -> ResourceNames:
    """What pods ask for by the device-plugin API."""
    return ResourceNames(
        settings.extended_resource_name,
        settings.shared_extended_resource_name,
        settings.mig_extended_resource_prefix,
    )


def _facts(settings: DoctorSettings, cluster: CheckedCluster, served: ServedApi) -> NodeApiFacts:
    names = resource_names(settings)
    reader = ClusterFactsReader(
        cluster.resources, NodeLabels(cluster.server, cluster.node), names, settings.driver_name
    )
    reader.class_expected_until = float("-inf")
    facts = reader.read()
    profile = LastProfileFile(settings.last_profile).read()
    others = facts.allocatable if served.api is AllocationApi.DRA else ()
    directory = settings.device_plugin_dir
    registered = registered_devices(KubeletCheckpoint(directory), names)
    foreign = foreign_devices(registered, names, facts.allocatable)
    ledger = settings.ledger_dir / boot_id(settings.host_root)
    claims = ClaimReader(cluster.resources, settings.driver_name, settings.node_name)
    holders = Holders(
        lambda: (),
        lambda: read_ledger_directory(ledger),
        claims,
        lambda since: True,
        lambda: _pods_of_others(settings, cluster),
    )
    return NodeApiFacts(
        asked=profile.api if profile else None,
        dra_served=facts.dra_served,
        kubelet=facts.kubelet,
        resource=names.gpu,
        device_class=facts.device_class,
        serving=served.api,
        holder_names=holders.names(served.api),
        other_plugin=other_device_plugin(nvidia_sockets(directory), others, foreign)
        or _told_by_plugin(cluster),
    )


def _told_by_plugin(cluster: CheckedCluster) -> str:
    """What the plugin said last of another device plugin: that it was here a moment ago, or that
    pods have GPUs by it."""
    try:
        node = cluster.server.get(f"/api/v1/nodes/{cluster.node}")
    except ApiServerError:  # the other checks tell of it
        return ""
    condition = condition_of(node, GPUS_ALLOCATED_BY)
    if condition.get("reason") != OTHER_DEVICE_PLUGIN:
        return ""
    return f"{condition.get('message', '')} (so the plugin said last)"


def _pods_of_others(settings: DoctorSettings, cluster: CheckedCluster) -> tuple[str, ...] | None:
    """Those that have GPUs by another device plugin. None: the kubelet or the API server does not
    tell."""
    try:
        containers = KubeletCheckpoint(settings.device_plugin_dir).containers()
        pods = PodReader(cluster.server).on_node(settings.node_name)
    except (ApiServerError, NodeError):
        return None
    if containers is None:
        return None
    theirs = by_giver(containers, (), beside_other=False)[Giver.OTHER]
    return holding_pods(theirs, {pod.pod.uid: pod for pod in pods}, resource_names(settings))


def check_pods(settings: DoctorSettings, cluster: CheckedCluster) -> Iterator[Finding]:
    """Those that no scheduler has seen, and those whose devices the kubelet has forgotten."""
    served = ServedApiFile(settings.served_api).inspect()
    if served is None:
        yield skip(PODS, "the plugin has not chosen yet by which API this node gives its GPUs out")
        return
    directory, by_dra = settings.device_plugin_dir, served.api is AllocationApi.DRA
    if not (by_dra or directory.is_dir()):
        mend = "say where the kubelet has the sockets of device plugins: --device-plugin-dir"
        yield warn(PODS, f"{directory} does not exist, so it is not known who has GPUs", mend)
        return
    try:
        pods = PodReader(cluster.server).on_node(settings.node_name)
        find = _pods_by_dra if by_dra else _pods_by_device_plugin
        findings = tuple(find(settings, pods))
    except (Forbidden, NodeError) as e:
        yield skip(PODS, str(e))
        return
    yield from findings or [ok(PODS, "none that asks for a GPU runs without")]


def _pods_by_dra(settings: DoctorSettings, pods: tuple[NodePod, ...]) -> Iterator[Finding]:
    if without := pods_without_gpus(pods, resource_names(settings)):
        yield _without_gpus(without, POD_MEND)


def _pods_by_device_plugin(
    settings: DoctorSettings, pods: tuple[NodePod, ...]
) -> Iterator[Finding]:
    """NodeError: it is not known now who has devices."""
    containers, records = _devices(settings)
    if without := pods_without_devices(pods, containers, records, resource_names(settings)):
        yield _without_gpus(without, DEVICE_MEND)
    if forgotten := forgotten_pods(pods, containers, records):
        problem = f"the kubelet has lost which devices these have: {_names(forgotten)}"
        yield warn(PODS, problem, FORGOTTEN_MEND)


def _without_gpus(pods: tuple[NodePod, ...], mend: str) -> Finding:
    return warn(PODS, f"these ask for GPUs and run without: {_names(pods)}", mend)


def _names(pods: Iterable[NodePod]) -> str:
    return abbreviated(f"{pod.namespace}/{pod.pod.name}" for pod in pods)


def _devices(
    settings: DoctorSettings,
) -> tuple[Sequence[AllocatedContainer], Sequence[ClaimRecord]]:
    """Who has devices by the kubelet, and by the ledger. NodeError: it is not known now."""
    containers = KubeletCheckpoint(settings.device_plugin_dir).containers()
    if containers is None:
        raise NodeError(
            f"the kubelet has not written to {settings.device_plugin_dir} yet who has devices"
        )
    records, _ = read_ledger_directory(settings.ledger_dir / boot_id(settings.host_root))
    return containers, tuple(records.values())
