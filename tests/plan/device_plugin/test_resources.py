"""What a node lists by the device-plugin API, by value and by its rules."""

import doctest
from dataclasses import replace

import pytest
from hypothesis import given as given_any
from hypothesis import strategies as st

from dra_driver.kubeletplugin.device_plugin.device_list import encode
from dra_driver.kubeletplugin.device_plugin.resources import (
    MAX_LIST_BYTES,
    DeviceId,
    ListedDevice,
    Resource,
)
from dra_driver.model.gpus import DeviceName, GpuUuid, Topology
from dra_driver.model.health import Effect, Fault, HealthRules, Problem
from dra_driver.model.offer import AdminAccess, Device, Offer, Replica
from dra_driver.model.profiles import MigRules, Rules
from dra_driver.plan.device_plugin import resources as resources_module
from dra_driver.plan.device_plugin.allocations import allocation_claim
from dra_driver.plan.device_plugin.resources import (
    ResourceNames,
    ResourceOffer,
    device_id,
    resource_of,
    resources,
    uuid_of,
)
from dra_driver.plan.prepare.claim import plan_claim
from tests.builders import POOL, SLICEABLE, gpu
from tests.plan.device_plugin.offers import BOARD, GPU, NAMES, SHARED, given, made, offer_of
from tests.plan.mig.boards import instance
from tests.plan.profile_rules import any_rules

A, B = DeviceId(gpu(0).uuid), DeviceId(gpu(1).uuid)


def listed(offer, *held, names=NAMES, others=()):
    """The ids of each resource; an unhealthy one with a minus."""
    return {
        str(resource.name): [
            str(device.id) if device.healthy else f"-{device.id}" for device in resource.devices
        ]
        for resource in resources(offer, names, held, others).resources
    }


def problems_of(offer):
    return resources(offer, NAMES, ()).problems


def record_of(allocation, offer):
    """What is recorded of an allocation that was made while *offer* held."""
    return plan_claim(allocation_claim(allocation, offer, NAMES, POOL), offer, (), POOL).record


def replicas_of(*uuids, number=2):
    return [f"{uuid}::{place}" for uuid in uuids for place in range(number)]


def test_whole_gpus_are_listed_by_their_uuid():
    assert resources(offer_of(), NAMES, ()) == ResourceOffer(
        (Resource(GPU, (ListedDevice(A, True, 0), ListedDevice(B, True, 0))),)
    )


@pytest.mark.parametrize(
    ("rules", "resource"),
    [({"replicas": 2}, GPU), ({"replicas": 2, "rename": True}, SHARED)],
    ids=["not renamed", "renamed"],
)
def test_replicas_are_listed_with_their_place_under_the_name_that_the_profile_says(rules, resource):
    assert listed(offer_of(**rules)) == {resource: replicas_of(A, B)}


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        pytest.param(
            {},
            {
                "nvidia.com/mig-1g.5gb": ["MIG-19-4-of-0"],
                "nvidia.com/mig-1g.5gb.me": ["MIG-20-6-of-0"],
                "nvidia.com/mig-3g.20gb": ["MIG-9-0-of-0"],
            },
            id="mixed",
        ),
        pytest.param(
            {"mig": MigRules(replicas=(("1g.5gb", 2),))},
            {
                "nvidia.com/mig-1g.5gb": replicas_of("MIG-19-4-of-0"),
                "nvidia.com/mig-1g.5gb.me": ["MIG-20-6-of-0"],
                "nvidia.com/mig-3g.20gb": ["MIG-9-0-of-0"],
            },
            id="mixed with replicas",
        ),
        pytest.param(
            {"mig": MigRules(replicas=(("1g.5gb", 2),)), "rename": True},
            {
                "nvidia.com/mig-1g.5gb.shared": replicas_of("MIG-19-4-of-0"),
                "nvidia.com/mig-1g.5gb.me": ["MIG-20-6-of-0"],
                "nvidia.com/mig-3g.20gb": ["MIG-9-0-of-0"],
            },
            id="mixed with renamed replicas",
        ),
    ],
)
def test_instances_are_listed_by_the_name_of_their_profile(rules, expected):
    board = made(("3g.20gb", 0), ("1g.5gb", 4), ("1g.5gb+me", 6))

    assert listed(offer_of(board, **rules)) == expected


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        pytest.param({}, {GPU: ["MIG-19-4-of-0", "MIG-19-5-of-0"]}, id="whole"),
        pytest.param(
            {"replicas": (("*", 2),)},
            {GPU: replicas_of("MIG-19-4-of-0", "MIG-19-5-of-0")},
            id="replicas",
        ),
    ],
)
def test_instances_of_one_kind_are_gpus_with_the_strategy_single(rules, expected):
    offer = offer_of(made(("1g.5gb", 4), ("1g.5gb", 5)), mig=MigRules(single=True, **rules))

    assert listed(offer) == expected


