"""What becomes of GPUs that can be cut: as a whole, in partitions, or in both."""

from dataclasses import replace
from typing import Any

import pytest

from dra_driver.model.gpus import DeviceName, GuestRestriction, Inventory, MigInfo, Version
from dra_driver.model.offer import (
    AdminAccess,
    ApiFeatures,
    Exclusive,
    Fractional,
    PendingChange,
    partition_name,
)
from dra_driver.model.profiles import (
    DEFAULT_PROFILE,
    GpuSelector,
    MigRules,
    Profile,
    ProfileEntry,
    Rules,
    SharingStrategy,
)
from dra_driver.model.records import Holding
from dra_driver.plan.mig.partitions import created_partitions, dynamic_profiles
from dra_driver.plan.offer.devices import build_offer
from dra_driver.plan.offer.slice_documents import published_devices
from dra_driver.plan.profiles.rules import decode_profile
from tests.builders import MIB, SLICEABLE, gpu, ref
from tests.plan.mig.boards import (
    dynamic,
    instance,
    key,
    mig,
    mig_gpu,
    partition,
    profile,
    unusable,
)

PLAIN = ("1g.5gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb")
HOPPER: dict[str, Any] = {"board": "h100-80-sxm"}
ON: dict[str, Any] = {"on": True, "pending": True}


def offer_of(*gpus, profile=DEFAULT_PROFILE, features=None, held=None, **fields):
    return build_offer(Inventory(gpus), profile, features or ApiFeatures(), held or {}, **fields)


def names(offered):
    return [str(device.name).replace("gpu-0-mig-", "") for device in offered.devices]


def kinds(offered):
    """The profiles of the partitions that are offered, each once."""
    return {device.partition.profile.name for device in offered.devices if device.partition}


def holding(device, **fields):
    """What a claim holds that was prepared of *device*."""
    defaults: dict[str, Any] = {
        "gpu": device.gpu.uuid,
        "shape": device.shape,
        "offered": device.offered,
        "partition": device.partition and device.partition.key,
        "created_for_claims": device.created_for_claims,
    }
    return {device.name: (Holding(ref("holder"), device.name, **defaults | fields),)}


def of(offered, part, start):
    """The device of one partition of the first GPU that has it."""
    return next(
        device
        for device in offered.devices
        if device.partition
        and (device.partition.profile.name, device.partition.placement.start) == (part, start)
    )


# Which profiles are allowed.


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        pytest.param((), set(PLAIN), id="plain ones, of two with one slice the smaller"),
        pytest.param(("1g.10gb",), {"1g.10gb"}, id="the one with double memory by its name"),
        pytest.param(("1g.*", "3g.20gb"), {"1g.5gb", "1g.5gb+me", "1g.10gb", "3g.20gb"}, id="some"),
        pytest.param(("9g.*",), set(), id="none of this board"),
    ],
)
def test_a_profile_allows_partitions_by_patterns(patterns, expected):
    assert {
        allowed.name for allowed in dynamic_profiles(mig(), MigRules(True, patterns))
    } == expected


def test_a_profile_without_a_place_is_not_offered():
    mig_info = mig()
    nowhere = replace(mig_info.profiles[0], placements=())

    assert "1g.5gb" not in {
        allowed.name
        for allowed in dynamic_profiles(
            replace(mig_info, profiles=(nowhere, *mig_info.profiles[1:])), MigRules(True)
        )
    }


def test_a_pattern_that_matches_nothing_on_this_node_is_told_with_what_there_is():
    node = (mig_gpu("a100-40", 0), mig_gpu("a100-80", 1), gpu(2))

    warnings = offer_of(*node, profile=dynamic("1g.5gb", "1g.20gb", "9g.*")).warnings

    assert (
        warnings[0]
        == "profile 'p', spec.gpus[0].mig: has no effect on gpu-2, which cannot be partitioned"
    )
    assert warnings[1].startswith(
        "profile 'p', spec.gpus[0].mig.profiles: '9g.*' matches no profile of NVIDIA a100-40, "
        "NVIDIA a100-80; there are: 1g.5gb, "
    )
    assert len(warnings) == 2


def test_why_a_gpu_cannot_be_cut_is_told_where_it_is_known():
    old = [replace(gpu(minor), mig_problem="the library is old") for minor in (1, 3)]

    offered = offer_of(gpu(0), *old, gpu(2), profile=dynamic("1g.5gb"))

    where = "profile 'p', spec.gpus[0].mig: has no effect on"
    assert offered.warnings == (
        f"{where} gpu-0, gpu-2, which cannot be partitioned",
        f"{where} gpu-1, gpu-3, which cannot be partitioned: the library is old",
    )
    assert (
        len([device for device in offered.devices if not isinstance(device.shape, AdminAccess)])
        == 4
    )


@pytest.mark.parametrize("rules", [dynamic("9g.*"), dynamic(single=True)], ids=["9g.*", "Single"])
def test_where_no_gpu_can_be_cut_neither_patterns_nor_single_are_told(rules):
    (note,) = offer_of(gpu(0), profile=rules).warnings

    assert "cannot be partitioned" in note


