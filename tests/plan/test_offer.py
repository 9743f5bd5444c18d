"""What becomes of each GPU, by its profile, by what the API server keeps, and by what is held."""

import pytest

from dra_driver.model.devices import DeviceName, Version
from dra_driver.model.holdings import Holding
from dra_driver.model.inventory import Inventory
from dra_driver.model.offer import Exclusive, Keeps, Monitor, Pending, Replica, Sliceable, board
from dra_driver.model.profiles import DEFAULT_PROFILE, Entry, Profile, Rules, Selection, Strategy
from dra_driver.plan.offer import described, offer
from tests.fakes.values import MIB, SLICEABLE, gpu, ref

GIB = 1024 * MIB
EVERYTHING = Keeps()
NO_CAPACITY = Keeps(capacity=False)


def profile(**rules):
    return Profile("p", (Entry(Selection(), Rules(**rules), "spec.gpus[0]"),))


def shapes(node, its=DEFAULT_PROFILE, keeps=EVERYTHING, held=None):
    found = offer(node, its, keeps, held or {})
    return {str(device.name): device.shape for device in found.devices}


def one(**fields):
    return Inventory((gpu(0, **fields),))


def holding(shape, device="gpu-0", **fields):
    name = DeviceName(device)
    return {name: (Holding(ref("holder"), name, shape=shape, **fields),)}


def test_without_a_profile_every_gpu_is_sliceable_and_can_be_watched():
    found = shapes(Inventory((gpu(0), gpu(1))))

    assert found == {
        "gpu-0": SLICEABLE,
        "gpu-1": SLICEABLE,
        "gpu-0-mon": Monitor(),
        "gpu-1-mon": Monitor(),
    }
    assert list(found) == ["gpu-0", "gpu-1", "gpu-0-mon", "gpu-1-mon"]  # monitors come last


def test_the_exclusive_device_of_nvidias_driver_comes_alone():
    assert shapes(one(), profile(fractions=False)) == {"gpu-0": Exclusive()}


@pytest.mark.point(76)
def test_where_taints_are_dropped_nothing_would_keep_pods_off_monitors():
    assert shapes(one(), keeps=Keeps(taints=False)) == {"gpu-0": SLICEABLE}


@pytest.mark.point(76)
def test_where_capacity_is_not_consumable_gpus_are_exclusive():
    assert shapes(one(), keeps=NO_CAPACITY) == {"gpu-0": Exclusive()}


def test_where_capacity_is_not_consumable_replicas_are_devices():
    half = 81559 * MIB // 2 // MIB * MIB

    found = shapes(one(), profile(replicas=2, rename=True), NO_CAPACITY)

    assert found == {f"gpu-0-{n}": Replica(n, 2, half, renamed=True) for n in range(2)}


def test_too_many_devices_are_not_made_of_a_gpu():
    found = offer(one(), profile(replicas=65), NO_CAPACITY, {})

    assert found.by_name[DeviceName("gpu-0")].shape == Exclusive()
    assert "lower replicas to 64" in found.pending[0].reason


def test_replicas_divide_the_memory_and_the_shares():
    found = shapes(one(), profile(replicas=4))["gpu-0"]

    assert found == Sliceable(20389 * MIB, GIB, MIB, shares=4, replicas=4)


def test_the_least_amount_is_never_more_than_the_default():
    found = shapes(one(memory_bytes=16 * GIB), profile(replicas=32))["gpu-0"]

    assert (found.memory_default, found.memory_least) == (512 * MIB, 512 * MIB)


def test_amounts_lie_on_the_steps_of_the_profile():
    found = shapes(one(), profile(memory_step=512 * MIB, memory_least=700 * MIB))["gpu-0"]

    assert (found.memory_default, found.memory_least) == (81408 * MIB, 1024 * MIB)


@pytest.mark.parametrize(
    ("fields", "clients"),
    [
        pytest.param({}, 48, id="cuda-13.0"),
        pytest.param({"cuda_driver_version": Version(13, 1)}, 60, id="cuda-13.1"),
        pytest.param({"compute_capability": Version(6, 1)}, 16, id="before-volta"),
    ],
)
def test_as_many_shares_as_mps_takes_clients(fields, clients):
    assert shapes(one(**fields))["gpu-0"].shares == clients


