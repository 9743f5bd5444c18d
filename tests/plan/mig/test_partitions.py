"""What becomes of GPUs that can be partitioned: as a whole, in partitions, or in both."""

from dataclasses import replace
from typing import Any

import pytest

from dra_driver.model.gpus import DeviceName, GuestRestriction, Inventory, Version
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
from tests.plan.mig.boards import dynamic, instance, key, mig, mig_gpu, partition, profile, unusable

PLAIN = {"1g.5gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"}
H100 = "h100-80-sxm"
HOPPER = mig_gpu(H100)
WHOLE = ["gpu-0", "gpu-0-mon"]
NO_COUNTERS, NO_CAPACITY = ApiFeatures(counters=False), ApiFeatures(capacity=False)
TURNS, MPS = SharingStrategy.TIME_SLICING, SharingStrategy.MPS


def offer_of(*gpus, profile=None, features=None, held=None, **fields):
    """As a profile says that has partitions created for claims, unless it is given."""
    return build_offer(
        Inventory(gpus), profile or dynamic(), features or ApiFeatures(), held or {}, **fields
    )


def names(offered):
    return [str(device.name).replace("gpu-0-mig-", "") for device in offered.devices]


def partitions(offered):
    return [device for device in offered.devices if device.partition]


def holding(device, **fields):
    """What a claim holds that was prepared with *device*."""
    defaults: dict[str, Any] = {
        "gpu": device.gpu.uuid,
        "shape": device.shape,
        "offered": device.offered,
        "partition": device.partition and device.partition.key,
        "created_for_claims": device.created_for_claims,
    }
    return {device.gpu.uuid: (Holding(ref("holder"), device.name, **defaults | fields),)}


def of(offered, name, start=0):
    """The device of one partition of the first GPU that has it."""
    place = name, start
    return next(
        device
        for device in partitions(offered)
        if (device.partition.profile.name, device.partition.placement.start) == place
    )


def with_instances(*parts, board=H100, minor=0, **fields):
    """A GPU of which somebody created these partitions."""
    instances = tuple(
        instance(mig(board), name, start, gi) for gi, (name, start) in enumerate(parts)
    )
    return mig_gpu(board, minor, instances=instances, **{"on": True} | fields)


# Which profiles are allowed.


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        pytest.param((), PLAIN, id="plain ones, of two with one slice the smaller"),
        pytest.param(("1g.10gb",), {"1g.10gb"}, id="the one with double memory by its name"),
        pytest.param(("1g.*", "3g.20gb"), {"1g.5gb", "1g.5gb+me", "1g.10gb", "3g.20gb"}, id="some"),
        pytest.param(("9g.*",), set(), id="none of this board"),
    ],
)
def test_a_profile_allows_partitions_by_patterns(patterns, expected):
    allowed = dynamic_profiles(mig(), MigRules(True, patterns))

    assert {mig_profile.name for mig_profile in allowed} == expected


def test_a_profile_without_a_placement_is_not_offered():
    mig_info = mig()
    nowhere = replace(mig_info.profiles[0], placements=())
    profiles = (nowhere, *mig_info.profiles[1:])

    allowed = dynamic_profiles(replace(mig_info, profiles=profiles), MigRules(True))

    assert "1g.5gb" not in {mig_profile.name for mig_profile in allowed}


# Rules that hold, and those that do not.


def lines(*ends, entry=0):
    return [f"profile 'p', spec.gpus[{entry}].{end}" for end in ends]


NO_MIG = "mig: has no effect on {}, which cannot be partitioned"
SINGLE = profile(mig=MigRules(single=True))
OLD = [replace(gpu(minor), mig_problem="the library is old") for minor in (1, 3)]
HALVES = with_instances(("3g.20gb", 0), ("3g.20gb", 4), board="a100-40")
SMALL = with_instances(("1g.5gb", 0), ("3g.20gb", 4), board="a100-40")
HALF = with_instances(("3g.20gb", 4), board="a100-40", minor=1)
MIXED = Profile(
    "p",
    tuple(
        ProfileEntry(selector, Rules(mig=MigRules(single=True, layout=layout)), f"spec.gpus[{n}]")
        for n, (selector, layout) in enumerate(
            [(GpuSelector(minors=frozenset({0})), "all-balanced"), (GpuSelector(), "")]
        )
    ),
)
TWICE = Profile(
    "p",
    tuple(
        ProfileEntry(selector, Rules(mig=MigRules(single=True)), f"spec.gpus[{n}]")
        for n, selector in enumerate([GpuSelector(minors=frozenset({0})), GpuSelector()])
    ),
)
KINDS = "mig.strategy: Single has no effect, since there are partitions of several kinds: "
STRICT = (
    "memoryLimit: Strict has each partition given out whole, since the GPU's driver limits no part "
    "of one; to share partitions, write BestEffort"
)


