"""Which containers MPS can serve.

A program reaches the one MPS server that its environment names, and sees the GPUs of that server
and no others. So the GPUs of a container are all on one server, or none is, also where they come
from several claims; and the node's profile says whose containers may use MPS.

``prepare`` refuses what cannot be served. The kubelet asks nothing for pods that join a prepared
claim, so these cannot be refused: ``unusable_devices`` says what they cannot use.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import cdi
from dra_driver.k8s.claims import ClaimRef, Pod
from dra_driver.k8s.pods import ContainerSpec, PodSpec
from dra_driver.model.profiles import MpsTenants
from dra_driver.model.records import ClaimRecord

_NOT_ROOT = (
    "securityContext.runAsNonRoot: true (or a runAsUser) and allowPrivilegeEscalation: false, "
    "without privileged and without added capabilities"
)


@dataclass(frozen=True, slots=True)
class ContainerRequests:
    """A container of a pod, and what it uses."""

    pod: PodSpec
    container: ContainerSpec

    def requests(self, claim: ClaimRef, known: Collection[str]) -> set[str]:
        """Which of the *known* requests of *claim* it uses; one without a name may be any."""
        used = {request for name, request in self.container.uses if name == claim.name}
        if self.pod.namespace != claim.namespace or not used:
            return set()
        return {name for name in known if "" in used or name in ("", *used)}

    def __str__(self) -> str:
        return f"pod {self.pod.namespace}/{self.pod.name}, container {self.container.name!r}"


def container_requests(pods: Iterable[PodSpec]) -> tuple[ContainerRequests, ...]:
    """All containers of *pods*."""
    return tuple(ContainerRequests(pod, container) for pod in pods for container in pod.containers)


def mixed_problems(
    claim: ClaimRef, used: Iterable[ContainerRequests], ours: set[str], everything: set[str]
) -> Iterator[str]:
    """Containers with requests of *claim* under MPS (*ours*) and others without."""
    for container in used:
        requests = container.requests(claim, everything)
        if requests & ours and requests - ours:
            yield (
                f"{container} uses request {_list(requests & ours)} under MPS and "
                f"{_list(requests - ours)} without: a program under MPS sees no other GPU; use the "
                "same strategy for both, or different containers"
            )


def split_problems(
    claim: ClaimRef,
    used: Sequence[ContainerRequests],
    groups: Iterable[set[str]],
    gpus: Mapping[str, set[str]],
) -> Iterator[str]:
    """Containers with some of the GPUs of a server that others need to be over more.

    *groups*: the requests that share a server; *gpus*: the names of the GPUs of each request.
    """
    for group in groups:
        everything = set().union(*(gpus[request] for request in group))
        for container in used:
            has = set().union(*(gpus[request] for request in container.requests(claim, group)))
            if has and has != everything:
                yield (
                    f"{container} uses {_list(has)} under MPS, and another container "
                    f"{_list(everything)}: a GPU of a claim is on one MPS server; let both use the "
                    "same requests, or write a claim for each"
                )


def tenant_problems(
    tenants: MpsTenants, claim: ClaimRef, pod: PodSpec, requests: Collection[str]
) -> list[str]:
    """The containers for which *pod* may not use *requests*, those of *claim* under MPS.

    A container that does not name the claim counts too, an init or ephemeral one as well: what one
    has of MPS it can hand to the others of its pod, in a volume or by a socket.
    """
    containers = container_requests([pod])
    users = tuple(container for container in containers if container.requests(claim, requests))
    if not users or not pod.host_users or tenants is MpsTenants.ANY:
        return []
    if tenants is MpsTenants.USER_NAMESPACES:
        message = (
            ": this node's profile lets only pods with a user namespace share a GPU by MPS "
            "(mpsTenants: UserNamespaces); set spec.hostUsers: false"
        )
        return [f"{container}{message}" for container in users]
    message = (
        " can run as root or become it, and this node's profile lets no pod with such a container "
        f"share a GPU by MPS (mpsTenants: NonRoot); set {_NOT_ROOT}, or spec.hostUsers: false"
    )
    return [f"{container}{message}" for container in containers if container.container.root]


def strictest_tenants(tenants: Iterable[MpsTenants]) -> MpsTenants:
    """The rule that holds where several do."""
    return max(tenants, key=list(MpsTenants).index, default=MpsTenants.ANY)


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


_HOW = (
    "write both as requests of one claim with the same strategy, or use them in different "
    "containers"
)


@dataclass(frozen=True, slots=True)
class _ServedRequests:
    """The requests of a claim, but for those that look on.

    Of a GPU, or a MIG partition, that a claim has parts of both under MPS and without, all count as
    under MPS.
    """

    claim: ClaimRef
    under: frozenset[str]
    without: frozenset[str]


def separate_server_problems(
    mine: ClaimRecord, others: Iterable[ClaimRecord], pods: Iterable[PodSpec]
) -> Sequence[str]:
    """Containers that use *mine* and another claim, though no MPS server leads to both."""
    sides, more = _sides(mine), [_sides(other) for other in others if other.claim != mine.claim]
    return [
        problem
        for container in container_requests(pods)
        for problem in _pair_problems(container, sides, more)
    ]


def served_requests(record: ClaimRecord) -> frozenset[str]:
    """The requests under MPS; "": one that an earlier release did not name."""
    return _sides(record).under


def mps_tenants_of(record: ClaimRecord) -> MpsTenants:
    """Whose pods may use it, by what the profile said when it was prepared."""
    return strictest_tenants(holding.tenants for holding in record.holdings)


def _sides(record: ClaimRecord) -> _ServedRequests:
    served = {gpu for namespace in record.namespaces for gpu in namespace.gpus}
    taken = [holding for holding in record.holdings if not holding.admin]
    return _ServedRequests(
        record.claim,
        frozenset(holding.request for holding in taken if holding.uuid in served),
        frozenset(holding.request for holding in taken if holding.uuid not in served),
    )


def _pair_problems(
    container: ContainerRequests, mine: _ServedRequests, others: Iterable[_ServedRequests]
) -> Iterator[str]:
    used = [side for side in others if container.requests(side.claim, side.under | side.without)]
    under = _names(side for side in used if container.requests(side.claim, side.under))
    without = _names(side for side in used if container.requests(side.claim, side.without))
    if container.requests(mine.claim, mine.under):
        if under:
            yield (
                f"{container} uses claim {under} too: it is under MPS as well, and a program "
                "reaches one MPS server; write both as requests of one claim, or use them in "
                "different containers"
            )
        if without:
            yield (
                f"{container} uses claim {without} too, which is not under MPS: a program under "
                f"MPS sees no other GPU; {_HOW}"
            )
    elif under and container.requests(mine.claim, mine.without):
        yield (
            f"{container} uses claim {under} too, which is under MPS: a program under MPS sees no "
            f"other GPU; {_HOW}"
        )


def _names(sides: Iterable[_ServedRequests]) -> str:
    return ", ".join(sorted(side.claim.name for side in sides))


_OURS = "CUDA_MPS_"


@dataclass(frozen=True, slots=True)
class JoinedPod:
    """A pod that uses a prepared claim, and may use it otherwise than the claim's first pod."""

    record: ClaimRecord
    pod: Pod


