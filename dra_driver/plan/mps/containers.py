"""Which containers MPS can serve.

A program reaches the one MPS server that its environment names, and sees the GPUs of that server
and no others. So the GPUs of a container are all on one server, or none is, also where they come
from several claims; and the node's profile says whose containers may use MPS.

``prepare`` refuses what cannot be served. The kubelet asks nothing for pods that join a prepared
claim, so these cannot be refused: ``unusable_devices`` says what they cannot use.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from cdi.encoding import from_text
from cdi.errors import CdiError
from cdi.spec import parse_name
from dra_driver.base.frozen import frozen
from dra_driver.k8s.claims import ClaimRef, Pod
from dra_driver.k8s.pods import ContainerSpec, PodSpec
from dra_driver.model.profiles import MpsTenants
from dra_driver.model.records import ClaimRecord

_NOT_ROOT = (
    "securityContext.runAsNonRoot: true (or a runAsUser) and allowPrivilegeEscalation: false, "
    "without privileged and without added capabilities"
)


@frozen
class ContainerRequests:
    """A container of a pod, and what it uses."""

    pod: PodSpec
    container: ContainerSpec

    def requests(self, claim: ClaimRef, known: Collection[str]) -> set[str]:
        """Which of the *known* requests of *claim* it uses."""
        used = {request for name, request in self.container.uses if name == claim.name}
        if self.pod.namespace != claim.namespace:
            return set()
        return {name for name in known if name in used or "" in used}

    def __str__(self) -> str:
        return f"pod {self.pod.namespace}/{self.pod.name}, container {self.container.name!r}"


def container_requests(pods: Iterable[PodSpec]) -> tuple[ContainerRequests, ...]:
    """All containers of *pods*."""
    return tuple(ContainerRequests(pod, container) for pod in pods for container in pod.containers)


def mixed_problems(
    claim: ClaimRef, used: Iterable[ContainerRequests], under: set[str], everything: set[str]
) -> Iterator[str]:
    """Containers with requests of *claim* under MPS and others without."""
    for container in used:
        requests = container.requests(claim, everything)
        if requests & under and requests - under:
            yield (
                f"{container} uses request {_join(requests & under)} under MPS and "
                f"{_join(requests - under)} without: a program under MPS sees no other GPU; use "
                "the same strategy for both, or different containers"
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
                    f"{container} uses {_join(has)} under MPS, and another container "
                    f"{_join(everything)}: a GPU of a claim is on one MPS server; let both use the "
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


def _join(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names)))


_REMEDY = (
    "write both as requests of one claim with the same strategy, or use them in different "
    "containers"
)


@frozen
class _ServedRequests:
    """The requests of a claim, but for those with admin access.

    Of a GPU, or a MIG partition, that a claim has parts of both under MPS and without, all count as
    under MPS.
    """

    claim: ClaimRef
    under: frozenset[str]
    without: frozenset[str]


def separate_server_problems(
    record: ClaimRecord, others: Iterable[ClaimRecord], pods: Iterable[PodSpec]
) -> Sequence[str]:
    """Containers that use *record* and another claim, though no MPS server leads to both."""
    served = _served(record)
    other_served = [_served(other) for other in others if other.claim != record.claim]
    return [
        problem
        for container in container_requests(pods)
        for problem in _pair_problems(container, served, other_served)
    ]


def served_requests(record: ClaimRecord) -> frozenset[str]:
    """The requests under MPS."""
    return _served(record).under


def mps_tenants_of(record: ClaimRecord) -> MpsTenants:
    """Whose pods may use it, by what the profile said when it was prepared."""
    return strictest_tenants(holding.tenants for holding in record.holdings)


def _served(record: ClaimRecord) -> _ServedRequests:
    gpus = {gpu for namespace in record.namespaces for gpu in namespace.gpus}
    taken = [holding for holding in record.holdings if not holding.admin]
    return _ServedRequests(
        record.claim,
        frozenset(holding.request for holding in taken if holding.uuid in gpus),
        frozenset(holding.request for holding in taken if holding.uuid not in gpus),
    )


def _pair_problems(
    container: ContainerRequests, served: _ServedRequests, others: Iterable[_ServedRequests]
) -> Iterator[str]:
    others = [
        other for other in others if container.requests(other.claim, other.under | other.without)
    ]
    under = _join(
        other.claim.name for other in others if container.requests(other.claim, other.under)
    )
    without = _join(
        other.claim.name for other in others if container.requests(other.claim, other.without)
    )
    if container.requests(served.claim, served.under):
        if under:
            yield (
                f"{container} uses claim {under} too: it is under MPS as well, and a program "
                "reaches one MPS server; write both as requests of one claim, or use them in "
                "different containers"
            )
        if without:
            yield (
                f"{container} uses claim {without} too, which is not under MPS: a program under "
                f"MPS sees no other GPU; {_REMEDY}"
            )
    elif under and container.requests(served.claim, served.without):
        yield (
            f"{container} uses claim {under} too, which is under MPS: a program under MPS sees no "
            f"other GPU; {_REMEDY}"
        )


_MPS_VARIABLE = "CUDA_MPS_"


@frozen
class JoinedPod:
    """A pod that uses a prepared claim, and may use it otherwise than the claim's first pod."""

    record: ClaimRecord
    pod: Pod


