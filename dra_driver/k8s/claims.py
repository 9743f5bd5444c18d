"""ResourceClaims: our own allocation results and their configuration, as values, and their reader.

No copy is kept: it might be older than the allocation. What the API server has in memory may be a
moment old too, so nothing is prepared or unprepared by that alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, NewType

from dra_driver.base.errors import ClaimError, NotFound, NotServed
from dra_driver.base.frozen import frozen, ordered
from dra_driver.k8s.api import FROM_WATCH_CACHE, MOST_RECENT, Query
from dra_driver.k8s.resource_api import ResourceApi

ClaimUid = NewType("ClaimUid", str)
ShareId = NewType("ShareId", str)
PodUid = NewType("PodUid", str)


@ordered
class ClaimRef:
    """Which claim the kubelet means: with the same name and another UID it is another claim.

    Without a namespace it is not of the API server: ``model.records.AllocationClaim``.
    """

    namespace: str
    name: str
    uid: ClaimUid

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name

    def named_for(self, namespace: str) -> str:
        """What tenants of *namespace* are told of it: who the others are is not theirs to know."""
        if namespace == self.namespace:
            return f"claim {self} (UID {self.uid})"
        return "a claim of another namespace"


@frozen
class Toleration:
    """Which taints of devices a request puts up with (``DeviceToleration``, KEP-5055)."""

    key: str = ""  # empty: every key
    operator: str = "Equal"  # or "Exists"
    value: str = ""
    effect: str = ""  # empty: every effect

    def tolerates(self, key: str, value: str, effect: str) -> bool:
        """By the rules of ``resourceclaim.ToleratesTaint`` of Kubernetes."""
        if self.effect not in ("", effect) or self.key not in ("", key):
            return False
        return self.operator == "Exists" or (bool(self.key) and self.value == value)


@frozen
class AllocationResult:
    """One result of the scheduler for our driver (``status.allocation.devices.results[]``)."""

    request: str  # "gpu", or "gpu/large" where it came from a prioritized list
    pool: str
    device: str
    admin: bool = False
    share: ShareId | None = None
    consumed: tuple[tuple[str, str], ...] = ()  # (capacity, quantity), sorted
    tolerations: tuple[Toleration, ...] = ()

    @property
    def base_request(self) -> str:
        """The request without its subrequest: what the kubelet compares with a container's claim
        request."""
        return self.request.partition("/")[0]


@frozen
class OpaqueConfig:
    """One opaque configuration for our driver, as the user wrote it."""

    source: str  # "FromClass" or "FromClaim"
    requests: tuple[str, ...]  # empty: all
    parameters: Any  # the raw object; decoding is the driver's
    path: str  # where it stands: "status.allocation.devices.config[2].opaque.parameters"

    def concerns(self, request: str) -> bool:
        """Whether it applies to *request*: named itself, or by its main request (KEP-4816)."""
        return (
            not self.requests
            or request in self.requests
            or request.partition("/")[0] in self.requests
        )


@ordered
class Pod:
    """A pod that a claim is reserved for; it is in the claim's namespace."""

    name: str
    uid: PodUid


@frozen
class Claim:
    """An allocated claim, as far as it concerns this driver."""

    ref: ClaimRef
    allocations: tuple[AllocationResult, ...]
    configs: tuple[OpaqueConfig, ...] = ()  # class before claim, in the order of the API
    pods: tuple[Pod, ...] = ()  # sorted
    pod_claim_name: str = ""  # under which a pod's spec names the template that it is from
    made_for_pod: bool = False  # as from a template; other pods can name it all the same
    decoded: object = field(default=None, repr=False, compare=False)  # the driver's, of *configs*


@frozen
class PreparedDevice:
    """One device of the answer to the kubelet."""

    requests: tuple[str, ...]  # base request names
    pool: str
    device: str
    cdi_ids: tuple[str, ...]
    share: ShareId | None = None