@pytest.mark.parametrize(
    ("node", "node_profile", "warnings"),
    [
        pytest.param(
            [mig_gpu("a100-40", 0), mig_gpu("a100-80", 1), gpu(2)],
            dynamic("1g.5gb", "1g.20gb", "9g.*"),
            lines(
                NO_MIG.format("gpu-2"),
                "mig.profiles: '9g.*' matches no profile of NVIDIA a100-40, NVIDIA a100-80; "
                "there are: 1g.5gb, ",
            ),
            id="a pattern that matches nothing, and what there is",
        ),
        pytest.param(
            [gpu(0), OLD[0], gpu(2), OLD[1]],
            dynamic("1g.5gb"),
            lines(
                NO_MIG.format("gpu-0, gpu-2"),
                NO_MIG.format("gpu-1, gpu-3") + ": the library is old",
            ),
            id="why GPUs cannot be partitioned, where it is known",
        ),
        pytest.param(
            [gpu(0)], dynamic("9g.*"), lines(NO_MIG.format("gpu-0")), id="no GPU: no pattern"
        ),
        pytest.param(
            [gpu(0)], dynamic(single=True), lines(NO_MIG.format("gpu-0")), id="no GPU: no Single"
        ),
        pytest.param(
            [HOPPER], dynamic(strict=True), lines(STRICT), id="the driver limits no part of one"
        ),
        pytest.param(
            [mig_gpu()],
            dynamic(strict=True),
            lines(STRICT),
            id="nor on a board that is yet to be switched",
        ),
        pytest.param([mig_gpu()], profile(strict=True), [], id="limits, and no partitions"),
        pytest.param(
            [gpu(0)], dynamic(strict=True), lines(NO_MIG.format("gpu-0")), id="limits, and no MIG"
        ),
        pytest.param(
            [HOPPER], dynamic(strict=True, fractions=False), [], id="all is given out whole anyway"
        ),
        pytest.param(
            [HOPPER],
            dynamic(replicas=(("1g.10gb", 2), ("1g.20gb", 2), ("9g.90gb", 2))),
            lines(
                "mig.replicas: '9g.90gb' matches no",
                "mig.replicas: '1g.20gb' is divided nowhere, since no such partitions are created; "
                "add it to mig.profiles, which names what is created, or remove it here",
            ),
            id="replicas of what is not created",
        ),
        pytest.param(
            [mig_gpu()],
            profile(mig=MigRules(replicas=(("1g.10gb", 4), ("9g.90gb", 2)))),
            lines("mig.replicas: '9g.90gb' matches no profile"),
            id="replicas of what there cannot be",
        ),
        pytest.param([HALVES, HALF, mig_gpu(minor=2)], SINGLE, [], id="Single, and one kind"),
        pytest.param(
            [SMALL, HALF],
            SINGLE,
            lines(
                f"{KINDS}1g.5gb on gpu-0, 3g.20gb on gpu-0, gpu-1; have GPUs partitioned into one "
                "kind only, by mig.layout or the node's label nvidia.com/mig.config: for example "
                "all-1g.5gb"
            ),
            id="Single, and several kinds",
        ),
        pytest.param(
            [SMALL, HALF],
            TWICE,
            lines(KINDS.replace(":", " and 1 more:", 1) + "1g.5gb on gpu-0, 3g.20gb on gpu-0"),
            id="Single, and several kinds, in two entries",
        ),
        pytest.param(
            [with_instances(("1g.5gb+me", 0), board="a100-40"), HALF, mig_gpu(minor=2)],
            MIXED,
            [
                *lines(
                    f"{KINDS}1g.5gb+me on gpu-0, 3g.20gb on gpu-1; have GPUs partitioned into one "
                    "kind only, by mig.layout (now 'all-balanced') or the node's label "
                    "nvidia.com/mig.config: for example all-1g.5gb.me"
                ),
                *lines(
                    f"{KINDS}1g.5gb+me on gpu-0, 3g.20gb on gpu-1; have GPUs partitioned into one "
                    "kind only, by mig.layout or the",
                    entry=1,
                ),
            ],
            id="Single, and several kinds by the layout of the profile, in each entry",
        ),
        pytest.param(
            [mig_gpu(), gpu(1)],
            SINGLE,
            lines(
                NO_MIG.format("gpu-1"),
                "mig.strategy: Single has no effect while no partitions exist; have them created "
                "by a layout (mig.layout, or the node's label nvidia.com/mig.config)",
            ),
            id="Single, and nothing exists",
        ),
        pytest.param(
            [HALVES, gpu(1)],
            dynamic("1g.5gb", single=True),
            lines(
                NO_MIG.format("gpu-1"),
                "mig.strategy: Single has no effect on partitions that are created for claims; "
                "only those that exist serve claims for a GPU: have them created by a layout",
            ),
            id="Single, and partitions that are created for claims",
        ),
    ],
)
def test_rules_that_have_no_effect_are_warned_of(node, node_profile, warnings):
    offered = offer_of(*node, profile=node_profile)

    assert len(offered.warnings) == len(warnings)
    assert [
        line[: len(start)] for line, start in zip(offered.warnings, warnings, strict=True)
    ] == warnings


