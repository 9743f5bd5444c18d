"""What the kubelet gave to a container by the device-plugin API, as a claim."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence

from dra_driver.base.errors import ClaimError, UnknownDevice, join_problems
from dra_driver.k8s.claims import AllocationResult, ClaimRef, ClaimUid, Toleration
from dra_driver.kubeletplugin.device_plugin.resources import DeviceId, ResourceName
from dra_driver.model.offer import Device, Offer, Replica
from dra_driver.model.records import ALLOCATION_UID_PREFIX, AllocationClaim, DeviceAllocation
from dra_driver.plan.device_plugin.resources import (
    DevicesById,
    ResourceNames,
    listed_devices,
    uuid_of,
)
from dra_driver.plan.offer.shapes import describe_shape


def allocation_uid(allocation: DeviceAllocation) -> ClaimUid:
    """The same for the same devices, in whatever order and however often they are given out."""
    words = "\n".join([allocation.resource, *sorted(allocation.ids)])
    digest = hashlib.sha256(words.encode()).hexdigest()
    return ClaimUid(f"{ALLOCATION_UID_PREFIX}{digest[:32]}")


def allocation_ref(allocation: DeviceAllocation) -> ClaimRef:
    """By which it is recorded, as long as its pod is not known."""
    return ClaimRef("", allocation.resource.replace("/", "-"), allocation_uid(allocation))


def allocation_claim(
    allocation: DeviceAllocation, offer: Offer, names: ResourceNames, pool: str
) -> AllocationClaim:
    """The claim that *allocation* amounts to, on the node whose pool is *pool*.

    ClaimError: a device is not known or not healthy, or the profile refuses as many.
    """
    devices = _devices(allocation, offer, names)
    if problems := [*_unhealthy(devices), *_too_many(devices, allocation)]:
        raise ClaimError(join_problems(f"{allocation.resource}: ", problems))
    return _claim(allocation, devices, pool)


def held_claim(
    allocation: DeviceAllocation, offer: Offer, names: ResourceNames, pool: str
) -> AllocationClaim:
    """The same of what a container was given before: it keeps what has become sick since.

    UnknownDevice: a device is not known.
    """
    tolerated = (Toleration(operator="Exists"),)
    return _claim(allocation, _devices(allocation, offer, names), pool, tolerated)


def _claim(
    allocation: DeviceAllocation,
    devices: Sequence[Device],
    pool: str,
    tolerations: tuple[Toleration, ...] = (),
) -> AllocationClaim:
    request = allocation.resource.rpartition("/")[2]
    return AllocationClaim(
        allocation_ref(allocation),
        tuple(
            AllocationResult(request, pool, device.name, tolerations=tolerations)
            for device in devices
        ),
        made_for_pod=True,
        allocation=allocation,
    )


def _devices(allocation: DeviceAllocation, offer: Offer, names: ResourceNames) -> Sequence[Device]:
    """Those of its ids, in their order. UnknownDevice: there is none for an id."""
    uuids = {uuid_of(id_) for id_ in allocation.ids}
    # Not of the other GPUs: a node lists up to 60,000 devices, and all its pods wait.
    lists = listed_devices((each for each in offer.devices if each.uuid in uuids), names)
    devices = lists.get(allocation.resource, {})
    unknown = [_unknown(id_, lists, offer) for id_ in allocation.ids if id_ not in devices]
    if unknown:
        raise UnknownDevice(join_problems(f"{allocation.resource}: ", unknown))
    return [devices[id_] for id_ in allocation.ids]


def _unknown(id_: DeviceId, lists: Mapping[ResourceName, DevicesById], offer: Offer) -> str:
    mend = "delete the pod to have it placed anew"
    if elsewhere := [resource for resource in sorted(lists) if id_ in lists[resource]]:
        return f"device {id_} is of {elsewhere[0]} now; {mend}"
    uuid = uuid_of(id_)
    for device in offer.devices:
        if uuid in (device.uuid, device.gpu.uuid):
            is_now = describe_shape(device.shape)
            return (
                f"there is no device {id_} any more: {device.unit} is offered as {is_now}; {mend}"
            )
    reasons = [each.reason for each in offer.unavailable if uuid in each.what]
    why = f" ({reasons[0]})" if reasons else ""
    return f"this node does not offer device {id_}{why}; {mend}"


def _unhealthy(devices: Sequence[Device]) -> Iterator[str]:
    for device in {device.unit: device for device in devices}.values():
        what = f"{device.unit} ({device.uuid})"
        if not device.rules.include:
            yield f"{what} is left out by this node's profile (include: false)"
        for taint in device.taints:
            yield f"{what} has the taint {taint.key}: {taint.reason}"


def _too_many(devices: Sequence[Device], allocation: DeviceAllocation) -> Iterator[str]:
    one_share = any(isinstance(d.shape, Replica) and d.rules.one_share for d in devices)
    if one_share and len(devices) > 1:
        yield (
            f"{len(devices)} replicas were asked for, and this node's profile gives a container "
            "one (failRequestsGreaterThanOne): two are not twice as much; write "
            f'"{allocation.resource}": 1 in the resources.limits of the container'
        )