@dataclass(frozen=True, slots=True)
class RequestedDevice:
    """A device of a claim, as a container gets it with its requests."""

    requests: tuple[str, ...]
    gpu: str  # or the MIG partition
    mps: tuple[str, ...]  # the variables that lead to a server; empty: it is not under MPS


def pods_to_check(records: Iterable[ClaimRecord]) -> tuple[JoinedPod, ...]:
    """Whose spec matters: the claim has several requests or is not for everybody, or the pod may
    have GPUs of other claims.

    Who prepared a claim is looked at again: nobody remembers which pod it was.
    """
    known = [record for record in records if record.completed and record.computes]
    uses = Counter(pod.uid for record in known for pod in record.pods)
    unnoticed = {record.claim.namespace for record in known if _is_joined_unnoticed(record)}
    return tuple(
        JoinedPod(record, pod)
        for record in known
        if record.namespaces
        for pod in record.pods
        if uses[pod.uid] > 1
        or record.claim.namespace in unnoticed
        or len({device.requests for device in record.prepared or ()}) > 1
        or mps_tenants_of(record) is not MpsTenants.ANY
    )


def _is_joined_unnoticed(record: ClaimRecord) -> bool:
    """Nobody looks which pods come to it later (``plugin.memory.pod_limits``)."""
    return not (record.pod_claim_name or record.limited or record.namespaces)


