"""What is remembered of layouts, and what is told of it."""

import pytest

from dra_driver.model.devices import GpuUuid
from dra_driver.model.layouts import Book, Made, Outcome, State, state_of
from dra_driver.model.mig import PartitionKey


def outcome(state):
    return Outcome("all-balanced", state, "")


@pytest.mark.parametrize(
    ("states", "together"),
    [
        ((), State.SUCCESS),
        ((State.SUCCESS, State.PENDING), State.PENDING),
        ((State.PENDING, State.FAILED, State.SUCCESS), State.FAILED),
    ],
)
def test_the_worst_state_of_a_gpu_is_the_state_of_the_node(states, together):
    assert state_of(map(outcome, states)) is together


def test_what_waits_has_not_failed():
    outcomes = {GpuUuid("a"): outcome(State.PENDING), GpuUuid("b"): outcome(State.FAILED)}

    assert Book(outcomes=outcomes).failures == 1
    assert Book(boards={GpuUuid("a"): "in use"}, problem="no such layout").failures == 2


def test_where_layouts_made_something_is_known_without_what():
    key = PartitionKey(19, 3, 1, 1)

    assert Book(made={GpuUuid("a"): (Made(key, 7, "MIG-1"),)}).keys == {GpuUuid("a"): (key,)}
