"""What becomes of each GPU, by its profile, by what the API server keeps, and by what is held."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.model.gpus import DeviceName, Inventory, Version
from dra_driver.model.offer import (
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


def shapes(node, profile_=DEFAULT_PROFILE, features=EVERYTHING, held=None):
    offer = build_offer(node, profile_, features, held or {})
    return {str(device.name): device.shape for device in offer.devices}


def one_gpu(**fields):
    return Inventory((gpu(0, **fields),))


def holding(shape, device="gpu-0", **fields):
    name = DeviceName(device)
    return {name: (Holding(ref("holder"), name, gpu(0).uuid, shape=shape, **fields),)}


def test_without_a_profile_every_gpu_is_sliceable_and_can_be_watched():
    offered_shapes = shapes(Inventory((gpu(0), gpu(1))))

    assert offered_shapes == {
        "gpu-0": SLICEABLE,
        "gpu-1": SLICEABLE,
        "gpu-0-mon": AdminAccess(),
        "gpu-1-mon": AdminAccess(),
    }
    assert list(offered_shapes) == [
        "gpu-0",
        "gpu-1",
        "gpu-0-mon",
        "gpu-1-mon",
    ]  # monitors come last


def test_the_exclusive_device_of_nvidias_driver_comes_alone():
    assert shapes(one_gpu(), profile(fractions=False)) == {"gpu-0": Exclusive()}


@pytest.mark.point(76)
def test_where_taints_are_dropped_nothing_would_keep_pods_off_monitors():
    assert shapes(one_gpu(), features=ApiFeatures(device_taints=False)) == {"gpu-0": SLICEABLE}


@pytest.mark.point(76)
def test_where_capacity_is_not_consumable_gpus_are_exclusive():
    assert shapes(one_gpu(), features=NO_CAPACITY) == {"gpu-0": Exclusive()}


def test_where_capacity_is_not_consumable_replicas_are_devices():
    half = 81559 * MIB // 2 // MIB * MIB

    offered_shapes = shapes(one_gpu(), profile(replicas=2, rename=True), NO_CAPACITY)

    assert offered_shapes == {f"gpu-0-{n}": Replica(n, 2, half, renamed=True) for n in range(2)}


def test_too_many_devices_are_not_made_of_a_gpu():
    offer = build_offer(one_gpu(), profile(replicas=65), NO_CAPACITY, {})

    assert offer.by_name[DeviceName("gpu-0")].shape == Exclusive()
    assert "lower replicas to 64" in offer.pending[0].reason


def test_replicas_divide_the_memory_and_the_shares():
    shape = shapes(one_gpu(), profile(replicas=4))["gpu-0"]

    assert shape == Fractional(20389 * MIB, GIB, MIB, shares=4, replicas=4)


def test_the_least_amount_is_never_more_than_the_default():
    shape = shapes(one_gpu(memory_bytes=16 * GIB), profile(replicas=32))["gpu-0"]

    assert (shape.memory_default, shape.memory_least) == (512 * MIB, 512 * MIB)


def test_amounts_lie_on_the_steps_of_the_profile():
    shape = shapes(one_gpu(), profile(memory_step=512 * MIB, memory_least=700 * MIB))["gpu-0"]

    assert (shape.memory_default, shape.memory_least) == (81408 * MIB, 1024 * MIB)


@pytest.mark.parametrize(
    ("fields", "clients"),
    [
        pytest.param({}, 48, id="cuda-13.0"),
        pytest.param({"cuda_driver_version": Version(13, 1)}, 60, id="cuda-13.1"),
        pytest.param({"compute_capability": Version(6, 1)}, 16, id="before-volta"),
    ],
)
def test_as_many_shares_as_mps_takes_clients(fields, clients):
    assert shapes(one_gpu(**fields))["gpu-0"].shares == clients


def test_cores_cannot_be_reserved_where_mps_is_not_allowed_or_cannot_limit():
    slicing = profile(strategies=(SharingStrategy.TIME_SLICING,))

    assert not shapes(one_gpu(), slicing)["gpu-0"].cores
    assert not shapes(one_gpu(compute_capability=Version(6, 1)))["gpu-0"].cores


def test_replicas_that_share_by_mps_divide_the_cores_too():
    shape = shapes(one_gpu(), profile(replicas=3, **BY_MPS))["gpu-0"]

    assert (shape.cores, shape.cores_default) == (True, 33)


def test_replicas_that_are_devices_and_share_by_mps_have_their_part_of_the_cores():
    offered_shapes = shapes(one_gpu(memory_bytes=None), profile(replicas=4, **BY_MPS), NO_CAPACITY)

    assert offered_shapes == {f"gpu-0-{n}": Replica(n, 4, None, cores=25) for n in range(4)}


@pytest.mark.parametrize(
    "rules",
    [
        pytest.param({"replicas": 4}, id="replicas that take turns"),
        pytest.param(BY_MPS, id="a GPU that is not divided"),
    ],
)
def test_else_no_cores_are_reserved_for_a_claim_that_names_none(rules):
    assert shapes(one_gpu(), profile(**rules))["gpu-0"].cores_default == 0


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


def test_as_many_replicas_as_one_likes_take_turns():
    assert shapes(one_gpu(), profile(replicas=200))["gpu-0"].replicas == 200


@pytest.mark.parametrize(
    ("fields", "mps"),
    [pytest.param(OLD, True, id="old-board"), pytest.param({}, False, id="no-agent")],
)
def test_where_mps_cannot_work_no_device_allows_it(fields, mps):
    offer = build_offer(one_gpu(**fields), profile(replicas=4), EVERYTHING, {}, mps)

    assert {device.rules.strategies for device in offer.devices} == {
        (SharingStrategy.TIME_SLICING,)
    }
    shape = offer.by_name[DeviceName("gpu-0")].shape
    assert isinstance(shape, Fractional)
    assert not shape.cores
    assert offer.warnings == ()


def test_a_board_from_compute_capability_7_0_on_can_be_shared_by_mps():
    (device, _) = build_offer(
        one_gpu(compute_capability=Version(7, 0)), profile(), EVERYTHING, {}
    ).devices

    assert device.rules.strategies == (SharingStrategy.TIME_SLICING, SharingStrategy.MPS)


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
    ("shape", "kept", "features"),
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
def test_a_held_gpu_that_mps_leaves_reserves_no_cores_for_the_next_claim(shape, kept, features):
    held = holding(shape)

    with_mps = build_offer(one_gpu(), profile(replicas=4, **BY_MPS), features, held)
    without = build_offer(one_gpu(), profile(replicas=4, **BY_MPS), features, held, mps=False)

    assert with_mps.devices[0].shape == shape
    assert without.devices[0].shape == kept


def test_a_held_gpu_that_is_to_be_shared_by_mps_says_what_it_becomes():
    held = holding(shapes(one_gpu(), profile(replicas=4))["gpu-0"])

    offer = build_offer(one_gpu(), profile(replicas=4, **BY_MPS), EVERYTHING, held)

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


def test_booked_replicas_may_be_as_small_as_the_device_plugin_makes_them():
    offered_shapes = shapes(one_gpu(memory_bytes=GIB), profile(replicas=8, limited=False))

    assert offered_shapes["gpu-0"].memory_default == 128 * MIB


def test_a_gpu_that_is_left_out_says_so():
    offer = build_offer(one_gpu(), profile(include=False), EVERYTHING, {})

    assert offer.devices == ()
    assert "profile p leaves it out" in offer.unavailable[0].reason


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
    held = holding(SLICEABLE)

    offer = build_offer(renamed, profile(fractions=False), EVERYTHING, held)

    assert offer.by_name[DeviceName("gpu-1")].shape == SLICEABLE


def test_two_replicas_of_one_request_are_of_different_gpus():
    node = Inventory((gpu(0), gpu(1)))

    offer = build_offer(node, profile(replicas=2), NO_CAPACITY, {})

    names = [str(device.name) for device in offer.devices]
    assert names == ["gpu-0-0", "gpu-1-0", "gpu-0-1", "gpu-1-1"]


def test_a_held_gpu_whose_new_rules_cannot_be_published_is_still_what_it_was():
    held = holding(SLICEABLE)

    offer = build_offer(one_gpu(), profile(memory_least=90 * GIB), EVERYTHING, held)

    assert offer.by_name[DeviceName("gpu-0")].shape == SLICEABLE
    assert offer.pending == (PendingChange(DeviceName("gpu-0"), "exclusive"),)


def test_a_held_replica_keeps_all_replicas():
    held = holding(Replica(1, 2, 40 * GIB), "gpu-0-1")

    offer = build_offer(one_gpu(), DEFAULT_PROFILE, NO_CAPACITY, held)

    assert [str(device.name) for device in offer.devices] == ["gpu-0-0", "gpu-0-1"]
    assert offer.pending[0].change == "exclusive"


def test_a_gpu_in_the_shape_that_it_should_have_has_nothing_pending():
    assert build_offer(one_gpu(), DEFAULT_PROFILE, EVERYTHING, holding(SLICEABLE)).pending == ()


def test_who_looks_on_keeps_no_shape():
    held = holding(SLICEABLE, admin=True)

    assert shapes(one_gpu(), profile(fractions=False), held=held) == {"gpu-0": Exclusive()}


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
