"""Which MIG instances of prepared claims are not there any more, and what their pods are told.

Nobody can remove an instance on which something runs, but an idle one, or all of a GPU that is
reset.

What claims do to a GPU that can be cut: partitions come with the first, and go with the last.

Where the mode changes without a reset (Hopper and newer), it goes on with the first partition and
off with the last; a claim for the GPU as a whole finds it off. On an older board the node has
switched it before it offered any partition.
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

InstancesByDevice = Mapping[DeviceName, MigInstance]
"""What the partitions of a claim are, by device."""


def partition_steps(
    grants: Iterable[DeviceGrant], others: Iterable[ClaimRecord]
) -> tuple[Step, ...]:
    """The mode of each GPU, then every partition that is cut for claims; those are new that none of
    *others* has had cut."""
    known = {(cut.gpu, cut.key) for cut in partitions_created_for(others)}
    devices = [grant.device for grant in grants if not grant.allocation.admin]
    modes = {step for device in devices for step in _mode(device)}
    wanted = {
        CreatePartition(device.gpu.uuid, key, new=(device.gpu.uuid, key) not in known)
        for device in devices
        if device.created_for_claims and (key := device.key) is not None
    }
    return (
        *sorted(modes, key=lambda step: step.gpu),
        *sorted(wanted, key=lambda step: (step.gpu, step.key)),
    )


def partitions_left_behind(left: ClaimRecord | None) -> tuple[ClaimRecord, ...]:
    """What was cut for a claim whose record cannot be read, as that claim's new preparation has to
    see it: it is there, and nobody else holds it."""
    return (replace(left, holdings=()),) if left else ()


def whole_gpus(grants: Iterable[DeviceGrant], steps: Iterable[Step]) -> tuple[Gpu, ...]:
    """The GPUs that are given as a whole, or parts of that, and could be in MIG mode: no step turns
    it off."""
    off = {step.gpu for step in steps if isinstance(step, SetMigMode)}
    whole = (g.device for g in grants if not g.allocation.admin and g.device.partition is None)
    gpus = {one.gpu.uuid: one.gpu for one in whole if one.gpu.mig and one.gpu.uuid not in off}
    return tuple(gpus.values())


def with_created(record: ClaimRecord, begun: Collection[CreatePartition]) -> ClaimRecord:
    """*record*, as its claim stands with no cuts but those that were *begun*: what is in the place
    of others is not to be removed when it is given back."""
    steps = (s for s in record.steps if not isinstance(s, CreatePartition) or s in begun)
    return replace(record, steps=tuple(steps))


def blocking_instances(
    step: CreatePartition, taken: Iterable[PartitionKey], others: Iterable[ClaimRecord]
) -> tuple[PartitionKey, ...]:
    """What was cut where *step* has to, and is of none of *others*."""
    ours = {cut.key for cut in partitions_created_for(others) if cut.gpu == step.gpu}
    placement = step.key.placement
    return tuple(key for key in taken if key not in ours and key.placement.overlaps(placement))


def unmanaged_at(name: str, offer: Offer) -> tuple[DeviceName, ...]:
    """The instances that were not cut for claims, where the partition *name* would be; for a GPU as
    a whole or a replica of it, all that it has."""
    its = [device for device in offer.devices if device.gpu.name == gpu_name_of(name)]
    there = [one for one in its if one.partition is not None and one.instance is not None]
    if not there:
        return ()
    place = _places(there[0].gpu).get(name)
    if place is None and "-mig-" in name:
        return ()  # no board like this has it
    return tuple(
        one.name
        for one in there
        if one.partition is not None and (place is None or place.overlaps(one.partition.placement))
    )


def _places(gpu: Gpu) -> dict[str, Placement]:
    """Of each partition that *gpu* could have, by its name."""
    profiles = gpu.mig.profiles if gpu.mig else ()
    every = (Partition(profile, place) for profile in profiles for place in profile.placements)
    return {partition_name(gpu, one): one.placement for one in every}


def partitions_created_for(records: Iterable[ClaimRecord]) -> Iterator[CreatePartition]:
    """The partitions that were, or are being, cut for *records*."""
    return (
        step for record in records for step in record.steps if isinstance(step, CreatePartition)
    )


def remove_steps(record: ClaimRecord, others: Iterable[ClaimRecord]) -> tuple[RemovePartition, ...]:
    """What is left of *record*'s partitions, newest first; those of *others* stay.

    Where both know of an instance, and not of the same, that of the other is gone already. What was
    cut for *record* and is not known yet may be in the place of one that is.
    """
    theirs = [partition_instances(other) for other in others]

    def removed(step: CreatePartition, mine: GpuUuid | None) -> RemovePartition | None:
        known = {their[step] for their in theirs if step in their}
        if None in known or (mine is not None and mine in known):
            return None
        unless = frozenset(one for one in known if one is not None) if mine is None else frozenset()
        return RemovePartition(step.gpu, step.key, mine, unless)

    its = [removed(step, uuid) for step, uuid in partition_instances(record).items()]
    return tuple(one for one in reversed(its) if one is not None)


def partition_instances(record: ClaimRecord) -> dict[CreatePartition, GpuUuid | None]:
    """The partitions that were, or are being, cut for *record*: each with the instance that came of
    it, where that was recorded."""
    told = {(h.gpu, h.partition): h.instance.uuid for h in record.holdings if h.cut and h.instance}
    return {step: told.get((step.gpu, step.key)) for step in partitions_created_for([record])}


def steps_with_instances(
    steps: Iterable[Step], grants: Iterable[DeviceGrant], instances: InstancesByDevice
) -> tuple[Step, ...]:
    """*steps*, told what the partitions are now that they were cut."""
    known = _known(grants, instances)

    def told(step: Step) -> Step:
        if not isinstance(step, ServeMpsNamespace):
            return step
        return replace(step, namespace=_over(step.namespace, known))

    return tuple(map(told, steps))


def grants_with_instances(
    grants: Sequence[DeviceGrant], instances: InstancesByDevice
) -> tuple[DeviceGrant, ...]:
    """*grants*, each of a partition with what that is."""
    known = _known(grants, instances)
    return tuple(
        replace(
            grant,
            instance=instances.get(grant.device.name),
            namespace=grant.namespace and _over(grant.namespace, known),
        )
        for grant in grants
    )


def _over(namespace: MpsNamespace, known: Mapping[GpuUuid, GpuUuid]) -> MpsNamespace:
    """*namespace*, over the instances themselves."""
    return replace(namespace, gpus=tuple(known.get(gpu, gpu) for gpu in namespace.gpus))


def _known(grants: Iterable[DeviceGrant], instances: InstancesByDevice) -> dict[GpuUuid, GpuUuid]:
    """What stands for an instance, and its UUID."""
    return {
        grant.device.uuid: instances[grant.device.name].uuid
        for grant in grants
        if grant.device.name in instances
    }


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

    Of a GPU that is not among them, and of one that does not say how it is cut, nothing is known.
    """
    there = {
        gpu.uuid: {(instance.key, instance.uuid) for instance in gpu.mig.instances}
        for gpu in gpus
        if gpu.mig is not None
    }
    return tuple(
        holding
        for holding in computed_partitions(record)
        if holding.gpu in there and _identity(holding) not in there[holding.gpu]
    )


