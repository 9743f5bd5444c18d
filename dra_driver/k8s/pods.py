"""Pods as their runtime, the kubelet and the API server show them, and their reader."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import field
from datetime import UTC, datetime
from typing import Any, Final

from dra_driver.base.errors import Forbidden
from dra_driver.base.frozen import frozen, ordered
from dra_driver.k8s.api import FROM_WATCH_CACHE, MOST_RECENT, KubernetesApi
from dra_driver.k8s.claims import ClaimUid, Pod, PodUid

DEFAULT_GRACE_SECONDS: Final = 30.0  # that a pod has to end, unless it says otherwise


@frozen
class Container:
    """A container as its runtime started it. That never changes."""

    id: str
    name: str  # in its pod's spec
    namespace: str
    pod: Pod
    claims: frozenset[ClaimUid] = frozenset()  # that it was given anything of


@ordered
class ClaimName:
    """A claim as a pod names it: the kubelet gives no UID here."""

    namespace: str
    name: str


@frozen
class KubeletPod:
    """A pod of this node. Of its init containers only those are listed that go on to run."""

    namespace: str
    name: str
    containers: Mapping[str, frozenset[ClaimName]]
    devices: Mapping[tuple[str, str], frozenset[str]] = field(default_factory=dict)
    """The ids that the kubelet gave out, by container and resource (device-plugin API)."""


@frozen
class ContainerSpec:
    """What a container of a pod asks for; also of an init container."""

    name: str
    uses: frozenset[tuple[str, str]]  # (name of a ResourceClaim, request; "": all of the claim)
    root: bool  # it may run as user 0 of its user namespace, or become it
    asks_for: frozenset[str] = frozenset()  # extended resources: "nvidia.com/gpu"


@frozen
class PodDeletion:
    """The kubelet ends the pod, and kills what is left of it after the grace period."""

    ends_at: float  # the grace period is over, by the API server's clock: seconds of the epoch
    grace_seconds: float  # from the deletion to that
    left_seconds: float | None = None  # at least, when it was read; None: not known


@frozen
class PodSpec:
    """A pod as the API server has it."""

    namespace: str
    name: str
    uid: PodUid
    containers: tuple[ContainerSpec, ...]
    host_users: bool = True  # False: user 0 in there is nobody on the node (hostUsers: false)
    deletion: PodDeletion | None = None
    grace_seconds: float = DEFAULT_GRACE_SECONDS  # after its deletion, unless that says otherwise
    extended_claim: bool = False  # the scheduler made a claim for its extended resources


@frozen
class NodePod:
    """A pod of a node, as the kubelet there knows it: of a static pod the API server has a mirror
    only, with another UID."""

    namespace: str
    pod: Pod  # with the UID that its cgroup and the kubelet's events have
    ended: bool  # all its containers, for good
    spec: PodSpec
    acknowledged: bool = True  # by the kubelet, which then has decided what devices it has


_STATIC_UID: Final = "kubernetes.io/config.hash"
_ENDED: Final = ("Succeeded", "Failed")
_CONTAINER_LISTS: Final = ("initContainers", "containers", "ephemeralContainers")
_GRACE_FIELD: Final = "terminationGracePeriodSeconds"
_ROOT_UID: Final = 0
_WHOLE_SECONDS: Final = 1.0  # the precision of both moments: so much less may remain
_HARMLESS_CAPABILITIES: Final = ("NET_BIND_SERVICE",)  # capabilities with which nobody becomes root


class PodReader:
    """Reads one pod at a time, for which it needs the right to ``get`` pods, or many, for which it
    needs that to ``list`` them."""

    def __init__(self, api: KubernetesApi) -> None:
        self._api = api

    def read(self, namespace: str, name: str) -> PodSpec:
        """The pod as it is at this moment.

        NotFound: there is none. Forbidden: a rule is missing, and which one.
        """
        return self._read(namespace, name, MOST_RECENT)

    def read_cached(self, namespace: str, name: str) -> PodSpec:
        """The pod as the API server has it in memory, for callers that ask often.

        It may be a moment old: a new pod can be NotFound.
        """
        return self._read(namespace, name, FROM_WATCH_CACHE)

    def on_node(self, node: str) -> tuple[NodePod, ...]:
        """The pods of a node, as the API server has them in memory. Forbidden: a rule is missing,
        and which one."""
        query = {"fieldSelector": f"spec.nodeName={node}", **FROM_WATCH_CACHE}
        try:
            documents = self._api.list("/api/v1/pods", query)["items"]
        except Forbidden as e:
            raise Forbidden(
                f'{e}; this driver reads the pods of its node: it needs the rule "list pods"'
            ) from e
        now = self._api.now()
        return tuple(_node_pod(document, now) for document in documents)

    def on_nodes(self, nodes: Collection[str]) -> Iterator[tuple[str, NodePod]]:
        """The pods of *nodes*, each with its node, by one list of all pods of the cluster.

        Not from memory: the API server would send such a list in one piece, however long it is.
        """
        for page in self._api.pages("/api/v1/pods"):
            for document in page.get("items") or ():
                if (node := document["spec"].get("nodeName")) in nodes:
                    yield node, _node_pod(document, None)

    def nodes_of(self, selector: str) -> frozenset[str]:
        """The nodes of all pods with these labels, as the API server has them in memory."""
        query = {"labelSelector": selector, **FROM_WATCH_CACHE}
        specs = (each["spec"] for each in self._api.list("/api/v1/pods", query)["items"])
        return frozenset(spec["nodeName"] for spec in specs if spec.get("nodeName"))

    def _read(self, namespace: str, name: str, query: Mapping[str, str]) -> PodSpec:
        try:
            document = self._api.get(f"/api/v1/namespaces/{namespace}/pods/{name}", query)
        except Forbidden as e:
            raise Forbidden(
                f'{e}; this driver reads the pods of its claims: it needs the rule "get pods"'
            ) from e
        return parse_pod(document, self._api.now())


def _node_pod(document: Mapping[str, Any], now: float | None) -> NodePod:
    spec = parse_pod(document, now)
    annotations = document["metadata"].get("annotations") or {}
    uid = PodUid(annotations.get(_STATIC_UID) or spec.uid)
    status = document.get("status") or {}
    return NodePod(
        spec.namespace,
        Pod(spec.name, uid),
        ended=status.get("phase") in _ENDED,
        spec=spec,
        acknowledged="startTime" in status,
    )


def parse_pod(document: Mapping[str, Any], now: float | None = None) -> PodSpec:
    """The pod in *document* (v1). *now*: what the API server's clock shows, if that is known."""
    metadata, spec = document["metadata"], document["spec"]
    claims = _claim_names(document)
    extended = _extended_uses(document)
    pod_context = spec.get("securityContext") or {}
    containers = [container for kind in _CONTAINER_LISTS for container in spec.get(kind) or ()]
    return PodSpec(
        metadata["namespace"],
        metadata["name"],
        PodUid(metadata["uid"]),
        tuple(
            ContainerSpec(
                container["name"],
                frozenset((*_uses(container, claims), *extended.get(container["name"], ()))),
                _may_be_root(container.get("securityContext") or {}, pod_context),
                frozenset(_extended_resources(container)),
            )
            for container in containers
        ),
        host_users=spec.get("hostUsers") is not False,
        deletion=_deletion(metadata, now),
        grace_seconds=DEFAULT_GRACE_SECONDS
        if (grace := spec.get(_GRACE_FIELD)) is None
        else float(grace),
        extended_claim=bool((document.get("status") or {}).get("extendedResourceClaimStatus")),
    )