def test_replicas_of_instances_that_are_gpus_are_renamed_as_those_of_gpus():
    rules = MigRules(single=True, replicas=(("*", 2),))

    offer = offer_of(made(("1g.5gb", 4)), mig=rules, rename=True)

    assert listed(offer) == {SHARED: replicas_of("MIG-19-4-of-0")}


def test_gpus_by_different_rules_are_in_one_list_or_in_several():
    devices = (
        Device(gpu(0)),
        *(Device(gpu(1), Replica(place, 2, None)) for place in (0, 1)),
        *(Device(gpu(2), Replica(place, 2, None, renamed=True)) for place in (0, 1)),
    )

    assert listed(Offer(devices)) == {GPU: [A, *replicas_of(B)], SHARED: replicas_of(gpu(2).uuid)}


def test_more_replicas_than_slices_have_room_for_are_listed():
    assert len(listed(offer_of(gpu(0), replicas=500, limited=False))[GPU]) == 500


def test_devices_for_admin_access_and_instances_that_are_yet_to_come_are_not_listed():
    board = made(("1g.5gb", 4))
    (part,) = (device for device in offer_of(board).devices if device.partition)
    assert part.instance is not None
    yet_to_come = replace(part, instance=replace(part.instance, uuid=GpuUuid("")))

    for device in (
        Device(gpu(0), AdminAccess()),
        Device(gpu(0), SLICEABLE),
        replace(part, instance=None),
        yet_to_come,
    ):
        assert device_id(device) is None
    assert any(isinstance(device.shape, AdminAccess) for device in offer_of(board).devices)
    assert listed(offer_of(board)) == {"nvidia.com/mig-1g.5gb": ["MIG-19-4-of-0"]}


def test_a_node_without_gpus_lists_nothing():
    assert resources(Offer(), NAMES, ()) == ResourceOffer()


# Names.


@pytest.mark.parametrize(
    ("names", "rules", "problem"),
    [
        pytest.param(
            ResourceNames(gpu=""),
            {},
            "gpu-0, gpu-1: nobody can ask for it, because --extended-resource-name is empty",
            id="GPUs",
        ),
        pytest.param(
            ResourceNames(shared=""),
            {"replicas": 2, "rename": True},
            "gpu-0, gpu-1: nobody can ask for its replicas, because "
            "--shared-extended-resource-name is empty",
            id="renamed replicas",
        ),
    ],
)
def test_what_has_no_name_is_not_listed_and_that_is_said(names, rules, problem):
    assert resources(offer_of(**rules), names, ()) == ResourceOffer((), (problem,))


def test_instances_without_a_name_are_not_listed_and_that_is_said():
    board, names = made(("1g.5gb", 4), ("3g.20gb", 0)), ResourceNames(mig_prefix="")

    assert resources(offer_of(board), names, ()) == ResourceOffer(
        (),
        (
            "gpu-0: nobody can ask for its partitions, because --mig-extended-resource-prefix is "
            "empty",
        ),
    )


def test_names_are_those_of_the_settings():
    names = ResourceNames("example.com/gpu", "example.com/part", "example.com/slice-")
    board = made(("1g.5gb", 4))

    assert listed(offer_of(gpu(0)), names=names) == {"example.com/gpu": [A]}
    assert listed(offer_of(board), names=names) == {"example.com/slice-1g.5gb": ["MIG-19-4-of-0"]}


