"""What a claim has of MPS: which of its GPUs one server is over, with which limits.

A container names one pipe directory, and a program sees the GPUs of the server behind it and no
others. So the GPUs that a container has of a claim are served together, and what cannot be is
refused. Which container uses what is read from the pod, where a claim leaves it open.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from dra_driver.errors import ClaimError
from dra_driver.kubeletplugin.claims import Allocation, Claim, ClaimRef
from dra_driver.kubeletplugin.pods import ContainerSpec, PodSpec
from dra_driver.model.devices import DeviceName, Gpu
from dra_driver.model.holdings import Record
from dra_driver.model.mps import ALL_CORES, Allowance, Space, SpaceName
from dra_driver.model.offer import Device, Replica, Sliceable
from dra_driver.model.profiles import Tenants
from dra_driver.model.steps import ServeMps
from dra_driver.plan.amounts import Amount
from dra_driver.plan.sharing import ByMps, Sharing

Pods = Sequence[PodSpec]


class PodsNeeded(Exception):
    """It depends on the pods of the claim, which have to be read first."""


@dataclass(frozen=True, slots=True)
class Grant:
    """One device that a claim gets, how much of it, and how."""

    allocation: Allocation
    device: Device
    amount: Amount
    sharing: Sharing
    space: Space | None = None  # of what is shared by MPS


@dataclass(frozen=True, slots=True)
class Part:
    """A grant that is shared by MPS."""

    grant: Grant
    sharing: ByMps

    @property
    def gpu(self) -> Gpu:
        return self.grant.device.gpu

    @property
    def request(self) -> str:
        return self.grant.allocation.base_request


def with_spaces(claim: Claim, grants: Sequence[Grant], pods: Pods | None) -> tuple[Grant, ...]:
    """*grants*, each with its space where it is shared by MPS.

    *pods*: those of the claim. PodsNeeded: they are None, and it depends on them. ClaimError:
    every problem of containers that cannot be served like this.
    """
    parts = [Part(g, g.sharing) for g in grants if isinstance(g.sharing, ByMps)]
    if not parts:
        return tuple(grants)
    ours = {part.request for part in parts}
    everything = {g.allocation.base_request for g in grants if not g.allocation.admin}
    if pods is None and (len(everything) > 1 or _tenants(parts) is not Tenants.ANY):
        raise PodsNeeded
    used = [(pod, container) for pod in pods or () for container in pod.containers]
    groups = _groups(ours, [_requests(claim, one, ours) for _, one in used])
    problems = [
        *_tenant_problems(claim, parts, used),
        *_mixed_problems(claim, used, ours, everything),
        *_split_problems(claim, parts, groups, used),
    ]
    if problems:
        raise ClaimError(f"claim {claim.ref}: " + "; ".join(dict.fromkeys(problems)))
    spaces: dict[Allocation, Space] = {}
    for group in groups:
        its = [part for part in parts if part.request in group]
        spaces |= dict.fromkeys((part.grant.allocation for part in its), _space(claim, its))
    return tuple(replace(g, space=spaces.get(g.allocation)) for g in grants)


def serve_steps(grants: Iterable[Grant]) -> tuple[ServeMps, ...]:
    """One step for each space, however many allocations share it."""
    spaces = {grant.space for grant in grants if grant.space is not None}
    return tuple(ServeMps(space) for space in sorted(spaces, key=lambda one: one.name))


def served_steps(record: Record) -> Iterator[ServeMps]:
    """What the MPS agent does for the record's claim."""
    return (step for step in record.steps if isinstance(step, ServeMps))


def two_directories(claim: ClaimRef, others: Iterable[ClaimRef], pods: Pods) -> Sequence[str]:
    """The containers that use *claim* and another one that is shared by MPS as well."""
    names = {other.name: other for other in others if other.namespace == claim.namespace}
    found = []
    for pod in pods:
        for container in pod.containers:
            its = {name for name, _ in container.uses}
            if claim.name in its and (more := sorted(its & names.keys() - {claim.name})):
                found.append(
                    f"{_where(pod, container)} uses claim {', '.join(more)} too, which is also "
                    "shared by MPS, and a program reaches one MPS server; write both as requests "
                    "of one claim, or use them in different containers"
                )
    return found


def _groups(requests: Iterable[str], used: Iterable[set[str]]) -> list[set[str]]:
    """The requests that containers use together, directly or by way of others."""
    groups = [{request} for request in sorted(requests)]
    for together in used:
        touched = [group for group in groups if group & together]
        if len(touched) > 1:
            groups = [group for group in groups if not group & together]
            groups.append(set().union(*touched))
    return sorted(groups, key=min)


