"""What the kubelet gave out, as a claim; and what is refused."""

import itertools
import re
from dataclasses import replace

import pytest

from dra_driver.base.errors import ClaimError, DeviceUnhealthy, UnknownDevice
from dra_driver.k8s.claims import ClaimRef, Toleration
from dra_driver.model.gpus import UnavailableGpu
from dra_driver.model.health import Fault, Problem
from dra_driver.model.offer import Device, Offer, Replica
from dra_driver.model.profiles import MigRules, SharingStrategy
from dra_driver.model.records import AllocationClaim
from dra_driver.plan.device_plugin.allocations import (
    allocation_claim,
    allocation_uid,
    held_claim,
)
from dra_driver.plan.device_plugin.resources import device_id
from dra_driver.plan.prepare.claim import plan_claim
from tests.builders import MIB, POOL, allocation, gpu
from tests.plan.device_plugin.offers import GPU, NAMES, SHARED, given, made, offer_of

A, B = gpu(0).uuid, gpu(1).uuid
XID = Fault(A, Problem.XID, "79")


def claim(offer, resource, *ids):
    return allocation_claim(given(resource, *ids), offer, NAMES, POOL)


def refusal(offer, resource, *ids):
    with pytest.raises(ClaimError) as refused:
        claim(offer, resource, *ids)
    return str(refused.value)


def test_an_allocation_is_a_claim_for_its_devices():
    allocated = given(GPU, A, B)

    assert claim(offer_of(), GPU, A, B) == AllocationClaim(
        ClaimRef("", "nvidia.com-gpu", allocation_uid(allocated)),
        (allocation("gpu-0"), allocation("gpu-1")),
        made_for_pod=True,
        allocation=allocated,
    )


def test_replicas_and_instances_are_claimed_by_the_names_of_their_devices():
    replicas = claim(offer_of(replicas=4, rename=True), SHARED, f"{A}::3", f"{B}::0")
    board = made(("1g.5gb+me", 6))
    part = claim(offer_of(board), "nvidia.com/mig-1g.5gb.me", "MIG-20-6-of-0")

    assert [(a.request, a.device) for a in replicas.allocations] == [
        ("gpu.shared", "gpu-0-3"),
        ("gpu.shared", "gpu-1-0"),
    ]
    assert (part.ref.name, *((a.request, a.device) for a in part.allocations)) == (
        "nvidia.com-mig-1g.5gb.me",
        ("mig-1g.5gb.me", "gpu-0-mig-1g5gb-me-20-6"),
    )


@pytest.mark.point(137, 142)
def test_the_same_devices_are_the_same_claim_in_whatever_order():
    ids = (f"{A}::0", f"{A}::1", f"{B}::1")
    uids = {allocation_uid(given(GPU, *order)) for order in itertools.permutations(ids)}

    assert len(uids) == 1
    assert re.fullmatch("dp-[0-9a-f]{32}", uids.pop())


def test_other_devices_or_another_resource_are_another_claim():
    allocations = [given(GPU, A), given(GPU, B), given(GPU, A, B), given(SHARED, A), given(GPU)]

    assert len({allocation_uid(each) for each in allocations}) == len(allocations)


# What is refused.


@pytest.mark.point(138)
@pytest.mark.parametrize(
    ("offer", "resource", "id_", "reason"),
    [
        pytest.param(
            offer_of(),
            GPU,
            "GPU-none",
            "this node does not offer device GPU-none",
            id="never heard of",
        ),
        pytest.param(
            Offer(unavailable=(UnavailableGpu(f"GPU 0000:18:00.0 ({A})", "it does not answer"),)),
            GPU,
            A,
            f"this node does not offer device {A} (it does not answer)",
            id="not offered",
        ),
        pytest.param(
            offer_of(replicas=2),
            GPU,
            f"{A}::2",
            f"there is no device {A}::2 any more: gpu-0 is offered as 2 replicas",
            id="fewer replicas",
        ),
        pytest.param(
            offer_of(),
            GPU,
            f"{A}::0",
            f"there is no device {A}::0 any more: gpu-0 is offered as exclusive",
            id="no replicas",
        ),
        pytest.param(
            offer_of(replicas=2, rename=True),
            GPU,
            f"{A}::0",
            f"device {A}::0 is of nvidia.com/gpu.shared now",
            id="renamed",
        ),
    ],
)
def test_a_device_that_is_not_known_is_refused_with_what_there_is(offer, resource, id_, reason):
    allocated = given(resource, id_)

    for of in (allocation_claim, held_claim):
        with pytest.raises(UnknownDevice) as refused:
            of(allocated, offer, NAMES, POOL)
        assert str(refused.value) == (
            f"{resource}: {reason}; delete the pod to have it placed anew"
        )


