"""Which taints a device gets for what is wrong with its GPU (KEP-5055)."""

from collections.abc import Mapping

from dra_driver.base.errors import DeviceUnhealthy, join_problems
from dra_driver.k8s.claims import AllocationResult, Claim
from dra_driver.model.gpus import PartitionKey
from dra_driver.model.health import DeviceTaint, Effect, Fault, Faults, Problem
from dra_driver.model.offer import AdminAccess, Device
from dra_driver.plan.health.messages import describe_faults
from dra_driver.plan.health.problems import effect_of, taint_key

_BY_STRENGTH = (Effect.NONE, Effect.NO_SCHEDULE, Effect.NO_EXECUTE)
_MOST_TAINTS = 4  # of a device in Kubernetes 1.33 and 1.34 (DeviceTaintsMaxLength); later 16


def device_taints(device: Device, faults: Faults) -> tuple[DeviceTaint, ...]:
    """The taints of *device*, by key: one for each problem, with the strongest effect of its faults
    and the value of the latest.

    A fault of a partition is one of all devices that overlap it, also of the GPU as a whole.
    Devices for admin access have none: they are there to look at sick GPUs.
    """
    if isinstance(device.shape, AdminAccess):
        return ()
    by_problem: dict[Problem, list[Fault]] = {}
    for fault in faults:
        if concerns(fault, device) and _effect(fault, device) is not Effect.NONE:
            by_problem.setdefault(fault.problem, []).append(fault)
    return tuple(
        DeviceTaint(
            key=taint_key(problem),
            effect=max((_effect(fault, device) for fault in same), key=_BY_STRENGTH.index),
            value=max(same, key=lambda fault: (fault.since, fault.value)).value,
            since=min(fault.since for fault in same),
            reason=describe_faults(same),
        )
        for problem, same in sorted(by_problem.items())
    )


def few_taints(taints: tuple[DeviceTaint, ...]) -> tuple[DeviceTaint, ...]:
    """As many of *taints* as an older API server takes: of too many it would refuse the slice, and
    offer the device as if it were well. Those stay that evict, that an administrator waits for, and
    that are there the longest, so that none goes because another one comes."""
    first = sorted(
        taints,
        key=lambda taint: (
            -_BY_STRENGTH.index(taint.effect),
            taint.key != taint_key(Problem.RELEASED),
            taint.since,
            taint.key,
        ),
    )[:_MOST_TAINTS]
    return tuple(taint for taint in taints if taint in first)


def concerns(fault: Fault, device: Device) -> bool:
    """Whether *device* is part of what *fault* is about, or has part of it."""
    return fault.gpu == device.gpu.uuid and share_memory(fault.partition, device.key)


def share_memory(partition: PartitionKey | None, other: PartitionKey | None) -> bool:
    """Whether two parts of a GPU have memory in common; None: the GPU as a whole."""
    if partition is None or other is None:
        return True
    return partition.placement.overlaps(other.placement)


def refuse_unhealthy(claim: Claim, devices: Mapping[AllocationResult, Device]) -> None:
    """DeviceUnhealthy: one of *devices* has a taint that *claim* does not tolerate. The scheduler
    avoids those, but a device may have become sick after it chose."""
    problems = [
        f"{device.name} has the taint {taint.key}: {taint.reason}"
        for allocation, device in devices.items()
        for taint in device.taints
        if not allocation.admin and not _tolerates(allocation, taint)
    ]
    if problems:
        raise DeviceUnhealthy(join_problems(f"claim {claim.ref}: ", problems))


def _tolerates(allocation: AllocationResult, taint: DeviceTaint) -> bool:
    return any(
        toleration.tolerates(taint.key, taint.value, taint.effect.value)
        for toleration in allocation.tolerations
    )


def _effect(fault: Fault, device: Device) -> Effect:
    return effect_of(fault.problem, fault.value, device.rules.health)
