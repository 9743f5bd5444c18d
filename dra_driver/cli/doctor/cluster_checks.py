"""``doctor``'s checks against the API server: the Node, permissions, features, claims in use."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from dra_driver.base.errors import ClaimInUse, Forbidden, NotFound, Refused
from dra_driver.base.frozen import frozen, ordered
from dra_driver.cli.findings import Finding, abbreviated, fail, ok, skip, warn
from dra_driver.k8s.api import KubernetesApi
from dra_driver.k8s.claims import ClaimRef
from dra_driver.k8s.pods import PodReader
from dra_driver.k8s.resource_api import ResourceApi
from dra_driver.k8s.resource_versions import RESOURCE_GROUP
from dra_driver.kubeletplugin.slices.features import SliceFeatures, probe_slice_features
from dra_driver.model.profiles import AllocationApi
from dra_driver.model.records import ClaimRecord
from dra_driver.node.state.node_api_file import ServedApi
from dra_driver.plugin.claims.in_use import InUseCheck

SERVER, NODE, RIGHTS, CLASS, FEATURES = (
    "API server",
    "Node object",
    "rights",
    "DeviceClass",
    "API features",
)
_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"

# What each of Features is for, and what turns it on.
_GATES: Mapping[str, tuple[str, str]] = {
    "device_taints": ("device taints", "DRADeviceTaints"),
    "consumable_capacity": ("consumable capacity", "DRAConsumableCapacity"),
    "shared_counters": ("shared counters", "DRAPartitionableDevices"),
    "list_attributes": ("list attributes", "DRAListTypeAttributes"),
}

# What this driver does where one is not kept.
_WITHOUT_FEATURE: Mapping[str, str] = {
    "consumable_capacity": "GPUs are given out whole, and a profile's replicas are devices of "
    "their own: no claim can say how much it takes",
    "device_taints": "there are no monitor devices: claims with admin access see only GPUs that "
    "are given out whole",
}

_WITHOUT_COUNTERS = (
    "without shared counters as Kubernetes 1.35 and newer have them no MIG "
    "partition is created for claims: instances that exist are offered"
)


@frozen
class CheckedCluster:
    """The API server that is asked, and as which driver on which node."""

    server: KubernetesApi
    resources: ResourceApi
    driver: str
    node: str

    def listed(self, resource: str) -> Iterator[dict[str, Any]]:
        """All documents of a *resource* of DRA. Forbidden: this account may not read them."""
        path = f"/apis/{RESOURCE_GROUP}/{self.resources.version}/{resource}"
        for page in self.server.pages(path):
            yield from page.get("items") or ()


@ordered
class ApiPermission:
    """One thing that RBAC can allow."""

    group: str
    resource: str
    verb: str

    def __str__(self) -> str:
        """
        >>> print(ApiPermission("resource.k8s.io", "resourceclaims", "list"))
        list resourceclaims.resource.k8s.io
        """
        return f"{self.verb} {self.resource}{f'.{self.group}' if self.group else ''}"


# Exactly what k8s/resource_api.py, k8s/node_labels.py and k8s/events.py ask of the
# API server; nodes are patched where a layout of MIG instances says how far it is.
NEEDED_PERMISSIONS = (
    *(ApiPermission(RESOURCE_GROUP, "resourceclaims", verb) for verb in ("get", "list")),
    *(
        ApiPermission(RESOURCE_GROUP, "resourceslices", verb)
        for verb in ("list", "watch", "create", "update", "delete")
    ),
    *(ApiPermission("", "nodes", verb) for verb in ("get", "list", "watch", "patch")),
    *(ApiPermission(RESOURCE_GROUP, "deviceclasses", verb) for verb in ("get", "list")),
    *(ApiPermission("", "events", verb) for verb in ("create", "patch")),
    # k8s/pods.py: which pod has a device, and which container uses which requests of its claim.
    *(ApiPermission("", "pods", verb) for verb in ("get", "list")),
)


def check_node_object(cluster: CheckedCluster) -> Iterator[Finding]:
    try:
        uid = cluster.resources.node_uid(cluster.node)
    except NotFound:
        yield fail(
            NODE,
            f"there is no Node {cluster.node}",
            "give --node-name the name that `kubectl get nodes` shows (spec.nodeName in the pod)",
        )
    except Forbidden as e:
        yield skip(NODE, str(e))
    else:
        yield ok(NODE, f"{cluster.node} has UID {uid}")


def check_permissions(cluster: CheckedCluster) -> Iterator[Finding]:
    """The API server is asked about each right by itself; nothing is tried out."""
    needed = NEEDED_PERMISSIONS
    try:
        missing = {right: why for right in needed if (why := denied(cluster.server, right))}
    except (NotFound, Forbidden, Refused) as e:
        yield skip(RIGHTS, f"the API server does not say: {e}")
        return
    for right, why in sorted(missing.items()):
        yield fail(
            RIGHTS,
            f"this account may not {right} ({why})",
            f'in the chart\'s ClusterRole (its name ends in -kubelet-plugin): verb "{right.verb}" '
            f'on "{right.resource}" in API group "{right.group}"; is it bound to this account?',
        )
    if not missing:
        yield ok(RIGHTS, f"all {len(needed)} that the plugin uses")


def check_device_class(
    cluster: CheckedCluster, read_served: Callable[[], ServedApi | None]
) -> Iterator[Finding]:
    """Claims name a class; the chart makes one with the driver's name."""
    path = f"/apis/{RESOURCE_GROUP}/{cluster.resources.version}/deviceclasses/{cluster.driver}"
    try:
        cluster.server.get(path)
    except NotFound:
        served = read_served()
        if served is not None and served.api is AllocationApi.DEVICE_PLUGIN:
            yield ok(CLASS, "none, and this node needs none to give GPUs out by DevicePlugin")
            return
        yield warn(
            CLASS,
            f"there is none with the name {cluster.driver}, which claims usually ask for",
            "install the chart's DeviceClass (kubectl get deviceclasses)",
        )
    except Forbidden:
        yield skip(
            CLASS,
            f"this account need not and may not read it: kubectl get deviceclass {cluster.driver}",
        )
    else:
        yield ok(CLASS, cluster.driver)


