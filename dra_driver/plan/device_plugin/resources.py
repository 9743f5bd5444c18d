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

The ids are those of NVIDIA's device plugin. They stay the same when GPUs are numbered anew.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from dra_driver.kubeletplugin.device_plugin.resources import (
    DeviceId,
    ListedDevice,
    Resource,
    ResourceName,
)
from dra_driver.model.offer import AdminAccess, Device, Fractional, Offer, Replica
from dra_driver.model.records import DeviceAllocation

_SHARED = ".shared"  # as NVIDIA's device plugin calls what it renames


@dataclass(frozen=True, slots=True)
class ResourceNames:
    """What pods ask for. What has an empty name is not offered."""

    gpu: str = "nvidia.com/gpu"
    shared: str = "nvidia.com/gpu.shared"  # replicas that the profile renames
    mig_prefix: str = "nvidia.com/mig-"  # with the name of a MIG profile: its instances


@dataclass(frozen=True, slots=True)
class ResourceOffer:
    """What the kubelet is told, and what it is not told and why."""

    resources: tuple[Resource, ...] = ()  # by name
    problems: tuple[str, ...] = ()


ListedDevices = Mapping[ResourceName, Mapping[DeviceId, Device]]


def resources(
    offer: Offer, names: ResourceNames, held: Collection[DeviceAllocation]
) -> ResourceOffer:
    """What of *offer* is listed. An id that is *held* stays in its list, unhealthy, when it is
    not offered any more."""
    lists: dict[ResourceName, dict[DeviceId, ListedDevice]] = defaultdict(dict)
    for resource, devices in listed_devices(offer, names).items():
        for id_, device in devices.items():
            numa_node = device.gpu.topology.numa_node
            lists[resource][id_] = ListedDevice(id_, not device.taints, numa_node)
    for allocation in held:
        for id_ in allocation.ids:
            lists[allocation.resource].setdefault(id_, ListedDevice(id_, healthy=False))
    return ResourceOffer(
        tuple(
            Resource(resource, tuple(lists[resource][id_] for id_ in sorted(lists[resource])))
            for resource in sorted(lists)
        )
    )


def listed_devices(offer: Offer, names: ResourceNames) -> ListedDevices:
    """The devices of *offer* that pods can ask for by name, in its order."""
    lists: dict[ResourceName, dict[DeviceId, Device]] = defaultdict(dict)
    for device in offer.devices:
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
    its parts have any size, or it exists only while claims hold it."""
    if isinstance(device.shape, AdminAccess | Fractional) or device.created_for_claims:
        return None
    if isinstance(device.shape, Replica):
        return DeviceId(f"{device.uuid}::{device.shape.place}")
    return DeviceId(device.uuid) if device.uuid else None
