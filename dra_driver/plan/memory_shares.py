"""How much of each GPU's memory each claim may use, and for which claims a process uses it.

A MIG instance has memory of its own: it is looked at like a GPU, under its own UUID.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dra_driver.kubeletplugin.claims import ClaimRef, ClaimUid, PodUid
from dra_driver.kubeletplugin.pods import Container
from dra_driver.model.devices import GpuUuid
from dra_driver.model.holdings import Holding, Record
from dra_driver.model.processes import Process
from dra_driver.model.profiles import Guard, GuardPolicy

_MILDEST_FIRST = (GuardPolicy.OFF, GuardPolicy.WARN, GuardPolicy.KILL)
_NOBODY = Guard(GuardPolicy.OFF)


@dataclass(frozen=True, slots=True)
class Share:
    """What one claim may use of one GPU's memory."""

    claim: ClaimRef
    pods: frozenset[PodUid]
    memory_bytes: int | None  # None: nobody limits it
    guard: Guard = _NOBODY
    admin: bool = False  # it looks on, and is never judged


@dataclass(frozen=True, slots=True)
class Holder:
    """A pod, and the claims of ours that it has."""

    namespace: str
    name: str
    claims: tuple[ClaimRef, ...]


@dataclass(frozen=True, slots=True)
class Uses:
    """The claims that a container uses, and those of its pod of which that cannot be told."""

    known: frozenset[ClaimUid] = frozenset()
    possible: frozenset[ClaimUid] = frozenset()
    namespace: str = ""  # of the container, where its claims are known


def mildest(guards: Iterable[Guard]) -> Guard:
    """One guard for all: the policy that does least, after the longest of the grace periods.

    What happens to a process must be allowed by each claim that it may be of.
    """
    several = tuple(guards)
    policy = min((guard.policy for guard in several), key=_MILDEST_FIRST.index)
    return Guard(policy, max(guard.grace_seconds for guard in several))


def shares(records: Sequence[Record]) -> Mapping[GpuUuid, tuple[Share, ...]]:
    """Who shares each GPU of which a guarded claim holds a part; other GPUs need no look."""
    held: dict[GpuUuid, dict[ClaimRef, list[Holding]]] = defaultdict(lambda: defaultdict(list))
    pods = {record.claim: frozenset(pod.uid for pod in record.pods) for record in records}
    for record in records:
        for holding in record.holdings:
            if (memory := holding.memory_of) is not None:
                held[memory][record.claim].append(holding)
    found = {
        gpu: tuple(_share(claim, pods[claim], its) for claim, its in sorted(claims.items()))
        for gpu, claims in sorted(held.items())
    }
    return {gpu: its for gpu, its in found.items() if any(map(_is_guarded, its))}


def known_as(records: Iterable[Record]) -> Mapping[GpuUuid, str]:
    """The instances that claims hold, each as people know it: its UUID says nothing to them."""
    return {
        holding.instance.uuid: f"{holding.unit} ({holding.instance.uuid})"
        for record in records
        for holding in record.holdings
        if holding.instance is not None
    }


def holders(records: Iterable[Record]) -> Mapping[PodUid, Holder]:
    """The pods of these claims."""
    found: dict[PodUid, Holder] = {}
    for record in records:
        for pod in record.pods:
            claims = found[pod.uid].claims if pod.uid in found else ()
            found[pod.uid] = Holder(record.claim.namespace, pod.name, (*claims, record.claim))
    return found


def uses(container: Container | None, holder: Holder | None) -> Uses:
    """What a container uses. *holder*: its pod, where it is recorded with claims.

    Where nobody knows the container, each claim of its pod may be the one that it uses.
    """
    if container is not None:
        return Uses(known=container.claims, namespace=container.namespace)
    return Uses(possible=frozenset(claim.uid for claim in holder.claims) if holder else frozenset())


def owners(gpu_shares: Iterable[Share], process: Process, its: Uses) -> frozenset[ClaimUid]:
    """The claims for which *process* may use the GPU. None: it is nobody's business here.

    A process that may be a monitor's is left alone, unless its container surely uses a share.
    """
    known = [
        share
        for share in gpu_shares
        if share.claim.uid in its.known and share.claim.namespace == its.namespace
    ]
    mine = [share for share in gpu_shares if process.pod in share.pods]
    possible = [share for share in mine if share.claim.uid in its.possible]
    if all(share.admin for share in known) and any(share.admin for share in possible):
        return frozenset()
    return frozenset(share.claim.uid for share in (*known, *possible) if not share.admin)


def _share(claim: ClaimRef, pods: frozenset[PodUid], holdings: Sequence[Holding]) -> Share:
    """What all holdings of one claim on one GPU are together."""
    if all(holding.admin for holding in holdings):
        return Share(claim, pods, None, admin=True)
    limits = [holding.limit for holding in holdings if holding.limit and not holding.admin]
    if len(limits) < len(holdings):
        # One holding is all of the GPU, or looks on: which one a process uses cannot be told.
        return Share(claim, pods, None)
    memory_bytes = sum(limit.memory_bytes for limit in limits)
    return Share(claim, pods, memory_bytes, mildest(limit.guard for limit in limits))


def _is_guarded(share: Share) -> bool:
    return share.memory_bytes is not None and share.guard.policy is not GuardPolicy.OFF
