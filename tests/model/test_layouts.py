"""What is remembered of layouts, and what is told of it."""

import pytest

from dra_driver.model.gpus import GpuUuid, PartitionKey
from dra_driver.model.mig_layouts import (
    LayoutInstance,
    LayoutOutcome,
    LayoutState,
    MigState,
    overall_state,
)


def outcome(state):
    return LayoutOutcome("all-balanced", state, "")


@pytest.mark.parametrize(
    ("states", "together"),
    [
        ((), LayoutState.SUCCESS),
        ((LayoutState.SUCCESS, LayoutState.PENDING), LayoutState.PENDING),
        ((LayoutState.PENDING, LayoutState.FAILED, LayoutState.SUCCESS), LayoutState.FAILED),
    ],
)
def test_the_worst_state_of_a_gpu_is_the_state_of_the_node(states, together):
    assert overall_state(map(outcome, states)) is together


def test_what_waits_has_not_failed():
    outcomes = {
        GpuUuid("a"): outcome(LayoutState.PENDING),
        GpuUuid("b"): outcome(LayoutState.FAILED),
    }

    assert MigState(outcomes=outcomes).failures == 1
    assert MigState(mode_problems={GpuUuid("a"): "in use"}, problem="no such layout").failures == 2


def test_where_layouts_made_something_is_known_without_what():
    key = PartitionKey(19, 3, 1, 1)

    assert MigState(instances={GpuUuid("a"): (LayoutInstance(key, 7, "MIG-1"),)}).keys == {
        GpuUuid("a"): (key,)
    }