# Boards that change their mode without a reset.


@pytest.mark.parametrize("on", [True, False])
def test_a_hopper_is_offered_as_a_whole_and_in_partitions_whatever_its_mode_is_now(on):
    offered = offer_of(mig_gpu(**HOPPER | {"on": on}), profile=dynamic())

    assert names(offered) == [
        "gpu-0",
        *(f"1g10gb-19-{start}" for start in range(7)),
        *("2g20gb-14-0", "2g20gb-14-2", "2g20gb-14-4"),
        *("3g40gb-9-4", "3g40gb-9-0", "4g40gb-5-0", "7g80gb-0-0"),
        "gpu-0-mon",
    ]
    (counters,) = offered.counter_sets
    assert counters.name == "gpu-0-counter-set"
    whole, *partitions, monitor = offered.devices
    assert whole.takes == (("block-0-4", 4), ("block-4-4", 4))
    assert all(part.takes and part.created_for_claims for part in partitions)
    assert monitor.takes == ()
    assert {device.offered for device in offered.devices} == {
        ("1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb")
    }
    assert offered.pending == ()


def test_without_a_profile_that_says_so_nothing_is_cut_for_claims():
    offered = offer_of(mig_gpu(**HOPPER))

    assert names(offered) == ["gpu-0", "gpu-0-mon"]
    assert offered.counter_sets == ()
    assert {device.offered for device in offered.devices} == {()}


def test_partitions_of_gpus_that_cannot_be_taken_whole_are_tried_first():
    gpus = [mig_gpu(**HOPPER | {"minor": minor}) for minor in range(3)]
    gpus[1] = mig_gpu("h100-80-sxm", 1, instances=(instance(mig("h100-80-sxm"), "1g.10gb", 0),))

    offered = offer_of(*gpus, profile=dynamic("7g.*"))

    assert names(offered) == [
        "gpu-0",
        "gpu-2",
        "gpu-1-mig-1g10gb-19-0",
        "7g80gb-0-0",
        "gpu-2-mig-7g80gb-0-0",
        "gpu-0-mon",
        "gpu-1-mon",
        "gpu-2-mon",
    ]


# Boards that need a reset for it.


def test_an_a100_in_mig_mode_is_offered_in_partitions_only():
    offered = offer_of(mig_gpu(**ON), profile=dynamic("3g.*", "7g.*"))

    assert names(offered) == ["3g20gb-9-4", "3g20gb-9-0", "7g40gb-0-0", "gpu-0-mon"]
    assert offered.pending == ()


def test_a_board_of_a_virtual_machine_that_is_in_mig_mode_is_cut_as_any_other():
    passed_through = offer_of(
        mig_gpu(**ON, fixed=GuestRestriction.MODE), profile=dynamic("3g.*", "7g.*")
    )

    assert passed_through == replace(
        offer_of(mig_gpu(**ON), profile=dynamic("3g.*", "7g.*")), devices=passed_through.devices
    )
    assert names(passed_through) == ["3g20gb-9-4", "3g20gb-9-0", "7g40gb-0-0", "gpu-0-mon"]


@pytest.mark.parametrize("board", ["a100-40", "h100-80-sxm"])
def test_of_a_vgpu_what_is_cut_of_it_is_offered_and_nothing_else(board):
    mig_info = mig(board)
    name = next(listed.name for listed in mig_info.profiles if listed.slices == 3)
    there = instance(mig_info, name, 4)
    vgpu = mig_gpu(board, **ON, switches=False, fixed=GuestRestriction.ALL, instances=(there,))

    offered = offer_of(vgpu, profile=dynamic())

    assert [device.instance for device in offered.devices if device.partition] == [there]
    (pending,) = offered.pending
    assert pending.change == "the partitions that exist"
    assert "it is a vGPU: its partitions are chosen where" in pending.reason


@pytest.mark.parametrize(
    ("fixed", "what"),
    [
        (GuestRestriction.NOTHING, "nvidia-smi -i 0000:18:00.0 -mig 0"),
        (GuestRestriction.MODE, "nvidia-smi -i 0000:18:00.0 -mig 0 and a reboot"),
        (
            GuestRestriction.ALL,
            "it is a vGPU: its partitions are chosen where the vGPU is made",
        ),
    ],
)
def test_what_to_do_with_a_board_without_partitions_is_what_can_be_done_there(fixed, what):
    (unavailable,) = offer_of(mig_gpu(**ON, fixed=fixed), profile=DEFAULT_PROFILE).unavailable

    assert unavailable.reason.endswith(what)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        pytest.param({}, "MIG mode is off and is being switched", id="off"),
        pytest.param(
            {"pending": True},
            "MIG mode is off and is being switched",
            id="somebody, or a crash, left it pending",
        ),
        pytest.param(
            {"fixed": GuestRestriction.MODE},
            "MIG mode is off: it takes a reset, which this virtual machine cannot make; have it "
            "done on the host before the machine starts, or drain the node, run nvidia-smi -i "
            "0000:18:00.0 -mig 1 and reboot it",
            id="in a virtual machine",
        ),
        pytest.param(
            {"fixed": GuestRestriction.MODE, "pending": True},
            "MIG mode is off, and goes on when the virtual machine is rebooted",
            id="in a virtual machine, and pending",
        ),
        pytest.param({"fixed": GuestRestriction.ALL}, "it is a vGPU: its partitions", id="vGPU"),
    ],
)
def test_an_a100_out_of_mig_mode_is_offered_as_without_mig_and_says_why(fields, reason):
    offered = offer_of(mig_gpu(**fields), profile=dynamic())

    assert names(offered) == ["gpu-0", "gpu-0-mon"]
    (pending,) = offered.pending
    assert pending.change == "sliceable"
    assert pending.reason.startswith(f"profile 'p', spec.gpus[0]: {reason}")