def parse_claim(document: Mapping[str, Any], ref: ClaimRef, driver: str) -> Claim:
    """The claim in *document* (v1 shape) as far as it concerns *driver*.

    ClaimError: it is another claim than *ref*, it is not allocated, or nothing in it is ours.
    """
    uid = document.get("metadata", {}).get("uid")
    if uid != ref.uid:
        raise ClaimError(
            f"claim {ref} got replaced: UID {ref.uid} was asked for, the API server has {uid}; "
            "the pod that used the old claim has to go first"
        )
    allocation = (document.get("status") or {}).get("allocation")
    if not allocation:
        raise ClaimError(f"claim {ref} is not allocated: the scheduler has to allocate it first")
    devices = allocation.get("devices") or {}
    results = tuple(
        _allocation(r) for r in devices.get("results") or () if r.get("driver") == driver
    )
    if not results:
        raise ClaimError(
            f"claim {ref} has no device of driver {driver}: this driver was asked by mistake"
        )
    metadata = document["metadata"]
    return Claim(
        ref,
        results,
        _configs(devices.get("config") or (), driver),
        _pods(document["status"].get("reservedFor") or ()),
        (metadata.get("annotations") or {}).get("resource.kubernetes.io/pod-claim-name") or "",
        any(_is_pod(owner) for owner in metadata.get("ownerReferences") or ()),
    )


def _is_pod(owner: Mapping[str, Any]) -> bool:
    """The pod is the controller of a claim from a template, or for an extended resource.

    That says who made it: whoever writes a claim can write the same. And any pod can name such a
    claim by its resourceClaimName; Kubernetes looks at the owner only for a template.
    """
    return owner.get("kind") == "Pod" and bool(owner.get("controller"))


def _pods(consumers: Sequence[Mapping[str, Any]]) -> tuple[Pod, ...]:
    return tuple(
        sorted(
            Pod(consumer["name"], PodUid(consumer["uid"]))
            for consumer in consumers
            if consumer.get("resource") == "pods" and not consumer.get("apiGroup")
        )
    )


def _allocation(result: Mapping[str, Any]) -> AllocationResult:
    share = result.get("shareID")
    return AllocationResult(
        request=result["request"],
        pool=result["pool"],
        device=result["device"],
        admin=bool(result.get("adminAccess")),
        share=ShareId(share) if share else None,
        consumed=tuple(sorted((result.get("consumedCapacity") or {}).items())),
        tolerations=tuple(parse_toleration(each) for each in result.get("tolerations") or ()),
    )


def _configs(entries: Sequence[Mapping[str, Any]], driver: str) -> tuple[OpaqueConfig, ...]:
    configs = [
        OpaqueConfig(
            source=entry.get("source", "FromClaim"),
            requests=tuple(entry.get("requests") or ()),
            parameters=entry["opaque"].get("parameters"),
            path=f"status.allocation.devices.config[{index}].opaque.parameters",
        )
        for index, entry in enumerate(entries)
        if (entry.get("opaque") or {}).get("driver") == driver
    ]
    # The API lists class entries first already; a stable sort keeps the promise whatever we are
    # given.
    return tuple(sorted(configs, key=lambda config: config.source != "FromClass"))