def test_a_warning_about_a_file_of_the_device_plugin_names_the_field_of_the_file():
    resources = [
        {"name": f"nvidia.com/{name}", "replicas": 2}
        for name in ("gpu", "mig-1g.5gb", "mig-9g.90gb")
    ]
    node_profile = decode_profile({"sharing": {"timeSlicing": {"resources": resources}}}, "p")

    without_mig, unknown = offer_of(mig_gpu(), gpu(1), profile=node_profile).warnings

    where = "profile 'p', sharing.timeSlicing.resources"
    assert unknown.startswith(f"{where}[2].name: '9g.90gb' matches no profile of NVIDIA a100-40")
    assert without_mig == (
        f"{where}[1].name, sharing.timeSlicing.resources[2].name: has no effect on gpu-1, which "
        "cannot be partitioned"
    )


# Boards that change their mode without a reset.


@pytest.mark.parametrize("on", [True, False])
def test_a_hopper_is_offered_as_a_whole_and_in_partitions_whatever_its_mode_is_now(on):
    offered = offer_of(mig_gpu(H100, on=on))

    assert names(offered) == [
        "gpu-0",
        *(f"1g10gb-19-{start}" for start in range(7)),
        *("2g20gb-14-0", "2g20gb-14-2", "2g20gb-14-4"),
        *("3g40gb-9-4", "3g40gb-9-0", "4g40gb-5-0", "7g80gb-0-0"),
        "gpu-0-mon",
    ]
    (counters,) = offered.counter_sets
    assert counters.name == "gpu-0-counter-set"
    whole, *parts, monitor = offered.devices
    assert whole.takes == (("block-0-4", 4), ("block-4-4", 4))
    assert all(part.takes and part.created_for_claims for part in parts)
    assert monitor.takes == ()
    assert {device.offered for device in offered.devices} == {
        ("1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb")
    }
    assert offered.pending == ()


def test_without_a_profile_that_says_so_nothing_is_created_for_claims():
    offered = offer_of(HOPPER, profile=DEFAULT_PROFILE)

    assert names(offered) == WHOLE
    assert offered.counter_sets == ()
    assert {device.offered for device in offered.devices} == {()}


def test_partitions_of_gpus_that_cannot_be_taken_whole_are_tried_first():
    gpus = [mig_gpu(H100, 0), with_instances(("1g.10gb", 0), minor=1), mig_gpu(H100, 2)]

    assert names(offer_of(*gpus, profile=dynamic("7g.*"))) == [
        *("gpu-0", "gpu-2", "gpu-1-mig-1g10gb-19-0", "7g80gb-0-0", "gpu-2-mig-7g80gb-0-0"),
        *("gpu-0-mon", "gpu-1-mon", "gpu-2-mon"),
    ]


def test_monitors_need_taints():
    features = ApiFeatures(device_taints=False)

    assert "gpu-0-mon" not in names(offer_of(mig_gpu(on=True), features=features))


# Boards that need a reset for it.