def check_api_features(cluster: CheckedCluster) -> Iterator[Finding]:
    """What is kept of slices; nothing is stored."""
    version = cluster.resources.version
    try:
        yield from api_feature_findings(
            probe_slice_features(cluster.server, version, cluster.driver, cluster.node)
        )
    except Forbidden as e:
        yield skip(FEATURES, f"cannot be tried without the right to create slices: {e}")
    except Refused as e:
        yield fail(
            FEATURES,
            f"not even a plain slice of this node is taken: {e}",
            "see what refuses it: kubectl get validatingadmissionpolicies,"
            "validatingwebhookconfigurations",
        )


def api_feature_findings(kept: SliceFeatures) -> Iterator[Finding]:
    """None of them is needed to give out whole GPUs: that some are off is no fault."""
    on = [name for field, (name, _) in _GATES.items() if getattr(kept, field)]
    off = [f"{name} ({gate})" for field, (name, gate) in _GATES.items() if not getattr(kept, field)]
    text = f"kept: {', '.join(on) or 'none'}"
    yield ok(FEATURES, f"{text}; off, by feature gate: {', '.join(off)}" if off else text)
    for field, follows in _WITHOUT_FEATURE.items():
        if not getattr(kept, field):
            yield ok(FEATURES, f"without {_GATES[field][0]} {follows}")
    if not kept.counters_apart:
        yield ok(FEATURES, _WITHOUT_COUNTERS)


def denied(server: KubernetesApi, right: ApiPermission) -> str:
    """Why *right* is not ours, in the API server's words; empty where it is. NotFound, Forbidden,
    Refused: the API server does not say."""
    attributes = {"group": right.group, "resource": right.resource, "verb": right.verb}
    review = server.create(
        _REVIEWS,
        {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        },
    )
    status = review.get("status") or {}
    if status.get("allowed"):
        return ""
    return str(status.get("reason") or status.get("evaluationError") or "no role allows it")


IN_USE = "claims in use"
_END_PROCESS = (
    "end that process; one that no signal ends (state D) waits for something in the kernel, such "
    "as a GPU that hangs: see dmesg, or reboot the node"
)


def check_claims_in_use(
    cluster: CheckedCluster, records: Iterable[ClaimRecord], in_use: InUseCheck
) -> Iterator[Finding]:
    """Of claims that pods are to use nothing is said: there it is as it should be. The same of what
    pods have by the device-plugin API."""
    number = 0
    for record in records:
        try:
            in_use.refuse_while_used(record)
        except ClaimInUse as error:
            if (why := _unused(cluster, record)) is not None:
                number += 1
                devices = abbreviated(sorted({holding.device for holding in record.holdings}))
                yield warn(IN_USE, f"{why} and holds {devices}: {error}", _END_PROCESS)
    if not number:
        yield ok(IN_USE, "none that no pod is to use any more")


def _unused(cluster: CheckedCluster, record: ClaimRecord) -> str | None:
    """Why no pod is to use it; None: one is."""
    if record.allocation is None:
        why = _unreserved(cluster, record.claim)
        return None if why is None else f"claim {record.claim} {why}"
    pods = PodReader(cluster.server).on_node(cluster.node)
    living = {pod.pod.uid for pod in pods if not pod.ended}
    if any(pod.uid in living for pod in record.pods):
        return None
    return f"{record.known_as} is of no pod any more"


def _unreserved(cluster: CheckedCluster, claim: ClaimRef) -> str | None:
    try:
        document = cluster.resources.claim(claim.namespace, claim.name)
    except NotFound:
        return "is deleted"
    if document["metadata"]["uid"] != claim.uid:
        return "is deleted"
    if not (document.get("status") or {}).get("reservedFor"):
        return "is reserved for no pod"
    return None