# What keeps partitions from being cut.


@pytest.mark.parametrize(
    ("node_profile", "features", "reason"),
    [
        pytest.param(
            dynamic(), ApiFeatures(counters=False), "keeps no counters (KEP-4815", id="api"
        ),
        pytest.param(
            dynamic("9g.*"), ApiFeatures(), "none of the profiles that are allowed", id="none"
        ),
        pytest.param(
            profile(mig=MigRules(True), replicas=2),
            ApiFeatures(capacity=False),
            "its 2 replicas are devices of their own",
            id="replicas",
        ),
    ],
)
@pytest.mark.parametrize("board", ["h100-80-sxm", "a100-40"])
def test_where_nothing_keeps_partitions_apart_none_is_cut(board, node_profile, features, reason):
    offered = offer_of(mig_gpu(board), profile=node_profile, features=features)

    assert kinds(offered) == set()
    assert offered.counter_sets == ()
    assert any(reason in pending.reason for pending in offered.pending)


def test_a_gpu_in_mig_mode_without_partitions_is_not_offered_and_says_what_to_do():
    plain, cannot = (
        offer_of(
            mig_gpu(**ON), profile=node_profile, features=ApiFeatures(counters=False)
        ).unavailable
        for node_profile in (DEFAULT_PROFILE, dynamic())
    )

    assert "let a profile do that (mig: Dynamic)" in plain[0].reason
    assert plain[0].what == f"GPU 0000:18:00.0 ({gpu(0).uuid})"
    assert "the API server keeps no counters" in cannot[0].reason


# What somebody else cut.


def with_instances(board="h100-80-sxm", *parts, **fields):
    mig_info = mig(board)
    instances = tuple(instance(mig_info, *part) for part in parts)
    return mig_gpu(board, instances=instances, **ON | fields)


def test_instances_are_offered_without_counters_where_nothing_is_cut_for_claims():
    node_gpu = with_instances("a100-40", ("1g.5gb", 6), ("3g.20gb", 0))

    offered = offer_of(node_gpu, features=ApiFeatures(counters=False))

    assert names(offered) == ["1g5gb-19-6", "3g20gb-9-0", "gpu-0-mon"]
    first, *_ = offered.devices
    assert first.instance == node_gpu.mig.instances[0]
    assert not first.created_for_claims
    assert {device.takes for device in offered.devices} == {()}
    assert (offered.unavailable, offered.pending) == ((), ())


def test_an_instance_takes_the_place_of_its_placement_and_hides_what_overlaps_it():
    node_gpu = with_instances("h100-80-sxm", ("2g.20gb", 0))

    offered = offer_of(node_gpu, profile=dynamic())

    static = of(offered, "2g.20gb", 0)
    assert static.instance == node_gpu.mig.instances[0]
    assert [device.name for device in offered.devices].count(static.name) == 1
    assert "gpu-0" not in names(offered)
    hidden = {"1g10gb-19-0", "1g10gb-19-1", "3g40gb-9-0", "4g40gb-5-0", "7g80gb-0-0"}
    assert not hidden & set(names(offered))
    assert {"1g10gb-19-2", "2g20gb-14-2", "3g40gb-9-4"} <= set(names(offered))


def test_an_instance_of_a_claim_is_no_instance_of_somebody_else():
    node_gpu = with_instances("h100-80-sxm", ("2g.20gb", 0))
    ours = frozenset({(node_gpu.uuid, node_gpu.mig.instances[0].key)})
    other = frozenset({(gpu(1).uuid, node_gpu.mig.instances[0].key)})

    while_looking = offer_of(node_gpu, profile=dynamic(), ours=ours)
    held = offer_of(node_gpu, profile=dynamic(), held=holding(of(while_looking, "2g.20gb", 0)))

    assert of(while_looking, "2g.20gb", 0).created_for_claims
    assert (
        names(held) == names(while_looking) == names(offer_of(mig_gpu(**HOPPER), profile=dynamic()))
    )
    assert not of(
        offer_of(node_gpu, profile=dynamic(), ours=other), "2g.20gb", 0
    ).created_for_claims


def test_an_instance_that_a_claim_holds_and_did_not_have_cut_stays_somebody_elses():
    node_gpu = with_instances("h100-80-sxm", ("2g.20gb", 0))
    static = of(offer_of(node_gpu, profile=dynamic()), "2g.20gb", 0)

    offered = offer_of(node_gpu, profile=dynamic(), held=holding(static))

    assert not of(offered, "2g.20gb", 0).created_for_claims
    assert created_partitions(holding(static)) == frozenset()