@pytest.mark.parametrize("fixed", [GuestRestriction.NOTHING, GuestRestriction.MODE])
def test_an_a100_in_mig_mode_is_offered_in_partitions_only_also_in_a_virtual_machine(fixed):
    offered = offer_of(mig_gpu(on=True, fixed=fixed), profile=dynamic("3g.*", "7g.*"))

    assert names(offered) == ["3g20gb-9-4", "3g20gb-9-0", "7g40gb-0-0", "gpu-0-mon"]
    assert (offered.pending, offered.warnings, offered.unavailable) == ((), (), ())


@pytest.mark.parametrize(("board", "name"), [("a100-40", "3g.20gb"), (H100, "3g.40gb")])
def test_of_a_vgpu_its_instances_are_offered_and_nothing_else(board, name):
    vgpu = with_instances((name, 4), board=board, switches=False, fixed=GuestRestriction.ALL)

    offered = offer_of(vgpu)

    assert tuple(device.instance for device in partitions(offered)) == vgpu.mig.instances
    (pending,) = offered.pending
    assert pending.change == "the partitions that exist"
    assert "it is a vGPU: its partitions are chosen where" in pending.reason


MIG_OFF = "MIG mode is off and is being switched"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        pytest.param({}, MIG_OFF, id="off"),
        pytest.param({"pending": True}, MIG_OFF, id="somebody, or a crash, left it pending"),
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
    offered = offer_of(mig_gpu(**fields))

    assert names(offered) == WHOLE
    (pending,) = offered.pending
    assert pending.change == "sliceable"
    assert pending.reason.startswith(f"profile 'p', spec.gpus[0]: {reason}")


# What keeps partitions from being created.


@pytest.mark.parametrize(
    ("node_profile", "features", "reason"),
    [
        pytest.param(dynamic(), NO_COUNTERS, "keeps no counters (KEP-4815", id="api"),
        pytest.param(dynamic("9g.*"), None, "none of the profiles that are allowed", id="none"),
        pytest.param(
            profile(mig=MigRules(True), replicas=2),
            NO_CAPACITY,
            "its 2 replicas are devices of their own",
            id="replicas",
        ),
    ],
)
@pytest.mark.parametrize("board", [H100, "a100-40"])
def test_where_nothing_keeps_partitions_apart_none_is_created(
    board, node_profile, features, reason
):
    offered = offer_of(mig_gpu(board), profile=node_profile, features=features)

    assert partitions(offered) == []
    assert offered.counter_sets == ()
    assert any(reason in pending.reason for pending in offered.pending)


@pytest.mark.parametrize(
    ("fixed", "node_profile", "reason"),
    [
        (
            GuestRestriction.NOTHING,
            DEFAULT_PROFILE,
            "create some (nvidia-smi mig -cgi), let a profile do that (mig: Dynamic), or turn MIG "
            "mode off with nvidia-smi -i 0000:18:00.0 -mig 0",
        ),
        (GuestRestriction.MODE, DEFAULT_PROFILE, "nvidia-smi -i 0000:18:00.0 -mig 0 and a reboot"),
        (
            GuestRestriction.ALL,
            DEFAULT_PROFILE,
            "it is a vGPU: its partitions are chosen where the vGPU is made",
        ),
        (GuestRestriction.NOTHING, dynamic(), "that are created for claims"),
    ],
)
def test_a_gpu_in_mig_mode_without_partitions_is_not_offered_and_says_what_can_be_done(
    fixed, node_profile, reason
):
    offered = offer_of(mig_gpu(on=True, fixed=fixed), profile=node_profile, features=NO_COUNTERS)

    (unavailable,) = offered.unavailable
    assert unavailable.what == f"GPU 0000:18:00.0 ({gpu(0).uuid})"
    assert unavailable.reason.endswith(reason)


@pytest.mark.parametrize("node_profile", [DEFAULT_PROFILE, dynamic()])
@pytest.mark.parametrize(
    ("problem", "reason"),
    [("", "root alone can, see the log"), ("the library is old", "the library is old")],
)
def test_a_gpu_whose_partitions_cannot_be_read_offers_none_and_says_why(
    node_profile, problem, reason
):
    offered = offer_of(
        replace(mig_gpu(profiles=(), on=True), mig_problem=problem), profile=node_profile
    )

    (unavailable,) = offered.unavailable
    assert unavailable.reason == f"MIG mode is on, and its partitions cannot be read: {reason}"
    assert offered.devices == ()


# Instances that were not created for claims.


