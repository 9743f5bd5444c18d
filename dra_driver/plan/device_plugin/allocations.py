"""What the kubelet gave to a container by the device-plugin API, as a claim."""

import hashlib

from dra_driver.base.errors import ClaimError, join_problems
from dra_driver.k8s.claims import AllocationResult, ClaimRef, ClaimUid
from dra_driver.model.offer import Offer
from dra_driver.model.records import ALLOCATION_UID_PREFIX, AllocationClaim, DeviceAllocation
from dra_driver.plan.device_plugin.resources import ResourceNames, listed_devices


def allocation_uid(allocation: DeviceAllocation) -> ClaimUid:
    """The same for the same devices, in whatever order and however often they are given out."""
    words = "\n".join([allocation.resource, *sorted(allocation.ids)])
    digest = hashlib.sha256(words.encode()).hexdigest()
    return ClaimUid(f"{ALLOCATION_UID_PREFIX}{digest[:32]}")


def allocation_claim(
    allocation: DeviceAllocation, offer: Offer, names: ResourceNames, pool: str
) -> AllocationClaim:
    """The claim that *allocation* amounts to, on the node whose pool is *pool*.

    ClaimError: a device is not known or not healthy, or the profile refuses as many.
    """
    devices = listed_devices(offer, names).get(allocation.resource, {})
    problems = [f"no device {id_!r}" for id_ in allocation.ids if id_ not in devices]
    if problems:
        raise ClaimError(join_problems(f"{allocation.resource}: ", problems))
    request = allocation.resource.rpartition("/")[2]
    return AllocationClaim(
        ClaimRef("", allocation.resource.replace("/", "-"), allocation_uid(allocation)),
        tuple(AllocationResult(request, pool, devices[id_].name) for id_ in allocation.ids),
        made_for_pod=True,
        allocation=allocation,
    )
