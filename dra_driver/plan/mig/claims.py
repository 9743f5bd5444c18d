"""Partitions of claims: created for the first claim, removed with the last, maybe lost between.

Where MIG mode changes without a reset (Hopper and newer), it is turned on for the first partition
and off after the last; a claim for the GPU as a whole finds it off. An older board was switched
before any partition of it was offered.

Somebody may remove an idle instance, or reset the GPU. The pods of a claim that lost an instance
so get an event.
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
from dra_driver.model.offer import Offer, gpu_name_of, partition_name
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
    modes: set[SetMigMode] = set()
    create_steps: set[CreatePartition] = set()
    for device in (grant.device for grant in grants if not grant.allocation.admin):
        gpu, mig, key = device.gpu.uuid, device.gpu.mig, device.key
        if device.created_for_claims and key is not None:
            create_steps.add(CreatePartition(gpu, key, new=(gpu, key) not in created))
        if mig is not None and mig.switches and device.created_for_claims:
            modes.add(SetMigMode(gpu, on=True))
        elif mig is not None and mig.switches and device.partition is None and device.offered:
            modes.add(SetMigMode(gpu, on=False))
    return (
        *sorted(modes, key=lambda step: step.gpu),
        *sorted(create_steps, key=lambda step: (step.gpu, step.key)),
    )


def partitions_left_behind(record: ClaimRecord | None) -> tuple[ClaimRecord, ...]:
    """The *record* of a claim, for its new preparation: its partitions were created, and no other
    claim holds them."""
    return (replace(record, holdings=()),) if record else ()


def whole_gpus(grants: Iterable[DeviceGrant], steps: Iterable[Step]) -> tuple[Gpu, ...]:
    """The GPUs that are granted as a whole, or in shares, and could be in MIG mode, since no step
    turns it off."""
    off = {step.gpu for step in steps if isinstance(step, SetMigMode)}
    gpus = {
        grant.device.gpu.uuid: grant.device.gpu
        for grant in grants
        if not grant.allocation.admin and grant.device.partition is None and grant.device.gpu.mig
    }
    return tuple(gpu for gpu in gpus.values() if gpu.uuid not in off)


def with_created(record: ClaimRecord, begun: Collection[CreatePartition]) -> ClaimRecord:
    """*record* with no partitions but those that were *begun*: an instance in the place of another
    one is not removed when the claim is undone."""
    steps = (
        step for step in record.steps if not isinstance(step, CreatePartition) or step in begun
    )
    return replace(record, steps=tuple(steps))


def blocking_instances(
    step: CreatePartition, existing: Iterable[PartitionKey], others: Iterable[ClaimRecord]
) -> tuple[PartitionKey, ...]:
    """The instances in the place of *step* that were created for none of *others*."""
    created = {other.key for other in partitions_created_for(others) if other.gpu == step.gpu}
    placement = step.key.placement
    return tuple(
        key for key in existing if key not in created and key.placement.overlaps(placement)
    )


def unmanaged_at(name: str, offer: Offer) -> tuple[DeviceName, ...]:
    """The instances that were not created for claims, in the place of the partition *name*; for a
    GPU as a whole or a replica of it, all instances of the GPU."""
    return tuple(
        device.name
        for device in offer.devices
        if device.gpu.name == gpu_name_of(name)
        and device.partition is not None
        and device.instance is not None
        and ("-mig-" not in name or _overlaps(name, device.gpu, device.partition.placement))
    )


def _overlaps(name: str, gpu: Gpu, placement: Placement) -> bool:
    """Whether the partition *name* of *gpu*, if there can be one, overlaps *placement*."""
    return gpu.mig is not None and any(
        place.overlaps(placement) and partition_name(gpu, Partition(profile, place)) == name
        for profile in gpu.mig.profiles
        for place in profile.placements
    )


def partitions_created_for(records: Iterable[ClaimRecord]) -> Iterator[CreatePartition]:
    """The partitions that were, or are being, created for *records*."""
    return (
        step for record in records for step in record.steps if isinstance(step, CreatePartition)
    )


def remove_steps(record: ClaimRecord, others: Iterable[ClaimRecord]) -> tuple[RemovePartition, ...]:
    """Removes the partitions of *record*, newest first; those of *others* stay.

    Where both records name an instance of a partition, and not the same, that of the other is gone
    already. An instance for *record* that is not recorded yet may be in the place of one that is.
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


def with_instances(
    steps: Iterable[Step], grants: Sequence[DeviceGrant], instances: CreatedInstances
) -> tuple[tuple[Step, ...], tuple[DeviceGrant, ...]]:
    """*steps* and *grants* with the *instances* that their partitions are, once these exist."""

    def on_instances(namespace: MpsNamespace) -> MpsNamespace:
        gpus = (instances[gpu].uuid if gpu in instances else gpu for gpu in namespace.gpus)
        return replace(namespace, gpus=tuple(gpus))

    return tuple(
        replace(step, namespace=on_instances(step.namespace))
        if isinstance(step, ServeMpsNamespace)
        else step
        for step in steps
    ), tuple(
        replace(
            grant,
            instance=instances.get(grant.device.uuid),
            namespace=grant.namespace and on_instances(grant.namespace),
        )
        for grant in grants
    )


def lost_instances(record: ClaimRecord, gpus: Iterable[Gpu]) -> tuple[Holding, ...]:
    """What a prepared claim holds of *gpus* and they do not have, or have another instance for.

    Nothing is known of a GPU that is not among them, or that does not tell its instances.
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
    """The instances that a prepared claim computes on."""
    if not record.completed:
        return ()
    return tuple(
        holding for holding in record.holdings if holding.instance is not None and not holding.admin
    )


def with_lost_instances(record: ClaimRecord, lost: Iterable[Holding]) -> ClaimRecord:
    """*record* with the instances that are *lost*: the claim holds their placements on, and an
    instance that comes there is not ours, though it may have the same UUID."""
    places = {(holding.gpu, holding.partition) for holding in lost}
    created = [
        step for step in partitions_created_for([record]) if (step.gpu, step.key) not in places
    ]
    holdings = (
        replace(holding, created_for_claims=False)
        if (holding.gpu, holding.partition) in places
        else holding
        for holding in record.holdings
    )
    return replace(with_created(record, created), holdings=tuple(holdings))


def released_partitions(record: ClaimRecord) -> tuple[Holding, ...]:
    """The instances that a prepared claim has certainly lost, whatever exists now.

    MIG mode is turned on only for a partition that is created for the claim. The record does not
    say which of several partitions that was, nor whether one was created on a board that is not
    switched for claims.
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
    """What an event says of a lost instance."""
    served = any(holding.uuid in namespace.gpus for namespace in record.namespaces)
    return (
        f"{holding.unit} ({holding.uuid}) is not there any more: somebody removed the MIG "
        f"instance, or the GPU was reset. Claim {record.claim} has nothing to compute on"
        f"{', and its MPS server is ended' if served else ''}; delete the pod (and a claim that "
        "is not from a template) to have one allocated anew"
    )


def _identity(holding: Holding) -> object:
    return holding.instance and (holding.instance.key, holding.instance.uuid)