def test_cores_cannot_be_reserved_where_mps_is_not_allowed_or_cannot_limit():
    slicing = profile(strategies=(Strategy.TIME_SLICING,))

    assert not shapes(one(), slicing)["gpu-0"].cores
    assert not shapes(one(compute_capability=Version(6, 1)))["gpu-0"].cores


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
    found = offer(Inventory((gpu(0, **fields), gpu(1))), profile(**rules), EVERYTHING, {})

    assert found.by_name[DeviceName("gpu-0")].shape == Exclusive()
    assert reason in found.pending[0].reason
    assert found.pending[0].reason.startswith("profile 'p', spec.gpus[0]: ")
    assert DeviceName("gpu-1") in found.by_name


def test_booked_replicas_may_be_as_small_as_the_device_plugin_makes_them():
    found = shapes(one(memory_bytes=GIB), profile(replicas=8, limited=False))

    assert found["gpu-0"].memory_default == 128 * MIB


def test_a_gpu_that_is_left_out_says_so():
    found = offer(one(), profile(include=False), EVERYTHING, {})

    assert found.devices == ()
    assert "profile p leaves it out" in found.withheld[0].reason


@pytest.mark.parametrize(
    ("rules", "change"),
    [
        pytest.param({"fractions": False}, "exclusive", id="exclusive"),
        pytest.param({"replicas": 4}, "4 replicas", id="replicas"),
        pytest.param({"include": False}, "left out", id="left-out"),
    ],
)
def test_a_held_gpu_keeps_its_shape_until_nobody_holds_it(rules, change):
    found = offer(one(), profile(**rules), EVERYTHING, holding(SLICEABLE))

    assert found.by_name[DeviceName("gpu-0")].shape == SLICEABLE
    assert found.pending == (Pending(DeviceName("gpu-0"), change),)


def test_a_held_gpu_keeps_its_shape_under_another_name():
    renamed = Inventory((gpu(1, uuid=gpu(0).uuid),))
    held = holding(SLICEABLE, gpu=gpu(0).uuid)

    found = offer(renamed, profile(fractions=False), EVERYTHING, held)

    assert found.by_name[DeviceName("gpu-1")].shape == SLICEABLE


def test_two_replicas_of_one_request_are_of_different_gpus():
    node = Inventory((gpu(0), gpu(1)))

    found = offer(node, profile(replicas=2), NO_CAPACITY, {})

    names = [str(device.name) for device in found.devices]
    assert names == ["gpu-0-0", "gpu-1-0", "gpu-0-1", "gpu-1-1"]


def test_a_held_gpu_whose_new_rules_cannot_be_published_is_still_what_it_was():
    held = holding(SLICEABLE)

    found = offer(one(), profile(memory_least=90 * GIB), EVERYTHING, held)

    assert found.by_name[DeviceName("gpu-0")].shape == SLICEABLE
    assert found.pending == (Pending(DeviceName("gpu-0"), "exclusive"),)


def test_a_held_replica_keeps_all_replicas():
    held = holding(Replica(1, 2, 40 * GIB), "gpu-0-1")

    found = offer(one(), DEFAULT_PROFILE, NO_CAPACITY, held)

    assert [str(device.name) for device in found.devices] == ["gpu-0-0", "gpu-0-1"]
    assert found.pending[0].change == "exclusive"


def test_a_gpu_in_the_shape_that_it_should_have_has_nothing_pending():
    assert offer(one(), DEFAULT_PROFILE, EVERYTHING, holding(SLICEABLE)).pending == ()


def test_who_looks_on_keeps_no_shape():
    held = holding(SLICEABLE, admin=True)

    assert shapes(one(), profile(fractions=False), held=held) == {"gpu-0": Exclusive()}


def test_shapes_are_described_for_people():
    renamed = Replica(0, 3, None, renamed=True)
    every = (SLICEABLE, Exclusive(), Replica(0, 3, None), renamed, Monitor())

    assert [described(shape) for shape in every] == [
        *("sliceable", "exclusive", "3 replicas", "3 replicas (gpu-shared)", "monitor"),
    ]
    assert board("gpu-3-mon") == board("gpu-3") == board("gpu-3-12") == "gpu-3"
