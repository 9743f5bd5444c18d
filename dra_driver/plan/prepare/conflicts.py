"""What other claims hold that keeps a claim from its devices: the driver's own account.

The last guard against a GPU in too many hands, whatever the scheduler said.

The turns of the processes on a GPU: which interval holds.

A GPU has one interval. A claim that names none has no opinion; claims that name the same share it;
two different ones clash.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations

from dra_driver.base.errors import ClaimError, DeviceHeldByClaim
from dra_driver.k8s.claims import Claim, ClaimRef
from dra_driver.model.gpus import DeviceName, GpuUuid, PartitionKey
from dra_driver.model.offer import Device, Replica
from dra_driver.model.records import ClaimRecord, Holding
from dra_driver.model.steps import SetTimeSlice
from dra_driver.plan.prepare.amounts import NO_AMOUNT, Amount, shortage, total_amount
from dra_driver.plan.prepare.sharing import DeviceGrant, TimeSliced


def clashing_intervals(
    wanted: Mapping[GpuUuid, SetTimeSlice], others: Iterable[ClaimRecord]
) -> Iterator[tuple[ClaimRef, SetTimeSlice]]:
    """What other claims set that differs from what is *wanted* of the same GPU, by claim."""
    return (
        (record.claim, step)
        for record in sorted(others, key=lambda record: record.claim)
        for step in record.steps
        if isinstance(step, SetTimeSlice)
        and step.gpu in wanted
        and step.interval != wanted[step.gpu].interval
    )


_Conflict = tuple[str, str]  # for the node's log, and for tenants of the claim's namespace


def refuse_conflicts(
    claim: Claim,
    grants: Sequence[DeviceGrant],
    others: Sequence[ClaimRecord],
    intervals: Mapping[GpuUuid, SetTimeSlice],
) -> None:
    """ClaimError: *claim* was allocated more than there is. DeviceHeld: others hold it."""
    holdings = defaultdict(list)
    for holding in (h for record in others for h in record.holdings if not h.admin):
        holdings[holding.of_gpu].append(holding)
    mine: dict[DeviceName, Amount] = defaultdict(lambda: NO_AMOUNT)
    problems: list[_Conflict] = []
    taking = [grant for grant in grants if not grant.allocation.admin]
    _refuse_overlaps(claim, [grant.device for grant in taking])
    for grant in taking:
        device = grant.device
        its = [*holdings[device.gpu.uuid], *holdings[device.gpu.name]]
        unit = device.unit
        if lack := shortage(grant.amount, mine[unit], device.memory_bytes, device.shape):
            what = f"{unit} twice" if mine[unit] != NO_AMOUNT else f"too much of {unit}"
            raise ClaimError(f"claim {claim.ref} was allocated {what}: it needs {lack}")
        mine[unit] += grant.amount
        problems += _held(device, mine[unit], its, claim.ref.namespace)
    problems += _clashes(grants, clashing_intervals(intervals, others), claim.ref.namespace)
    if problems:
        raise DeviceHeldByClaim(*(_refusal(claim, texts) for texts in zip(*problems, strict=True)))


def _refusal(claim: Claim, problems: Iterable[str]) -> str:
    return (
        f"claim {claim.ref} cannot have its devices yet: "
        + "; ".join(dict.fromkeys(problems))
        + "; it is served once the pod that uses that claim has ended on this node"
    )


def _refuse_overlaps(claim: Claim, devices: Iterable[Device]) -> None:
    """Two devices of one claim that cannot exist together."""
    for one, other in combinations(sorted(set(devices), key=lambda each: each.name), 2):
        same = one.gpu.uuid == other.gpu.uuid
        if same and _excludes(one.key, other.key):
            raise ClaimError(
                f"claim {claim.ref} was allocated {one.name} and {other.name}, which are the same "
                "part of one GPU; delete the pod (and a claim that is not from a template) to have "
                "it allocated anew"
            )


def _held(
    device: Device, wanted: Amount, its: Sequence[Holding], namespace: str
) -> Iterator[_Conflict]:
    """Why *wanted* of *device* is not to be had beside what others hold of its GPU."""
    key = device.key
    over = [h for h in its if _excludes(h.partition, key)]
    if over:
        parts = ", ".join(sorted({h.device for h in over}))
        all_of_them, theirs = _holders(over, namespace)
        what = f"{device.name} overlaps {parts}, held by"
        yield f"{what} {all_of_them}", f"{what} {theirs}"
        return
    same = [h for h in its if h.partition == key]
    twice = isinstance(device.shape, Replica) and any(h.device == device.name for h in same)
    lack = shortage(wanted, total_amount(same), device.memory_bytes, device.shape)
    if twice or lack:
        all_of_them, theirs = _holders(same, namespace)
        what, needs = f"{device.name} is held by", f"and it needs {lack or 'all of it'}"
        yield f"{what} {all_of_them}, {needs}", f"{what} {theirs}, {needs}"


def _excludes(one: PartitionKey | None, other: PartitionKey | None) -> bool:
    """Whether two parts of one GPU, None being all of it, cannot be in use together. What is the
    same part can be shared."""
    if one == other:
        return False
    return one is None or other is None or one.placement.overlaps(other.placement)


def _clashes(
    grants: Iterable[DeviceGrant], clashes: Iterable[tuple[ClaimRef, SetTimeSlice]], namespace: str
) -> list[_Conflict]:
    """Intervals that this claim asks for where another one has set a different one."""
    set_by_others = {step.gpu: (step.interval, holder) for holder, step in clashes}
    found = []
    for grant in grants:
        sharing, gpu = grant.sharing, grant.device.gpu
        if not isinstance(sharing, TimeSliced) or sharing.interval is None:
            continue
        if gpu.uuid in set_by_others:
            interval, holder = set_by_others[gpu.uuid]
            its = (
                f"{sharing.path}.timeSlicingConfig.interval: {sharing.interval} on {gpu.name}, but"
            )
            mend = (
                f"has set {interval}; write {interval}, or leave timeSlicingConfig out, which fits "
                "any"
            )
            known = holder.named_for(holder.namespace)
            found.append((f"{its} {known} {mend}", f"{its} {holder.named_for(namespace)} {mend}"))
    return found


def _holders(holdings: Iterable[Holding], namespace: str) -> _Conflict:
    claims = sorted({holding.claim for holding in holdings})
    everybody = (claim.named_for(claim.namespace) for claim in claims)
    known = dict.fromkeys(claim.named_for(namespace) for claim in claims)
    return ", ".join(everybody), ", ".join(known)