def computed_partitions(record: ClaimRecord) -> tuple[Holding, ...]:
    """What a prepared claim computes on of GPUs that are cut."""
    if not record.completed:
        return ()
    return tuple(
        holding for holding in record.holdings if holding.instance is not None and not holding.admin
    )


def with_lost_instances(record: ClaimRecord, away: Iterable[Holding]) -> ClaimRecord:
    """*record*, of whose instances these are known to be *away*: it goes on holding their places,
    and what comes to them is not ours, though it may be called the same."""
    places = {(one.gpu, one.partition) for one in away}
    left = [cut for cut in partitions_created_for([record]) if (cut.gpu, cut.key) not in places]
    holdings = (
        replace(holding, cut=False) if (holding.gpu, holding.partition) in places else holding
        for holding in record.holdings
    )
    return replace(with_created(record, left), holdings=tuple(holdings))


def released_partitions(record: ClaimRecord) -> tuple[Holding, ...]:
    """Of what a prepared claim computes on, what was certainly given up, whatever is there now.

    Only a partition that was cut for the claim had it turn MIG mode on. Which of several it was, no
    record says; nor whether there was one on a board that is not switched for claims.
    """
    cut = {one.gpu for one in partitions_created_for([record])}
    switched = {step.gpu for step in record.steps if isinstance(step, SetMigMode) and step.on}
    its = computed_partitions(record)
    places = Counter(gpu for gpu, _ in {(one.gpu, one.partition) for one in its})
    certain = {gpu for gpu in switched - cut if places[gpu] == 1}
    return tuple(one for one in its if not one.cut and one.gpu in certain)


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
