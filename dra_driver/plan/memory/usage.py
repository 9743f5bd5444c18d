"""Who may use how much of each GPU's memory, for which claims a process uses it, and how much.

A MIG instance has memory of its own: it is treated like a GPU, under its own UUID.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from dra_driver.base.frozen import frozen
from dra_driver.k8s.claims import ClaimRef, ClaimUid, PodUid
from dra_driver.k8s.pods import Container
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.processes import ContainerProcess
from dra_driver.model.profiles import GuardPolicy, GuardRules
from dra_driver.model.records import ClaimRecord, Holding

_MILDEST_FIRST = (GuardPolicy.OFF, GuardPolicy.WARN, GuardPolicy.KILL)
_NOBODY = GuardRules(GuardPolicy.OFF)


@frozen
class MemoryShare:
    """What one claim may use of one GPU's memory."""

    claim: ClaimRef
    pods: frozenset[PodUid]
    memory_bytes: int | None  # None: no limit
    guard: GuardRules = _NOBODY
    admin: bool = False  # never judged


@frozen
class PodClaims:
    """A pod, and the claims of ours that it has."""

    namespace: str
    name: str
    claims: tuple[ClaimRef, ...]


@frozen
class ContainerClaims:
    """The claims that a container uses, and those of its pod that it may use."""

    known: frozenset[ClaimUid] = frozenset()
    possible: frozenset[ClaimUid] = frozenset()
    namespace: str = ""  # of the container, where its claims are known


def mildest_guard(guards: Iterable[GuardRules]) -> GuardRules:
    """One guard for all: the policy that does least, after the longest of the grace periods.

    What happens to a process must be allowed by each claim that it may be of.
    """
    every_guard = tuple(guards)
    policy = min((guard.policy for guard in every_guard), key=_MILDEST_FIRST.index)
    return GuardRules(policy, max(guard.grace_seconds for guard in every_guard))


def memory_shares(records: Sequence[ClaimRecord]) -> Mapping[GpuUuid, tuple[MemoryShare, ...]]:
    """The shares of each GPU of which a guarded claim holds a part; other GPUs need no scan."""
    holdings: dict[GpuUuid, dict[ClaimRef, list[Holding]]] = defaultdict(lambda: defaultdict(list))
    pods = {record.claim: frozenset(pod.uid for pod in record.pods) for record in records}
    for record in records:
        for holding in record.holdings:
            if (memory := holding.memory_of) is not None:
                holdings[memory][record.claim].append(holding)
    shares = {
        gpu: tuple(
            _share(claim, pods[claim], gpu_shares) for claim, gpu_shares in sorted(claims.items())
        )
        for gpu, claims in sorted(holdings.items())
    }
    return {
        gpu: gpu_shares for gpu, gpu_shares in shares.items() if any(map(_is_guarded, gpu_shares))
    }


def instance_names(records: Iterable[ClaimRecord]) -> Mapping[GpuUuid, str]:
    """The instances that claims hold, each as people know it: its UUID says nothing to them."""
    return {
        holding.instance.uuid: f"{holding.unit} ({holding.instance.uuid})"
        for record in records
        for holding in record.holdings
        if holding.instance is not None
    }


def pod_claims(records: Iterable[ClaimRecord]) -> Mapping[PodUid, PodClaims]:
    """The pods of these claims."""
    by_pod: dict[PodUid, PodClaims] = {}
    for record in records:
        for pod in record.pods:
            claims = by_pod[pod.uid].claims if pod.uid in by_pod else ()
            by_pod[pod.uid] = PodClaims(record.claim.namespace, pod.name, (*claims, record.claim))
    return by_pod


def container_claims(container: Container | None, holder: PodClaims | None) -> ContainerClaims:
    """What a container uses. *holder*: its pod, where it is recorded with claims.

    Where the container is not known, each claim of its pod may be the one that it uses.
    """
    if container is not None:
        return ContainerClaims(known=container.claims, namespace=container.namespace)
    return ContainerClaims(
        possible=frozenset(claim.uid for claim in holder.claims) if holder else frozenset()
    )


def possible_owners(
    gpu_shares: Iterable[MemoryShare], process: ContainerProcess, container_claims: ContainerClaims
) -> frozenset[ClaimUid]:
    """The claims for which *process* may use the GPU. Empty: it is not judged.

    A process that may have admin access is left alone, unless its container surely uses a share.
    """
    known_shares = [
        share
        for share in gpu_shares
        if share.claim.uid in container_claims.known
        and share.claim.namespace in ("", container_claims.namespace)
    ]
    pod_shares = [share for share in gpu_shares if process.pod in share.pods]
    possible_shares = [
        share for share in pod_shares if share.claim.uid in container_claims.possible
    ]
    if all(share.admin for share in known_shares) and any(share.admin for share in possible_shares):
        return frozenset()
    return frozenset(
        share.claim.uid for share in (*known_shares, *possible_shares) if not share.admin
    )


def _share(claim: ClaimRef, pods: frozenset[PodUid], holdings: Sequence[Holding]) -> MemoryShare:
    """What all holdings of one claim on one GPU are together."""
    if all(holding.admin for holding in holdings):
        return MemoryShare(claim, pods, None, admin=True)
    limits = [holding.limit for holding in holdings if holding.limit and not holding.admin]
    if len(limits) < len(holdings):
        # One holding is all of the GPU, or admin access: which one a process uses is not known.
        return MemoryShare(claim, pods, None)
    memory_bytes = sum(limit.memory_bytes for limit in limits)
    return MemoryShare(claim, pods, memory_bytes, mildest_guard(limit.guard for limit in limits))


def _is_guarded(share: MemoryShare) -> bool:
    return share.memory_bytes is not None and share.guard.policy is not GuardPolicy.OFF


@frozen
class ProcessUsage:
    """What a process uses of a GPU's memory, and the claims for which that may be."""

    process: ContainerProcess
    memory_bytes: int | None  # None: not known; then it is neither counted nor ended
    claims: frozenset[ClaimUid]


@frozen
class GpuMemorySample:
    """One GPU at one moment."""

    gpu: GpuUuid
    shares: tuple[MemoryShare, ...]
    usages: tuple[ProcessUsage, ...] = ()


@frozen
class ClaimMemoryUsage:
    """What a claim uses of its share of a GPU."""

    gpu: GpuUuid
    claim: ClaimRef
    used_bytes: float
    limit_bytes: int


def claim_usages(sample: GpuMemorySample) -> tuple[ClaimMemoryUsage, ...]:
    """What every limited claim uses. What may be of several claims is theirs in proportion to their
    shares; what may be of a claim without a limit counts for none."""
    limits = {
        share.claim.uid: share.memory_bytes
        for share in sample.shares
        if share.memory_bytes is not None
    }
    used: dict[ClaimUid, float] = dict.fromkeys(limits, 0.0)
    for use in sample.usages:
        if limits.keys() >= use.claims and (total := sum(limits[uid] for uid in use.claims)):
            for uid in use.claims:
                used[uid] += (use.memory_bytes or 0) * limits[uid] / total
    return tuple(
        ClaimMemoryUsage(sample.gpu, share.claim, used[share.claim.uid], share.memory_bytes)
        for share in sample.shares
        if share.memory_bytes is not None
    )