def test_a_gpu_in_parts_that_claims_still_have_is_not_listed_and_that_is_said():
    offer = Offer((Device(gpu(0), SLICEABLE), Device(gpu(1))))

    assert resources(offer, NAMES, ()) == ResourceOffer(
        (Resource(GPU, (ListedDevice(B, True, 0),)),),
        ("gpu-0: claims share it, so that it is not listed before they have ended",),
    )


# Health.


@pytest.mark.parametrize("effect", [Effect.NO_SCHEDULE, Effect.NO_EXECUTE])
def test_a_sick_gpu_is_unhealthy_in_every_replica_and_comes_back(effect):
    health = HealthRules(xids=((79, effect),))
    fault = Fault(gpu(0).uuid, Problem.XID, "79")

    sick = offer_of(faults=(fault,), replicas=2, health=health)

    assert listed(sick) == {GPU: [f"-{A}::0", f"-{A}::1", *replicas_of(B)]}
    assert listed(offer_of(replicas=2, health=health)) == {GPU: replicas_of(A, B)}


def test_a_problem_without_an_effect_makes_nothing_unhealthy():
    rules = HealthRules(xids=((79, Effect.NONE),))

    offer = offer_of(faults=(Fault(gpu(0).uuid, Problem.XID, "79"),), health=rules)

    assert listed(offer) == {GPU: [A, B]}


def test_a_fault_of_an_instance_is_its_own():
    board = made(("1g.5gb", 4), ("1g.5gb", 5))
    key = instance(BOARD, "1g.5gb", 4).key

    offer = offer_of(board, faults=(Fault(gpu(0).uuid, Problem.XID, "79", partition=key),))

    assert listed(offer) == {"nvidia.com/mig-1g.5gb": ["-MIG-19-4-of-0", "MIG-19-5-of-0"]}


# What is held.


@pytest.mark.point(129)
def test_what_is_held_stays_in_its_list_when_it_is_not_offered_any_more():
    gone = given("nvidia.com/gpu", f"{A}::1", f"{A}::3")

    assert listed(Offer(), gone) == {GPU: [f"-{A}::1", f"-{A}::3"]}
    assert listed(offer_of(gpu(1)), gone) == {GPU: [f"-{A}::1", f"-{A}::3", B]}


def test_of_a_gpu_that_is_left_out_only_what_is_held_stays():
    shared = offer_of(gpu(0), replicas=2)
    held = given("nvidia.com/gpu", f"{A}::1")

    offer = offer_of(gpu(0), gpu(1), records=(record_of(held, shared),), include=False)

    assert listed(offer, held) == {GPU: [f"-{A}::1"]}


def test_a_gpu_in_use_keeps_its_replicas_when_the_profile_has_others():
    held = given("nvidia.com/gpu", f"{A}::1")
    record = record_of(held, offer_of(replicas=2))

    offer = offer_of(records=(record,), replicas=3, rename=True)

    assert listed(offer, held) == {GPU: replicas_of(A), SHARED: replicas_of(B, number=3)}


def test_what_is_held_under_a_former_name_is_given_to_nobody_under_the_new_one():
    held = given("example.com/gpu", f"{A}::1")

    assert listed(offer_of(replicas=2), held) == {
        "example.com/gpu": [f"-{A}::1"],
        GPU: [f"{A}::0", f"-{A}::1", *replicas_of(B)],
    }


def test_of_a_gpu_that_others_have_in_another_form_nothing_is_healthy():
    """The kubelet compares ids: it would give out a part of what is given out whole, or the whole
    of which a part is."""
    whole, part = given("nvidia.com/gpu", A), given("nvidia.com/gpu", f"{A}::1")

    assert listed(offer_of(replicas=2), whole, others=(whole,)) == {
        GPU: [f"-{A}", *(f"-{id_}" for id_ in replicas_of(A)), *replicas_of(B)]
    }
    assert listed(offer_of(), part, others=(part,)) == {GPU: [f"-{A}", f"-{A}::1", B]}
    assert listed(offer_of(), whole, others=(whole,)) == {GPU: [A, B]}
    assert listed(offer_of(replicas=2), part, others=(part,)) == {GPU: replicas_of(A, B)}


