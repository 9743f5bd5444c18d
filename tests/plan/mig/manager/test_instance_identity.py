"""What layouts made is known again, and nothing else is taken for it."""

from dataclasses import replace

import pytest

from dra_driver.model.gpus import (
    GpuUuid,
    Inventory,
    MigInfo,
    MigInstance,
    PartitionKey,
    UnusableGpuInstance,
)
from dra_driver.model.mig_layouts import LayoutBefore, LayoutInstance, MigState
from dra_driver.plan.mig.manager.state import (
    layout_instance,
    partition_keys,
    pruned_state,
    still_present,
)
from tests.builders import gpu

KEY, OTHER = PartitionKey(19, 0, 1, 1), PartitionKey(19, 1, 1, 1)
MADE = LayoutInstance(KEY, 7, "MIG-1")


def cut(*instances, unusable=(), on=True):
    return replace(gpu(), mig=MigInfo(on, on, True, (), instances, unusable))


def instance(key=KEY, gi=7, uuid="MIG-1"):
    return MigInstance(key, gi, 0, GpuUuid(uuid))


@pytest.mark.parametrize(
    ("there", "is_ours"),
    [
        pytest.param(cut(instance()), True, id="the same"),
        pytest.param(cut(instance(gi=8)), False, id="another GPU instance"),
        pytest.param(cut(instance(uuid="MIG-2")), False, id="another compute instance"),
        pytest.param(cut(instance(OTHER)), False, id="another place"),
        pytest.param(cut(unusable=(UnusableGpuInstance(KEY, 7, 0),)), True, id="half removed"),
        pytest.param(
            cut(unusable=(UnusableGpuInstance(KEY, 8, 0),)), False, id="half of another one"
        ),
        pytest.param(cut(), False, id="nothing"),
        pytest.param(gpu(), False, id="a GPU that cannot be cut"),
    ],
)
def test_an_instance_is_known_by_more_than_its_place(there, is_ours):
    assert still_present(there, [MADE]) == ((MADE,) if is_ours else ())


def test_what_it_is_known_by_is_told_by_the_instance():
    assert layout_instance(instance()) == MADE
    assert partition_keys([MADE, LayoutInstance(OTHER)]) == {KEY, OTHER}


@pytest.mark.parametrize(
    "there", [cut(instance()), cut(unusable=(UnusableGpuInstance(KEY, 3, 0),))]
)
def test_what_a_crash_kept_from_being_known_further_is_what_lies_there(there):
    assert still_present(there, [LayoutInstance(KEY), LayoutInstance(OTHER)]) == (
        LayoutInstance(KEY),
    )


def test_what_is_gone_is_forgotten():
    uuid = gpu().uuid
    book = MigState(instances={uuid: (MADE, LayoutInstance(OTHER, 8, "MIG-2"))})

    assert pruned_state(book, Inventory((cut(instance()),)), ()).instances == {uuid: (MADE,)}
    assert pruned_state(book, Inventory((cut(),)), ()).instances == {}


def test_of_what_cannot_be_seen_nothing_is_forgotten():
    uuid = gpu().uuid
    book = MigState(instances={uuid: (MADE,)})

    assert pruned_state(book, Inventory(), ()) == book
    assert pruned_state(book, Inventory((gpu(),)), ()) == book


def test_of_a_gpu_that_a_look_could_not_read_nothing_is_forgotten():
    uuid = gpu().uuid
    book = MigState(instances={uuid: (MADE,)}, left_on=(uuid,))

    def seen(*old):
        return Inventory((cut(on=False),), stale=frozenset(old))

    assert pruned_state(book, seen(uuid), ()) == book
    assert pruned_state(book, seen(GpuUuid("GPU-another")), ()) == MigState()


def test_what_is_gone_of_a_change_that_was_cut_short_is_forgotten_too():
    uuid = gpu().uuid
    before = {uuid: LayoutBefore(True, (KEY,))}
    book = MigState(instances={uuid: (MADE, LayoutInstance(OTHER))}, before=before)

    assert pruned_state(book, Inventory((cut(),)), ()) == MigState(before=before)
    state = pruned_state(book, Inventory((cut(unusable=(UnusableGpuInstance(KEY, 7, 0),)),)), ())
    assert state == MigState(instances={uuid: (MADE,)}, before=before)


def test_whose_mode_a_claim_turned_on_is_known_until_it_is_off():
    uuid = gpu().uuid
    noted = pruned_state(MigState(), Inventory((cut(on=False),)), {uuid})

    assert noted.left_on == (uuid,)
    assert pruned_state(noted, Inventory((cut(),)), ()).left_on == (uuid,)
    assert pruned_state(noted, Inventory(), ()).left_on == (uuid,)
    assert pruned_state(noted, Inventory((cut(on=False),)), ()).left_on == ()