def test_instances_are_offered_without_counters_where_nothing_is_created_for_claims():
    node_gpu = with_instances(("1g.5gb", 6), ("3g.20gb", 0), board="a100-40")

    offered = offer_of(node_gpu, profile=DEFAULT_PROFILE, features=NO_COUNTERS)

    assert names(offered) == ["1g5gb-19-6", "3g20gb-9-0", "gpu-0-mon"]
    assert offered.devices[0].instance == node_gpu.mig.instances[0]
    assert not offered.devices[0].created_for_claims
    assert {device.takes for device in offered.devices} == {()}
    assert (offered.unavailable, offered.pending) == ((), ())


def test_an_instance_takes_the_place_of_its_partition_and_hides_what_overlaps_it():
    node_gpu = with_instances(("2g.20gb", 0))

    offered = offer_of(node_gpu)

    existing = of(offered, "2g.20gb")
    assert (existing.instance, existing.created_for_claims) == (node_gpu.mig.instances[0], False)
    offered_names = names(offered)
    assert offered_names.count("2g20gb-14-0") == 1
    hidden = {"gpu-0", "1g10gb-19-0", "1g10gb-19-1", "3g40gb-9-0", "4g40gb-5-0", "7g80gb-0-0"}
    assert not hidden & set(offered_names)
    assert {"1g10gb-19-2", "2g20gb-14-2", "3g40gb-9-4"} <= set(offered_names)

    held = holding(existing)
    assert not of(offer_of(node_gpu, held=held), "2g.20gb").created_for_claims
    assert created_partitions(held) == frozenset()


def test_an_instance_of_a_claim_is_not_unmanaged():
    node_gpu = with_instances(("2g.20gb", 0))
    instance_key = node_gpu.mig.instances[0].key

    preparing = offer_of(node_gpu, ours=frozenset({(node_gpu.uuid, instance_key)}))
    held = offer_of(node_gpu, held=holding(of(preparing, "2g.20gb")))
    of_another_gpu = offer_of(node_gpu, ours=frozenset({(gpu(1).uuid, instance_key)}))

    assert of(preparing, "2g.20gb").created_for_claims
    assert names(held) == names(preparing) == names(offer_of(HOPPER))
    assert not of(of_another_gpu, "2g.20gb").created_for_claims


def test_an_unusable_instance_hides_what_overlaps_it_and_says_what_to_do():
    useless = unusable(mig(H100), "3g.40gb", 4)
    node_gpu = mig_gpu(H100, unusable=(useless,), on=True)

    offered = offer_of(node_gpu)

    assert {device.partition.placement.end <= 4 for device in partitions(offered)} == {True}
    assert "gpu-0" not in names(offered)
    (unavailable,) = offered.unavailable
    assert unavailable.what.startswith("GPU instance 9 of GPU 0000:18:00.0")
    assert unavailable.reason.startswith("it has no compute instances, and none that fills it; ")

    creating = frozenset({(node_gpu.uuid, useless.key)})
    being_created = offer_of(node_gpu, ours=creating)
    assert (names(being_created), being_created.unavailable) == (names(offer_of(HOPPER)), ())


def test_an_instance_of_a_profile_that_the_board_does_not_list_is_unusable():
    listed = instance(mig(H100), "1g.10gb", 0)
    unlisted = replace(listed, key=replace(listed.key, profile_id=77))

    offered = offer_of(mig_gpu(H100, instances=(unlisted,), on=True), profile=DEFAULT_PROFILE)

    assert offered.devices == ()
    assert (
        "it has 1 compute instance, and none that fills it and has a name; "
        in offered.unavailable[1].reason
    )


# Shapes.


@pytest.mark.parametrize(
    ("board", "cuda", "expected"),
    [
        pytest.param("a100-40", 13, {1: 6, 2: 13, 3: 20, 4: 27, 7: 48}, id="sevenths"),
        pytest.param("a30-24", 13, {1: 12, 2: 24, 4: 48}, id="quarters"),
        pytest.param(H100, 14, {1: 8, 2: 17, 3: 25, 4: 34, 7: 60}, id="newer driver"),
    ],
)
def test_a_partition_takes_as_many_claims_as_mps_takes_clients_on_its_compute_slices(
    board, cuda, expected
):
    offered = offer_of(replace(mig_gpu(board, on=True), cuda_driver_version=Version(cuda)))

    assert {
        device.partition.profile.slices: device.shape.shares for device in partitions(offered)
    } == expected
    assert offered.warnings == ()


