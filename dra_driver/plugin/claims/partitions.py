"""The partitions of claims, as the GPUs have them: none of ours is lost or somebody else's."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import assert_never

from dra_driver.base.errors import MigInstanceNotFound, NodeError, PlacementTaken
from dra_driver.base.threads import in_parallel
from dra_driver.model.gpus import Gpu, GpuUuid, MigInstance, PartitionKey, UnusableGpuInstance
from dra_driver.model.records import ClaimRecord, Holding
from dra_driver.model.steps import (
    CreatePartition,
    SetMigMode,
    Step,
)
from dra_driver.node.gpu_node import GpuNode
from dra_driver.plan.mig.claims import (
    CreatedInstances,
    blocking_instances,
    partition_instances,
    whole_gpus,
)
from dra_driver.plan.prepare.claim import ClaimPlan, undo_steps
from dra_driver.plan.prepare.sharing import DeviceGrant


def instance_at(node: GpuNode, gpu: GpuUuid, key: PartitionKey) -> MigInstance | None:
    """None: no instance is there. NodeError: the GPU does not answer."""
    try:
        return node.instance(gpu, key)
    except MigInstanceNotFound:
        return None


log = logging.getLogger(__name__)


class ClaimPartitions:
    """Creates the partitions of claims, and asks the GPUs of *node* for them, each time anew."""

    def __init__(self, node: GpuNode) -> None:
        self._node = node

    def are_taken(self, plan: ClaimPlan, others: Sequence[ClaimRecord]) -> bool:
        """Whether somebody else has changed since the last look what *plan* counts on."""
        return any(self._problems(plan, others))

    def refuse_taken(self, plan: ClaimPlan, others: Sequence[ClaimRecord]) -> None:
        """PlacementTaken: what *plan* counts on is not there, also after another look. Once the
        claim is recorded, somebody else's instance could not be distinguished from ours."""
        if problems := list(self._problems(plan, others)):
            raise PlacementTaken(
                f"claim {plan.claim.ref} cannot be prepared: {'; '.join(problems)}"
            )

    def _problems(self, plan: ClaimPlan, others: Sequence[ClaimRecord]) -> Iterator[str]:
        gpus = {grant.device.gpu.uuid: grant.device.gpu for grant in plan.grants}
        for step in plan.steps:
            if isinstance(step, CreatePartition | SetMigMode):
                keys = self._unmanaged(step, others)
                yield from (_in_the_way(gpus[step.gpu], key) for key in keys)
        boards = whole_gpus(plan.grants, plan.steps)
        # One that does not answer is a matter of who computes on it.
        partitioned = self._node.in_mig_mode([board.uuid for board in boards])
        for board in (board for board in boards if board.uuid in partitioned):
            yield (
                f"MIG mode of {board.name} is on now, so that nothing can compute on it as a "
                "whole; whoever turned it on has to turn it off: "
                f"nvidia-smi -i {board.pci_bus_id} -mig 0"
            )

    def _unmanaged(
        self, step: CreatePartition | SetMigMode, others: Sequence[ClaimRecord]
    ) -> tuple[PartitionKey, ...]:
        """Instances that are not of *others*, and that keep *step* from being done."""
        match step:
            case SetMigMode(gpu=gpu, on=on):
                return () if on else self._node.partitions(gpu)
            case CreatePartition(gpu=gpu, new=True):
                return blocking_instances(step, self._node.partitions(gpu), others)
            case CreatePartition(key=key):
                return () if self._is_of(step, others) else (key,)
            case _:
                assert_never(step)

    def _is_of(self, step: CreatePartition, others: Sequence[ClaimRecord]) -> bool:
        """Whether what is there now is what one of *others* was given."""
        known = {
            instances[step] for other in others if step in (instances := partition_instances(other))
        }
        if None in known:
            return True
        instance = instance_at(self._node, step.gpu, step.key)
        return instance is None or instance.uuid in known  # where none is, one is created

    def carry_out(self, step: Step, begun: set[CreatePartition]) -> None:
        """Do *step*; a partition that it may have created is among *begun* then. PlacementTaken:
        none was created, since somebody else was quicker."""
        partition = {step} if isinstance(step, CreatePartition) else set()
        begun |= partition
        try:
            self._node.carry_out(step)
        except PlacementTaken:
            begun -= partition
            raise

    def remove_recorded(self, record: ClaimRecord | None, others: Sequence[ClaimRecord]) -> None:
        """Remove the partitions of *record* that none of *others* needs. None: there are none."""
        for step in undo_steps(record, others) if record else ():
            self._node.restore(step)

    def of(self, plan: ClaimPlan) -> CreatedInstances:
        """What the partitions of *plan* are now. MigInstanceNotFound: one is not there.

        A claim with admin access sees no partition that is not created yet.
        """
        grants = [grant for grant in plan.grants if grant.device.partition is not None]
        instances = in_parallel(self._find, grants)
        pairs = zip(grants, instances, strict=True)
        return {grant.device.uuid: instance for grant, instance in pairs if instance is not None}

    def _find(self, grant: DeviceGrant) -> MigInstance | None:
        device = grant.device
        assert device.key is not None
        try:
            return self._node.instance(device.gpu.uuid, device.key)
        except MigInstanceNotFound:
            if grant.allocation.admin and device.created_for_claims:
                return None
            raise

    def are_there(self, record: ClaimRecord) -> bool:
        """Whether a prepared claim still has the instances that it was given; where it has not,
        it can be prepared anew.

        MigInstanceNotFound: it has something else besides, which its pods may be using. What
        cannot be asked now is taken to be there.
        """
        lost = [holding for holding in record.holdings if self._is_lost(holding)]
        taken = [holding for holding in record.holdings if not holding.admin]
        gone = [holding for holding in lost if not holding.admin]
        if not gone:
            return bool(taken) or not lost  # admin access is to what is there now
        facts = {"claim": str(record.claim), "devices": _names(gone)}
        log.error("the partition of a prepared claim is gone", extra=facts)
        if remaining := [holding for holding in taken if holding not in lost]:
            raise MigInstanceNotFound(
                f"claim {record.claim} has lost {_names(gone)}: nvidia-smi, a MIG manager or a "
                f"reset removed it; its pods may still use {_names(remaining)}, so no "
                "partition is created anew while they are there: delete them"
            )
        return False

    def _is_lost(self, holding: Holding) -> bool:
        if holding.partition is None or holding.instance is None:
            return False
        try:
            return instance_at(self._node, holding.gpu, holding.partition) != holding.instance
        except NodeError:
            return False


def _in_the_way(gpu: Gpu, key: PartitionKey) -> str:
    instances: list[MigInstance | UnusableGpuInstance] = (
        [*gpu.mig.instances, *gpu.mig.unusable] if gpu.mig else []
    )
    of = next(
        (f"-gi {instance.gi}" for instance in instances if instance.key == key),
        "-gi <its id in nvidia-smi mig -lgi>",
    )
    mig = f"nvidia-smi mig -i {gpu.pci_bus_id}"
    return (
        f"{gpu.name} has an instance of {key} that was not created for a claim; remove it with "
        f"{mig} -dci {of} and {mig} -dgi {of}, or wait until whoever made it does"
    )


def _names(holdings: Iterable[Holding]) -> str:
    return ", ".join(sorted({holding.device for holding in holdings}))