def test_an_odd_instance_hides_what_overlaps_it_is_not_offered_and_says_what_to_do():
    strange = unusable(mig("h100-80-sxm"), "3g.40gb", 4)

    offered = offer_of(mig_gpu("h100-80-sxm", unusable=(strange,), **ON), profile=dynamic())

    assert {
        device.partition.placement.end <= 4 for device in offered.devices if device.partition
    } == {True}
    assert "gpu-0" not in names(offered)
    (unavailable,) = offered.unavailable
    assert unavailable.what.startswith("GPU instance 9 of GPU 0000:18:00.0")
    assert unavailable.reason.startswith("it has no compute instances, and none that fills it; ")


def test_an_odd_instance_that_is_being_cut_for_a_claim_is_nobodys_fault():
    strange = unusable(mig("h100-80-sxm"), "3g.40gb", 4)
    node_gpu = mig_gpu("h100-80-sxm", unusable=(strange,), **ON)

    offered = offer_of(node_gpu, profile=dynamic(), ours=frozenset({(node_gpu.uuid, strange.key)}))

    assert names(offered) == names(offer_of(mig_gpu(**HOPPER), profile=dynamic()))
    assert offered.unavailable == ()


def test_an_instance_of_a_profile_that_the_board_does_not_list_is_odd():
    mig_info = mig("h100-80-sxm")
    strange = instance(mig_info, "1g.10gb", 0)
    strange = replace(strange, key=replace(strange.key, profile_id=77))

    offered = offer_of(mig_gpu("h100-80-sxm", instances=(strange,), **ON))

    assert offered.devices == ()
    assert (
        "it has 1 compute instance, and none that fills it and has a name; "
        in offered.unavailable[1].reason
    )


# Shapes.


def test_partitions_are_sliceable_within_their_own_memory():
    shape = of(offer_of(mig_gpu(**HOPPER), profile=dynamic()), "1g.10gb", 0).shape

    assert shape == Fractional(10000 * MIB, 1024 * MIB, MIB, shares=6)


@pytest.mark.parametrize(
    ("board", "cuda", "expected"),
    [
        pytest.param("a100-40", 13, {1: 6, 2: 13, 3: 20, 4: 27, 7: 48}, id="sevenths"),
        pytest.param("a30-24", 13, {1: 12, 2: 24, 4: 48}, id="quarters"),
        pytest.param("h100-80-sxm", 14, {1: 8, 2: 17, 3: 25, 4: 34, 7: 60}, id="newer driver"),
    ],
)
def test_a_partition_takes_as_many_claims_as_mps_takes_clients_on_its_compute_slices(
    board, cuda, expected
):
    node_gpu = replace(mig_gpu(board, **ON), cuda_driver_version=Version(cuda))

    offered = offer_of(node_gpu, profile=dynamic())

    assert {
        device.partition.profile.slices: device.shape.shares
        for device in offered.devices
        if device.partition
    } == expected
    assert offered.warnings == ()


def test_where_the_profile_wants_more_claims_on_a_partition_than_mps_takes_a_note_says_so():
    offered = offer_of(mig_gpu(**HOPPER), gpu(1), profile=dynamic("1g.10gb", "4g.40gb", shares=16))

    assert of(offered, "1g.10gb", 0).shape.shares == 6
    assert of(offered, "4g.40gb", 0).shape.shares == 16
    assert {device.shape.shares for device in offered.devices[:2]} == {16}
    assert offered.warnings[1:] == (
        "profile 'p', spec.gpus[0].shares: MPS takes fewer clients in a partition, so at most so "
        "many claims share one: 6 in 1g.10gb",
    )


@pytest.mark.parametrize(
    ("fields", "shares"),
    [
        pytest.param(
            {"shares": 16, "strategies": (SharingStrategy.TIME_SLICING,)}, 16, id="taking turns"
        ),
        pytest.param({"shares": 4}, 4, id="fewer than MPS takes"),
        pytest.param({"shares": 16, "replicas": (("1g.10gb", 6),)}, 6, id="replicas"),
    ],
)
def test_where_mps_takes_as_many_clients_shares_of_partitions_are_as_the_profile_says(
    fields, shares
):
    offered = offer_of(mig_gpu(**HOPPER), profile=dynamic("1g.10gb", **fields))

    assert of(offered, "1g.10gb", 0).shape.shares == shares
    assert offered.warnings == ()


def test_more_replicas_than_mps_takes_clients_take_turns_and_a_note_says_which():
    replicas = (("1g.10gb", 7), ("2g.20gb", 9), ("3g.40gb", 30))

    offered = offer_of(mig_gpu(**HOPPER), profile=dynamic(replicas=replicas))

    assert of(offered, "1g.10gb", 0).shape.shares == 7
    assert offered.pending == ()
    assert offered.warnings == (
        "profile 'p', spec.gpus[0].mig.replicas: 7 replicas of 1g.10gb can take turns, and MPS, "
        "which claims may ask for, takes 6 clients there; lower them to 6, or leave MPS out of "
        "strategies",
        "profile 'p', spec.gpus[0].mig.replicas: 30 replicas of 3g.40gb can take turns, and MPS, "
        "which claims may ask for, takes 20 clients there; lower them to 20, or leave MPS out of "
        "strategies",
    )


