"""The resources of a node by the device-plugin API: what is listed under which name and id.

=======================  =====================  ====================
device                   resource               id
=======================  =====================  ====================
GPU                      ``nvidia.com/gpu``     ``GPU-…``
one of its replicas      the same               ``GPU-…::3``
the same, renamed        ``…/gpu.shared``       the same
MIG instance             ``…/mig-1g.10gb``      ``MIG-…``
the same, as a GPU       ``nvidia.com/gpu``     the same
one of its replicas      as the instance        ``MIG-…::3``
the same, renamed        ``….shared``           the same
=======================  =====================  ====================

The names and ids are those of NVIDIA's device plugin. Ids stay the same when GPUs are numbered
anew.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from typing import Final
from uuid import UUID

from dra_driver.base.frozen import frozen
from dra_driver.kubeletplugin.device_plugin.resources import (
    MAX_LIST_BYTES,
    DeviceId,
    ListedDevice,
    Resource,
    ResourceName,
)
from dra_driver.model.gpus import Gpu, GpuUuid, is_mig_uuid
from dra_driver.model.offer import Device, Exclusive, Fractional, Offer, Replica
from dra_driver.model.records import DeviceAllocation

_SHARED: Final = ".shared"  # as NVIDIA's device plugin calls what it renames
_PLACE: Final = "::"
MOST_LISTED: Final = 50_000
"""Replicas of one GPU or instance: more do not fit into a message, with no other beside it."""


@frozen
class ResourceNames:
    """What pods ask for. What has an empty name is not offered."""

    gpu: str = "nvidia.com/gpu"
    shared: str = "nvidia.com/gpu.shared"  # replicas that the profile renames
    mig_prefix: str = "nvidia.com/mig-"  # with the name of a MIG profile: its instances

    def include(self, resource: str) -> bool:
        """Whether pods that ask for *resource* mean this driver."""
        is_partition = bool(self.mig_prefix) and resource.startswith(self.mig_prefix)
        return bool(resource) and (resource in (self.gpu, self.shared) or is_partition)


@frozen
class ResourceOffer:
    """What the kubelet is told, and what it is not told and why."""

    resources: tuple[Resource, ...] = ()  # by name
    problems: tuple[str, ...] = ()


DevicesById = Mapping[DeviceId, Device]


def resources(
    offer: Offer,
    names: ResourceNames,
    held: Collection[DeviceAllocation],
    others: Collection[DeviceAllocation] = (),
) -> ResourceOffer:
    """What of *offer* is listed.

    An id that is *held* stays in its list, unhealthy, when it is not offered any more. In the list
    of another resource, since names were changed meanwhile, it is unhealthy until it is given back.
    *others*: those of *held* that another device plugin gave. Of a GPU that is offered under other
    ids than theirs nothing is healthy: to the kubelet these are devices that nobody has.
    """
    held_ids: dict[ResourceName, set[DeviceId]] = defaultdict(set)
    for allocation in held:
        held_ids[allocation.resource].update(allocation.ids)
    problems = list(_unlisted(offer, names))
    offered = listed_devices(offer.devices, names)
    listed_ids = {id_ for devices in offered.values() for id_ in devices}
    away = {uuid_of(id_) for each in others for id_ in each.ids if id_ not in listed_ids}
    taken = _gpus_with(away, offer)
    listed: list[Resource] = []
    for resource in sorted({*offered, *held_ids}):
        kept = held_ids.get(resource, set())
        elsewhere = {id_ for other, ids in held_ids.items() if other != resource for id_ in ids}
        devices, too_many = _within_message(resource, offered.get(resource, {}), kept)
        problems += too_many
        listed.append(Resource(resource, tuple(_listed(devices, kept, elsewhere, taken))))
    return ResourceOffer(tuple(listed), tuple(problems))


def _gpus_with(uuids: Set[GpuUuid], offer: Offer) -> Set[GpuUuid]:
    """The GPUs that these are, or are instances of. Of an instance that is gone nobody knows which
    GPU it was of: it may be any with MIG."""
    if not uuids:
        return frozenset()
    gpus = {device.gpu.uuid: device.gpu for device in offer.devices}
    gone = set(uuids).difference(*(gpu.uuids for gpu in gpus.values()))
    may_be_any = any(map(is_mig_uuid, gone))
    return {
        uuid
        for uuid, gpu in gpus.items()
        if not uuids.isdisjoint(gpu.uuids) or (may_be_any and gpu.mig is not None)
    }


def _listed(
    devices: DevicesById,
    held: Collection[DeviceId],
    elsewhere: Collection[DeviceId],
    taken: Set[GpuUuid],
) -> Iterator[ListedDevice]:
    """Where a part of the devices had a NUMA node, the kubelet could count those alone."""
    nodes = {device.gpu.topology.numa_node for device in devices.values()}
    for id_ in sorted({*devices, *held}):
        device = devices.get(id_)
        if device is None:
            yield ListedDevice(id_, healthy=False)
        elif device.rules.include or id_ in held:
            is_free = id_ not in elsewhere and device.gpu.uuid not in taken
            healthy = device.rules.include and not device.taints and is_free
            numa_node = None if None in nodes else device.gpu.topology.numa_node
            yield ListedDevice(id_, healthy, numa_node)


def listed_devices(
    devices: Iterable[Device], names: ResourceNames
) -> Mapping[ResourceName, DevicesById]:
    """Those of *devices* that pods can ask for by name, in their order."""
    lists: dict[ResourceName, dict[DeviceId, Device]] = defaultdict(dict)
    for device in devices:
        resource, id_ = resource_of(device, names), device_id(device)
        if resource and id_:
            lists[resource][id_] = device
    return lists


def resource_of(device: Device, names: ResourceNames) -> ResourceName:
    """What pods ask for to get *device*; empty: it has no name."""
    renamed = isinstance(device.shape, Replica) and device.shape.renamed
    if device.partition is None or device.as_gpu:
        return ResourceName(names.shared if renamed else names.gpu)
    if not names.mig_prefix:
        return ResourceName("")
    profile = device.partition.profile.name.replace("+", ".")
    return ResourceName(f"{names.mig_prefix}{profile}{_SHARED if renamed else ''}")


def device_id(device: Device) -> DeviceId | None:
    """How the kubelet knows *device*. None: the API cannot give it out: it is for admin access,
    its parts have any size, or it exists only while claims hold it, or not yet."""
    uuid = device.gpu.uuid
    if device.partition is not None:
        uuid = device.instance.uuid if device.instance else GpuUuid("")
    match device.shape:
        case Replica(place=place) if uuid:
            return DeviceId(f"{uuid}{_PLACE}{place}")
        case Exclusive() if uuid:
            return DeviceId(uuid)
        case _:
            return None


def uuid_of(id_: DeviceId) -> GpuUuid:
    """Of which GPU or instance the device is, whether that is there or not.

    >>> uuid_of(DeviceId("GPU-5c1b::3")), uuid_of(DeviceId("MIG-5c1b"))
    ('GPU-5c1b', 'MIG-5c1b')
    """
    return GpuUuid(id_.partition(_PLACE)[0])


def _unlisted(offer: Offer, names: ResourceNames) -> Iterator[str]:
    """A line for each reason why GPUs are not listed although they are offered."""
    gpus: dict[str, dict[str, None]] = defaultdict(dict)
    for device in offer.devices:
        if reason := _reason(device, names):
            gpus[reason][device.gpu.name] = None
    for reason in sorted(gpus):
        yield f"{', '.join(gpus[reason])}: {reason}"


def _reason(device: Device, names: ResourceNames) -> str:
    if isinstance(device.shape, Fractional):
        return "claims share it, so that it is not listed before they have ended"
    if device_id(device) is None or resource_of(device, names):
        return ""
    if device.partition is not None and not device.as_gpu:
        return "nobody can ask for its partitions, because --mig-extended-resource-prefix is empty"
    if isinstance(device.shape, Replica) and device.shape.renamed:
        return "nobody can ask for its replicas, because --shared-extended-resource-name is empty"
    return "nobody can ask for it, because --extended-resource-name is empty"


def _within_message(
    resource: ResourceName, devices: DevicesById, held: Collection[DeviceId]
) -> tuple[DevicesById, tuple[str, ...]]:
    """*devices* without the GPUs for which there is no room in one message of the kubelet's, and a
    line that names these. They are those with the most devices."""
    if _bytes({*devices, *held}) <= MAX_LIST_BYTES:
        return devices, ()
    by_gpu: dict[Gpu, list[DeviceId]] = defaultdict(list)
    for id_, device in devices.items():
        by_gpu[device.gpu].append(id_)
    room = MAX_LIST_BYTES - _bytes(held)
    listed: dict[DeviceId, Device] = {id_: devices[id_] for id_ in held if id_ in devices}
    unlisted = []
    for gpu, ids in sorted(by_gpu.items(), key=lambda item: (len(item[1]), item[0].minor)):
        room -= _bytes(ids)
        if room >= 0:
            listed |= {id_: devices[id_] for id_ in ids}
            continue
        unlisted.append(gpu)
    names = ", ".join(gpu.name for gpu in sorted(unlisted, key=lambda gpu: gpu.minor))
    most = MAX_LIST_BYTES // (len({uuid_of(id_) for id_ in devices}) * max(map(_entry, devices)))
    problem = (
        f"{names}: the list of {resource} would be longer than the 4 MiB that the kubelet takes; "
        f"lower replicas to {most} at most"
    )
    return listed, (problem,)


def most_replicas(units: int) -> int:
    """The most replicas of each of *units*, GPUs or instances, that fit into one message.

    >>> most_replicas(8)
    7281
    """
    longest = _entry(DeviceId(f"GPU-{UUID(int=0)}{_PLACE}{MOST_LISTED - 1}"))
    return min(MOST_LISTED, MAX_LIST_BYTES // (units * longest))


def _bytes(ids: Iterable[DeviceId]) -> int:
    return sum(map(_entry, ids))


def _entry(id_: DeviceId) -> int:
    """The most bytes that a device takes in a message: its ID, "Unhealthy", and a NUMA node."""
    return len(id_.encode()) + 25
