"""Places on a GPU that can be partitioned, and what lies there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.model.gpus import (
    GpuUuid,
    Inventory,
    MigInfo,
    MigInstance,
    Placement,
    UnusableGpuInstance,
    is_free,
)
from tests.builders import gpu
from tests.fakes.mig import H100, ONE, THREE, partition

PLACES = st.builds(Placement, st.integers(0, 11), st.integers(1, 12))


@given(PLACES, PLACES)
def test_two_placements_overlap_where_they_have_a_unit_in_common(placement, other):
    units = set(range(placement.start, placement.end)) & set(range(other.start, other.end))

    assert placement.overlaps(other) is bool(units)
    assert placement.contains(other) is (len(units) == other.size)


def test_a_key_is_the_place_and_says_so_in_messages():
    key = partition(THREE, 4).key

    assert (key.placement, str(key)) == (Placement(4, 4), "profile 9 at 4")


def test_a_key_of_another_board_is_no_partition_of_this_one():
    board = MigInfo(on=True, pending=True, switches=True, profiles=(ONE,))

    assert board.partition(partition(ONE, 6).key) == partition(ONE, 6)
    assert board.partition(partition(THREE, 4).key) is None


def test_a_board_is_as_large_as_its_last_placement():
    assert MigInfo(on=False, pending=False, switches=True, profiles=H100).units == 8
    assert MigInfo(on=True, pending=True, switches=True).units == 0


@pytest.mark.parametrize(("start", "free"), [(0, True), (4, False)])
def test_odd_instances_are_in_the_way_like_any(start, free):
    unusable = UnusableGpuInstance(partition(ONE, 5).key, 3, 2)
    there = MigInstance(partition(ONE, 6).key, 4, 0, GpuUuid("MIG-1"))

    board = MigInfo(True, True, True, H100, (there,), (unusable,))

    assert board.keys == (unusable.key, there.key)
    assert is_free(partition(THREE, start).placement, board.keys) is free


def test_a_lost_gpu_is_among_those_of_the_node_but_does_not_answer():
    gpus = (gpu(0), gpu(1))

    assert Inventory(gpus).answering is gpus
    assert Inventory(gpus, lost=((gpus[0].uuid, "it fell off the bus"),)).answering == gpus[1:]