def _space(claim: Claim, parts: Sequence[Part]) -> Space:
    """The limits are the claim's on each GPU: parts of one GPU that are used together add up."""
    by_gpu: dict[Gpu, list[ByMps]] = {}
    for part in sorted(parts, key=lambda one: one.gpu.minor):
        by_gpu.setdefault(part.gpu, []).append(part.sharing)
    gpus = tuple(gpu.uuid for gpu in by_gpu)
    requests = sorted({part.request for part in parts})
    digest = hashlib.sha256(",".join((claim.ref.uid, *requests, *gpus)).encode()).hexdigest()
    percents = [min(ALL_CORES, sum(one.percent for one in its)) for its in by_gpu.values()]
    return Space(
        SpaceName(f"c_{digest[:24]}"),
        claim.ref.uid,
        gpus,
        min(percents),
        tuple(_sum(its) for its in by_gpu.values()),
        max(part.sharing.priority for part in parts),
        _most([part.grant.device for part in parts]),
    )


def _sum(its: Sequence[ByMps]) -> int | None:
    sizes = [one.memory_bytes for one in its]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def _most(devices: Sequence[Device]) -> Allowance:
    """The most that one claim can have of these by the rules of the node: one replica where a claim
    cannot have more, else all there is."""
    rules = devices[0].rules
    if len(devices) > 1 or not rules.one_share:
        return Allowance()
    match devices[0].shape:
        case Sliceable(replicas=number, cores_default=cores, memory_default=memory) if number > 1:
            return Allowance(cores or ALL_CORES, memory if rules.limited else None)
        case Replica(cores=cores, memory_bytes=memory):
            return Allowance(cores or ALL_CORES, memory if rules.limited else None)
        case _:
            return Allowance()


def _requests(claim: Claim, container: ContainerSpec, known: set[str]) -> set[str]:
    """Which of the *known* requests of *claim* the container uses."""
    its = {request for name, request in container.uses if name == claim.ref.name}
    return set(known) if "" in its else its & known


def _split_problems(
    claim: Claim,
    parts: Sequence[Part],
    groups: Iterable[set[str]],
    used: Iterable[tuple[PodSpec, ContainerSpec]],
) -> Iterator[str]:
    """Containers with some of the GPUs of a server that others need to be over more."""
    names = {part.request: DeviceName(part.gpu.name) for part in parts}
    gpus: dict[str, set[str]] = {}
    for part in parts:
        gpus.setdefault(part.request, set()).add(part.gpu.name)
    for group in groups:
        everything = set().union(*(gpus[request] for request in group))
        for pod, container in used:
            its = _requests(claim, container, set(names)) & group
            has = set().union(*(gpus[request] for request in its))
            if has and has != everything:
                yield (
                    f"{_where(pod, container)} uses {_list(has)} under MPS, and another container "
                    f"{_list(everything)}: a GPU of a claim is on one MPS server; let both use the "
                    "same requests, or write a claim for each"
                )


def _mixed_problems(
    claim: Claim,
    used: Iterable[tuple[PodSpec, ContainerSpec]],
    ours: set[str],
    everything: set[str],
) -> Iterator[str]:
    for pod, container in used:
        requests = _requests(claim, container, everything)
        if requests & ours and requests - ours:
            yield (
                f"{_where(pod, container)} uses request {_list(requests & ours)} under MPS and "
                f"{_list(requests - ours)} without: a program under MPS sees no other GPU; use the "
                "same strategy for both, or different containers"
            )


def _tenants(parts: Iterable[Part]) -> Tenants:
    """The strictest rule of the GPUs."""
    order = list(Tenants)
    return max((part.grant.device.rules.tenants for part in parts), key=order.index)


def _tenant_problems(
    claim: Claim, parts: Sequence[Part], used: Iterable[tuple[PodSpec, ContainerSpec]]
) -> Iterator[str]:
    tenants = _tenants(parts)
    requests = {part.request for part in parts}
    if tenants is not Tenants.ANY and not claim.of_one_pod:
        yield (
            f"any pod can join this claim, and this node's profile says which may share a GPU by "
            f"MPS (mpsTenants: {tenants}); use a ResourceClaimTemplate, which makes one for each"
        )
    for pod, container in used:
        if not _requests(claim, container, requests) or not pod.host_users:
            continue
        if tenants is Tenants.USER_NAMESPACES:
            yield (
                f"{_where(pod, container)}: this node's profile lets only pods with a user "
                "namespace share a GPU by MPS (mpsTenants: UserNamespaces); set "
                "spec.hostUsers: false"
            )
        elif tenants is Tenants.NON_ROOT and container.root:
            yield (
                f"{_where(pod, container)} can run as root, and this node's profile lets no such "
                "pod share a GPU by MPS (mpsTenants: NonRoot); set securityContext.runAsNonRoot: "
                "true, or spec.hostUsers: false"
            )


def _where(pod: PodSpec, container: ContainerSpec) -> str:
    return f"pod {pod.namespace}/{pod.name}, container {container.name!r}"


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
