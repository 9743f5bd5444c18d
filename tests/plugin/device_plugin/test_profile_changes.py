"""A change of the profile, on GPUs that pods have by the device-plugin API."""

import pytest

from dra_driver.model.profiles import SharingStrategy
from tests.fakes.allocations import AllocationWorld, profile_of, replica

BY_MPS = {"replicas": 4, "default_strategy": SharingStrategy.MPS}
ONLY_BY_MPS = {**BY_MPS, "strategies": (SharingStrategy.MPS,)}
BY_TURNS = {"replicas": 4, "limited": False}
ONLY_BY_TURNS = {**BY_TURNS, "strategies": (SharingStrategy.TIME_SLICING,)}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(BY_TURNS, BY_MPS, id="to MPS"),
        pytest.param(BY_TURNS, ONLY_BY_MPS, id="to MPS, which alone is allowed"),
        pytest.param(BY_MPS, BY_TURNS, id="from MPS"),
        pytest.param(BY_MPS, ONLY_BY_TURNS, id="from MPS, which is not allowed any more"),
    ],
)
def test_as_long_as_a_gpu_is_in_use_its_next_pods_share_it_as_the_others_do(
    tmp_path, before, after
):
    """What MPS promises of memory and cores does not hold beside programs that are not under it."""
    world = AllocationWorld(tmp_path, **before)
    world.admit("old", replica(0))
    world.run("old", replica(0))
    world.profile = profile_of(**after)

    world.admit("new", replica(1))
    world.run("new", replica(1))
    world.admit("elsewhere", replica(0, 1))

    assert is_under_mps(world, replica(1)) == (before is BY_MPS)
    assert is_under_mps(world, replica(0, 1)) == ("limited" not in after)
    for name in ("old", "new"):
        world.end(name)
    world.reconciler.look()
    world.now += 60
    world.reconciler.look()
    world.admit("last", replica(1))
    assert is_under_mps(world, replica(1)) == ("limited" not in after)


def is_under_mps(world, *ids):
    return bool(world.recorded(*ids).namespaces)
