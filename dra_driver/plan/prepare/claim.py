"""A claim, what the node offers and what others hold become a Plan, or a complete refusal.

What giving a claim back takes: its steps undone, newest first, for what others still need.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dra_driver.base.errors import ClaimError, UnknownDevice, join_problems
from dra_driver.k8s.claims import AllocationResult, Claim
from dra_driver.model.gpus import DeviceName, GpuUuid
from dra_driver.model.offer import AdminAccess, Device, Fractional, Offer, Replica
from dra_driver.model.profiles import MpsTenants
from dra_driver.model.records import ClaimRecord, Holding
from dra_driver.model.steps import CreateDeviceNodes, RemoveMpsNamespace, SetTimeSlice, Step
from dra_driver.plan.memory.pod_limits import memory_limit_steps, restored_memory_limit_steps
from dra_driver.plan.mig.claims import (
    InstancesByDevice,
    grants_with_instances,
    partition_steps,
    remove_steps,
    steps_with_instances,
    unmanaged_at,
)
from dra_driver.plan.mps.namespaces import ClaimPodSpecs, mps_steps, with_namespaces
from dra_driver.plan.prepare.amounts import NO_AMOUNT, Amount, requested_amount
from dra_driver.plan.prepare.conflicts import refuse_conflicts
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


_MOST_NAMES_SHOWN = 16

_Devices = Mapping[AllocationResult, Device]
_Amounts = Mapping[AllocationResult, Amount]


@dataclass(frozen=True, slots=True)
class ClaimPlan:
    """What to do for a claim. Nothing was touched yet."""

    claim: Claim
    grants: tuple[DeviceGrant, ...]
    steps: tuple[Step, ...]

    @property
    def record(self) -> ClaimRecord:
        """What the ledger is told before the first step."""
        return ClaimRecord(
            self.claim.ref,
            tuple(_holding(self.claim, grant) for grant in self.grants),
            self.steps,
            pods=self.claim.pods,
            pod_claim_name=self.claim.pod_claim_name,
        )

    def settled(self, instances: InstancesByDevice) -> "ClaimPlan":
        """The same, told what its partitions are, now that they are there."""
        if not instances:
            return self
        steps = steps_with_instances(self.steps, self.grants, instances)
        return replace(self, grants=grants_with_instances(self.grants, instances), steps=steps)


def plan_claim(
    claim: Claim,
    offer: Offer,
    others: Sequence[ClaimRecord],
    pool: str,
    pods: ClaimPodSpecs | None = None,
) -> ClaimPlan:
    """What preparing *claim* takes, on the node whose pool is *pool*.

    *others*: what other claims hold of the same GPUs. *pods*: those that use the claim.

    ClaimError: it can never work like this. UnknownDevice: a device is not (or no longer) here.
    DeviceHeld: another claim has to go first. A message names every such problem of its kind.
    PodsNeeded: *pods* is None, and it depends on them.
    """
    configs = decode_configs(claim)
    devices = _lookup(claim, offer, pool)
    amounts = {a: requested_amount(a.consumed, device.shape) for a, device in devices.items()}
    _refuse_misuse(claim, devices, amounts)
    grants = with_namespaces(claim, _grants(claim, devices, amounts, configs), pods)
    intervals = _intervals(claim, grants)
    refuse_conflicts(claim, grants, others, intervals)
    wanted = ClaimPlan(claim, grants, ())
    _refuse_strict_for_nobody(wanted.record)
    minors = sorted({grant.device.gpu.minor for grant in grants})
    steps: tuple[Step, ...] = (
        CreateDeviceNodes(tuple(minors)),
        *partition_steps(grants, others),
        *(step for _, step in sorted(intervals.items())),
        *memory_limit_steps(wanted.record, others),
        *compute_mode_steps(grants, others),
        *mps_steps(grants),
    )
    return replace(wanted, steps=with_inherited_values(steps, others))


def _lookup(claim: Claim, offer: Offer, pool: str) -> dict[AllocationResult, Device]:
    found: dict[AllocationResult, Device] = {}
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
                "was not cut for a claim"
            )
        elif device is None:
            problems.append(f"{allocation.device!r}, but this node has: {_names(offer)}")
        else:
            found[allocation] = device
    if problems:
        raise UnknownDevice(
            f"claim {claim.ref} was allocated "
            + "; ".join(problems)
            + _unavailable(offer)
            + "; delete the pod (and a claim that is not from a template) to have it allocated anew"
        )
    return found


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
    asked = Counter(a.base_request for a, its in devices.items() if _is_one_share(its))
    for allocation, device in devices.items():
        where = f"request {allocation.request!r}"
        if isinstance(device.shape, AdminAccess) and not allocation.admin:
            problems.append(
                f"{where}: {device.name} is for monitoring only; write adminAccess: true, or ask "
                "for a device of another class"
            )
        its = amounts[allocation]
        if _is_nothing(allocation, device, its):
            problems.append(
                f"{where}, capacity.requests.memory: 0 was allocated, which nothing fits into; ask "
                "for more"
            )
        if (most := _most_cores(device)) and its.cores > most:
            problems.append(
                f"{where}, capacity.requests.cores: {its.cores} % is more than one share, which "
                f"this node's profile refuses (failRequestsGreaterThanOne); ask for {most} or less"
            )
        if device.partition and device.rules.strict and not (its.whole or allocation.admin):
            problems.append(
                f"{where}: the driver does not limit parts of a MIG partition, and this node's "
                f"profile wants that it does (memoryLimit: Strict); ask for all of {device.name}"
            )
        several = asked[allocation.base_request] > 1 or its.shares > 1
        if _is_one_share(device) and several and not allocation.admin:
            problems.append(
                f"{where}: more than one share was asked for, which this node's profile refuses "
                "(failRequestsGreaterThanOne): two shares are not twice as much; ask for one"
            )
    if problems:
        raise ClaimError(join_problems(f"claim {claim.ref}: ", sorted(problems)))


def _is_nothing(allocation: AllocationResult, device: Device, its: Amount) -> bool:
    divided = isinstance(device.shape, Fractional)
    return divided and not allocation.admin and not its.whole and not its.memory_bytes


def _is_one_share(device: Device) -> bool:
    shape = device.shape
    divided = isinstance(shape, Replica) or (isinstance(shape, Fractional) and shape.replicas > 1)
    return divided and device.rules.one_share


def _most_cores(device: Device) -> int:
    """What a claim can reserve where it gets no more than one share, in percent; 0: all there is.

    A server of protocol 2 holds every client to that (``model.mps.Namespace``).
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
    for allocation, config in chosen.items():
        device = devices[allocation]
        its = NO_AMOUNT if allocation.admin else amounts[allocation]
        same = (a for a, other in chosen.items() if other.path == config.path and not a.admin)
        alike = {devices[one].uuid: devices[one] for one in same}
        in_order = [one for _, one in sorted(alike.items())]
        sharing, found = sharing_of(allocation, device, its, config, in_order)
        grants.append(DeviceGrant(allocation, device, its, sharing))
        problems += found
    if problems:
        raise ClaimError(join_problems(f"claim {claim.ref}: ", problems))
    return tuple(grants)


