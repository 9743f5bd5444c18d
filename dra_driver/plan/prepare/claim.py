"""Both ways: planning a claim, and the steps that undo it.

A claim, what the node offers and what others hold become a plan, or a complete refusal. What others
hold is the driver's own account: the last guard against a GPU in too many hands, whatever the
scheduler said. The steps of a claim that is unprepared are undone newest first, for what others
still need.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from itertools import combinations

from dra_driver.base.errors import ClaimError, DeviceHeldByClaim, UnknownDevice, join_problems
from dra_driver.base.frozen import frozen
from dra_driver.k8s.claims import AllocationResult, Claim, ClaimRef
from dra_driver.model.gpus import DeviceName, GpuUuid, PartitionKey
from dra_driver.model.offer import AdminAccess, Device, Fractional, Offer, Replica
from dra_driver.model.profiles import MpsTenants
from dra_driver.model.records import AllocationClaim, ClaimRecord, Holding
from dra_driver.model.steps import (
    RemoveMpsNamespace,
    SetTimeSlice,
    Step,
    TimeSliceInterval,
)
from dra_driver.plan.health.taints import refuse_unhealthy
from dra_driver.plan.memory.pod_limits import memory_limit_steps, restored_memory_limit_steps
from dra_driver.plan.mig.claims import (
    CreatedInstances,
    partition_steps,
    remove_steps,
    unmanaged_at,
    with_instances,
)
from dra_driver.plan.mps.namespaces import ClaimPodSpecs, mps_steps, with_namespaces
from dra_driver.plan.prepare.amounts import (
    NO_AMOUNT,
    Amount,
    requested_amount,
    shortage,
    total_amount,
)
from dra_driver.plan.prepare.gpu_settings import (
    compute_mode_steps,
    restore_steps,
    with_inherited_values,
)
from dra_driver.plan.prepare.sharing import (
    AppliedConfig,
    DecodedConfig,
    DeviceGrant,
    TimeSliced,
    applied_config,
    decode_configs,
    default_share_cores,
    memory_limit_of,
    sharing_of,
)

_MOST_NAMES_SHOWN = 16

_Devices = Mapping[AllocationResult, Device]
_Amounts = Mapping[AllocationResult, Amount]


@frozen
class ClaimPlan:
    """What to do for a claim. Nothing was touched yet."""

    claim: Claim
    grants: tuple[DeviceGrant, ...]
    holdings: tuple[Holding, ...]  # what the claim has by *grants*
    steps: tuple[Step, ...] = ()
    record: ClaimRecord = field(init=False)  # what the ledger records before the first step

    def __post_init__(self) -> None:
        record = ClaimRecord(
            self.claim.ref,
            self.holdings,
            self.steps,
            pods=self.claim.pods,
            pod_claim_name=self.claim.pod_claim_name,
            allocation=self.claim.allocation if isinstance(self.claim, AllocationClaim) else None,
        )
        object.__setattr__(self, "record", record)

    def settled(self, instances: CreatedInstances) -> "ClaimPlan":
        """The plan with its instances, once its partitions were created."""
        steps, grants = with_instances(self.steps, self.grants, instances)
        return replace(self, grants=grants, holdings=_holdings(self.claim, grants), steps=steps)


def plan_claim(
    claim: Claim,
    offer: Offer,
    others: Sequence[ClaimRecord],
    pool: str,
    pods: ClaimPodSpecs | None = None,
) -> ClaimPlan:
    """What preparing *claim* takes, on the node whose pool is *pool*.

    *others*: what other claims hold of the same GPUs. *pods*: those that use the claim.

    The kubelet counts the devices that it allocates, and may have given out again what its last
    user still has: an allocation is in no other one's way before its container starts
    (``plugin.device_plugin``). What depends on its pod is seen to then, too.

    ClaimError: it can never work like this. UnknownDevice: a device is not (or no longer) here.
    DeviceHeldByClaim: another claim has to go first. DeviceUnhealthy: a device has a taint that the
    claim does not tolerate. A message names each such problem.
    PodsNeeded: *pods* is None, and it depends on them.
    """
    configs = decode_configs(claim)
    devices = _lookup(claim, offer, pool)
    refuse_unhealthy(claim, devices)
    amounts = {a: requested_amount(a.consumed, device.shape) for a, device in devices.items()}
    _refuse_misuse(claim, devices, amounts)
    grants = with_namespaces(claim, _grants(claim, devices, amounts, configs), pods)
    intervals = _intervals(claim, grants)
    _refuse_conflicts(claim, grants, _in_the_way(claim, others))
    without_steps = ClaimPlan(claim, grants, _holdings(claim, grants))
    if not isinstance(claim, AllocationClaim):
        _refuse_strict_for_nobody(without_steps.record)
    steps: tuple[Step, ...] = (
        *partition_steps(grants, others),
        *(step for _, step in sorted(intervals.items())),
        *memory_limit_steps(without_steps.record, others),
        *compute_mode_steps(grants, others),
        *mps_steps(grants),
    )
    return ClaimPlan(claim, grants, without_steps.holdings, with_inherited_values(steps, others))


def _lookup(claim: Claim, offer: Offer, pool: str) -> dict[AllocationResult, Device]:
    devices: dict[AllocationResult, Device] = {}
    problems: list[str] = []
    for allocation in claim.allocations:
        device = offer.by_name.get(DeviceName(allocation.device))
        if allocation.pool != pool:
            problems.append(
                f"{allocation.device!r} of pool {allocation.pool!r}, but this node serves {pool!r}"
            )
        elif device is None and (there := unmanaged_at(allocation.device, offer)):
            problems.append(
                f"{allocation.device!r}, but {', '.join(there)} is in its place now, which "
                "was not created for a claim"
            )
        elif device is None:
            problems.append(f"{allocation.device!r}, but this node has: {_names(offer)}")
        else:
            devices[allocation] = device
    if problems:
        raise UnknownDevice(
            f"claim {claim.ref} was allocated "
            + "; ".join(problems)
            + _unavailable(offer)
            + "; delete the pod (and a claim that is not from a template) to have it allocated anew"
        )
    return devices


def _names(offer: Offer) -> str:
    names = [device.name for device in offer.devices if not isinstance(device.shape, AdminAccess)]
    more = len(names) - _MOST_NAMES_SHOWN
    return (", ".join(names[:_MOST_NAMES_SHOWN]) or "no device") + (
        f" and {more} more" if more > 0 else ""
    )


def _unavailable(offer: Offer) -> str:
    reasons = [f"{unavailable.what}: {unavailable.reason}" for unavailable in offer.unavailable]
    return f" (not offered: {'; '.join(reasons)})" if reasons else ""


def _refuse_misuse(claim: Claim, devices: _Devices, amounts: _Amounts) -> None:
    """Allocations that the scheduler makes and that this driver does not serve."""
    problems = []
    shares = Counter(a.base_request for a, device in devices.items() if _is_one_share(device))
    for allocation, device in devices.items():
        where = f"request {allocation.request!r}"
        if isinstance(device.shape, AdminAccess) and not allocation.admin:
            problems.append(
                f"{where}: {device.name} is for monitoring only; write adminAccess: true, or ask "
                "for a device of another class"
            )
        amount = amounts[allocation]
        if _is_nothing(allocation, device, amount):
            problems.append(
                f"{where}, capacity.requests.memory: 0 was allocated, which nothing fits into; ask "
                "for more"
            )
        if (most := _most_cores(device)) and amount.cores > most:
            problems.append(
                f"{where}, capacity.requests.cores: {amount.cores} % is more than one share, which "
                f"this node's profile refuses (failRequestsGreaterThanOne); ask for {most} or less"
            )
        if device.partition and device.rules.strict and not (amount.whole or allocation.admin):
            problems.append(
                f"{where}: the driver does not limit parts of a MIG partition, and this node's "
                f"profile wants that it does (memoryLimit: Strict); ask for all of {device.name}"
            )
        several = shares[allocation.base_request] > 1 or amount.shares > 1
        if _is_one_share(device) and several and not allocation.admin:
            problems.append(
                f"{where}: more than one share was asked for, which this node's profile refuses "
                "(failRequestsGreaterThanOne): two shares are not twice as much; ask for one"
            )
    if problems:
        raise ClaimError(join_problems(f"claim {claim.ref}: ", sorted(problems)))


def _is_nothing(allocation: AllocationResult, device: Device, amount: Amount) -> bool:
    divided = isinstance(device.shape, Fractional)
    return divided and not allocation.admin and not amount.whole and not amount.memory_bytes


def _is_one_share(device: Device) -> bool:
    shape = device.shape
    divided = isinstance(shape, Replica) or (isinstance(shape, Fractional) and shape.replicas > 1)
    return divided and device.rules.one_share


def _most_cores(device: Device) -> int:
    """What a claim can reserve where it gets no more than one share, in percent; 0: all there is.

    A server of protocol 2 holds every client to that (``model.mps.MpsNamespace``).
    """
    return default_share_cores(device.shape) if _is_one_share(device) else 0


def _grants(
    claim: Claim, devices: _Devices, amounts: _Amounts, configs: Sequence[DecodedConfig]
) -> tuple[DeviceGrant, ...]:
    grants = []
    problems: list[str] = []
    chosen: dict[AllocationResult, AppliedConfig] = {}
    for allocation in claim.allocations:
        try:
            chosen[allocation] = applied_config(allocation, configs, devices[allocation])
        except ClaimError as e:
            problems.append(str(e))
    alike: dict[str, dict[GpuUuid, Device]] = defaultdict(dict)  # by configuration
    for allocation, config in chosen.items():
        if not allocation.admin:
            alike[config.path][devices[allocation].uuid] = devices[allocation]
    in_order = {path: [each for _, each in sorted(alike[path].items())] for path in alike}
    for allocation, config in chosen.items():
        device = devices[allocation]
        amount = NO_AMOUNT if allocation.admin else amounts[allocation]
        same = in_order.get(config.path, ())
        sharing, sharing_problems = sharing_of(allocation, device, amount, config, same)
        grants.append(DeviceGrant(allocation, device, amount, sharing))
        problems += sharing_problems
    if problems:
        raise ClaimError(join_problems(f"claim {claim.ref}: ", problems))
    return tuple(grants)


def _refuse_strict_for_nobody(record: ClaimRecord) -> None:
    """A driver's own limit is there before the first container where the pod is known by then."""
    strict = [
        holding for holding in record.holdings if holding.limit is not None and holding.limit.strict
    ]
    if strict and not record.pods:
        names = ", ".join(sorted({holding.device for holding in strict}))
        raise ClaimError(
            f"claim {record.claim}: its part of {names} is to be limited by the driver "
            "(memoryLimit: Strict in this node's profile), and which pods to limit is not known: "
            "it is reserved for no pod (a PodGroup does not tell its pods); write a claim for each "
            "pod, or let the profile say memoryLimit: BestEffort"
        )


