"""What layouts created is recognized, and nothing else is taken for it."""

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
UUID = gpu().uuid


def board(*instances, unusable=None, on=True):
    """A GPU with these instances; *unusable*: a GPU instance that is left of one."""
    left_over = () if unusable is None else (UnusableGpuInstance(KEY, unusable, 0),)
    return replace(gpu(), mig=MigInfo(on, on, True, (), instances, left_over))


def instance(key=KEY, gi=7, uuid="MIG-1"):
    return MigInstance(key, gi, 0, GpuUuid(uuid))


@pytest.mark.parametrize(
    ("node_gpu", "is_ours"),
    [
        pytest.param(board(instance()), True, id="the same"),
        pytest.param(board(instance(gi=8)), False, id="another GPU instance"),
        pytest.param(board(instance(uuid="MIG-2")), False, id="another compute instance"),
        pytest.param(board(instance(OTHER)), False, id="another place"),
        pytest.param(board(unusable=7), True, id="half removed"),
        pytest.param(board(unusable=8), False, id="half of another one"),
        pytest.param(board(), False, id="nothing"),
        pytest.param(gpu(), False, id="a GPU that cannot be partitioned"),
    ],
)
def test_an_instance_is_recognized_by_more_than_its_place(node_gpu, is_ours):
    assert still_present(node_gpu, [MADE]) == ((MADE,) if is_ours else ())


def test_an_instance_says_how_it_is_recognized():
    assert layout_instance(instance()) == MADE
    assert partition_keys([MADE, LayoutInstance(OTHER)]) == {KEY, OTHER}


@pytest.mark.parametrize("node_gpu", [board(instance()), board(unusable=3)])
def test_where_a_crash_left_only_a_place_recorded_what_is_there_counts(node_gpu):
    recorded = [LayoutInstance(KEY), LayoutInstance(OTHER)]

    assert still_present(node_gpu, recorded) == (LayoutInstance(KEY),)


BOTH = MigState(instances={UUID: (MADE, LayoutInstance(OTHER, 8, "MIG-2"))})
LEFT_ON = MigState(instances={UUID: (MADE,)}, left_on=(UUID,))
BEGUN = MigState(
    instances={UUID: (MADE, LayoutInstance(OTHER))}, before={UUID: LayoutBefore(True, (KEY,))}
)
OFF = board(on=False)


@pytest.mark.parametrize(
    ("state", "inventory", "expected"),
    [
        pytest.param(
            BOTH, Inventory((board(instance()),)), MigState(instances={UUID: (MADE,)}), id="gone"
        ),
        pytest.param(BOTH, Inventory((board(),)), MigState(), id="all gone"),
        pytest.param(BOTH, Inventory(), BOTH, id="the GPU is not seen"),
        pytest.param(BOTH, Inventory((gpu(),)), BOTH, id="nor whether it has MIG"),
        pytest.param(
            LEFT_ON, Inventory((OFF,), stale=frozenset({UUID})), LEFT_ON, id="it could not be read"
        ),
        pytest.param(
            LEFT_ON,
            Inventory((OFF,), stale=frozenset({GpuUuid("GPU-another")})),
            MigState(),
            id="another could not be read",
        ),
        pytest.param(
            BEGUN,
            Inventory((board(),)),
            MigState(before=BEGUN.before),
            id="a change that a crash interrupted",
        ),
        pytest.param(
            BEGUN,
            Inventory((board(unusable=7),)),
            MigState(instances={UUID: (MADE,)}, before=BEGUN.before),
            id="a change that a crash interrupted, and half an instance",
        ),
    ],
)
def test_what_is_certainly_gone_is_forgotten(state, inventory, expected):
    assert pruned_state(state, inventory, ()) == expected


def test_a_mode_that_a_claim_turned_on_is_remembered_until_it_is_off():
    noted = pruned_state(MigState(), Inventory((OFF,)), {UUID})

    assert noted.left_on == (UUID,)
    for inventory, left_on in (
        (Inventory((board(),)), (UUID,)),
        (Inventory(), (UUID,)),
        (Inventory((OFF,)), ()),
    ):
        assert pruned_state(noted, inventory, ()).left_on == left_on