def test_an_instance_that_others_have_keeps_its_gpu_or_all_that_it_may_have_been_of():
    there = offer_of(made(("1g.10gb", 0), ("1g.10gb", 2)), gpu(1))
    name = "nvidia.com/mig-1g.10gb"
    first, second = listed(there)[name]

    theirs = given(name, first)
    assert listed(there, theirs, others=(theirs,))[name] == [first, second]
    parted = given(name, f"{first}::0")  # a replica, which is not offered
    assert f"-{first}" in listed(there, parted, others=(parted,))[name]
    gone = given(name, "MIG-gone")
    assert listed(there, gone, others=(gone,)) == {
        GPU: [B],
        name: sorted(["-MIG-gone", f"-{first}", f"-{second}"], key=lambda each: each[1:]),
    }


def test_of_a_gpu_that_others_have_whole_no_partition_is_healthy():
    offer = offer_of(made(("1g.10gb", 0)), gpu(1))
    (partition,) = listed(offer)["nvidia.com/mig-1g.10gb"]
    whole = given("nvidia.com/gpu", A)

    assert listed(offer, whole, others=(whole,))["nvidia.com/mig-1g.10gb"] == [f"-{partition}"]


@pytest.mark.point(126)
def test_ids_stay_the_same_when_gpus_are_numbered_anew():
    swapped = (gpu(0, uuid=B), gpu(1, uuid=A))

    assert listed(offer_of(*swapped, replicas=2)) == listed(offer_of(replicas=2))


# NUMA.


@pytest.mark.point(130)
@pytest.mark.parametrize(
    ("nodes", "expected"),
    [((0, 1), [0, 1]), ((None, None), [None, None]), ((0, None), [None, None])],
    ids=["known", "unknown", "of one only: the kubelet would never count the other"],
)
def test_a_device_has_a_numa_node_where_all_of_its_list_have_one(nodes, expected):
    gpus = (gpu(minor, topology=Topology(numa_node=node)) for minor, node in enumerate(nodes))

    (resource,) = resources(offer_of(*gpus), NAMES, ()).resources

    assert [device.numa_node for device in resource.devices] == expected


def test_lists_have_numa_nodes_each_by_itself():
    board = made(("1g.5gb", 4))
    unknown = gpu(1, topology=Topology())

    mig_list, gpu_list = sorted(
        resources(offer_of(board, unknown), NAMES, ()).resources, key=lambda each: each.name != GPU
    )[::-1]

    assert [device.numa_node for device in gpu_list.devices] == [None]
    assert [device.numa_node for device in mig_list.devices] == [0]


# The size of the kubelet's message.


LONG = 2_000  # characters of a UUID: few devices fill a message


def long_gpu(minor):
    return gpu(minor, uuid=f"GPU-{minor}-{'f' * LONG}")


def overfull(replicas=1_100):
    """Three GPUs, of which one fits into the kubelet's message."""
    return offer_of(*map(long_gpu, range(3)), replicas=replicas, limited=False)


@pytest.mark.point(131)
def test_gpus_for_which_a_message_has_no_room_are_named_in_one_line_with_the_mend():
    offered = resources(overfull(), NAMES, ())

    (resource,) = offered.resources
    assert {uuid_of(device.id) for device in resource.devices} == {long_gpu(0).uuid}
    assert offered.problems == (
        "gpu-1, gpu-2: the list of nvidia.com/gpu would be longer than the 4 MiB that the kubelet "
        "takes; lower replicas to 686 at most",
    )
    assert message_bytes(resource) <= MAX_LIST_BYTES
    mended = resources(overfull(686), NAMES, ())
    assert mended.problems == ()
    assert message_bytes(mended.resources[0]) <= MAX_LIST_BYTES


@pytest.mark.exhaustive
def test_of_one_gpu_as_many_replicas_are_listed_as_a_message_has_room_for():
    offer = offer_of(gpu(0), replicas=50_000, limited=False)

    offered = resources(offer, NAMES, ())
    assert (offer.pending, offered.problems) == ((), ())
    assert message_bytes(offered.resources[0]) <= MAX_LIST_BYTES


