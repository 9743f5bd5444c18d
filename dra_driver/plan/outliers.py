"""Which claims certainly use more of a GPU's memory than they were given.

A process of a container that uses several claims of a GPU may be of any of them. So claims are
*certainly* above their shares when the processes that can be of nobody else use more than their
shares together. All that NVML tells of a process counts, also what the CUDA context takes of a GPU
before the program allocates anything (some hundred MiB): a claim has to hold that, too.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dra_driver.kubeletplugin.claims import ClaimRef, ClaimUid
from dra_driver.model.devices import GpuUuid
from dra_driver.model.profiles import Guard, GuardPolicy
from dra_driver.plan.memory_look import GpuLook, Use
from dra_driver.plan.memory_shares import mildest

TOLERANCE_BYTES: Final = 2 << 20
"""What a claim may use of each GPU beyond its share: drivers give memory out in pages of up to
2 MiB, and may count a limit of theirs in such pages. Who fills what the driver allows is within
its share."""

_Claims = frozenset[ClaimUid]


@dataclass(frozen=True, slots=True)
class Group:
    """Claims of one GPU, and the processes that can be of no other; mostly it is one claim."""

    gpu: GpuUuid
    claims: tuple[ClaimRef, ...]
    limit_bytes: int
    guard: Guard
    uses: tuple[Use, ...]

    @property
    def used_bytes(self) -> int:
        return sum(use.memory_bytes or 0 for use in self.uses)

    @property
    def above(self) -> bool:
        """Whether they use more than they were given, and somebody is to do something about it."""
        allowed = self.limit_bytes + TOLERANCE_BYTES * len(self.claims)
        return self.used_bytes > allowed and self.guard.policy is not GuardPolicy.OFF


def outliers(look: GpuLook) -> tuple[Group, ...]:
    """The claims that are certainly above their shares; none is in two of the groups.

    A claim that fits its share whatever may be counted is in no group. Fewer claims go before more:
    whoever is above by itself is judged by its own processes alone, not by those of claims that
    share a container with it. Claims that remain tied are looked at again when it is below.
    """
    if not look.uses:
        return ()
    found: list[Group] = []
    taken: set[ClaimUid] = set()
    for claims in _suspects(look):
        if not taken & claims and (group := _group(look, claims)).above:
            found.append(group)
            taken |= claims
    return tuple(sorted(found, key=lambda group: group.claims))


def _suspects(look: GpuLook) -> list[_Claims]:
    """The sets of claims that may be above: those of each container, and all that hang together by
    containers. Every other set would take too long to try where many hang together."""
    allowed = {
        share.claim.uid: share.memory_bytes + TOLERANCE_BYTES
        for share in look.shares
        if share.memory_bytes is not None
    }
    limited = [use for use in look.uses if use.claims and allowed.keys() >= use.claims]
    containers = {use.claims for use in _in_doubt(limited, allowed)}
    return sorted(containers | set(_tied(containers)), key=lambda one: (len(one), sorted(one)))


def _in_doubt(uses: Sequence[Use], allowed: Mapping[ClaimUid, int]) -> Sequence[Use]:
    """Without the processes that may be of a claim that fits its share even with all of them: they
    are no reason to end anything. What others may use is less without them, so again and again."""
    while True:
        most: Counter[ClaimUid] = Counter()
        for use in uses:
            most.update(dict.fromkeys(use.claims, use.memory_bytes or 0))
        kept = [use for use in uses if all(most[claim] > allowed[claim] for claim in use.claims)]
        if len(kept) == len(uses):
            return kept
        uses = kept


def _tied(sets: Iterable[_Claims]) -> list[_Claims]:
    """Claims that hang together by containers that use several of them."""
    tied: list[_Claims] = []
    for claims in sets:
        touching = [group for group in tied if group & claims]
        tied = [group for group in tied if not group & claims]
        tied.append(claims.union(*touching))
    return tied


def _group(look: GpuLook, claims: _Claims) -> Group:
    """Each of *claims* is limited."""
    shares = sorted((s for s in look.shares if s.claim.uid in claims), key=lambda s: s.claim)
    return Group(
        gpu=look.gpu,
        claims=tuple(share.claim for share in shares),
        limit_bytes=sum(share.memory_bytes or 0 for share in shares),
        guard=mildest(share.guard for share in shares),
        uses=tuple(use for use in look.uses if use.claims and use.claims <= claims),
    )