@pytest.mark.parametrize(
    ("node_profile", "shares", "warnings"),
    [
        pytest.param(
            dynamic(shares=16, strategies=(TURNS,)), {"1g.10gb": 16}, [], id="taking turns"
        ),
        pytest.param(dynamic(shares=4), {"1g.10gb": 4}, [], id="fewer than MPS takes"),
        pytest.param(
            dynamic("1g.10gb", shares=16, replicas=(("1g.10gb", 6),)),
            {"1g.10gb": 6},
            [],
            id="replicas",
        ),
        pytest.param(
            dynamic("1g.10gb", "4g.40gb", shares=16),
            {"1g.10gb": 6, "4g.40gb": 16},
            lines(
                "shares: MPS takes fewer clients in a partition, so at most so many claims share "
                "one: 6 in 1g.10gb"
            ),
            id="more claims than MPS takes clients",
        ),
        pytest.param(
            dynamic(replicas=(("1g.10gb", 7), ("2g.20gb", 9), ("3g.40gb", 30))),
            {"1g.10gb": 7, "2g.20gb": 9, "3g.40gb": 30},
            lines(
                *(
                    f"mig.replicas: {replicas} replicas of {name} can take turns, and MPS, which "
                    f"claims may ask for, takes {most} clients there; lower them to {most}, or "
                    "leave MPS out of strategies"
                    for replicas, name, most in ((7, "1g.10gb", 6), (30, "3g.40gb", 20))
                )
            ),
            id="more replicas than MPS takes clients",
        ),
        pytest.param(
            dynamic(replicas=(("1g.10gb", 7),), strategies=(TURNS,)),
            {"1g.10gb": 7},
            [],
            id="as many replicas as the profile says, where no claim may use MPS",
        ),
    ],
)
def test_claims_share_a_partition_as_the_profile_says_and_as_mps_can(
    node_profile, shares, warnings
):
    offered = offer_of(HOPPER, profile=node_profile)

    assert {name: of(offered, name).shape.shares for name in shares} == shares
    assert list(offered.warnings) == warnings
    assert offered.pending == ()


def test_replicas_divide_instances_that_others_created_too():
    node_profile = dynamic("3g.40gb", replicas=(("1g.20gb", 2),))

    offered = offer_of(with_instances(("1g.20gb", 0)), profile=node_profile)

    assert of(offered, "1g.20gb").shape.shares == 2
    assert offered.warnings == ()


def test_replicas_of_partitions_are_said_by_profile_and_are_not_those_of_gpus():
    (entry,) = dynamic(replicas=(("1g.10gb", 4),)).entries
    entry = replace(entry, rules=replace(entry.rules, replicas=2, rename=True))

    offered = offer_of(HOPPER, profile=Profile("p", (entry,)))

    smaller, larger = of(offered, "1g.10gb").shape, of(offered, "2g.20gb").shape
    assert (smaller.memory_default, smaller.shares, smaller.replicas) == (2500 * MIB, 4, 4)
    assert (larger.replicas, larger.renamed, smaller.renamed) == (1, False, False)
    assert offered.devices[0].shape.replicas == 2


@pytest.mark.parametrize(
    ("node_profile", "features", "shapes"),
    [
        pytest.param(dynamic(), None, {Fractional}, id="within their own memory"),
        pytest.param(
            dynamic(strict=True), None, {Fractional, Exclusive}, id="the driver limits no part"
        ),
        pytest.param(dynamic(fractions=False), None, {Exclusive}, id="fractions-never"),
        pytest.param(dynamic(), NO_CAPACITY, {Exclusive}, id="no-capacity"),
    ],
)
def test_partitions_are_exclusive_where_they_cannot_be_shared(node_profile, features, shapes):
    offered = offer_of(HOPPER, profile=node_profile, features=features)

    small = of(offered, "1g.10gb").shape
    shared = Fractional(10000 * MIB, 1024 * MIB, MIB, shares=6)
    assert small == (shared if shapes == {Fractional} else Exclusive())
    # Counters would refuse admin access to what is in use, so that there are monitors.
    assert {type(device.shape) for device in offered.devices} == shapes | {AdminAccess}
    assert isinstance(offered.devices[0].shape, Fractional) == (Fractional in shapes)
    assert offered.pending == ()


