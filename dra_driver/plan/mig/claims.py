"""Partitions of claims: they come with the first claim, go with the last, and may be lost between.

Where the mode changes without a reset (Hopper and newer), it goes on with the first partition and
off with the last; a claim for the GPU as a whole finds it off. On an older board the node has
switched it before it offered any partition.

Nobody can remove an instance on which something runs, but an idle one, or all of a GPU that is
reset: then the pods of its claim are told.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from dra_driver.model.gpus import (
    DeviceName,
    Gpu,
    GpuUuid,
    MigInstance,
    Partition,
    PartitionKey,
    Placement,
)
from dra_driver.model.mps import MpsNamespace
from dra_driver.model.offer import Device, Offer, gpu_name_of, partition_name
from dra_driver.model.records import ClaimRecord, Holding
from dra_driver.model.steps import (
    CreatePartition,
    RemovePartition,
    ServeMpsNamespace,
    SetMigMode,
    Step,
)
from dra_driver.plan.prepare.sharing import DeviceGrant

CreatedInstances = Mapping[GpuUuid, MigInstance]
"""What the partitions of a claim are, by ``Device.uuid``, which may be a placeholder."""


def partition_steps(
    grants: Iterable[DeviceGrant], others: Iterable[ClaimRecord]
) -> tuple[Step, ...]:
    """The mode of each GPU, then every partition that is created for claims. Those that were
    created for none of *others* are new."""
    created = {(step.gpu, step.key) for step in partitions_created_for(others)}
    devices = [grant.device for grant in grants if not grant.allocation.admin]
    modes = {step for device in devices for step in _mode(device)}
    create_steps = {
        CreatePartition(device.gpu.uuid, key, new=(device.gpu.uuid, key) not in created)
        for device in devices
        if device.created_for_claims and (key := device.key) is not None
    }
    return (
        *sorted(modes, key=lambda step: step.gpu),
        *sorted(create_steps, key=lambda step: (step.gpu, step.key)),
    )


def partitions_left_behind(record: ClaimRecord | None) -> tuple[ClaimRecord, ...]:
    """What was created for a claim whose record cannot be read, as that claim's new preparation has
    to see it: it is there, and nobody else holds it."""
    return (replace(record, holdings=()),) if record else ()


def whole_gpus(grants: Iterable[DeviceGrant], steps: Iterable[Step]) -> tuple[Gpu, ...]:
    """The GPUs that are given as a whole, or parts of that, and could be in MIG mode: no step turns
    it off."""
    off = {step.gpu for step in steps if isinstance(step, SetMigMode)}
    whole = (
        grant.device
        for grant in grants
        if not grant.allocation.admin and grant.device.partition is None
    )
    gpus = {
        device.gpu.uuid: device.gpu
        for device in whole
        if device.gpu.mig and device.gpu.uuid not in off
    }
    return tuple(gpus.values())


def with_created(record: ClaimRecord, begun: Collection[CreatePartition]) -> ClaimRecord:
    """*record*, as its claim stands with no partitions but those that were *begun*: what is in the
    place of others is not to be removed when it is given back."""
    steps = (
        step for step in record.steps if not isinstance(step, CreatePartition) or step in begun
    )
    return replace(record, steps=tuple(steps))


def blocking_instances(
    step: CreatePartition, existing: Iterable[PartitionKey], others: Iterable[ClaimRecord]
) -> tuple[PartitionKey, ...]:
    """What is in the place of *step*, and was created for none of *others*."""
    created = {other.key for other in partitions_created_for(others) if other.gpu == step.gpu}
    placement = step.key.placement
    return tuple(
        key for key in existing if key not in created and key.placement.overlaps(placement)
    )


def unmanaged_at(name: str, offer: Offer) -> tuple[DeviceName, ...]:
    """The instances that were not created for claims, in the place of the partition *name*; for a
    GPU as a whole or a replica of it, all that it has."""
    devices = [device for device in offer.devices if device.gpu.name == gpu_name_of(name)]
    unmanaged = [
        device for device in devices if device.partition is not None and device.instance is not None
    ]
    if not unmanaged:
        return ()
    placement = _places(unmanaged[0].gpu).get(name)
    if placement is None and "-mig-" in name:
        return ()  # no board like this has it
    return tuple(
        device.name
        for device in unmanaged
        if device.partition is not None
        and (placement is None or placement.overlaps(device.partition.placement))
    )


def _places(gpu: Gpu) -> dict[str, Placement]:
    """Of each partition that *gpu* could have, by its name."""
    profiles = gpu.mig.profiles if gpu.mig else ()
    partitions = (
        Partition(profile, placement) for profile in profiles for placement in profile.placements
    )
    return {partition_name(gpu, partition): partition.placement for partition in partitions}


def partitions_created_for(records: Iterable[ClaimRecord]) -> Iterator[CreatePartition]:
    """The partitions that were, or are being, created for *records*."""
    return (
        step for record in records for step in record.steps if isinstance(step, CreatePartition)
    )


def remove_steps(record: ClaimRecord, others: Iterable[ClaimRecord]) -> tuple[RemovePartition, ...]:
    """What is left of *record*'s partitions, newest first; those of *others* stay.

    Where both know of an instance, and not of the same, that of the other is gone already. What was
    created for *record* and is not known yet may be in the place of one that is.
    """
    instances_of_others = [partition_instances(other) for other in others]

    def remove_step(step: CreatePartition, uuid: GpuUuid | None) -> RemovePartition | None:
        of_others = {instances[step] for instances in instances_of_others if step in instances}
        if None in of_others or (uuid is not None and uuid in of_others):
            return None
        unless = frozenset(other for other in of_others if other is not None)
        return RemovePartition(step.gpu, step.key, uuid, unless if uuid is None else frozenset())

    steps = [remove_step(step, uuid) for step, uuid in partition_instances(record).items()]
    return tuple(step for step in reversed(steps) if step is not None)


def partition_instances(record: ClaimRecord) -> dict[CreatePartition, GpuUuid | None]:
    """The partitions that were, or are being, created for *record*: each with its instance, where
    that was recorded."""
    uuids = {
        (holding.gpu, holding.partition): holding.instance.uuid
        for holding in record.holdings
        if holding.created_for_claims and holding.instance
    }
    return {step: uuids.get((step.gpu, step.key)) for step in partitions_created_for([record])}


def steps_with_instances(steps: Iterable[Step], instances: CreatedInstances) -> tuple[Step, ...]:
    """*steps*, told what the partitions are now that they are created."""

    def updated(step: Step) -> Step:
        if not isinstance(step, ServeMpsNamespace):
            return step
        return replace(step, namespace=_over(step.namespace, instances))

    return tuple(map(updated, steps))


def grants_with_instances(
    grants: Sequence[DeviceGrant], instances: CreatedInstances
) -> tuple[DeviceGrant, ...]:
    """*grants*, each of a partition with what that is."""
    return tuple(
        replace(
            grant,
            instance=instances.get(grant.device.uuid),
            namespace=grant.namespace and _over(grant.namespace, instances),
        )
        for grant in grants
    )


def _over(namespace: MpsNamespace, instances: CreatedInstances) -> MpsNamespace:
    """*namespace*, over the instances themselves."""
    gpus = (instances[gpu].uuid if gpu in instances else gpu for gpu in namespace.gpus)
    return replace(namespace, gpus=tuple(gpus))


def _mode(device: Device) -> Iterator[SetMigMode]:
    mig = device.gpu.mig
    if mig is None or not mig.switches:
        return
    if device.created_for_claims:
        yield SetMigMode(device.gpu.uuid, on=True)
    elif device.partition is None and device.offered:
        yield SetMigMode(device.gpu.uuid, on=False)


def lost_instances(record: ClaimRecord, gpus: Iterable[Gpu]) -> tuple[Holding, ...]:
    """What a prepared claim holds of *gpus* and they have not, or another one in its place.

    Of a GPU that is not among them, and of one that does not tell its instances, nothing is known.
    """
    present = {
        gpu.uuid: {(instance.key, instance.uuid) for instance in gpu.mig.instances}
        for gpu in gpus
        if gpu.mig is not None
    }
    return tuple(
        holding
        for holding in computed_partitions(record)
        if holding.gpu in present and _identity(holding) not in present[holding.gpu]
    )


def computed_partitions(record: ClaimRecord) -> tuple[Holding, ...]:
    """What a prepared claim computes on of partitioned GPUs."""
    if not record.completed:
        return ()
    return tuple(
        holding for holding in record.holdings if holding.instance is not None and not holding.admin
    )


def with_lost_instances(record: ClaimRecord, lost: Iterable[Holding]) -> ClaimRecord:
    """*record*, of whose instances these are known to be *lost*: it goes on holding their places,
    and what comes to them is not ours, though it may be called the same."""
    places = {(holding.gpu, holding.partition) for holding in lost}
    kept = [step for step in partitions_created_for([record]) if (step.gpu, step.key) not in places]
    holdings = (
        replace(holding, created_for_claims=False)
        if (holding.gpu, holding.partition) in places
        else holding
        for holding in record.holdings
    )
    return replace(with_created(record, kept), holdings=tuple(holdings))


def released_partitions(record: ClaimRecord) -> tuple[Holding, ...]:
    """Of what a prepared claim computes on, what was certainly given up, whatever is there now.

    Only a partition that was created for the claim had it turn MIG mode on. No record says which of
    several it was; nor whether there was one on a board that is not switched for claims.
    """
    created = {step.gpu for step in partitions_created_for([record])}
    switched_on = {step.gpu for step in record.steps if isinstance(step, SetMigMode) and step.on}
    partitions = computed_partitions(record)
    partitions_per_gpu = Counter(
        gpu for gpu, _ in {(holding.gpu, holding.partition) for holding in partitions}
    )
    certain = {gpu for gpu in switched_on - created if partitions_per_gpu[gpu] == 1}
    return tuple(
        holding
        for holding in partitions
        if not holding.created_for_claims and holding.gpu in certain
    )


def lost_instance_message(record: ClaimRecord, holding: Holding) -> str:
    """In the words of the person who has to mend it."""
    served = any(holding.uuid in namespace.gpus for namespace in record.namespaces)
    return (
        f"{holding.unit} ({holding.uuid}) is not there any more: somebody removed the MIG "
        f"instance, or the GPU was reset. Claim {record.claim} has nothing to compute on"
        f"{', and its MPS server is ended' if served else ''}; delete the pod (and a claim that "
        "is not from a template) to have one allocated anew"
    )


def _identity(holding: Holding) -> object:
    return holding.instance and (holding.instance.key, holding.instance.uuid)
