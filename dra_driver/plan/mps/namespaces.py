"""What a claim has of MPS: which of its GPUs one server is over, with which limits.

A container names one pipe directory, and a program sees the GPUs of the server behind it and no
others. So the GPUs that a container has of a claim are served together, and what cannot be is
refused. Which container uses what is read from the pods, where a claim leaves it open.
"""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from dra_driver.base.errors import ClaimError, join_problems
from dra_driver.base.frozen import frozen
from dra_driver.k8s.claims import AllocationResult, Claim
from dra_driver.k8s.pods import PodSpec
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.mps import ALL_CORES, MpsLimits, MpsNamespace, MpsNamespaceName
from dra_driver.model.offer import Device, Fractional, Replica
from dra_driver.model.profiles import MpsServerScope, MpsTenants
from dra_driver.model.records import AllocationClaim
from dra_driver.model.steps import ServeMpsNamespace
from dra_driver.plan.mps.containers import (
    container_requests,
    mixed_problems,
    split_problems,
    strictest_tenants,
    tenant_problems,
)
from dra_driver.plan.prepare.sharing import DeviceGrant, MpsShared

ClaimPodSpecs = Sequence[PodSpec]


class PodsNeeded(Exception):
    """It depends on the pods of the claim, which have to be read first: says why."""


@frozen
class MpsPart:
    """A grant that is shared by MPS."""

    grant: DeviceGrant
    sharing: MpsShared

    @property
    def device(self) -> Device:
        return self.grant.device

    @property
    def request(self) -> str:
        return self.grant.allocation.base_request


def with_namespaces(
    claim: Claim, grants: Sequence[DeviceGrant], pods: ClaimPodSpecs | None
) -> tuple[DeviceGrant, ...]:
    """*grants*, each with its namespace where it is shared by MPS.

    *pods*: those of the claim. PodsNeeded: they are None, and it depends on them. ClaimError:
    every problem of containers that cannot be served like this. Of an allocation one container has
    everything, and whose that is is looked at before it starts.
    """
    parts = [MpsPart(g, g.sharing) for g in grants if isinstance(g.sharing, MpsShared)]
    if not parts:
        return tuple(grants)
    under = {part.request for part in parts}
    everything = {g.allocation.base_request for g in grants if not g.allocation.admin}
    tenants = strictest_tenants(part.grant.device.rules.tenants for part in parts)
    depends_on_pods = len(everything) > 1 or tenants is not MpsTenants.ANY
    if pods is None and depends_on_pods and not isinstance(claim, AllocationClaim):
        raise PodsNeeded("it is shared by MPS")
    used = container_requests(pods or ())
    groups = _groups(under, [container.requests(claim.ref, under) for container in used])
    units: dict[str, set[str]] = {
        request: {part.device.unit for part in parts if part.request == request}
        for request in under
    }
    problems = [
        *_unknown_problems(pods, under, tenants),
        *_joinable_problems(claim, tenants),
        *(
            problem
            for pod in pods or ()
            for problem in tenant_problems(tenants, claim.ref, pod, under)
        ),
        *mixed_problems(claim.ref, used, under, everything),
        *split_problems(claim.ref, used, groups, units),
        *_partition_problems(groups, parts),
    ]
    if problems:
        raise ClaimError(join_problems(f"claim {claim.ref}: ", problems))
    namespaces: dict[AllocationResult, MpsNamespace] = {}
    for group in groups:
        members = [part for part in parts if part.request in group]
        namespace = _namespace(claim, members)
        namespaces |= dict.fromkeys((part.grant.allocation for part in members), namespace)
    return tuple(replace(g, namespace=namespaces.get(g.allocation)) for g in grants)


def mps_steps(grants: Iterable[DeviceGrant]) -> tuple[ServeMpsNamespace, ...]:
    """One step for each namespace, however many allocations share it."""
    namespaces = {grant.namespace for grant in grants if grant.namespace is not None}
    return tuple(
        ServeMpsNamespace(namespace)
        for namespace in sorted(namespaces, key=lambda namespace: namespace.name)
    )