def _intervals(claim: Claim, grants: Iterable[DeviceGrant]) -> dict[GpuUuid, SetTimeSlice]:
    """The interval that the claim asks for on each GPU; two different ones cannot both hold."""
    intervals: dict[GpuUuid, SetTimeSlice] = {}
    for grant in grants:
        sharing, gpu = grant.sharing, grant.device.gpu
        if not isinstance(sharing, TimeSliced) or (interval := sharing.interval) is None:
            continue
        step = SetTimeSlice(gpu.uuid, interval)
        if intervals.setdefault(gpu.uuid, step) != step:
            raise ClaimError(
                f"claim {claim.ref}: {sharing.path}.timeSlicingConfig.interval: {interval} "
                f"on {gpu.name}, for which another request says {intervals[gpu.uuid].interval}: a "
                "GPU has one interval; write the same in both"
            )
    return intervals


def _holdings(claim: Claim, grants: Iterable[DeviceGrant]) -> tuple[Holding, ...]:
    return tuple(_holding(claim, grant) for grant in grants)


def _holding(claim: Claim, grant: DeviceGrant) -> Holding:
    allocation, device = grant.allocation, grant.device
    return Holding(
        claim=claim.ref,
        device=device.name,
        share=allocation.share,
        consumed=allocation.consumed,
        admin=allocation.admin,
        gpu=device.gpu.uuid,
        shape=device.shape,
        limit=None if allocation.admin else memory_limit_of(device, grant.amount),
        request=allocation.base_request,
        tenants=device.rules.tenants if grant.namespace else MpsTenants.ANY,
        partition=device.key,
        created_for_claims=device.created_for_claims and not allocation.admin,
        instance=grant.instance or device.instance,
        offered=device.offered,
    )