@pytest.mark.parametrize(
    ("fields", "features", "reason"),
    [
        pytest.param(
            {"replicas": (("1g.10gb", 4),)},
            NO_CAPACITY,
            "replicas of a partition need consumable capacity",
            id="no-capacity",
        ),
        pytest.param(
            {"memory_least": 40 * 1024 * MIB},
            None,
            "the least share of 40960Mi leaves no room for another in its 10000Mi; lower "
            "memory.least",
            id="least",
        ),
        pytest.param(
            {"memory_step": 16 * 1024 * MIB},
            None,
            "all of its 10000Mi is less than a step of 16384Mi; lower memory.step",
            id="step",
        ),
        pytest.param(
            {"replicas": (("1g.10gb", 7),), "default_strategy": MPS},
            None,
            "7 replicas share by MPS, which takes 6 clients on partitions of 1g.10gb; lower "
            "replicas to 6 at most",
            id="clients",
        ),
    ],
)
def test_partitions_that_cannot_be_published_as_the_profile_says_are_exclusive(
    fields, features, reason
):
    offered = offer_of(HOPPER, profile=dynamic("1g.10gb", **fields), features=features)

    assert of(offered, "1g.10gb").shape == Exclusive()
    (pending,) = offered.pending
    assert pending.reason.startswith(f"profile 'p', spec.gpus[0]: partitions 1g.10gb: {reason}")
    assert "and partitions created for claims (1g.10gb)" in pending.change


# While claims hold it.


@pytest.mark.parametrize(
    ("before", "part", "after", "change"),
    [
        pytest.param(
            dynamic("1g.10gb", "3g.40gb"),
            "3g.40gb",
            dynamic("2g.20gb"),
            "sliceable and partitions created for claims (2g.20gb)",
            id="a partition",
        ),
        pytest.param(dynamic(), None, DEFAULT_PROFILE, "sliceable", id="the whole, off"),
        pytest.param(dynamic(), None, profile(include=False), "left out", id="the whole, left out"),
        pytest.param(
            DEFAULT_PROFILE,
            None,
            dynamic("1g.10gb"),
            "sliceable and partitions created for claims (1g.10gb)",
            id="the whole, before there were partitions",
        ),
    ],
)
def test_a_gpu_is_offered_as_it_was_until_no_claim_holds_it(before, part, after, change):
    offered_before = offer_of(HOPPER, profile=before)
    device = of(offered_before, part) if part else offered_before.devices[0]

    offered = offer_of(HOPPER, profile=after, held=holding(device))

    assert names(offered) == names(offered_before)
    assert offered.counter_sets == offered_before.counter_sets
    assert offered.pending == (PendingChange(DeviceName("gpu-0"), change),)


def test_a_partition_that_is_held_keeps_its_shape_and_the_others_follow_the_profile():
    device = of(offer_of(HOPPER), "1g.10gb")

    offered = offer_of(HOPPER, profile=dynamic(fractions=False), held=holding(device))

    assert of(offered, "1g.10gb").shape == device.shape
    assert of(offered, "1g.10gb", 1).shape == Exclusive()


def test_without_mps_a_held_partition_reserves_no_cores_for_the_next_claim():
    node_profile = dynamic(replicas=(("1g.10gb", 4),), default_strategy=MPS)
    before = of(offer_of(HOPPER, profile=node_profile), "1g.10gb")

    offered = offer_of(HOPPER, profile=node_profile, held=holding(before), mps=False)

    assert before.shape.cores_default == 25
    assert of(offered, "1g.10gb").shape == replace(before.shape, cores_default=0)


def test_what_is_held_stays_alone_where_the_api_server_drops_counters_now():
    before = offer_of(HOPPER)
    for device, expected in (
        (of(before, "3g.40gb", 4), ["3g40gb-9-4", "gpu-0-mon"]),
        (before.devices[0], WHOLE),
    ):
        offered = offer_of(HOPPER, features=NO_COUNTERS, held=holding(device))

        assert (names(offered), offered.counter_sets) == (expected, ())


def test_what_is_held_stays_beside_an_instance_that_somebody_creates():
    before, node_gpu = offer_of(HOPPER), with_instances(("2g.20gb", 0))

    part_held = offer_of(node_gpu, held=holding(of(before, "1g.10gb")))
    whole_held = offer_of(node_gpu, held=holding(before.devices[0]))

    assert {"1g10gb-19-0", "2g20gb-14-0"} <= set(names(part_held))
    assert "gpu-0" not in names(part_held)
    assert "block-0-2" in dict(of(part_held, "1g.10gb").takes)
    assert ("block-0-2", 2) in of(part_held, "2g.20gb").takes
    assert names(whole_held)[0] == "gpu-0"
    assert of(whole_held, "2g.20gb").takes