def requested_devices(record: ClaimRecord) -> tuple[RequestedDevice, ...]:
    """What containers get of a claim, but for what only looks on. *record*: the whole of it."""
    return tuple(_given(record))


def tenant_violations(joined: JoinedPod, spec: PodSpec) -> Sequence[str]:
    """The pod's containers that the profile does not let use the claim, in words."""
    record = joined.record
    return tenant_problems(mps_tenants_of(record), record.claim, spec, served_requests(record))


def unusable_devices(
    joined: JoinedPod,
    spec: PodSpec,
    given: Sequence[RequestedDevice],
    records: Iterable[ClaimRecord],
) -> Sequence[str]:
    """What the pod's containers cannot use of the claim, in words. *given*: of the claim."""
    return (
        *(f"{problem}; its clients are ended" for problem in tenant_violations(joined, spec)),
        *separate_server_problems(joined.record, _others(joined, records), [spec]),
        *(
            f"pod {spec.namespace}/{spec.name}, container {container.name!r} {problem}"
            for container in spec.containers
            for problem in _problems(given, _requests(container, joined.record.claim.name))
        ),
    )


def _others(joined: JoinedPod, records: Iterable[ClaimRecord]) -> Iterator[ClaimRecord]:
    """The prepared claims that the pod may use, but for those of which it is told of this one."""
    for record in records:
        same_pod = any(pod.uid == joined.pod.uid for pod in record.pods)
        reported = same_pod and record.claim < joined.record.claim and record.namespaces
        if record.completed and not reported:
            yield record


def _requests(container: ContainerSpec, claim: str) -> frozenset[str]:
    """Of the claim; "" is all of them."""
    return frozenset(request for name, request in container.uses if name == claim)


def _given(record: ClaimRecord) -> Iterator[RequestedDevice]:
    try:
        spec = cdi.from_text(record.spec or "")
    except cdi.CdiError:  # it is written anew when the claim is prepared
        return
    edits = {entry.name: entry.container_edits for entry in spec.devices}
    for holding, device in zip(record.holdings, record.prepared or (), strict=False):
        names = [cdi.parse_name(id_).device for id_ in device.cdi_ids]
        env = [entry for name in names if name in edits for entry in edits[name].env]
        if not holding.admin:
            mps = tuple(sorted(entry for entry in env if entry.startswith(_OURS)))
            yield RequestedDevice(device.requests, holding.unit, mps)


def _problems(given: Sequence[RequestedDevice], requests: frozenset[str]) -> Iterator[str]:
    mine = [device for device in given if "" in requests or requests & set(device.requests)]
    under = [device for device in mine if device.mps]
    if not under:
        return
    if len(under) < len(mine):
        without = [device for device in mine if not device.mps]
        yield (
            f"uses {_gpus(under)} under MPS and {_gpus(without)} "
            "without: a program under MPS sees no other GPU; use them in different containers"
        )
    if len({device.mps for device in under}) > 1:
        yield (
            f"uses requests {_join_names(name for device in under for name in device.requests)} "
            "together, which were prepared for containers that use them apart, and a program "
            "reaches one MPS server; use one of them in each container, or write a claim for each "
            "pod"
        )
        return
    (mps,) = {device.mps for device in under}
    everything = [device for device in given if device.mps == mps]
    if {device.gpu for device in everything} != {device.gpu for device in under}:
        yield (
            f"uses {_gpus(under)} under MPS, and its MPS server is over {_gpus(everything)}: let "
            "all pods of the claim use the same requests, or write a claim for each"
        )


def _gpus(given: Iterable[RequestedDevice]) -> str:
    return _join_names(device.gpu for device in given)


def _join_names(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names)))