def _unknown_problems(
    pods: ClaimPodSpecs | None, under: Collection[str], tenants: MpsTenants
) -> Iterator[str]:
    """No pod was found, and it depends on them."""
    why = "it is reserved for no pod that is there (a PodGroup does not tell its pods)"
    if pods is None or pods:
        return
    if len(under) > 1:
        yield (
            f"requests {', '.join(sorted(under))} are under MPS, and which of them a container "
            f"uses is not known: {why}; ask for all of it in one request, or write a claim for each"
        )
    if tenants is not MpsTenants.ANY:
        yield (
            f"whose pods may share a GPU by MPS is said by this node's profile (mpsTenants: "
            f"{tenants}), and who uses the claim is not known: {why}"
        )


def _joinable_problems(claim: Claim, tenants: MpsTenants) -> Iterator[str]:
    """The first line: pods that join nevertheless are looked at when they do."""
    if tenants is not MpsTenants.ANY and not claim.made_for_pod:
        yield (
            f"any pod can join this claim, and this node's profile says which may share a GPU by "
            f"MPS (mpsTenants: {tenants}); use a ResourceClaimTemplate, which makes one for each"
        )


def _partition_problems(groups: Iterable[set[str]], parts: Sequence[MpsPart]) -> Iterator[str]:
    """A program computes on one MIG partition, and a server is over that one."""
    for group in groups:
        devices = {part.device.uuid: part.device for part in parts if part.request in group}
        if len(devices) > 1 and any(device.partition for device in devices.values()):
            names = ", ".join(sorted(device.name for device in devices.values()))
            yield (
                f"requests {', '.join(sorted(group))}: {names} under MPS in one container: a "
                "program under MPS computes on one partition; ask for one, use different "
                "containers, or strategy TimeSlicing"
            )


def _groups(requests: Iterable[str], used: Iterable[set[str]]) -> list[set[str]]:
    """The requests that containers use together, directly or by way of others."""
    groups = [{request} for request in sorted(requests)]
    for together in used:
        touched = [group for group in groups if group & together]
        if len(touched) > 1:
            groups = [group for group in groups if not group & together]
            groups.append(set().union(*touched))
    return sorted(groups, key=min)


def _namespace(claim: Claim, parts: Sequence[MpsPart]) -> MpsNamespace:
    """The limits are the claim's on each GPU: parts of one GPU that are used together add up."""
    by_gpu: dict[GpuUuid, list[MpsShared]] = {}
    for part in sorted(parts, key=lambda part: part.device.gpu.minor):
        by_gpu.setdefault(part.device.uuid, []).append(part.sharing)
    gpus = tuple(by_gpu)
    requests = sorted({part.request for part in parts})
    digest = hashlib.sha256(",".join((claim.ref.uid, *requests, *gpus)).encode()).hexdigest()
    percents = [min(ALL_CORES, sum(part.percent for part in shared)) for shared in by_gpu.values()]
    # With protocol 3 a server keeps its namespaces apart, and the agent puts all into one.
    apart = any(part.device.rules.mps_servers is MpsServerScope.PER_NAMESPACE for part in parts)
    return MpsNamespace(
        name=MpsNamespaceName(f"c_{digest[:24]}"),
        claim=claim.ref.uid,
        gpus=gpus,
        percent=min(percents),
        memory_bytes=tuple(_sum(shared) for shared in by_gpu.values()),
        priority=max(part.sharing.priority for part in parts),
        default_limits=_most([part.grant.device for part in parts]),
        tenant=claim.ref.namespace if apart else "",
    )


def _sum(parts: Sequence[MpsShared]) -> int | None:
    sizes = [part.memory_bytes for part in parts]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def _most(devices: Sequence[Device]) -> MpsLimits:
    """The most that one claim can have of these by the rules of the node: one replica where a claim
    cannot have more, else all there is."""
    rules = devices[0].rules
    if len(devices) > 1 or not rules.one_share:
        return MpsLimits()
    match devices[0].shape:
        case Fractional(replicas=number, cores_default=cores, memory_default=memory) if number > 1:
            return MpsLimits(cores or ALL_CORES, memory if rules.limited else None)
        case Replica(cores=cores, memory_bytes=memory):
            return MpsLimits(cores or ALL_CORES, memory if rules.limited else None)
        case _:
            return MpsLimits()