def _deletion(metadata: Mapping[str, Any], now: float | None) -> PodDeletion | None:
    """The clock of this node has no part in it: it may be wrong."""
    if not (written := metadata.get("deletionTimestamp")):
        return None
    ends_at = _epoch(written)
    remaining_seconds = None if now is None else max(0.0, ends_at - now - _WHOLE_SECONDS)
    return PodDeletion(
        ends_at, float(metadata.get("deletionGracePeriodSeconds") or 0), remaining_seconds
    )


def _claim_names(document: Mapping[str, Any]) -> Mapping[str, str]:
    """The name of the ResourceClaim behind each name that the pod has for one.

    One that is made from a template is missing as long as it is not made.
    """
    status = document.get("status") or {}
    generated = {
        entry["name"]: entry["resourceClaimName"]
        for entry in status.get("resourceClaimStatuses") or ()
        if entry.get("resourceClaimName")
    }
    entries = document["spec"].get("resourceClaims") or ()
    return generated | {
        entry["name"]: entry["resourceClaimName"]
        for entry in entries
        if entry.get("resourceClaimName")
    }


def _uses(container: Mapping[str, Any], claims: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    entries: Iterable[Mapping[str, str]] = (container.get("resources") or {}).get("claims") or ()
    for entry in entries:
        if entry["name"] in claims:
            yield claims[entry["name"]], entry.get("request") or ""


def _extended_uses(document: Mapping[str, Any]) -> Mapping[str, list[tuple[str, str]]]:
    """By container, what the scheduler claimed for resources like ``nvidia.com/gpu: 1``."""
    extended = (document.get("status") or {}).get("extendedResourceClaimStatus") or {}
    uses: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for mapping in extended.get("requestMappings") or ():
        use = (extended["resourceClaimName"], mapping["requestName"])
        uses[mapping["containerName"]].append(use)
    return uses


def _extended_resources(container: Mapping[str, Any]) -> Iterator[str]:
    """Their names have a domain, those of Kubernetes' own resources have none."""
    limits = (container.get("resources") or {}).get("limits") or {}
    yield from (name for name, quantity in limits.items() if "/" in name and str(quantity) != "0")


def _may_be_root(container: Mapping[str, Any], pod: Mapping[str, Any]) -> bool:
    """Whether the container may run as user 0 or become it: the image says it where the pod does
    not.

    Each field of the container's stands before the same field of the pod's. Who starts as another
    user stays it where no program can give it more (setuid), and where it was given nothing.
    """
    user, refused = (
        pod.get(field) if container.get(field) is None else container[field]
        for field in ("runAsUser", "runAsNonRoot")
    )
    if not refused and user in (None, _ROOT_UID):
        return True
    added = (container.get("capabilities") or {}).get("add") or ()
    return (
        bool(container.get("privileged"))
        or container.get("allowPrivilegeEscalation") is not False
        or any(name.upper().removeprefix("CAP_") not in _HARMLESS_CAPABILITIES for name in added)
    )


def _epoch(timestamp: str) -> float:
    """Seconds since the epoch: of ``2026-01-02T03:04:05Z``, as the API writes it."""
    moment = datetime.fromisoformat(timestamp)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
