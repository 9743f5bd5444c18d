"""What becomes of each GPU, by its profile, by what the API server keeps, and by what is held."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.model.gpus import DeviceName, Inventory, Version
from dra_driver.model.offer import (
    DEVICE_PLUGIN_FEATURES,
    AdminAccess,
    ApiFeatures,
    Exclusive,
    Fractional,
    PendingChange,
    Replica,
    gpu_name_of,
)
from dra_driver.model.profiles import (
    DEFAULT_PROFILE,
    AllocationPolicy,
    GpuSelector,
    Profile,
    ProfileEntry,
    Rules,
    SharingStrategy,
)
from dra_driver.model.records import Holding
from dra_driver.plan.offer.devices import build_offer
from dra_driver.plan.offer.shapes import describe_shape
from tests.builders import MIB, SLICEABLE, gpu, ref
from tests.plan.profile_rules import any_rules

GIB = 1024 * MIB
EVERYTHING = ApiFeatures()
NO_CAPACITY = ApiFeatures(capacity=False)
OLD = {"compute_capability": Version(6, 1)}  # a board that MPS does not take
BY_MPS: dict[str, Any] = {"default_strategy": SharingStrategy.MPS}
MPS_ONLY = {"strategies": (SharingStrategy.MPS,), **BY_MPS}


def entry(rules):
    """A profile with these rules for every GPU."""
    return Profile("p", (ProfileEntry(GpuSelector(), rules, "spec.gpus[0]"),))


def profile(**rules):
    return entry(Rules(**rules))


def shapes(node, profile_=DEFAULT_PROFILE, features=EVERYTHING, holdings=None):
    offer = build_offer(node, profile_, features, holdings or {})
    return {str(device.name): device.shape for device in offer.devices}


def one_gpu(**fields):
    return Inventory((gpu(0, **fields),))


def part(default, least, **fields):
    """The shape of a GPU of which claims get so many MiB."""
    return Fractional(default * MIB, least * MIB, MIB, **fields)


def holding(shape, device="gpu-0", **fields):
    name = DeviceName(device)
    return {name: (Holding(ref("holder"), name, gpu(0).uuid, shape=shape, **fields),)}


def test_without_a_profile_every_gpu_is_sliceable_and_can_be_watched():
    offered_shapes = shapes(Inventory((gpu(0), gpu(1))))

    assert list(offered_shapes.items()) == [
        ("gpu-0", SLICEABLE),
        ("gpu-1", SLICEABLE),
        ("gpu-0-mon", AdminAccess()),
        ("gpu-1-mon", AdminAccess()),
    ]  # monitors come last


HALF = 81559 * MIB // 2 // MIB * MIB


@pytest.mark.point(76)
@pytest.mark.parametrize(
    ("fields", "rules", "features", "expected"),
    [
        ({}, {"fractions": False}, EVERYTHING, [Exclusive()]),  # as with NVIDIA's driver
        ({}, {}, ApiFeatures(device_taints=False), [SLICEABLE]),  # monitors would be open to all
        ({}, {}, NO_CAPACITY, [Exclusive()]),
        (
            {},
            {"replicas": 2, "rename": True},
            NO_CAPACITY,
            [Replica(place, 2, HALF, renamed=True) for place in range(2)],
        ),
        (
            {"memory_bytes": None},
            {"replicas": 4, **BY_MPS},
            NO_CAPACITY,
            [Replica(place, 4, None, cores=25) for place in range(4)],
        ),
    ],
)
def test_a_gpu_is_offered_in_a_way_that_the_api_server_keeps(fields, rules, features, expected):
    assert list(shapes(one_gpu(**fields), profile(**rules), features).values()) == expected


@pytest.mark.parametrize(
    ("fields", "rules", "expected"),
    [
        # Replicas divide the memory and the shares, and the cores where they share by MPS.
        ({}, {"replicas": 4}, part(20389, 1024, shares=4, replicas=4)),
        ({}, {"replicas": 200}, part(407, 407, shares=200, replicas=200)),
        ({}, {"replicas": 3, **BY_MPS}, part(27186, 1024, shares=3, replicas=3, cores_default=33)),
        ({}, BY_MPS, SLICEABLE),
        # The least amount is never more than the default, and both lie on the steps.
        ({"memory_bytes": 16 * GIB}, {"replicas": 32}, part(512, 512, shares=32, replicas=32)),
        (
            {},
            {"memory_step": 512 * MIB, "memory_least": 700 * MIB},
            replace(SLICEABLE, memory_default=81408 * MIB, memory_step=512 * MIB),
        ),
        # Booked replicas may be as small as the device plugin makes them.
        (
            {"memory_bytes": GIB},
            {"replicas": 8, "limited": False},
            part(128, 128, shares=8, replicas=8),
        ),
        # As many shares as MPS takes clients; cores cannot be reserved where it cannot limit.
        ({"cuda_driver_version": Version(13, 1)}, {}, replace(SLICEABLE, shares=60)),
        (OLD, {}, replace(SLICEABLE, shares=16, cores=False)),
        ({}, {"strategies": (SharingStrategy.TIME_SLICING,)}, replace(SLICEABLE, cores=False)),
    ],
)
def test_the_rules_and_the_board_say_which_parts_of_a_gpu_can_be_had(fields, rules, expected):
    assert shapes(one_gpu(**fields), profile(**rules))["gpu-0"] == expected


@pytest.mark.parametrize("features", [EVERYTHING, NO_CAPACITY])
@pytest.mark.parametrize(
    ("fields", "replicas", "most"),
    [
        pytest.param({}, 49, 48, id="cuda-13.0"),
        pytest.param({"cuda_driver_version": Version(13, 1)}, 61, 60, id="cuda-13.1"),
        pytest.param({}, 1000, 48, id="less-than-a-percent-each"),
    ],
)
def test_more_replicas_than_mps_takes_clients_are_not_made_where_they_share_by_mps(
    fields, replicas, most, features
):
    offer = build_offer(one_gpu(**fields), profile(replicas=replicas, **BY_MPS), features, {})
    fewer = build_offer(one_gpu(**fields), profile(replicas=most, **BY_MPS), features, {})

    assert offer.by_name[DeviceName("gpu-0")].shape == Exclusive()
    assert f"lower replicas to {most} at most" in offer.pending[0].reason
    assert fewer.pending == ()


def test_too_many_devices_are_not_made_of_a_gpu():
    offer = build_offer(one_gpu(), profile(replicas=65), NO_CAPACITY, {})

    assert offer.by_name[DeviceName("gpu-0")].shape == Exclusive()
    assert "lower replicas to 64" in offer.pending[0].reason


@pytest.mark.parametrize(
    ("fields", "mps", "strategies"),
    [
        pytest.param(OLD, True, (SharingStrategy.TIME_SLICING,), id="old-board"),
        pytest.param({}, False, (SharingStrategy.TIME_SLICING,), id="no-agent"),
        pytest.param(
            {"compute_capability": Version(7, 0)},
            True,
            (SharingStrategy.TIME_SLICING, SharingStrategy.MPS),
            id="from Volta on",
        ),
    ],
)
def test_where_mps_cannot_work_no_device_allows_it(fields, mps, strategies):
    offer = build_offer(one_gpu(**fields), profile(replicas=4), EVERYTHING, {}, mps)

    assert {device.rules.strategies for device in offer.devices} == {strategies}
    shape = offer.devices[0].shape
    assert isinstance(shape, Fractional)
    assert shape.cores is (SharingStrategy.MPS in strategies)
    assert offer.warnings == ()


def test_where_a_profile_does_not_allow_mps_nothing_is_said_of_a_gpu_that_cannot_have_it():
    strategies = (SharingStrategy.TIME_SLICING,)
    offer = build_offer(one_gpu(**OLD), profile(strategies=strategies), EVERYTHING, {})

    assert {device.rules.strategies for device in offer.devices} == {strategies}
    assert (offer.pending, offer.warnings) == ((), ())


@pytest.mark.parametrize(
    ("fields", "mps", "reason"),
    [
        pytest.param(OLD, True, "MPS takes compute capability 7.0 and newer", id="old-board"),
        pytest.param({}, False, "this node runs no MPS agent", id="no-agent"),
        pytest.param(OLD, False, "MPS takes compute capability 7.0 and newer", id="both"),
    ],
)
@pytest.mark.parametrize("more", [{}, {"replicas": 4}, {"fractions": False}])
def test_a_gpu_that_is_for_mps_only_and_cannot_is_exclusive_and_says_why(fields, mps, reason, more):
    offer = build_offer(one_gpu(**fields), profile(**MPS_ONLY, **more), EVERYTHING, {}, mps)

    (device,) = offer.devices
    assert device.shape == Exclusive()
    assert device.rules.strategies == ()
    (pending,) = offer.pending
    assert pending.reason.startswith(
        f"profile 'p', spec.gpus[0]: only MPS is allowed, and {reason}"
    )
    assert pending.reason.endswith("; add TimeSlicing to strategies")
    assert offer.warnings == ()


def test_where_the_default_strategy_cannot_be_mps_it_is_time_slicing_and_each_entry_says_so_once():
    entries = tuple(
        ProfileEntry(
            GpuSelector(minors=frozenset(minors)),
            Rules(replicas=number, **BY_MPS),
            f"spec.gpus[{number}]",
        )
        for number, minors in enumerate([(0, 1, 2), (3,), (4,)], 2)
    )
    node = Inventory((gpu(0, **OLD), gpu(1), gpu(2, **OLD), gpu(3), gpu(4, **OLD)))

    offer = build_offer(node, Profile("p", entries), EVERYTHING, {})

    assert {
        str(device.name): (device.rules.default_strategy, device.shape.cores_default)
        for device in offer.devices
        if isinstance(device.shape, Fractional)
    } == {
        "gpu-0": (SharingStrategy.TIME_SLICING, 0),
        "gpu-1": (SharingStrategy.MPS, 50),
        "gpu-2": (SharingStrategy.TIME_SLICING, 0),
        "gpu-3": (SharingStrategy.MPS, 33),
        "gpu-4": (SharingStrategy.TIME_SLICING, 0),
    }
    assert offer.warnings == tuple(
        f"profile 'p', spec.gpus[{number}]: the default strategy is MPS, and on {where} processes "
        "take turns instead: MPS takes compute capability 7.0 and newer"
        for number, where in ((2, "gpu-0, gpu-2"), (4, "gpu-4"))
    )


def test_boards_and_an_agent_that_is_not_there_are_told_apart():
    node = Inventory((gpu(0, **OLD), gpu(1)))

    offer = build_offer(node, profile(**BY_MPS), EVERYTHING, {}, mps=False)

    assert [note.partition("on ")[2].partition(" processes")[0] for note in offer.warnings] == [
        "gpu-0",
        "gpu-1",
    ]
    assert offer.warnings[1].endswith("this node runs no MPS agent (--mps-socket is empty)")


@pytest.mark.parametrize(
    ("shape", "without_mps", "features"),
    [
        pytest.param(
            Fractional(20 * GIB, GIB, MIB, shares=4, replicas=4, cores_default=25),
            Fractional(20 * GIB, GIB, MIB, shares=4, replicas=4),
            EVERYTHING,
            id="sliceable",
        ),
        pytest.param(
            Replica(0, 4, 20 * GIB, cores=25), Replica(0, 4, 20 * GIB), NO_CAPACITY, id="replica"
        ),
        pytest.param(Exclusive(), Exclusive(), EVERYTHING, id="exclusive"),
    ],
)
def test_a_held_gpu_that_mps_leaves_reserves_no_cores_for_the_next_claim(
    shape, without_mps, features
):
    holdings = holding(shape)

    with_mps = build_offer(one_gpu(), profile(replicas=4, **BY_MPS), features, holdings)
    without = build_offer(one_gpu(), profile(replicas=4, **BY_MPS), features, holdings, mps=False)

    assert with_mps.devices[0].shape == shape
    assert without.devices[0].shape == without_mps


def test_a_held_gpu_that_is_to_be_shared_by_mps_says_what_it_becomes():
    holdings = holding(shapes(one_gpu(), profile(replicas=4))["gpu-0"])

    offer = build_offer(one_gpu(), profile(replicas=4, **BY_MPS), EVERYTHING, holdings)

    assert offer.pending == (
        PendingChange(DeviceName("gpu-0"), "4 replicas (MPS, 25 % of the cores each)"),
    )


@given(
    rules=any_rules(),
    capability=st.builds(Version, st.integers(3, 10), st.integers(0, 9)),
    features=st.builds(ApiFeatures),
    mps=st.booleans(),
)
def test_no_rules_make_a_gpu_shared_in_a_way_that_cannot_work(rules, capability, features, mps):
    offer = build_offer(one_gpu(compute_capability=capability), entry(rules), features, {}, mps)

    for device in offer.devices:
        possible = set(device.rules.strategies)
        assert possible <= set(rules.strategies)
        assert SharingStrategy.MPS not in possible or (mps and capability.major >= 7)
        assert device.rules.default_strategy in possible or device.shape == Exclusive()


@given(rules=any_rules(), features=st.builds(ApiFeatures), mps=st.booleans())
def test_replicas_never_reserve_more_than_all_cores_and_by_mps_one_percent_at_least(
    rules, features, mps
):
    for device in build_offer(one_gpu(), entry(rules), features, {}, mps).devices:
        match device.shape:
            case Fractional(cores_default=cores, replicas=number):
                assert device.shape.cores is (SharingStrategy.MPS in device.rules.strategies)
            case Replica(cores=cores, of=number):
                pass
            case _:
                continue
        by_mps = number > 1 and device.rules.default_strategy is SharingStrategy.MPS
        assert 1 <= cores * number <= 100 if by_mps else cores == 0


@pytest.mark.parametrize(
    ("fields", "rules", "reason"),
    [
        pytest.param({"memory_bytes": None}, {}, "NVML does not report", id="unknown-memory"),
        pytest.param({}, {"memory_least": 90 * GIB}, "lower memory.least", id="least-above-all"),
        pytest.param(
            {"memory_bytes": GIB}, {"replicas": 2000}, "lower replicas", id="nothing-each"
        ),
        pytest.param(
            {"memory_bytes": GIB}, {"replicas": 8}, "less than a CUDA context", id="too-little"
        ),
    ],
)
def test_rules_that_cannot_be_published_cost_the_gpu_its_fractions_only(fields, rules, reason):
    offer = build_offer(Inventory((gpu(0, **fields), gpu(1))), profile(**rules), EVERYTHING, {})

    assert offer.by_name[DeviceName("gpu-0")].shape == Exclusive()
    assert reason in offer.pending[0].reason
    assert offer.pending[0].reason.startswith("profile 'p', spec.gpus[0]: ")
    assert DeviceName("gpu-1") in offer.by_name


def test_a_gpu_that_is_left_out_says_so():
    offer = build_offer(one_gpu(), profile(include=False), EVERYTHING, {})

    assert offer.devices == ()
    assert offer.unavailable[0].reason == (
        "profile 'p', spec.gpus[0]: include: false leaves it out; remove that to offer it"
    )


@pytest.mark.parametrize(
    ("rules", "change"),
    [
        pytest.param({"fractions": False}, "exclusive", id="exclusive"),
        pytest.param({"replicas": 4}, "4 replicas", id="replicas"),
        pytest.param({"include": False}, "left out", id="left-out"),
    ],
)
def test_a_held_gpu_keeps_its_shape_until_nobody_holds_it(rules, change):
    offer = build_offer(one_gpu(), profile(**rules), EVERYTHING, holding(SLICEABLE))

    assert offer.by_name[DeviceName("gpu-0")].shape == SLICEABLE
    assert offer.pending == (PendingChange(DeviceName("gpu-0"), change),)


def test_a_held_gpu_keeps_its_shape_under_another_name():
    renamed = Inventory((gpu(1, uuid=gpu(0).uuid),))
    holdings = holding(SLICEABLE)

    offer = build_offer(renamed, profile(fractions=False), EVERYTHING, holdings)

    assert offer.by_name[DeviceName("gpu-1")].shape == SLICEABLE


def test_two_replicas_of_one_request_are_of_different_gpus():
    node = Inventory((gpu(0), gpu(1)))

    offer = build_offer(node, profile(replicas=2), NO_CAPACITY, {})

    names = [str(device.name) for device in offer.devices]
    assert names == ["gpu-0-0", "gpu-1-0", "gpu-0-1", "gpu-1-1"]


def test_a_held_gpu_whose_new_rules_cannot_be_published_is_still_what_it_was():
    holdings = holding(SLICEABLE)

    offer = build_offer(one_gpu(), profile(memory_least=90 * GIB), EVERYTHING, holdings)

    assert offer.by_name[DeviceName("gpu-0")].shape == SLICEABLE
    assert offer.pending == (PendingChange(DeviceName("gpu-0"), "exclusive"),)


def test_a_held_replica_keeps_all_replicas():
    holdings = holding(Replica(1, 2, 40 * GIB), "gpu-0-1")

    offer = build_offer(one_gpu(), DEFAULT_PROFILE, NO_CAPACITY, holdings)

    assert [str(device.name) for device in offer.devices] == ["gpu-0-0", "gpu-0-1"]
    assert offer.pending[0].change == "exclusive"


def test_a_gpu_in_the_shape_that_it_should_have_has_nothing_pending():
    assert build_offer(one_gpu(), DEFAULT_PROFILE, EVERYTHING, holding(SLICEABLE)).pending == ()


def test_admin_access_keeps_no_shape():
    holdings = holding(SLICEABLE, admin=True)

    assert shapes(one_gpu(), profile(fractions=False), holdings=holdings) == {"gpu-0": Exclusive()}


def test_shapes_are_described_for_people():
    renamed = Replica(0, 3, None, renamed=True)
    by_mps = Replica(0, 3, None, renamed=True, cores=33)
    every = (SLICEABLE, Exclusive(), Replica(0, 3, None), renamed, by_mps, AdminAccess())

    assert [describe_shape(shape) for shape in every] == [
        *("sliceable", "exclusive", "3 replicas", "3 replicas (gpu-shared)"),
        "3 replicas (gpu-shared, MPS, 33 % of the cores each)",
        "monitor",
    ]
    assert gpu_name_of("gpu-3-mon") == gpu_name_of("gpu-3") == gpu_name_of("gpu-3-12") == "gpu-3"


@pytest.mark.parametrize("policy", AllocationPolicy)
def test_which_replicas_are_given_out_is_said_by_profiles_for_the_device_plugin_api_alone(policy):
    node, everything = Inventory((gpu(0),)), profile(replicas=2, allocation_policy=policy)

    by_dra = build_offer(node, everything, EVERYTHING, {})
    by_device_plugin = build_offer(node, everything, DEVICE_PLUGIN_FEATURES, {})

    assert by_device_plugin.warnings == ()
    assert by_dra.warnings == (
        ()
        if policy is AllocationPolicy.AUTO
        else (
            "profile 'p', spec.gpus[0].allocationPolicy: has no effect by DRA, where the scheduler "
            "takes the first that is free; constraints of a claim spread or join",
        )
    )