def test_where_nobody_may_use_mps_as_many_take_turns_as_the_profile_says():
    node_profile = dynamic(replicas=(("1g.10gb", 7),), strategies=(SharingStrategy.TIME_SLICING,))

    offered = offer_of(mig_gpu(**HOPPER), profile=node_profile)

    assert of(offered, "1g.10gb", 0).shape.shares == 7
    assert offered.warnings == ()


def test_where_only_the_driver_may_limit_memory_partitions_are_whole_and_a_note_says_why():
    offered = offer_of(mig_gpu(**HOPPER), profile=dynamic(strict=True))

    partitions = {type(device.shape) for device in offered.devices if device.partition}
    assert partitions == {Exclusive}
    assert isinstance(offered.devices[0].shape, Fractional)
    assert offered.pending == ()
    assert offered.warnings == (
        "profile 'p', spec.gpus[0].memoryLimit: Strict has each partition given out whole, since "
        "the GPU's driver limits no part of one; to share partitions, write BestEffort",
    )


@pytest.mark.parametrize(
    ("node", "fields", "noted"),
    [
        pytest.param(mig_gpu(), {"dynamic": True}, True, id="a board that is yet to be switched"),
        pytest.param(mig_gpu(), {}, False, id="a board that nobody cuts"),
        pytest.param(gpu(0), {"dynamic": True}, False, id="one that cannot be partitioned"),
    ],
)
def test_that_partitions_are_whole_is_told_where_there_are_or_will_be_some(node, fields, noted):
    node_profile = profile(strict=True, mig=MigRules(**fields))

    assert (
        any("given out whole" in note for note in offer_of(node, profile=node_profile).warnings)
        is noted
    )


def test_where_all_is_given_out_whole_a_limit_by_the_driver_makes_no_difference():
    assert offer_of(mig_gpu(**HOPPER), profile=dynamic(strict=True, fractions=False)).warnings == ()


def test_replicas_of_what_is_not_cut_are_told():
    node_profile = dynamic(replicas=(("1g.10gb", 2), ("1g.20gb", 2), ("9g.90gb", 2)))

    warnings = offer_of(mig_gpu(**HOPPER), profile=node_profile).warnings

    assert warnings[0].startswith("profile 'p', spec.gpus[0].mig.replicas: '9g.90gb' matches no")
    assert warnings[1:] == (
        "profile 'p', spec.gpus[0].mig.replicas: '1g.20gb' is divided nowhere, since no such "
        "partitions are created; add it to mig.profiles, which names what is created, or remove "
        "it here",
    )


def test_replicas_of_what_somebody_has_cut_divide_that():
    there = instance(mig("h100-80-sxm"), "1g.20gb", 0)
    node_profile = dynamic("3g.40gb", replicas=(("1g.20gb", 2),))

    offered = offer_of(mig_gpu(**HOPPER, **ON, instances=(there,)), profile=node_profile)

    assert of(offered, "1g.20gb", 0).shape.shares == 2
    assert offered.warnings == ()


def test_replicas_of_partitions_are_said_by_profile_and_not_those_of_gpus():
    node_profile = dynamic(replicas=(("1g.10gb", 4),))
    more = replace(node_profile.entries[0].rules, replicas=2, rename=True)

    offered = offer_of(
        mig_gpu(**HOPPER), profile=Profile("p", (replace(node_profile.entries[0], rules=more),))
    )

    smaller, larger = of(offered, "1g.10gb", 0).shape, of(offered, "2g.20gb", 0).shape
    assert (smaller.memory_default, smaller.shares, smaller.replicas) == (2500 * MIB, 4, 4)
    assert (larger.replicas, larger.renamed, smaller.renamed) == (1, False, False)
    assert offered.devices[0].shape.replicas == 2


@pytest.mark.parametrize(
    ("node_profile", "features"),
    [
        pytest.param(dynamic(fractions=False), ApiFeatures(), id="fractions-never"),
        pytest.param(dynamic(), ApiFeatures(capacity=False), id="no-capacity"),
    ],
)
def test_partitions_are_exclusive_where_gpus_are(node_profile, features):
    offered = offer_of(mig_gpu(**HOPPER), profile=node_profile, features=features)

    shapes = {type(device.shape) for device in offered.devices}
    assert shapes == {Exclusive, AdminAccess}  # counters refuse who looks on at what is in use
    assert offered.pending == ()


