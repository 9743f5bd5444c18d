"""Replicas of partitions that exist, where parts of a device cannot be given out."""

from dataclasses import replace

import pytest

from dra_driver.base.errors import DeviceHeldByClaim
from dra_driver.k8s.claims import Claim
from dra_driver.model.gpus import Inventory
from dra_driver.model.health import Fault, Problem
from dra_driver.model.offer import (
    DEVICE_PLUGIN_FEATURES,
    EXCLUSIVE,
    AdminAccess,
    ApiFeatures,
    Replica,
)
from dra_driver.model.profiles import MigRules, SharingStrategy
from dra_driver.model.records import holdings_by_gpu
from dra_driver.plan.offer.devices import build_offer
from dra_driver.plan.offer.slice_documents import published_devices
from dra_driver.plan.prepare.claim import plan_claim
from dra_driver.plan.prepare.results import container_devices
from tests.builders import MIB, POOL, allocation, ref
from tests.plan.mig.boards import instance, mig, mig_gpu, profile

NO_CAPACITY = ApiFeatures(capacity=False)
BOARD = mig("a100-40")
LARGE, SMALL, SECOND = (
    instance(BOARD, *place) for place in (("3g.20gb", 0, 1), ("1g.5gb", 4, 2), ("1g.5gb", 5, 3))
)
GPU = mig_gpu("a100-40", on=True, instances=(LARGE, SMALL, SECOND))
MPS = SharingStrategy.MPS


def offer_of(gpu=GPU, features=NO_CAPACITY, records=(), faults=(), **rules):
    held = holdings_by_gpu(records)
    return build_offer(Inventory((gpu,)), profile(**rules), features, held, faults=faults)


def shapes(offer):
    return {
        str(device.name): device.shape
        for device in offer.devices
        if not isinstance(device.shape, AdminAccess)
    }


def divided(*replicas, **fields):
    """What a profile says that divides partitions."""
    return {"mig": MigRules(replicas=replicas, **fields)}


HALVES = divided(("1g.5gb", 2))


@pytest.mark.parametrize("features", [NO_CAPACITY, DEVICE_PLUGIN_FEATURES])
def test_each_replica_is_a_device_and_two_of_one_claim_are_of_different_partitions(features):
    offer = offer_of(features=features, **HALVES)

    half = Replica(0, 2, 2432 * MIB)
    assert list(shapes(offer).items()) == [
        ("gpu-0-mig-1g5gb-19-5-0", half),
        ("gpu-0-mig-1g5gb-19-4-0", half),
        ("gpu-0-mig-3g20gb-9-0", EXCLUSIVE),
        ("gpu-0-mig-1g5gb-19-5-1", replace(half, place=1)),
        ("gpu-0-mig-1g5gb-19-4-1", replace(half, place=1)),
    ]
    assert {device.unit for device in offer.devices if device.instance == SMALL} == {
        "gpu-0-mig-1g5gb-19-4"
    }
    assert offer.pending == ()


def test_replicas_that_share_by_mps_have_their_part_of_the_cores():
    offer = offer_of(**divided(("3g.20gb", 4)), default_strategy=MPS)

    assert shapes(offer)["gpu-0-mig-3g20gb-9-0-3"] == Replica(3, 4, 4992 * MIB, cores=25)


@pytest.mark.parametrize("features", [NO_CAPACITY, DEVICE_PLUGIN_FEATURES])
@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        pytest.param(
            divided(("1g.5gb", 7)) | {"default_strategy": MPS},
            "partitions 1g.5gb: 7 replicas share by MPS, which takes 6 clients on partitions of "
            "1g.5gb; lower replicas to 6 at most, or let TimeSlicing be the default strategy",
            id="more than MPS takes",
        ),
        pytest.param(divided(("1g.5gb", 2)) | {"strict": True}, "", id="the driver limits no part"),
        pytest.param(divided(("1g.5gb", 2)) | {"fractions": False}, "", id="never"),
    ],
)
def test_partitions_that_cannot_be_divided_are_whole(features, rules, reason):
    offer = offer_of(features=features, **rules)

    assert set(shapes(offer).values()) == {EXCLUSIVE}
    assert [change.reason for change in offer.pending] == (
        [f"profile 'p', spec.gpus[0]: {reason}"] if reason else []
    )


def test_in_slices_a_board_has_as_many_devices_as_with_replicas_of_the_gpu():
    nine = offer_of(**divided(("1g.5gb", 9)))
    ten = offer_of(**divided(("1g.5gb", 10)))

    assert len(shapes(nine)) == 2 * 9 + 1
    (change,) = ten.pending
    assert change.reason.endswith(
        "partitions 1g.5gb: 10 replicas would be as many devices, because the API server keeps no "
        "consumable capacity; lower replicas to 9 at most"
    )


def test_the_kubelets_list_takes_more_but_not_any_number():
    hundred = offer_of(features=DEVICE_PLUGIN_FEATURES, **divided(("1g.5gb", 100)))
    too_many = offer_of(features=DEVICE_PLUGIN_FEATURES, **divided(("1g.5gb", 2_000_000_000)))

    assert len(shapes(hundred)) == 2 * 100 + 1
    (change,) = too_many.pending
    assert change.reason.endswith(
        "because the kubelet knows nothing else; lower replicas to 8322 at most"
    )