def test_without_counters_a_whole_gpu_that_is_held_hides_instances_of_others():
    before = offer_of(HOPPER, profile=DEFAULT_PROFILE)

    offered = offer_of(
        with_instances(("2g.20gb", 0)), profile=DEFAULT_PROFILE, held=holding(before.devices[0])
    )

    assert names(offered) == WHOLE


def test_a_held_a100_that_lost_its_mode_is_not_offered_as_a_whole():
    before = offer_of(mig_gpu(on=True))
    held = holding(of(before, "1g.5gb"))

    assert names(offer_of(mig_gpu(), held=held)) == names(before)
    assert "gpu-0" not in names(offer_of(mig_gpu(), features=NO_COUNTERS, held=held))


def test_a_claim_with_admin_access_keeps_nothing_as_it_is():
    held = holding(offer_of(HOPPER).devices[-1], admin=True)

    assert names(offer_of(HOPPER, profile=DEFAULT_PROFILE, held=held)) == WHOLE


def test_a_held_partition_of_a_gpu_that_cannot_be_partitioned_any_more_is_gone():
    offered = offer_of(gpu(0), held=holding(of(offer_of(HOPPER), "1g.10gb")))

    assert names(offered) == WHOLE
    assert offered.devices[0].shape == SLICEABLE


@pytest.mark.parametrize(
    ("starts", "change"),
    [
        pytest.param((0,), "sliceable", id="whole, where its mode goes with its last claim"),
        pytest.param((0, 3), "the partitions that exist", id="where others partitioned it too"),
    ],
)
def test_what_a_held_gpu_will_offer_depends_on_who_has_partitioned_it(starts, change):
    held = holding(of(offer_of(HOPPER, profile=dynamic("1g.10gb")), "1g.10gb"))
    node_gpu = with_instances(*(("1g.10gb", start) for start in starts))

    offered = offer_of(node_gpu, profile=DEFAULT_PROFILE, held=held)

    assert offered.pending == (PendingChange(DeviceName("gpu-0"), change),)


# Partitions that serve claims for a GPU.


@pytest.mark.parametrize(
    ("node", "node_profile", "serving"),
    [
        pytest.param(
            [HALVES, HALF, mig_gpu(minor=2)],
            SINGLE,
            ["gpu-0-mig-3g20gb-9-4", "gpu-0-mig-3g20gb-9-0", "gpu-1-mig-3g20gb-9-4"],
            id="of one kind, that exist",
        ),
        pytest.param([SMALL, HALF], SINGLE, [], id="of several kinds"),
        pytest.param(
            [with_instances(("3g.20gb", 0), board="a100-40"), gpu(1)],
            dynamic("1g.5gb", single=True),
            ["gpu-0-mig-3g20gb-9-0"],
            id="not those created for claims: they have no UUID before, and beside whole GPUs",
        ),
        pytest.param(
            [
                with_instances(("3g.20gb", 4), board="a100-40"),
                with_instances(("1g.5gb", 0), board="a100-40", minor=1),
            ],
            Profile("p", (MIXED.entries[0], ProfileEntry(GpuSelector(), Rules(), "spec.gpus[1]"))),
            ["gpu-0-mig-3g20gb-9-4"],
            id="GPUs with other rules do not count",
        ),
    ],
)
def test_partitions_of_one_kind_that_exist_serve_claims_for_a_gpu_where_the_profile_says_so(
    node, node_profile, serving
):
    offered = offer_of(*node, profile=node_profile)

    assert [device.name for device in offered.devices if device.as_gpu] == serving
    published = [
        device["attributes"].get("uuid")
        for device in published_devices(offered)
        if "asGpu" in device["attributes"]
    ]
    assert len(published) == len(serving)  # with a UUID that selectors can read
    assert all(uuid["string"].startswith("MIG-9-") for uuid in published)


def test_the_names_of_partitions_are_those_of_nvidias_driver():
    media = partition(mig("rtx-pro-6000-96"), "1g.24gb+me.all", 3)

    assert partition_name(gpu(3), media) == "gpu-3-mig-1g24gb-meall-65-3"
    assert partition_name(gpu(0), partition(mig(), "1g.5gb", 6)) == "gpu-0-mig-1g5gb-19-6"


def test_keys_find_their_partition_again():
    assert mig().partition(key(mig(), "3g.20gb", 4)) == partition(mig(), "3g.20gb", 4)
