"""One look at the memory of a GPU: who may use how much of it, and who does."""

from dataclasses import dataclass

from dra_driver.kubeletplugin.claims import ClaimRef, ClaimUid
from dra_driver.model.devices import GpuUuid
from dra_driver.model.processes import Process
from dra_driver.plan.memory_shares import Share


@dataclass(frozen=True, slots=True)
class Use:
    """What a process uses of a GPU's memory, and the claims for which that may be."""

    process: Process
    memory_bytes: int | None  # None: NVML does not tell; it is neither counted nor ended
    claims: frozenset[ClaimUid]


@dataclass(frozen=True, slots=True)
class GpuLook:
    """One GPU at one moment."""

    gpu: GpuUuid
    shares: tuple[Share, ...]
    uses: tuple[Use, ...] = ()


@dataclass(frozen=True, slots=True)
class ClaimUse:
    """What a claim uses of its share of a GPU."""

    gpu: GpuUuid
    claim: ClaimRef
    used_bytes: float
    limit_bytes: int


def claim_uses(look: GpuLook) -> tuple[ClaimUse, ...]:
    """What every limited claim uses. What may be of several claims is theirs in proportion to their
    shares; what may be of one that nobody limits is nobody's."""
    limits = {
        share.claim.uid: share.memory_bytes
        for share in look.shares
        if share.memory_bytes is not None
    }
    used: dict[ClaimUid, float] = dict.fromkeys(limits, 0.0)
    for use in look.uses:
        if limits.keys() >= use.claims and (whole := sum(limits[uid] for uid in use.claims)):
            for uid in use.claims:
                used[uid] += (use.memory_bytes or 0) * limits[uid] / whole
    return tuple(
        ClaimUse(look.gpu, share.claim, used[share.claim.uid], share.memory_bytes)
        for share in look.shares
        if share.memory_bytes is not None
    )