def undo_steps(record: ClaimRecord, others: Sequence[ClaimRecord]) -> tuple[Step, ...]:
    """The steps that leave the node as it would be without *record*'s claim.

    *others*: the records of the claims that share a GPU with it. Device files stay: they do no
    harm, and others may use them.
    """
    return (
        *(RemoveMpsNamespace(namespace.name) for namespace in record.namespaces),
        *remove_steps(record, others),
        *restored_memory_limit_steps(record, others),
        *restore_steps(record, others),
    )


def _in_the_way(claim: Claim, others: Sequence[ClaimRecord]) -> Sequence[ClaimRecord]:
    """Those of *others* from which *claim* cannot take anything."""
    if not isinstance(claim, AllocationClaim):
        return others
    return [record for record in others if record.allocation is None]


_Conflict = tuple[str, str]  # for the node's log, and for tenants of the claim's namespace


def _refuse_conflicts(
    claim: Claim,
    grants: Sequence[DeviceGrant],
    others: Sequence[ClaimRecord],
) -> None:
    """ClaimError: *claim* was allocated more than there is. DeviceHeldByClaim: others hold it."""
    holdings: dict[GpuUuid, list[Holding]] = defaultdict(list)
    for holding in (h for record in others for h in record.holdings if not h.admin):
        holdings[holding.gpu].append(holding)
    taken: dict[GpuUuid, Amount] = defaultdict(lambda: NO_AMOUNT)  # by this claim
    problems: list[_Conflict] = []
    taking = [grant for grant in grants if not grant.allocation.admin]
    _refuse_overlaps(claim, [grant.device for grant in taking])
    for grant in taking:
        device, before = grant.device, taken[grant.device.uuid]
        if lack := shortage(grant.amount, before, device.memory_bytes, device.shape):
            unit = device.unit
            excess = f"{unit} twice" if before != NO_AMOUNT else f"too much of {unit}"
            raise ClaimError(f"claim {claim.ref} was allocated {excess}: it needs {lack}")
        taken[device.uuid] = amount = before + grant.amount
        problems += _held(device, amount, holdings[device.gpu.uuid], claim.ref.namespace)
    problems += _clashes(grants, others, claim.ref.namespace)
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
    for device, other in combinations(sorted(set(devices), key=lambda each: each.name), 2):
        same = device.gpu.uuid == other.gpu.uuid
        if same and _excludes(device.key, other.key):
            raise ClaimError(
                f"claim {claim.ref} was allocated {device.name} and {other.name}, which are the "
                "same part of one GPU; delete the pod (and a claim that is not from a template) to "
                "have it allocated anew"
            )