@frozen
class RequestedDevice:
    """A device of a claim, as a container gets it with its requests."""

    requests: tuple[str, ...]
    gpu: str  # or the MIG partition
    mps: tuple[str, ...]  # the variables that lead to a server; empty: it is not under MPS


def pods_to_check(records: Iterable[ClaimRecord]) -> tuple[JoinedPod, ...]:
    """The pods whose spec matters: the claim has several requests or is not for everybody, or the
    pod may have GPUs of other claims.

    The pod for which a claim was prepared is among them: the record does not say which it was. No
    pod joins an allocation, which is one container's.
    """
    known = [
        record
        for record in records
        if record.completed and record.computes and record.allocation is None
    ]
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
    """Whether pods that join it later are not looked for (``plugin.memory.pod_limits``)."""
    return not (record.pod_claim_name or record.limited or record.namespaces)


def tenant_violations(joined: JoinedPod, spec: PodSpec) -> Sequence[str]:
    """The pod's containers that the profile does not let use the claim, in words."""
    record = joined.record
    return tenant_problems(mps_tenants_of(record), record.claim, spec, served_requests(record))


def unusable_devices(
    joined: JoinedPod,
    spec: PodSpec,
    devices: Sequence[RequestedDevice],
    records: Iterable[ClaimRecord],
) -> Sequence[str]:
    """What the pod's containers cannot use of the claim, in words. *devices*: of the claim."""
    return (
        *(f"{problem}; its clients are ended" for problem in tenant_violations(joined, spec)),
        *separate_server_problems(joined.record, _other_claims(joined, records), [spec]),
        *(
            f"{container} {problem}"
            for container in container_requests([spec])
            for problem in _problems(devices, container, joined.record.claim)
        ),
    )


def _other_claims(joined: JoinedPod, records: Iterable[ClaimRecord]) -> Iterator[ClaimRecord]:
    """The prepared claims that the pod may use, but for those whose event names this one."""
    for record in records:
        same_pod = any(pod.uid == joined.pod.uid for pod in record.pods)
        reported = same_pod and record.claim < joined.record.claim and record.namespaces
        if record.completed and not reported:
            yield record


def requested_devices(record: ClaimRecord) -> tuple[RequestedDevice, ...]:
    """What containers get of a claim, without admin access. *record*: with its CDI file."""
    try:
        spec = from_text(record.spec or "")
    except CdiError:  # it is written anew when the claim is prepared
        return ()
    env = {entry.name: entry.container_edits.env for entry in spec.devices}
    devices = []
    for holding, prepared in zip(record.holdings, record.prepared or (), strict=False):
        names = [parse_name(id_).device for id_ in prepared.cdi_ids]
        variables = (variable for name in names for variable in env.get(name, ()))
        mps = tuple(sorted(entry for entry in variables if entry.startswith(_MPS_VARIABLE)))
        if not holding.admin:
            devices.append(RequestedDevice(prepared.requests, holding.unit, mps))
    return tuple(devices)


def _problems(
    devices: Sequence[RequestedDevice], container: ContainerRequests, claim: ClaimRef
) -> Iterator[str]:
    used = [device for device in devices if container.requests(claim, device.requests)]
    under = [device for device in used if device.mps]
    without = [device for device in used if not device.mps]
    if not under:
        return
    if without:
        yield (
            f"uses {_gpus(under)} under MPS and {_gpus(without)} "
            "without: a program under MPS sees no other GPU; use them in different containers"
        )
    if len({device.mps for device in under}) > 1:
        yield (
            f"uses requests {_join(name for device in under for name in device.requests)} "
            "together, which were prepared for containers that use them apart, and a program "
            "reaches one MPS server; use one of them in each container, or write a claim for each "
            "pod"
        )
        return
    everything = [device for device in devices if device.mps == under[0].mps]
    if {device.gpu for device in everything} != {device.gpu for device in under}:
        yield (
            f"uses {_gpus(under)} under MPS, and its MPS server is over {_gpus(everything)}: let "
            "all pods of the claim use the same requests, or write a claim for each"
        )


def _gpus(devices: Iterable[RequestedDevice]) -> str:
    return _join(device.gpu for device in devices)