@pytest.mark.parametrize(
    ("node_profile", "features", "reason"),
    [
        pytest.param(
            dynamic("1g.10gb", replicas=(("1g.10gb", 4),)),
            ApiFeatures(capacity=False),
            "partitions 1g.10gb: replicas of a partition need consumable capacity",
            id="no-capacity",
        ),
        pytest.param(
            dynamic("1g.10gb", memory_least=40 * 1024 * MIB),
            ApiFeatures(),
            "partitions 1g.10gb: the least share of 40960Mi leaves no room for another in its "
            "10000Mi; lower memory.least",
            id="least",
        ),
        pytest.param(
            dynamic("1g.10gb", memory_step=16 * 1024 * MIB),
            ApiFeatures(),
            "partitions 1g.10gb: all of its 10000Mi is less than a step of 16384Mi; lower "
            "memory.step",
            id="step",
        ),
        pytest.param(
            dynamic("1g.10gb", replicas=(("1g.10gb", 7),), default_strategy=SharingStrategy.MPS),
            ApiFeatures(),
            "partitions 1g.10gb: 7 replicas share by MPS, which takes 6 clients on partitions of "
            "1g.10gb; lower replicas to 6 at most",
            id="clients",
        ),
    ],
)
def test_partitions_that_cannot_be_published_as_the_profile_says_are_exclusive(
    node_profile, features, reason
):
    offered = offer_of(mig_gpu(**HOPPER), profile=node_profile, features=features)

    assert of(offered, "1g.10gb", 0).shape == Exclusive()
    (pending,) = offered.pending
    assert pending.reason.startswith(f"profile 'p', spec.gpus[0]: {reason}")
    assert "and partitions created for claims (1g.10gb)" in pending.change


def test_monitors_need_taints():
    assert "gpu-0-mon" not in names(
        offer_of(mig_gpu(**ON), profile=dynamic(), features=ApiFeatures(device_taints=False))
    )


# While claims hold it.


def test_a_held_gpu_keeps_its_partitions_until_nobody_holds_it():
    before = offer_of(mig_gpu(**HOPPER), profile=dynamic("1g.10gb", "3g.40gb"))
    held = holding(of(before, "3g.40gb", 4))

    offered = offer_of(mig_gpu(**HOPPER), profile=dynamic("2g.20gb"), held=held)

    assert names(offered) == names(before)
    assert offered.counter_sets == before.counter_sets
    assert offered.pending == (
        PendingChange(DeviceName("gpu-0"), "sliceable and partitions created for claims (2g.20gb)"),
    )


@pytest.mark.parametrize(
    ("node_profile", "change"),
    [
        pytest.param(DEFAULT_PROFILE, "sliceable", id="off"),
        pytest.param(profile(include=False), "left out", id="left out"),
    ],
)
def test_a_held_gpu_goes_on_being_cut_until_nobody_holds_it(node_profile, change):
    before = offer_of(mig_gpu(**HOPPER), profile=dynamic())

    offered = offer_of(mig_gpu(**HOPPER), profile=node_profile, held=holding(before.devices[0]))

    assert names(offered) == names(before)
    assert offered.pending == (PendingChange(DeviceName("gpu-0"), change),)


def test_a_gpu_that_was_held_before_it_could_be_cut_is_not_cut_meanwhile():
    before = offer_of(mig_gpu(**HOPPER))

    offered = offer_of(mig_gpu(**HOPPER), profile=dynamic("1g.*"), held=holding(before.devices[0]))

    assert names(offered) == ["gpu-0", "gpu-0-mon"]
    assert offered.pending[0].change.startswith(
        "sliceable and partitions created for claims (1g.10gb,"
    )


def test_a_partition_that_is_held_keeps_its_shape_and_the_others_follow_the_profile():
    before = offer_of(mig_gpu(**HOPPER), profile=dynamic())
    held = holding(of(before, "1g.10gb", 0))

    offered = offer_of(mig_gpu(**HOPPER), profile=dynamic(fractions=False), held=held)

    assert of(offered, "1g.10gb", 0).shape == of(before, "1g.10gb", 0).shape
    assert of(offered, "1g.10gb", 1).shape == Exclusive()


def test_without_mps_a_held_partition_reserves_no_cores_for_the_next_claim():
    node_profile = dynamic(replicas=(("1g.10gb", 4),), default_strategy=SharingStrategy.MPS)
    before = of(offer_of(mig_gpu(**HOPPER), profile=node_profile), "1g.10gb", 0)

    offered = offer_of(mig_gpu(**HOPPER), profile=node_profile, held=holding(before), mps=False)

    assert before.shape.cores_default == 25
    assert of(offered, "1g.10gb", 0).shape == replace(before.shape, cores_default=0)


def test_what_is_held_stays_alone_where_the_api_server_drops_counters_now():
    before = offer_of(mig_gpu(**HOPPER), profile=dynamic())
    partition_held = holding(of(before, "3g.40gb", 4))
    whole_held = holding(before.devices[0])
    lost = ApiFeatures(counters=False)

    offered_now = offer_of(mig_gpu(**HOPPER), profile=dynamic(), features=lost, held=partition_held)
    whole = offer_of(mig_gpu(**HOPPER), profile=dynamic(), features=lost, held=whole_held)

    assert names(offered_now) == ["3g40gb-9-4", "gpu-0-mon"]
    assert names(whole) == ["gpu-0", "gpu-0-mon"]
    assert (offered_now.counter_sets, whole.counter_sets) == ((), ())