@pytest.mark.exhaustive
@pytest.mark.parametrize(("number", "replicas"), [(1, 50_001), (8, 2_000_000_000)])
def test_the_advice_on_too_many_replicas_works_at_once(number, replicas):
    gpus = [gpu(minor) for minor in range(number)]
    offer = offer_of(*gpus, replicas=replicas, limited=False)

    reasons = [change.reason for change in offer.pending]
    advice = {text.split("lower replicas to ")[1] for text in (*reasons, *problems_of(offer))}

    (most,) = {int(text.removesuffix(" at most")) for text in advice}
    mended = offer_of(*gpus, replicas=most, limited=False)
    assert len(mended.devices) == number * most
    assert (mended.pending, problems_of(mended)) == ((), ())


@pytest.mark.exhaustive
def test_the_advice_on_too_many_replicas_of_instances_works_at_once():
    boards = [made(("1g.5gb", 4), ("1g.5gb", 5), minor=minor) for minor in range(8)]

    def divided(replicas):
        return offer_of(*boards, limited=False, mig=MigRules(replicas=(("*", replicas),)))

    (advice,) = {change.reason.split("lower replicas to ")[1] for change in divided(10**6).pending}
    mended = divided(int(advice.removesuffix(" at most")))
    assert (mended.pending, problems_of(mended)) == ((), ())


def test_what_is_held_of_a_gpu_without_room_stays_in_the_list():
    held = given("nvidia.com/gpu", f"{long_gpu(2).uuid}::7")

    (resource,) = resources(overfull(), NAMES, (held,)).resources

    assert [d for d in resource.devices if uuid_of(d.id) == long_gpu(2).uuid] == [
        ListedDevice(held.ids[0], True, 0)
    ]


def message_bytes(resource):
    """As protobuf encodes the list, all of it unhealthy."""
    unhealthy = {device.id: replace(device, healthy=False) for device in resource.devices}
    return encode(unhealthy).ByteSize()


# Whatever is offered.


@given_any(
    rules=any_rules(),
    single=st.booleans(),
    places=st.lists(st.sampled_from([("1g.5gb", 4), ("1g.5gb", 5), ("3g.20gb", 0)]), unique=True),
    sick=st.booleans(),
    parts=st.integers(1, 12),
)
def test_every_device_is_in_one_list_and_what_is_listed_can_be_allocated(
    rules: Rules, single, places, sick, parts
):
    mig_rules = MigRules(single=single, replicas=(("1g.5gb", parts),))
    fields = {field: getattr(rules, field) for field in rules.__dataclass_fields__}
    faults = (Fault(gpu(0).uuid, Problem.LOST),) if sick else ()
    offer = offer_of(made(*places), gpu(1), faults=faults, **fields | {"mig": mig_rules})

    offered = resources(offer, NAMES, ())

    ids = [device.id for resource in offered.resources for device in resource.devices]
    assert len(ids) == len(set(ids))
    assert set(ids) == {id_ for device in offer.devices if (id_ := device_id(device))}
    for resource in offered.resources:
        assert list(resource.devices) == sorted(resource.devices, key=lambda device: device.id)
        for device in resource.devices[:4]:
            if device.healthy:
                allocation = given(resource.name, device.id)
                claim = allocation_claim(allocation, offer, NAMES, POOL)
                (result,) = claim.allocations
                allocated = offer.by_name[DeviceName(result.device)]
                assert device_id(allocated) == device.id
                assert resource_of(allocated, NAMES) == resource.name
            else:
                assert sick and uuid_of(device.id) != B


def test_ours_is_what_a_node_may_have_listed_under_some_profile():
    ours = ["nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.10gb.shared"]

    assert all(map(ResourceNames().include, ours))
    assert not any(map(ResourceNames().include, ["nvidia.com/pgpu", "cpu", ""]))
    assert not any(map(ResourceNames("", "", "").include, [*ours, ""]))


def test_the_example_of_a_uuid_is_true():
    assert doctest.testmod(resources_module).failed == 0
