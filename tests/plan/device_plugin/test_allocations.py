"""What the kubelet gave out, as a claim."""

from dra_driver.k8s.claims import ClaimRef
from dra_driver.kubeletplugin.device_plugin.resources import DeviceId, ResourceName
from dra_driver.model.gpus import Inventory
from dra_driver.model.offer import DEVICE_PLUGIN_FEATURES
from dra_driver.model.profiles import DEFAULT_PROFILE
from dra_driver.model.records import AllocationClaim, DeviceAllocation
from dra_driver.plan.device_plugin.allocations import allocation_claim, allocation_uid
from dra_driver.plan.device_plugin.resources import ResourceNames
from dra_driver.plan.offer.devices import build_offer
from tests.builders import POOL, allocation, gpu

GPU = ResourceName("nvidia.com/gpu")


def test_an_allocation_is_a_claim_for_its_devices():
    offer = build_offer(Inventory((gpu(0), gpu(1))), DEFAULT_PROFILE, DEVICE_PLUGIN_FEATURES, {})
    given = DeviceAllocation(GPU, (DeviceId(gpu(0).uuid), DeviceId(gpu(1).uuid)))

    claim = allocation_claim(given, offer, ResourceNames(), POOL)

    assert claim == AllocationClaim(
        ClaimRef("", "nvidia.com-gpu", allocation_uid(given)),
        (allocation("gpu-0"), allocation("gpu-1")),
        made_for_pod=True,
        allocation=given,
    )