def test_a_held_partition_stays_where_somebody_elses_instance_is_now():
    before = offer_of(mig_gpu(**HOPPER), profile=dynamic())
    held = holding(of(before, "1g.10gb", 0))

    offered = offer_of(with_instances("h100-80-sxm", ("2g.20gb", 0)), profile=dynamic(), held=held)

    assert {"1g10gb-19-0", "2g20gb-14-0"} <= set(names(offered))
    assert "gpu-0" not in names(offered)
    assert "block-0-2" in dict(of(offered, "1g.10gb", 0).takes)
    assert ("block-0-2", 2) in of(offered, "2g.20gb", 0).takes


def test_a_whole_gpu_that_is_held_stays_and_takes_all_beside_what_somebody_else_cut():
    before = offer_of(mig_gpu(**HOPPER), profile=dynamic())

    offered = offer_of(
        with_instances("h100-80-sxm", ("2g.20gb", 0)),
        profile=dynamic(),
        held=holding(before.devices[0]),
    )

    assert names(offered)[0] == "gpu-0"
    assert of(offered, "2g.20gb", 0).takes


def test_without_counters_a_whole_gpu_that_is_held_hides_what_somebody_else_cut():
    before = offer_of(mig_gpu(**HOPPER))

    offered = offer_of(
        with_instances("h100-80-sxm", ("2g.20gb", 0)), held=holding(before.devices[0])
    )

    assert names(offered) == ["gpu-0", "gpu-0-mon"]


def test_a_held_a100_that_lost_its_mode_is_not_offered_as_a_whole():
    before = offer_of(mig_gpu(**ON), profile=dynamic())
    held = holding(of(before, "1g.5gb", 0))

    assert names(offer_of(mig_gpu(), profile=dynamic(), held=held)) == names(before)
    assert "gpu-0" not in names(
        offer_of(mig_gpu(), profile=dynamic(), features=ApiFeatures(counters=False), held=held)
    )


def test_who_only_looks_on_keeps_nothing_as_it_is():
    before = offer_of(mig_gpu(**HOPPER), profile=dynamic())
    held = holding(before.devices[-1], admin=True)

    assert names(offer_of(mig_gpu(**HOPPER), held=held)) == ["gpu-0", "gpu-0-mon"]


def test_a_held_partition_of_a_gpu_that_cannot_be_cut_any_more_is_gone():
    before = offer_of(mig_gpu(**HOPPER), profile=dynamic())

    offered = offer_of(gpu(0), profile=dynamic(), held=holding(of(before, "1g.10gb", 0)))

    assert names(offered) == ["gpu-0", "gpu-0-mon"]
    assert offered.devices[0].shape == SLICEABLE


# Partitions that serve claims for a GPU.


SINGLE = profile(mig=MigRules(single=True))


def in_instances(minor, *parts):
    """A GPU that somebody cut into these."""
    there = tuple(instance(mig(), part, start, gi) for gi, (part, start) in enumerate(parts))
    return mig_gpu(minor=minor, **ON, instances=there)


def test_partitions_of_one_kind_that_exist_serve_claims_for_a_gpu_where_the_profile_says_so():
    node = (
        in_instances(0, ("3g.20gb", 0), ("3g.20gb", 4)),
        in_instances(1, ("3g.20gb", 4)),
        mig_gpu(minor=2),
    )

    offered = offer_of(*node, profile=SINGLE)

    assert [device.as_gpu for device in offered.devices if device.partition] == [True] * 3
    assert {device.as_gpu for device in offered.devices if not device.partition} == {False}
    assert offered.warnings == ()


def test_partitions_of_several_kinds_serve_no_claims_for_a_gpu():
    node = (in_instances(0, ("1g.5gb", 0), ("3g.20gb", 4)), in_instances(1, ("3g.20gb", 4)))

    offered = offer_of(*node, profile=SINGLE)

    assert not any(device.as_gpu for device in offered.devices)
    assert offered.warnings == (
        "profile 'p', spec.gpus[0].mig.strategy: Single has no effect, since there are partitions "
        "of several kinds: 1g.5gb on gpu-0, 3g.20gb on gpu-0, gpu-1; have GPUs partitioned into "
        "one kind only, by mig.layout or the node's label nvidia.com/mig.config: for example "
        "all-1g.5gb",
    )


def test_where_the_layout_of_the_profile_makes_several_kinds_it_is_named_in_each_entry():
    mixed = MigRules(single=True, layout="all-balanced")
    entries = (
        ProfileEntry(GpuSelector(minors=frozenset({0})), Rules(mig=mixed), "spec.gpus[0]"),
        ProfileEntry(GpuSelector(), Rules(mig=MigRules(single=True)), "spec.gpus[1]"),
    )
    node = (in_instances(0, ("1g.5gb+me", 0)), in_instances(1, ("3g.20gb", 4)), mig_gpu(minor=2))

    first, second = offer_of(*node, profile=Profile("p", entries)).warnings

    assert first.startswith("profile 'p', spec.gpus[0].mig.strategy: Single has no effect, since")
    assert "by mig.layout (now 'all-balanced') or the node's label" in first
    assert first.endswith("for example all-1g.5gb.me")
    assert second.startswith("profile 'p', spec.gpus[1].mig.strategy: Single has no effect, since")
    assert "now" not in second