def _refuse_strict_for_nobody(record: ClaimRecord) -> None:
    """A driver's own limit is there before the first container where the pod is known by then."""
    strict = [one for one in record.holdings if one.limit is not None and one.limit.strict]
    if strict and not record.pods:
        names = ", ".join(sorted({one.device for one in strict}))
        raise ClaimError(
            f"claim {record.claim}: its part of {names} is to be limited by the driver "
            "(memoryLimit: Strict in this node's profile), and which pods to limit is not known: "
            "it is reserved for no pod (a PodGroup does not tell its pods); write a claim for each "
            "pod, or let the profile say memoryLimit: BestEffort"
        )


def _intervals(claim: Claim, grants: Iterable[DeviceGrant]) -> dict[GpuUuid, SetTimeSlice]:
    """The interval that the claim asks for on each GPU; two different ones cannot both hold."""
    found: dict[GpuUuid, SetTimeSlice] = {}
    for grant in grants:
        sharing, gpu = grant.sharing, grant.device.gpu
        if not isinstance(sharing, TimeSliced) or (interval := sharing.interval) is None:
            continue
        step = SetTimeSlice(gpu.uuid, interval)
        if found.setdefault(gpu.uuid, step) != step:
            raise ClaimError(
                f"claim {claim.ref}: {sharing.path}.timeSlicingConfig.interval: {interval} "
                f"on {gpu.name}, for which another request says {found[gpu.uuid].interval}: a GPU "
                "has one interval; write the same in both"
            )
    return found


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
        cut=device.cut_for_claims and not allocation.admin,
        instance=grant.instance or device.instance,
        offered=device.offered,
    )
