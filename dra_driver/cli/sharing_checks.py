"""Is what a claim was granted of a GPU also what it can use here: profile, limits, guard?"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from dra_driver.cli.cluster_checks import Cluster
from dra_driver.cli.findings import Finding, fail, ok, skip, some, warn
from dra_driver.errors import ClusterError, DriverError, NodeError, SettingsError
from dra_driver.kubeletplugin.features import probe_devices
from dra_driver.kubeletplugin.pod_resources import PodResources
from dra_driver.model.inventory import Inventory
from dra_driver.model.offer import Keeps, Offer, Sliceable
from dra_driver.model.profiles import GuardPolicy, Profile
from dra_driver.node.cgroups import Cgroups, cgroup_root
from dra_driver.node.containers import NOWHERE, Containers
from dra_driver.node.limit_backend import Offered
from dra_driver.node.processes import Processes
from dra_driver.node.withhold import named
from dra_driver.plan.offer import described, offer
from dra_driver.plan.profiles import Wanted, wanted
from dra_driver.plugin.profiles import Profiles
from dra_driver.settings import DoctorSettings

PROFILE, SHAPES, LIMITS, CGROUPS, RUNTIME, PODS, PROCESSES = (
    "profile",
    "GPUs as offered",
    "memory limits",
    "cgroups",
    "container runtime",
    "pod-resources socket",
    "PID namespace",
)
_NO_GPUS = Inventory()


class Scene:
    """The node and its profile. Each part is looked at once, when it is asked for."""

    def __init__(
        self, settings: DoctorSettings, look: Callable[[], Inventory], cluster: Cluster | None
    ) -> None:
        """*cluster*: None where no API server can be asked."""
        self._settings = settings
        self._look = look
        self._cluster = cluster

    @functools.cached_property
    def wanted(self) -> Wanted:
        """ClusterError: the labels of the Node cannot be read."""
        flag, node = self._settings.profile, self._settings.node_name
        if flag or self._cluster is None:
            return wanted(flag, node, {})
        metadata = self._cluster.server.get(f"/api/v1/nodes/{node}").get("metadata") or {}
        return wanted("", node, metadata.get("labels") or {})

    @functools.cached_property
    def profile(self) -> Profile:
        """SettingsError: there is none of that name, or it is wrong."""
        return Profiles(self._settings.profiles).named(self.wanted.name)

    @functools.cached_property
    def inventory(self) -> Inventory:
        return self._look()

    @functools.cached_property
    def offered(self) -> Offer:
        """What is offered while no claim is held."""
        mps = bool(self._settings.mps_socket)
        return offer(self.inventory, self.profile, self._keeps(), {}, mps=mps)

    def _keeps(self) -> Keeps:
        cluster = self._cluster
        if cluster is None:
            return Keeps()
        try:
            version = cluster.resources.version
            kept = probe_devices(cluster.server, version, cluster.driver, cluster.node)
        except ClusterError:  # the check of its features says why
            return Keeps()
        return Keeps(*kept)


def profile(scene: Scene) -> Iterator[Finding]:
    """Which one is wanted, whether it can be used, and what becomes of the GPUs by it."""
    try:
        chosen = scene.wanted
    except ClusterError as e:
        yield skip(PROFILE, f"which one the Node's labels choose cannot be read: {e}")
        return
    try:
        found = scene.profile
    except SettingsError as e:
        yield of_unusable(chosen, e)
        return
    yield ok(PROFILE, f"{found.name} ({chosen.origin})")
    yield from of_notes(scene.offered.notes)
    yield from of_offer(scene.offered, scene.inventory)


def memory_limits(scene: Scene, status: Callable[[], Offered]) -> Iterator[Finding]:
    try:
        strict = insists(scene.offered)
        yield from unguarded(scene.offered)
    except DriverError:  # the check of the profile says why
        strict = False
    yield of_limits(status(), strict)


def cgroups(host_root: Path) -> Iterator[Finding]:
    tree = Cgroups(cgroup_root(host_root))
    pods = next(iter(tree.levels()), None)
    yield of_cgroups(tree.root, tree.root.is_dir(), tree.unified, pods)


def containers(host_root: Path, runtime_dir: str) -> Iterator[Finding]:
    try:
        yield of_runtime(Containers(host_root, runtime_dir).places())
    except NodeError as e:
        yield warn(RUNTIME, str(e), "ask as root")


def of_runtime(places: Sequence[str]) -> Finding:
    if not places:
        return warn(RUNTIME, NOWHERE, "chart value runtimeDir: containerd's state directory")
    return ok(RUNTIME, f"containers are told apart by their state in {', '.join(places)}")


def pod_resources(kubelet: Path) -> Iterator[Finding]:
    try:
        number = len(PodResources(kubelet).pods())
    except NodeError as e:
        yield of_pods(str(e), 0)
    else:
        yield of_pods("", number)


def pid_namespace(simulated: bool) -> Iterator[Finding]:
    if simulated:
        yield skip(PROCESSES, "simulated GPUs have no processes")
        return
    yield of_pid_namespace(Processes().sees_pods())


def of_unusable(chosen: Wanted, error: SettingsError) -> Finding:
    return fail(
        PROFILE,
        f"{chosen.origin}: {error}",
        "mend it, or choose another; until then the plugin keeps the last good one, also when it "
        "is started again; a node that never had one offers no GPU",
    )


def of_notes(notes: Iterable[str]) -> Iterator[Finding]:
    for note in notes:
        yield warn(PROFILE, note, "nothing, where that is what you want")


def of_offer(offered: Offer, found: Inventory = _NO_GPUS) -> Iterator[Finding]:
    """What the GPUs become, and what cannot be offered as the profile says. *found*: the GPUs; what
    they withhold themselves, and what the profile leaves out, is no matter of this check."""
    shapes: dict[str, list[str]] = {}
    for device in offered.devices:
        if device.partition is not None:
            what = f"partitions {'cut for claims' if device.cut_for_claims else 'that exist'}"
        elif device.name in (device.gpu.name, f"{device.gpu.name}-0"):
            what = described(device.shape)
        else:
            continue
        if device.gpu.name not in (its := shapes.setdefault(what, [])):
            its.append(device.gpu.name)
    for shape, gpus in sorted(shapes.items()):
        yield ok(SHAPES, f"{shape}: {some(gpus)}")
    yield from _withheld(offered, found)
    for change in offered.pending:
        yield warn(
            SHAPES,
            f"{change.device} is not offered as the profile says, but {change.change}: "
            f"{change.reason}",
            "",  # it says what to do
        )


def _withheld(offered: Offer, found: Inventory) -> Iterator[Finding]:
    """GPUs of which nothing is offered because of their MIG mode."""
    cut = {named(gpu.pci_bus_id, gpu.uuid) for gpu in found.gpus if gpu.mig and gpu.mig.on}
    judge = warn if offered.devices else fail
    for one in offered.withheld:
        if one.what in cut:
            yield judge(SHAPES, f"{one.what} is not offered: {one.reason}", "")


def of_limits(offered: Offered, strict: bool) -> Finding:
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
    found = f"not by the GPU's driver, the memory guard alone sees to them: {offered.reason}"
    return warn(LIMITS, found, "mend that, and ask again") if offered.fault else ok(LIMITS, found)


def of_cgroups(root: Path, is_there: bool, unified: bool, pods: Path | None) -> Finding:
    """*pods*: below which directory they have theirs."""
    if not is_there:
        return warn(
            CGROUPS,
            f"{root} is missing",
            "mount the host's cgroup file system there: the driver's limits are set by cgroup",
        )
    version = "v2" if unified else "v1, on which drivers set no limits; the memory guard works"
    return ok(CGROUPS, f"{version}; {f'pods are below {pods}' if pods else 'no pod has one yet'}")


def of_pods(problem: str, number: int) -> Finding:
    if not problem:
        return ok(PODS, f"the kubelet lists {number} pods with their claims")
    return warn(
        PODS,
        problem,
        "it is asked which pods joined a claim where no container runtime's state can be found",
    )


def of_pid_namespace(sees_pods: bool) -> Finding:
    """NVML counts processes as whoever asks it does: it need not be the machine's first namespace,
    and is not where nodes are containers themselves, but that of the node."""
    if sees_pods:
        return ok(PROCESSES, "the node's: the memory guard sees the processes of other pods")
    return warn(
        PROCESSES,
        "this pod's own: the memory guard sees no process of other pods",
        "set hostPID: true for the pod: else the memory guard can neither name nor end a process",
    )


def insists(offered: Offer) -> bool:
    """Whether some GPU in parts is only prepared with the driver's own limits."""
    return any(
        device.rules.strict for device in offered.devices if isinstance(device.shape, Sliceable)
    )


def unguarded(offered: Offer) -> Iterator[Finding]:
    """GPUs in parts on which nobody enforces anything: that is to be known, not mended."""
    names = [
        device.gpu.name
        for device in offered.devices
        if isinstance(device.shape, Sliceable)
        and (not device.rules.limited or device.rules.guard.policy is GuardPolicy.OFF)
        and not device.rules.strict
    ]
    if names:
        gpus = some(dict.fromkeys(names))  # partitions follow the rules of their GPU
        yield ok(LIMITS, f"by profile, the memory guard does not look at {gpus}")
