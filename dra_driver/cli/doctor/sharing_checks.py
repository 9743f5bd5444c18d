"""``doctor``'s checks of sharing: the profile, memory limits, and what the memory guard needs."""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from api.names import GPUS_CONFIGURED
from dra_driver.base.errors import ApiServerError, DriverError, NodeError, SettingsError
from dra_driver.base.frozen import frozen
from dra_driver.cli.doctor.api_checks import resource_names
from dra_driver.cli.doctor.cluster_checks import CheckedCluster
from dra_driver.cli.findings import Check, Finding, abbreviated, fail, ok, skip, warn
from dra_driver.k8s.node_labels import Labels
from dra_driver.kubeletplugin.serve.pod_resources import PodResourcesClient
from dra_driver.kubeletplugin.slices.features import probe_device_features
from dra_driver.model.gpus import Inventory
from dra_driver.model.offer import (
    DEVICE_PLUGIN_FEATURES,
    ApiFeatures,
    Fractional,
    Offer,
    Replica,
)
from dra_driver.model.profiles import AllocationApi, GuardPolicy, Profile
from dra_driver.node.cgroups.containers import NO_RUNTIME_STATE, ContainerBundles
from dra_driver.node.cgroups.processes import ContainerProcesses
from dra_driver.node.cgroups.tree import Cgroups, cgroup_root
from dra_driver.node.gpu_node import GpuNode
from dra_driver.node.inventory.unavailable import describe_pci_gpu
from dra_driver.node.memory.support import MemoryLimitSupport
from dra_driver.node.state.node_api_file import ServedApiFile
from dra_driver.node.state.profile_files import LastProfileFile
from dra_driver.plan.device_plugin.resources import resources
from dra_driver.plan.node_conditions import condition_of
from dra_driver.plan.offer.devices import build_offer
from dra_driver.plan.offer.shapes import describe_shape
from dra_driver.plugin.publish.profiles import ProfileCatalog
from dra_driver.plugin.publish.selection import NodeProfileReader, ProfileSelector, Selection
from dra_driver.settings import DoctorSettings

PROFILE, OFFERED_GPUS, LIMITS, CGROUPS, RUNTIME, POD_RESOURCES, PID_NAMESPACE = (
    "profile",
    "GPUs as offered",
    "memory limits",
    "cgroups",
    "container runtime",
    "pod-resources socket",
    "PID namespace",
)
_NO_GPUS = Inventory()


def checks(settings: DoctorSettings, node: GpuNode, cluster: CheckedCluster | None) -> list[Check]:
    profile = CheckedProfile(settings, node.inventory, cluster)
    cgroups = Cgroups(cgroup_root(node.root))
    host_root, runtime_dir = settings.host_root, settings.runtime_dir

    def sees_pods() -> bool | None:
        return None if settings.sim else ContainerProcesses().sees_pods()

    return [
        (PROFILE, lambda: check_profile(profile)),
        (LIMITS, lambda: check_memory_limits(profile, node.limits.status)),
        (CGROUPS, lambda: [cgroups_finding(cgroups)]),
        (RUNTIME, lambda: [container_runtime_finding(host_root, runtime_dir)]),
        (POD_RESOURCES, lambda: [pod_resources_finding(settings.kubelet_dir)]),
        (PID_NAMESPACE, lambda: [pid_namespace_finding(sees_pods())]),
    ]


@frozen
class ReadNode:
    """A Node as it was read once."""

    node: str
    document: Mapping[str, Any]

    def now(self) -> Labels:
        return self._metadata("labels")

    def annotations(self) -> Labels:
        return self._metadata("annotations")

    def _metadata(self, name: str) -> Labels:
        values: Labels = (self.document.get("metadata") or {}).get(name) or {}
        return values

    @property
    def report(self) -> Mapping[str, str]:
        """The condition in which the plugin says what became of the profile; empty: none."""
        return condition_of(self.document, GPUS_CONFIGURED)


