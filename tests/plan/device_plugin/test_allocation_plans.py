"""What is done for devices that the kubelet gave out: a claim whose pod is not known yet."""

import pytest

from dra_driver.base.errors import DeviceHeldByClaim
from dra_driver.kubeletplugin.device_plugin.resources import DeviceId, ResourceName
from dra_driver.model.gpus import Inventory
from dra_driver.model.offer import DEVICE_PLUGIN_FEATURES, Offer
from dra_driver.model.profiles import (
    GpuSelector,
    MpsTenants,
    Profile,
    ProfileEntry,
    Rules,
    SharingStrategy,
)
from dra_driver.model.records import AllocationClaim, ClaimRecord, DeviceAllocation
from dra_driver.plan.device_plugin.allocations import allocation_claim
from dra_driver.plan.device_plugin.resources import ResourceNames
from dra_driver.plan.offer.devices import build_offer
from dra_driver.plan.prepare.claim import ClaimPlan, plan_claim
from dra_driver.plan.prepare.results import prepared_devices
from tests.builders import POOL, claim, gpu, gpu_uuid, record

MPS = Rules(replicas=4, default_strategy=SharingStrategy.MPS)


def node(*minors: int, rules: Rules | None = None) -> Offer:
    """What a node with these GPUs offers."""
    entries = (ProfileEntry(GpuSelector(), rules, "spec.gpus[0]"),) if rules else ()
    gpus = Inventory(tuple(gpu(minor) for minor in minors))
    return build_offer(gpus, Profile("test", entries), DEVICE_PLUGIN_FEATURES, {})


def given(offer: Offer, *ids: str) -> AllocationClaim:
    """What the kubelet gave to a container."""
    sorted_ids = tuple(sorted(map(DeviceId, ids)))
    allocation = DeviceAllocation(ResourceName("nvidia.com/gpu"), sorted_ids)
    return allocation_claim(allocation, offer, ResourceNames(), POOL)


def planned(offer: Offer, *ids: str, others: tuple[ClaimRecord, ...] = ()) -> ClaimPlan:
    return plan_claim(given(offer, *ids), offer, others, POOL)


def test_the_record_says_what_the_kubelet_gave_and_that_no_pod_is_known():
    offer = node(0, 1)

    plan = planned(offer, gpu_uuid(1))

    assert plan.record.allocation == given(offer, gpu_uuid(1)).allocation
    assert (plan.record.claim.namespace, plan.record.pods) == ("", ())
    assert plan.record.gpus == {gpu_uuid(1)}


def test_another_allocation_of_the_same_device_is_not_in_the_way_and_a_claim_is():
    offer = node(0, 1)
    overlapping = planned(offer, gpu_uuid(0), gpu_uuid(1)).record

    assert planned(offer, gpu_uuid(0), others=(overlapping,)).record.gpus == {gpu_uuid(0)}
    with pytest.raises(DeviceHeldByClaim, match="gpu-0 is held by claim default/train"):
        planned(offer, gpu_uuid(0), others=(overlapping, record("train", "gpu-0")))


def test_a_claim_cannot_have_what_the_kubelet_gave_to_a_container():
    offer = node(0)

    with pytest.raises(DeviceHeldByClaim, match=r"gpu-0 is held by claim nvidia.com-gpu \(UID dp-"):
        plan_claim(claim("gpu-0"), offer, (planned(offer, gpu_uuid(0)).record,), POOL)


def test_what_depends_on_the_pod_is_not_asked_before_that_is_known():
    strict = Rules(replicas=4, strict=True)
    no_root = Rules(
        replicas=4,
        default_strategy=SharingStrategy.MPS,
        tenants=MpsTenants.NON_ROOT,
    )

    limited = planned(node(0, rules=strict), f"{gpu_uuid(0)}::0").record
    served = planned(node(0, rules=no_root), f"{gpu_uuid(0)}::0").record

    assert [holding.limit and holding.limit.strict for holding in limited.holdings] == [True]
    assert [holding.tenants for holding in served.holdings] == [MpsTenants.NON_ROOT]


def test_an_mps_server_is_for_everybody_since_the_pods_namespace_is_not_known():
    (namespace,) = planned(node(0, rules=MPS), f"{gpu_uuid(0)}::2").record.namespaces

    assert (namespace.tenant, namespace.percent) == ("", 25)


def test_the_names_for_the_runtime_stay_the_same_when_gpus_are_numbered_anew():
    before, after = (
        node(0, 1),
        build_offer(
            Inventory((gpu(0, uuid=gpu_uuid(1)), gpu(1, uuid=gpu_uuid(0)))),
            Profile("test"),
            DEVICE_PLUGIN_FEATURES,
            {},
        ),
    )

    def names(offer: Offer) -> list[str]:
        plan = planned(offer, gpu_uuid(1), gpu_uuid(0))
        return [device.cdi_ids[0] for device in prepared_devices(plan, "gpu.nvidia.com")]

    uid = given(before, gpu_uuid(0), gpu_uuid(1)).ref.uid
    assert names(before) == names(after)
    assert names(before) == [f"k8s.gpu.nvidia.com/claim={uid}-{place}" for place in (0, 1)]
