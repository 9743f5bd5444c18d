"""What claims do to a GPU that can be cut: partitions come with the first, and go with the last.

Where the mode changes without a reset (Hopper and newer), it goes on with the first partition and
off with the last; a claim for the GPU as a whole finds it off. On an older board the node has
switched it before it offered any partition.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from dra_driver.model.devices import DeviceName, Gpu
from dra_driver.model.holdings import Record
from dra_driver.model.mig import Instance, Partition, PartitionKey, Placement
from dra_driver.model.offer import Device, Offer, board, partition_name
from dra_driver.model.steps import CutPartition, RemovePartition, ServeMps, SetMigMode, Step
from dra_driver.model.uuids import GpuUuid
from dra_driver.plan.mps import Grant

Instances = Mapping[DeviceName, Instance]
"""What the partitions of a claim are, by device."""


def mig_steps(grants: Iterable[Grant]) -> tuple[Step, ...]:
    """The mode of each GPU, then every partition that is cut for claims."""
    devices = [grant.device for grant in grants if not grant.allocation.admin]
    modes = {step for device in devices for step in _mode(device)}
    cuts = {
        CutPartition(device.gpu.uuid, device.partition.key)
        for device in devices
        if device.partition is not None and device.cut_for_claims
    }
    return (
        *sorted(modes, key=lambda step: step.gpu),
        *sorted(cuts, key=lambda step: (step.gpu, step.key)),
    )


def new_cuts(steps: Iterable[Step], others: Iterable[Record]) -> tuple[CutPartition, ...]:
    """Those partitions of *steps* that none of *others* has had cut: nothing should be there."""
    known = set(cuts(others))
    return tuple(step for step in steps if isinstance(step, CutPartition) and step not in known)


def in_the_way(
    step: CutPartition, taken: Iterable[PartitionKey], others: Iterable[Record]
) -> tuple[PartitionKey, ...]:
    """What was cut where *step* has to, and is of none of *others*."""
    ours = {cut.key for cut in cuts(others) if cut.gpu == step.gpu}
    placement = step.key.placement
    return tuple(key for key in taken if key not in ours and key.placement.overlaps(placement))


def others_at(name: str, offer: Offer) -> tuple[DeviceName, ...]:
    """The instances that were not cut for claims, where the partition *name* would be; for a GPU as
    a whole, all that it has."""
    its = [device for device in offer.devices if device.gpu.name == board(name)]
    there = [one for one in its if one.partition is not None and one.instance is not None]
    if not there:
        return ()
    gpu = there[0].gpu
    place = _places(gpu).get(name)
    return tuple(
        one.name
        for one in there
        if one.partition is not None
        and (name == gpu.name or (place and place.overlaps(one.partition.placement)))
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
    """What is left of *record*'s partitions, newest first; those of *others* stay."""
    needed = set(cuts(others))
    mine = [step for step in cuts([record]) if step not in needed]
    return tuple(RemovePartition(step.gpu, step.key) for step in reversed(mine))


def settled_steps(
    steps: Iterable[Step], grants: Iterable[Grant], instances: Instances
) -> tuple[Step, ...]:
    """*steps*, told what the partitions are now that they were cut."""
    known = _known(grants, instances)

    def told(step: Step) -> Step:
        if not isinstance(step, ServeMps):
            return step
        gpus = tuple(known.get(gpu, gpu) for gpu in step.space.gpus)
        return replace(step, space=replace(step.space, gpus=gpus))

    return tuple(map(told, steps))


def settled_grants(grants: Sequence[Grant], instances: Instances) -> tuple[Grant, ...]:
    """*grants*, each of a partition with what that is."""
    known = _known(grants, instances)
    return tuple(
        replace(
            grant,
            instance=instances.get(grant.device.name),
            space=grant.space
            and replace(grant.space, gpus=tuple(known.get(gpu, gpu) for gpu in grant.space.gpus)),
        )
        for grant in grants
    )


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