@dataclass(frozen=True)
class CheckedProfile:
    """The node and its profile. Each part is looked at once, when it is asked for."""

    settings: DoctorSettings
    read_inventory: Callable[[], Inventory]
    cluster: CheckedCluster | None  # None: no API server can be asked

    @functools.cached_property
    def node(self) -> ReadNode:
        """ApiServerError: it cannot be read."""
        name = self.settings.node_name
        if self.cluster is None:
            return ReadNode(name, {})
        return ReadNode(name, self.cluster.server.get(f"/api/v1/nodes/{name}"))

    @functools.cached_property
    def selection(self) -> Selection:
        """What the plugin selects. ApiServerError: the labels of the Node cannot be read."""
        settings = self.settings
        namespace = settings.revision_namespace if self.cluster else ""
        objects = NodeProfileReader(self.cluster.server, namespace) if self.cluster else None
        selector = ProfileSelector(
            self.node,
            ProfileCatalog(settings.profiles).named,
            settings.profile,
            objects if namespace else None,
        )
        return selector.select(LastProfileFile(settings.last_profile).read())

    @functools.cached_property
    def profile(self) -> Profile:
        """DriverError: there is none of that name, or it is wrong."""
        profile, problem = self.selection.profile, self.selection.problem
        if profile is None:
            raise problem or SettingsError("there is no profile")
        return profile

    @functools.cached_property
    def inventory(self) -> Inventory:
        return self.read_inventory()

    @functools.cached_property
    def offered(self) -> Offer:
        """What is offered while no claim is held."""
        return self._offer(self._keeps())

    @functools.cached_property
    def unlisted(self) -> tuple[str, ...]:
        """What the kubelet is not told, and why, unless the node gives its GPUs out by DRA."""
        if self._api is AllocationApi.DRA:
            return ()
        offer = self._offer(DEVICE_PLUGIN_FEATURES)
        return resources(offer, resource_names(self.settings), ()).problems

    @functools.cached_property
    def _api(self) -> AllocationApi:
        """What the plugin has chosen; where none did yet, what the profile says."""
        served = ServedApiFile(self.settings.served_api).inspect()
        return served.api if served else self.profile.api

    def _offer(self, features: ApiFeatures) -> Offer:
        mps = bool(self.settings.mps_socket)
        return build_offer(self.inventory, self.profile, features, {}, mps=mps)

    def _keeps(self) -> ApiFeatures:
        cluster = self.cluster
        if self._api is AllocationApi.DEVICE_PLUGIN:
            return DEVICE_PLUGIN_FEATURES
        if cluster is None:
            return ApiFeatures()
        try:
            version = cluster.resources.version
            kept = probe_device_features(cluster.server, version, cluster.driver, cluster.node)
        except ApiServerError:  # the check of its features says why
            return ApiFeatures()
        return ApiFeatures(*kept)


def _kept_profile(settings: DoctorSettings) -> str:
    """What holds while no profile can be used."""
    kept = LastProfileFile(settings.last_profile).read()
    if kept is None:
        return "no last good one is known here; where there was none, the plugin offers no GPU"
    revision = f", revision {kept.revision}" if kept.revision else ""
    return (
        f"until then the plugin keeps the last good one, {kept.name}{revision}, also when it is "
        "started again"
    )


def check_profile(checked: CheckedProfile) -> Iterator[Finding]:
    """Which profile is selected, whether it can be used, and what it makes of the GPUs."""
    try:
        chosen = checked.selection.selected
        # A plugin that looks at no NodeProfile writes none: what is there is of an earlier release.
        report = checked.node.report if checked.settings.revision_namespace else {}
    except ApiServerError as e:
        yield skip(PROFILE, f"which one the Node's labels choose cannot be read: {e}")
        return
    if report.get("status") == "False":
        yield fail(PROFILE, f"the plugin reports: {report.get('message')}", "mend or undo it")
    elif report:
        yield ok(PROFILE, f"the plugin reports: {report.get('message')}")
    try:
        profile = checked.profile
    except DriverError as e:
        origin = chosen.origin if chosen else "the NodeProfiles"
        yield fail(
            PROFILE,
            f"{origin}: {e}",
            f"mend it, or choose another; {_kept_profile(checked.settings)}",
        )
        return
    revision = f", revision {profile.revision}" if profile.revision else ""
    yield ok(PROFILE, f"{profile.name}{revision} ({chosen.origin if chosen else ''})")
    for warning in checked.offered.warnings:
        yield warn(PROFILE, warning, "nothing, where that is what you want")
    yield from offer_findings(checked.offered, checked.inventory)
    for problem in checked.unlisted:  # it says what to do
        yield warn(OFFERED_GPUS, f"by the device-plugin API, part is not listed: {problem}", "")


def check_memory_limits(
    checked: CheckedProfile, status: Callable[[], MemoryLimitSupport]
) -> Iterator[Finding]:
    try:
        strict = requires_driver_limits(checked.offered)
        yield from unenforced_gpu_findings(checked.offered)
    except DriverError:  # the check of the profile says why
        strict = False
    yield memory_limit_finding(status(), strict)


def container_runtime_finding(host_root: Path, runtime_dir: str) -> Finding:
    try:
        directories = ContainerBundles(host_root, runtime_dir).runtime_directories()
    except NodeError as e:
        return warn(RUNTIME, str(e), "ask as root")
    if not directories:
        remedy = "chart value runtimeDir: containerd's state directory"
        return warn(RUNTIME, NO_RUNTIME_STATE, remedy)
    return ok(RUNTIME, f"containers are told apart by their state in {', '.join(directories)}")