def test_what_takes_of_counters_cannot_be_several_devices():
    """Not even an instance that others created: the first replica would take all of it."""
    gpu = mig_gpu("a100-40", on=True, instances=(SMALL,))

    offer = offer_of(gpu, **divided(("1g.5gb", 2), dynamic=True))

    assert set(shapes(offer).values()) == {EXCLUSIVE}
    (change,) = offer.pending
    assert change.reason.endswith(
        "partitions 1g.5gb: replicas of a partition need consumable capacity, which the API server "
        "does not keep, where partitions are created for claims"
    )


def test_by_the_device_plugin_api_no_partitions_are_created():
    offer = offer_of(features=DEVICE_PLUGIN_FEATURES, mig=MigRules(dynamic=True))

    assert set(shapes(offer).values()) == {EXCLUSIVE}
    (change,) = offer.pending
    assert change.reason == (
        "profile 'p', spec.gpus[0]: by the device-plugin API no partitions are created for pods; "
        "have them created by a layout (mig.layout)"
    )


def test_replicas_of_partitions_are_renamed_by_the_device_plugin_api_alone():
    rules = {**HALVES, "replicas": 4, "rename": True}

    for features, renamed in ((NO_CAPACITY, False), (DEVICE_PLUGIN_FEATURES, True)):
        shape = shapes(offer_of(features=features, **rules))["gpu-0-mig-1g5gb-19-4-0"]
        assert shape == Replica(0, 2, 2432 * MIB, renamed=renamed)


def test_replicas_serve_claims_for_a_gpu_where_all_partitions_are_of_one_kind():
    gpu = mig_gpu("a100-40", on=True, instances=(SMALL, SECOND))

    offer = offer_of(gpu, **divided(("1g.5gb", 2), single=True))

    assert [device.as_gpu for device in offer.devices] == [True] * 4 + [False]  # the monitor


def test_a_fault_of_a_partition_concerns_all_its_replicas():
    fault = Fault(GPU.uuid, Problem.XID, "79", partition=SMALL.key)

    offer = offer_of(faults=(fault,), **HALVES)

    sick = {str(device.name) for device in offer.devices if device.taints}
    assert sick == {"gpu-0-mig-1g5gb-19-4-0", "gpu-0-mig-1g5gb-19-4-1"}


def plan(offer, *devices, name="claim", others=()):
    requests = (
        allocation(device, f"gpu-{number}" if number else "gpu")
        for number, device in enumerate(devices)
    )
    return plan_claim(Claim(ref(name), tuple(requests)), offer, others, POOL)


def test_claims_have_different_replicas_of_one_partition_and_not_the_same_one():
    offer = offer_of(**HALVES)
    first = plan(offer, "gpu-0-mig-1g5gb-19-4-0", name="first").record

    second = plan(offer, "gpu-0-mig-1g5gb-19-4-1", others=(first,))

    (holding,) = second.holdings
    assert (holding.unit, holding.uuid) == ("gpu-0-mig-1g5gb-19-4", SMALL.uuid)
    assert holding.limit is not None
    assert holding.limit.memory_bytes == 2432 * MIB
    with pytest.raises(DeviceHeldByClaim, match="gpu-0-mig-1g5gb-19-4-0 is held by claim default"):
        plan(offer, "gpu-0-mig-1g5gb-19-4-0", others=(first,))


def test_a_partition_in_use_keeps_its_replicas_whatever_becomes_of_the_profile():
    record = plan(offer_of(**HALVES), "gpu-0-mig-1g5gb-19-4-1").record

    offer = offer_of(records=(record,), **divided(("1g.5gb", 4)))

    assert [name for name in shapes(offer) if "1g5gb-19-4" in name] == [
        "gpu-0-mig-1g5gb-19-4-0",
        "gpu-0-mig-1g5gb-19-4-1",
    ]
    assert [name for name in shapes(offer) if "1g5gb-19-5" in name] == [
        f"gpu-0-mig-1g5gb-19-5-{place}" for place in range(4)
    ]


def test_a_container_knows_the_partition_by_its_name_whichever_replica_it_has():
    offer = offer_of(**HALVES)
    planned = plan(offer, "gpu-0-mig-1g5gb-19-4-0", "gpu-0-mig-1g5gb-19-4-1")

    first, second = container_devices(planned, (), {})

    assert first.unit == second.unit == "gpu-0-mig-1g5gb-19-4"
    assert (first.device, second.device) == ("gpu-0-mig-1g5gb-19-4-0", "gpu-0-mig-1g5gb-19-4-1")


def test_a_slice_says_of_a_replica_how_much_memory_it_has():
    (device, *_) = published_devices(offer_of(**HALVES))

    assert device["name"] == "gpu-0-mig-1g5gb-19-5-0"
    assert device["attributes"]["type"] == {"string": "mig"}
    assert device["attributes"]["uuid"] == {"string": SECOND.uuid}
    assert device["capacity"]["memory"] == {"value": "2432Mi"}
    assert "allowMultipleAllocations" not in device


@pytest.mark.parametrize("features", [ApiFeatures(), NO_CAPACITY, DEVICE_PLUGIN_FEATURES])
def test_that_partitions_are_not_renamed_by_dra_is_told(features):
    renamed = {"rename": True, "replicas": 2}

    divided_too = offer_of(features=features, **HALVES, **renamed)

    assert divided_too.warnings == (
        ()
        if features.device_plugin
        else (
            "profile 'p', spec.gpus[0].rename: has no effect on partitions by DRA: pods ask for "
            "them by the name that their DeviceClass has, without .shared",
        )
    )
    assert offer_of(features=features, **renamed).warnings == ()