def test_partitions_that_are_cut_for_claims_serve_none_for_a_gpu_and_a_note_says_so():
    """They have no UUID before they are cut, and beside them there are whole GPUs to be had."""
    mine = in_instances(0, ("3g.20gb", 0))

    offered = offer_of(mine, gpu(1), profile=dynamic("1g.5gb", single=True))

    serving = [device for device in offered.devices if device.as_gpu]
    assert [partition.instance for partition in serving] == [*mine.mig.instances]
    assert len([device for device in offered.devices if device.created_for_claims]) == 3
    assert offered.warnings == (
        "profile 'p', spec.gpus[0].mig: has no effect on gpu-1, which cannot be partitioned",
        "profile 'p', spec.gpus[0].mig.strategy: Single has no effect on partitions that are "
        "created for claims; only those that exist serve claims for a GPU: have them created by a "
        "layout",
    )


def test_what_serves_claims_for_a_gpu_has_a_uuid_that_selectors_can_read():
    offered = offer_of(in_instances(0, ("3g.20gb", 0)), profile=SINGLE)

    (published,) = [
        device for device in published_devices(offered) if "asGpu" in device["attributes"]
    ]
    assert published["attributes"]["uuid"] == {"string": "MIG-9-0"}


def test_gpus_with_other_rules_do_not_count_for_that():
    entries = (
        ProfileEntry(
            GpuSelector(minors=frozenset({0})), Rules(mig=MigRules(single=True)), "spec.gpus[0]"
        ),
        ProfileEntry(GpuSelector(), Rules(), "spec.gpus[1]"),
    )
    node = (in_instances(0, ("3g.20gb", 4)), in_instances(1, ("1g.5gb", 0)))

    offered = offer_of(*node, profile=Profile("p", entries))

    assert {str(device.gpu.name) for device in offered.devices if device.as_gpu} == {"gpu-0"}


def test_the_names_of_partitions_are_those_of_nvidias_driver():
    mig_info = mig("rtx-pro-6000-96")
    two = partition(mig_info, "1g.24gb+me.all", 3)

    assert partition_name(gpu(3), two) == "gpu-3-mig-1g24gb-meall-65-3"
    assert partition_name(gpu(0), partition(mig(), "1g.5gb", 6)) == "gpu-0-mig-1g5gb-19-6"


def test_keys_find_their_partition_again():
    mig_info: MigInfo = mig()

    assert mig_info.partition(key(mig_info, "3g.20gb", 4)) == partition(mig_info, "3g.20gb", 4)


def test_a_strategy_that_nothing_is_there_for_is_told():
    offered = offer_of(mig_gpu(minor=0), gpu(1), profile=SINGLE)

    assert offered.warnings == (
        "profile 'p', spec.gpus[0].mig: has no effect on gpu-1, which cannot be partitioned",
        "profile 'p', spec.gpus[0].mig.strategy: Single has no effect while no partitions exist; "
        "have them created by a layout (mig.layout, or the node's label nvidia.com/mig.config)",
    )


def test_replicas_of_partitions_that_there_cannot_be_are_told():
    node_profile = profile(mig=MigRules(replicas=(("1g.10gb", 4), ("9g.90gb", 2))))

    (note,) = offer_of(mig_gpu(), profile=node_profile).warnings

    assert note.startswith("profile 'p', spec.gpus[0].mig.replicas: '9g.90gb' matches no profile")


def test_a_kind_that_a_file_of_the_device_plugin_names_is_told_under_the_field_that_names_it():
    names_of = ("gpu", "mig-1g.5gb", "mig-9g.90gb")
    resources = [{"name": f"nvidia.com/{name}", "replicas": 2} for name in names_of]
    node_profile = decode_profile({"sharing": {"timeSlicing": {"resources": resources}}}, "p")

    solid, unknown = offer_of(mig_gpu(), gpu(1), profile=node_profile).warnings

    where = "profile 'p', sharing.timeSlicing.resources"
    assert unknown.startswith(f"{where}[2].name: '9g.90gb' matches no profile of NVIDIA a100-40")
    assert solid == (
        f"{where}[1].name, sharing.timeSlicing.resources[2].name: has no effect on gpu-1, which "
        "cannot be partitioned"
    )


@pytest.mark.parametrize(
    ("starts", "change"),
    [
        pytest.param((0,), "sliceable", id="whole, where its mode goes with its last claim"),
        pytest.param((0, 3), "the partitions that exist", id="where somebody else has cut it too"),
    ],
)
def test_what_a_held_gpu_will_offer_depends_on_who_has_cut_it(starts, change):
    before = offer_of(mig_gpu(**HOPPER), profile=dynamic("1g.10gb"))
    held = holding(of(before, "1g.10gb", 0))
    instances = tuple(instance(mig("h100-80-sxm"), "1g.10gb", start) for start in starts)

    offered = offer_of(mig_gpu(**HOPPER, **ON, instances=instances), held=held)

    assert offered.pending == (PendingChange(DeviceName("gpu-0"), change),)