def pod_resources_finding(kubelet: Path) -> Finding:
    try:
        number = len(PodResourcesClient(kubelet).pods())
    except NodeError as e:
        return warn(
            POD_RESOURCES,
            str(e),
            "it is asked which pods joined a claim where no container runtime's state can be found",
        )
    return ok(POD_RESOURCES, f"the kubelet lists {number} pods with their claims")


def offer_findings(offered: Offer, inventory: Inventory = _NO_GPUS) -> Iterator[Finding]:
    """What the GPUs are offered as, and what cannot be offered as the profile says. GPUs that are
    unavailable in *inventory*, or left out by the profile, are no matter of this check."""
    shapes: dict[str, list[str]] = {}
    for device in offered.devices:
        if device.partition is not None:
            created = "created for claims" if device.created_for_claims else "that exist"
            shape = f"partitions {created}"
        elif device.name in (device.gpu.name, f"{device.gpu.name}-0"):
            shape = describe_shape(device.shape)
        else:
            continue
        if device.gpu.name not in (gpu_names := shapes.setdefault(shape, [])):
            gpu_names.append(device.gpu.name)
    for shape, gpus in sorted(shapes.items()):
        yield ok(OFFERED_GPUS, f"{shape}: {abbreviated(gpus)}")
    yield from _unavailable_findings(offered, inventory)
    for change in offered.pending:
        yield warn(
            OFFERED_GPUS,
            f"{change.device} is not offered as the profile says, but {change.change}: "
            f"{change.reason}",
            "",  # it says what to do
        )


def _unavailable_findings(offered: Offer, inventory: Inventory) -> Iterator[Finding]:
    """GPUs of which nothing is offered because of their MIG mode."""
    mig_gpus = {
        describe_pci_gpu(gpu.pci_bus_id, gpu.uuid)
        for gpu in inventory.gpus
        if gpu.mig and gpu.mig.on
    }
    finding = warn if offered.devices else fail
    for unavailable in offered.unavailable:
        if unavailable.what in mig_gpus:
            yield finding(
                OFFERED_GPUS, f"{unavailable.what} is not offered: {unavailable.reason}", ""
            )


def memory_limit_finding(offered: MemoryLimitSupport, strict: bool) -> Finding:
    if offered.backend is not None:
        return ok(
            LIMITS,
            f"the GPU's driver refuses a claim more than its share ({offered.backend} counts)",
        )
    if strict:
        return fail(
            LIMITS,
            f"the profile insists on the driver's own (memoryLimit: Strict), which are not to be "
            f"had: {offered.reason}",
            "mend that, or leave memoryLimit out: until then no fraction is prepared here",
        )
    message = f"not by the GPU's driver, the memory guard alone sees to them: {offered.reason}"
    return (
        warn(LIMITS, message, "mend that, and ask again") if offered.fault else ok(LIMITS, message)
    )


def cgroups_finding(tree: Cgroups) -> Finding:
    if not tree.root.is_dir():
        return warn(
            CGROUPS,
            f"{tree.root} is missing",
            "mount the host's cgroup file system there: the driver's limits are set by cgroup",
        )
    pods = next(iter(tree.levels()), None)
    version = "v2" if tree.unified else "v1, on which drivers set no limits; the memory guard works"
    return ok(CGROUPS, f"{version}; {f'pods are below {pods}' if pods else 'no pod has one yet'}")


def pid_namespace_finding(sees_pods: bool | None) -> Finding:
    """*sees_pods*: whether this process sees those of pods; None: GPUs are simulated.

    NVML counts processes as whoever asks it does: it need not be the machine's first namespace, and
    is not where nodes are containers themselves, but that of the node."""
    if sees_pods is None:
        return skip(PID_NAMESPACE, "simulated GPUs have no processes")
    if sees_pods:
        return ok(PID_NAMESPACE, "the node's: the memory guard sees the processes of other pods")
    return warn(
        PID_NAMESPACE,
        "this pod's own: the memory guard sees no process of other pods",
        "set hostPID: true for the pod: else the memory guard can neither name nor end a process",
    )


def requires_driver_limits(offered: Offer) -> bool:
    """Whether some GPU in parts is only prepared with the driver's own limits."""
    return any(
        device.rules.strict
        for device in offered.devices
        if isinstance(device.shape, Fractional | Replica)
    )


def unenforced_gpu_findings(offered: Offer) -> Iterator[Finding]:
    """Shared GPUs on which nothing is enforced: to be known, not to be mended."""
    names = [
        device.gpu.name
        for device in offered.devices
        if isinstance(device.shape, Fractional | Replica)
        and (not device.rules.limited or device.rules.guard.policy is GuardPolicy.OFF)
        and not device.rules.strict
    ]
    if names:
        gpus = abbreviated(dict.fromkeys(names))  # partitions follow the rules of their GPU
        yield ok(LIMITS, f"by profile, the memory guard does not look at {gpus}")
