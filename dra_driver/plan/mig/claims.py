"""What claims do to a GPU that can be cut: partitions come with the first, and go with the last.

Where the mode changes without a reset (Hopper and newer), it goes on with the first partition and
off with the last; a claim for the GPU as a whole finds it off. On an older board the node has
switched it before it offered any partition.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from dra_driver.model.devices import DeviceName, Gpu
from dra_driver.model.holdings import Record
from dra_driver.model.mig import Instance, Partition, PartitionKey, Placement
from dra_driver.model.mps import Space
from dra_driver.model.offer import Device, Offer, board, partition_name
from dra_driver.model.steps import CutPartition, RemovePartition, ServeMps, SetMigMode, Step
from dra_driver.model.uuids import GpuUuid
from dra_driver.plan.mps import Grant

Instances = Mapping[DeviceName, Instance]
"""What the partitions of a claim are, by device."""


def mig_steps(grants: Iterable[Grant], others: Iterable[Record]) -> tuple[Step, ...]:
    """The mode of each GPU, then every partition that is cut for claims; those are new that none of
    *others* has had cut."""
    known = {(cut.gpu, cut.key) for cut in cuts(others)}
    devices = [grant.device for grant in grants if not grant.allocation.admin]
    modes = {step for device in devices for step in _mode(device)}
    wanted = {
        CutPartition(device.gpu.uuid, key, new=(device.gpu.uuid, key) not in known)
        for device in devices
        if device.cut_for_claims and (key := device.key) is not None
    }
    return (
        *sorted(modes, key=lambda step: step.gpu),
        *sorted(wanted, key=lambda step: (step.gpu, step.key)),
    )


def still_cut(left: Record | None) -> tuple[Record, ...]:
    """What was cut for a claim whose record cannot be read, as that claim's new preparation has to
    see it: it is there, and nobody else holds it."""
    return (replace(left, holdings=()),) if left else ()


def whole_gpus(grants: Iterable[Grant], steps: Iterable[Step]) -> tuple[Gpu, ...]:
    """The GPUs that are given as a whole, or parts of that, and could be in MIG mode: no step turns
    it off."""
    off = {step.gpu for step in steps if isinstance(step, SetMigMode)}
    whole = (g.device for g in grants if not g.allocation.admin and g.device.partition is None)
    gpus = {one.gpu.uuid: one.gpu for one in whole if one.gpu.mig and one.gpu.uuid not in off}
    return tuple(gpus.values())


def with_cuts(record: Record, begun: Collection[CutPartition]) -> Record:
    """*record*, as its claim stands with no cuts but those that were *begun*: what is in the place
    of others is not to be removed when it is given back."""
    steps = (s for s in record.steps if not isinstance(s, CutPartition) or s in begun)
    return replace(record, steps=tuple(steps))


def in_the_way(
    step: CutPartition, taken: Iterable[PartitionKey], others: Iterable[Record]
) -> tuple[PartitionKey, ...]:
    """What was cut where *step* has to, and is of none of *others*."""
    ours = {cut.key for cut in cuts(others) if cut.gpu == step.gpu}
    placement = step.key.placement
    return tuple(key for key in taken if key not in ours and key.placement.overlaps(placement))


def others_at(name: str, offer: Offer) -> tuple[DeviceName, ...]:
    """The instances that were not cut for claims, where the partition *name* would be; for a GPU as
    a whole or a replica of it, all that it has."""
    its = [device for device in offer.devices if device.gpu.name == board(name)]
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


def cuts(records: Iterable[Record]) -> Iterator[CutPartition]:
    """The partitions that were, or are being, cut for *records*."""
    return (step for one in records for step in one.steps if isinstance(step, CutPartition))


def remove_steps(record: Record, others: Iterable[Record]) -> tuple[RemovePartition, ...]:
    """What is left of *record*'s partitions, newest first; those of *others* stay.

    Where both know of an instance, and not of the same, that of the other is gone already. What was
    cut for *record* and is not known yet may be in the place of one that is.
    """
    theirs = [instances_of(other) for other in others]

    def removed(step: CutPartition, mine: GpuUuid | None) -> RemovePartition | None:
        known = {its[step] for its in theirs if step in its}
        if None in known or (mine is not None and mine in known):
            return None
        unless = frozenset(one for one in known if one is not None) if mine is None else frozenset()
        return RemovePartition(step.gpu, step.key, mine, unless)

    its = [removed(step, uuid) for step, uuid in instances_of(record).items()]
    return tuple(one for one in reversed(its) if one is not None)


def instances_of(record: Record) -> dict[CutPartition, GpuUuid | None]:
    """The partitions that were, or are being, cut for *record*: each with the instance that came of
    it, where that was recorded."""
    told = {(h.gpu, h.partition): h.instance.uuid for h in record.holdings if h.cut and h.instance}
    return {step: told.get((step.gpu, step.key)) for step in cuts([record])}


def settled_steps(
    steps: Iterable[Step], grants: Iterable[Grant], instances: Instances
) -> tuple[Step, ...]:
    """*steps*, told what the partitions are now that they were cut."""
    known = _known(grants, instances)

    def told(step: Step) -> Step:
        if not isinstance(step, ServeMps):
            return step
        return replace(step, space=_over(step.space, known))

    return tuple(map(told, steps))


def settled_grants(grants: Sequence[Grant], instances: Instances) -> tuple[Grant, ...]:
    """*grants*, each of a partition with what that is."""
    known = _known(grants, instances)
    return tuple(
        replace(
            grant,
            instance=instances.get(grant.device.name),
            space=grant.space and _over(grant.space, known),
        )
        for grant in grants
    )


def _over(space: Space, known: Mapping[GpuUuid, GpuUuid]) -> Space:
    """*space*, over the instances themselves."""
    return replace(space, gpus=tuple(known.get(gpu, gpu) for gpu in space.gpus))


def _known(grants: Iterable[Grant], instances: Instances) -> dict[GpuUuid, GpuUuid]:
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
    if device.cut_for_claims:
        yield SetMigMode(device.gpu.uuid, on=True)
    elif device.partition is None and device.offered:
        yield SetMigMode(device.gpu.uuid, on=False)