def _held(
    device: Device, amount: Amount, on_gpu: Sequence[Holding], namespace: str
) -> Iterator[_Conflict]:
    """Why *amount* of *device* is not to be had beside what others hold of its GPU."""
    key = device.key
    over = [h for h in on_gpu if _excludes(h.partition, key)]
    if over:
        parts = ", ".join(sorted({h.device for h in over}))
        all_of_them, theirs = _holders(over, namespace)
        overlap = f"{device.name} overlaps {parts}, held by"
        yield f"{overlap} {all_of_them}", f"{overlap} {theirs}"
        return
    same = [h for h in on_gpu if h.partition == key]
    twice = isinstance(device.shape, Replica) and any(h.is_of(device) for h in same)
    lack = shortage(amount, total_amount(same), device.memory_bytes, device.shape)
    if twice or lack:
        all_of_them, theirs = _holders(same, namespace)
        held, needs = f"{device.name} is held by", f"and it needs {lack or 'all of it'}"
        yield f"{held} {all_of_them}, {needs}", f"{held} {theirs}, {needs}"


def _excludes(part: PartitionKey | None, other: PartitionKey | None) -> bool:
    """Whether two parts of one GPU, None being all of it, cannot be in use together. What is the
    same part can be shared."""
    if part == other:
        return False
    return part is None or other is None or part.placement.overlaps(other.placement)


def _clashes(
    grants: Iterable[DeviceGrant], others: Iterable[ClaimRecord], namespace: str
) -> Iterator[_Conflict]:
    """Intervals that this claim asks for where another one has set a different one."""
    set_by_others: dict[GpuUuid, dict[TimeSliceInterval, ClaimRef]] = defaultdict(dict)
    slices = (
        (record.claim, step)
        for record in others
        for step in record.steps
        if isinstance(step, SetTimeSlice)
    )
    for holder, step in sorted(slices, key=lambda slice_of: slice_of[0]):
        set_by_others[step.gpu][step.interval] = holder
    for grant in grants:
        sharing, gpu = grant.sharing, grant.device.gpu
        if not isinstance(sharing, TimeSliced) or (desired := sharing.interval) is None:
            continue
        field = f"{sharing.path}.timeSlicingConfig.interval: {desired} on {gpu.name}, but"
        for interval, holder in set_by_others[gpu.uuid].items():
            if interval != desired:
                mend = (
                    f"has set {interval}; write {interval}, or leave timeSlicingConfig out, which "
                    "fits any"
                )
                known = holder.named_for(holder.namespace)
                yield f"{field} {known} {mend}", f"{field} {holder.named_for(namespace)} {mend}"


def _holders(holdings: Iterable[Holding], namespace: str) -> _Conflict:
    claims = sorted({holding.claim for holding in holdings})
    everybody = (claim.named_for(claim.namespace) for claim in claims)
    known = dict.fromkeys(claim.named_for(namespace) for claim in claims)
    return ", ".join(everybody), ", ".join(known)
