"""How much of a GPU's memory each pod may use: the sum of what its claims hold of it.

A pod is the smallest thing that has a limit before any of its processes runs. Several pods of one
claim have no cgroup in common, so each may use all that the claim holds; that they do not use it
twice is the memory guard's to see. A pod with a claim for all of a GPU has no limit on it, and a
claim with admin access neither gives nor takes any.
"""

from collections.abc import Iterable, Mapping, Sequence

from dra_driver.k8s.claims import ClaimUid, PodUid
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.records import ClaimRecord, Holding
from dra_driver.model.steps import PodMemoryLimit, PodMemoryShare, SetMemoryLimits


def pod_memory_shares(records: Iterable[ClaimRecord]) -> tuple[PodMemoryShare, ...]:
    """What every pod of *records* holds of every GPU, sorted by GPU and pod."""
    claims: dict[tuple[GpuUuid, PodUid], dict[ClaimUid, int | None]] = {}
    strict: set[tuple[GpuUuid, PodUid]] = set()
    for record in records:
        for gpu, holdings in _by_gpu(record).items():
            for pod in record.pods:
                claims.setdefault((gpu, pod.uid), {})[record.claim.uid] = _memory_bytes(holdings)
                if _strict(holdings):
                    strict.add((gpu, pod.uid))
    return tuple(
        PodMemoryShare(pod, gpu, tuple(sorted(sizes.items())), (gpu, pod) in strict)
        for (gpu, pod), sizes in sorted(claims.items())
    )


def memory_limit_steps(
    record: ClaimRecord, other_records: Iterable[ClaimRecord]
) -> tuple[SetMemoryLimits, ...]:
    """What limits the pods of *record*, with what they hold by other records already."""
    others = _others_of_its_pods(record, other_records)
    if not _any_limited(record, *others):
        return ()
    strict = {gpu for gpu, holdings in _by_gpu(record).items() if _strict(holdings)}
    return _steps(record, pod_memory_shares((record, *others)), pod_memory_shares(others), strict)


def restored_memory_limit_steps(
    record: ClaimRecord, other_records: Iterable[ClaimRecord]
) -> tuple[SetMemoryLimits, ...]:
    """What limits the pods of *record*, once it is gone, to what they hold by other records.

    Never strict: a claim is given back also where its limit cannot be removed.
    """
    others = _others_of_its_pods(record, other_records)
    if not _any_limited(record, *others):
        return ()
    return _steps(
        record, pod_memory_shares(others), pod_memory_shares((record, *others)), frozenset()
    )


def _any_limited(*records: ClaimRecord) -> bool:
    """Most claims are for whole GPUs."""
    return any(record.limited for record in records)


def _others_of_its_pods(
    record: ClaimRecord, other_records: Iterable[ClaimRecord]
) -> list[ClaimRecord]:
    """Many claims can share a GPU, and few of them a pod."""
    pods = {pod.uid for pod in record.pods}
    return [
        other
        for other in other_records
        if other.claim.uid != record.claim.uid and any(pod.uid in pods for pod in other.pods)
    ]


def _steps(
    record: ClaimRecord,
    after: Sequence[PodMemoryShare],
    before: Sequence[PodMemoryShare],
    strict: Iterable[GpuUuid],
) -> tuple[SetMemoryLimits, ...]:
    """A step for each of the record's GPUs where one of its pods is limited before or after."""
    limits = _limits(after)
    limited = limits.keys() | _limits(before).keys()
    steps = []
    for gpu in sorted(_by_gpu(record)):
        pods = tuple(
            PodMemoryLimit(pod.uid, limits.get((gpu, pod.uid)))
            for pod in sorted(record.pods, key=lambda pod: pod.uid)
            if (gpu, pod.uid) in limited
        )
        if pods:
            steps.append(SetMemoryLimits(gpu, pods, gpu in strict))
    return tuple(steps)


def _limits(shares: Iterable[PodMemoryShare]) -> Mapping[tuple[GpuUuid, PodUid], int]:
    limits = {(share.gpu, share.pod): share.memory_bytes for share in shares}
    return {key: size for key, size in limits.items() if size is not None}


def _by_gpu(record: ClaimRecord) -> Mapping[GpuUuid, list[Holding]]:
    """The holdings of each GPU that are of the GPU itself, not of a partition."""
    holdings: dict[GpuUuid, list[Holding]] = {}
    for holding in record.holdings:
        if holding.partition is None and not holding.admin:
            holdings.setdefault(holding.gpu, []).append(holding)
    return holdings


def _memory_bytes(holdings: Sequence[Holding]) -> int | None:
    limits = [holding.limit for holding in holdings]
    return None if None in limits else sum(limit.memory_bytes for limit in limits if limit)


def _strict(holdings: Iterable[Holding]) -> bool:
    return any(holding.limit is not None and holding.limit.strict for holding in holdings)