class ClaimReader:
    """Reads claims for one driver. All methods may raise ApiServerError."""

    def __init__(self, resources: ResourceApi, driver: str, pool: str) -> None:
        """*pool*: the name of this node's pool."""
        self._resources = resources
        self._driver = driver
        self._pool = pool

    def read(self, ref: ClaimRef) -> Claim:
        """The claim *ref* as it is at this moment.

        ClaimError: it does not exist, got replaced, is not allocated, or nothing in it is ours.
        """
        return self._read(ref, MOST_RECENT)

    def read_cached(self, ref: ClaimRef) -> Claim:
        """The claim as the API server has it in memory, for callers that ask often.

        It may be a moment old. A ClaimError is not: the claim is read again before.
        """
        try:
            return self._read(ref, FROM_WATCH_CACHE)
        except ClaimError:
            return self.read(ref)

    def _read(self, ref: ClaimRef, query: Query) -> Claim:
        try:
            document = self._resources.claim(ref.namespace, ref.name, query)
        except NotFound as e:
            raise ClaimError(
                f"claim {ref} (UID {ref.uid}) does not exist any more: "
                "the pod that used it has to go or be created again"
            ) from e
        return parse_claim(document, ref, self._driver)

    def exists(self, ref: ClaimRef) -> bool:
        """Whether that very claim still holds devices of this node.

        True may be a moment old. False is certain: it is gone, replaced, deallocated, or allocated
        elsewhere. ApiServerError: it is not known, so the claim must not be unprepared.
        """
        try:
            return self._is_here(self.read_cached(ref)) or self._is_here(self.read(ref))
        except ClaimError:
            return False

    def _is_here(self, claim: Claim) -> bool:
        return any(allocation.pool == self._pool for allocation in claim.allocations)

    def is_deleted(self, ref: ClaimRef) -> bool:
        """Whether that very claim is gone for good: one that is merely deallocated is not."""
        try:
            document = self._resources.claim(ref.namespace, ref.name)
        except NotFound:
            return True
        return bool(document["metadata"]["uid"] != ref.uid)

    def find_by_uid(self, uid: ClaimUid) -> Claim | None:
        """The claim with *uid*, looked for among all claims of the cluster; None: there is none.

        For a record whose claim's name is lost. ClaimError: the claim holds nothing of ours.
        """
        documents = self._resources.claims(
            lambda claim: [claim] if claim["metadata"]["uid"] == uid else []
        )
        for document in documents:
            metadata = document["metadata"]
            ref = ClaimRef(metadata["namespace"], metadata["name"], uid)
            return parse_claim(document, ref, self._driver)
        return None

    def on_this_node(self) -> tuple[str, ...]:
        """The claims of the cluster with devices of this node, prepared or not, by their names;
        also with admin access only."""

        def of_this_node(claim: Mapping[str, Any]) -> list[str]:
            metadata = claim["metadata"]
            is_here = any(self._is_of_this_node(result) for result in _results(claim))
            return [f"{metadata['namespace']}/{metadata['name']}"] if is_here else []

        try:
            return tuple(sorted(self._resources.claims(of_this_node)))
        except NotServed:
            return ()

    def allocated(self) -> frozenset[str]:
        """The devices of this node that are allocated to claims of the cluster, prepared or not;
        without those with admin access. None, where the API server knows no claims."""

        def of_this_node(claim: Mapping[str, Any]) -> list[str]:
            return [
                result["device"]
                for result in _results(claim)
                if self._is_of_this_node(result) and not result.get("adminAccess")
            ]

        try:
            return frozenset(self._resources.claims(of_this_node))
        except NotServed:
            return frozenset()

    def _is_of_this_node(self, result: Mapping[str, Any]) -> bool:
        return (result.get("driver"), result.get("pool")) == (self._driver, self._pool)


@ordered
class HeldClaim:
    """A claim with devices of our driver, on whatever node."""

    namespace: str
    name: str
    pods: tuple[str, ...]  # their names


def held_claims(resources: ResourceApi, driver: str) -> list[HeldClaim]:
    """The claims of the cluster that have devices of *driver*, also with admin access."""

    def held(claim: Mapping[str, Any]) -> list[HeldClaim]:
        if not any(result.get("driver") == driver for result in _results(claim)):
            return []
        metadata = claim["metadata"]
        pods = _pods(claim["status"].get("reservedFor") or ())
        return [HeldClaim(metadata["namespace"], metadata["name"], tuple(p.name for p in pods))]

    return resources.claims(held)


def parse_toleration(toleration: Mapping[str, Any]) -> Toleration:
    """As a claim has it, what it leaves out filled in."""
    return Toleration(
        key=toleration.get("key") or "",
        operator=toleration.get("operator") or "Equal",
        value=toleration.get("value") or "",
        effect=toleration.get("effect") or "",
    )


def _results(claim: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    allocation = (claim.get("status") or {}).get("allocation") or {}
    return (allocation.get("devices") or {}).get("results") or ()