@pytest.mark.point(139)
def test_a_sick_device_is_refused_with_the_reason_of_its_taint():
    offer = offer_of(replicas=2, faults=(XID,))

    assert refusal(offer, GPU, f"{A}::0", f"{A}::1", f"{B}::0") == (
        f"nvidia.com/gpu: gpu-0 ({A}) has the taint gpu.nvidia.com/xid: "
        f"{offer.devices[0].taints[0].reason}"
    )


def test_a_device_of_a_gpu_that_is_left_out_is_refused():
    first = claim(offer_of(replicas=2), GPU, f"{A}::0")
    record = plan_claim(first, offer_of(replicas=2), (), POOL).record

    assert refusal(offer_of(records=(record,), include=False), GPU, f"{A}::1") == (
        f"nvidia.com/gpu: gpu-0 ({A}) is left out by this node's profile (include: false)"
    )


def test_what_a_container_has_already_is_claimed_though_it_is_sick():
    offer = offer_of(replicas=2, faults=(XID,))

    held = held_claim(given(GPU, f"{A}::0"), offer, NAMES, POOL)

    (result,) = held.allocations
    assert result.tolerations == (Toleration(operator="Exists"),)
    assert plan_claim(held, offer, (), POOL).holdings
    with pytest.raises(DeviceUnhealthy):
        plan_claim(claim(offer_of(replicas=2), GPU, f"{A}::0"), offer, (), POOL)


@pytest.mark.parametrize(
    ("offer", "resource", "ids"),
    [
        pytest.param(
            offer_of(replicas=4, one_share=True), GPU, (f"{A}::0", f"{B}::0"), id="of two GPUs"
        ),
        pytest.param(
            offer_of(replicas=4, one_share=True), GPU, (f"{A}::0", f"{A}::1"), id="of one GPU"
        ),
        pytest.param(
            offer_of(made(("1g.5gb", 4)), one_share=True, mig=MigRules(replicas=(("1g.5gb", 2),))),
            "nvidia.com/mig-1g.5gb",
            ("MIG-19-4-of-0::0", "MIG-19-4-of-0::1"),
            id="of an instance",
        ),
    ],
)
def test_more_than_one_replica_is_refused_where_the_profile_says_so(offer, resource, ids):
    assert refusal(offer, resource, *ids) == (
        f"{resource}: 2 replicas were asked for, and this node's profile gives a container one "
        "(failRequestsGreaterThanOne): two are not twice as much; write "
        f'"{resource}": 1 in the resources.limits of the container'
    )
    assert claim(offer, resource, ids[0])


def test_whole_gpus_are_no_replicas():
    offer = offer_of(one_share=True)

    assert len(claim(offer, GPU, A, B).allocations) == 2


def test_all_that_is_wrong_is_said_at_once():
    offer = offer_of(replicas=2, one_share=True, faults=(XID,))

    message = refusal(offer, GPU, f"{A}::0", f"{B}::0")

    assert "has the taint" in message and "failRequestsGreaterThanOne" in message


def test_parts_of_a_gpu_that_overlap_are_not_given_to_one_container():
    """No node offers both; if one ever did, nothing would be prepared."""
    board = made(("1g.5gb", 4))
    (part,) = (device for device in offer_of(board).devices if device.partition)
    as_gpu = Offer((Device(board), replace(part, as_gpu=True)))
    ids = [str(device_id(device)) for device in as_gpu.devices]

    both = allocation_claim(given(GPU, *ids), as_gpu, NAMES, POOL)

    with pytest.raises(ClaimError, match="which are the same part of one GPU"):
        plan_claim(both, as_gpu, (), POOL)


# What a container gets of what it was given.


def test_replicas_have_their_part_of_the_memory():
    offer = offer_of(gpu(0), replicas=4)

    plan = plan_claim(claim(offer, GPU, f"{A}::0", f"{A}::1"), offer, (), POOL)

    limits = [holding.limit.memory_bytes for holding in plan.holdings if holding.limit]
    assert limits == [20389 * MIB, 20389 * MIB]
    assert [holding.shape for holding in plan.holdings] == [
        Replica(place, 4, 20389 * MIB) for place in (0, 1)
    ]


def test_replicas_by_mps_have_their_part_of_the_cores_and_add_up():
    offer = offer_of(gpu(0), replicas=4, default_strategy=SharingStrategy.MPS)

    plan = plan_claim(claim(offer, GPU, f"{A}::0", f"{A}::1"), offer, (), POOL)

    (namespace,) = plan.record.namespaces
    assert (namespace.percent, namespace.memory_bytes) == (50, (2 * 20389 * MIB,))
