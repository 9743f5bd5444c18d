"""Whoever is refused since something is in the way is told what to type."""

from dataclasses import replace

import pytest

from dra_driver.base.errors import PlacementTaken
from tests.fakes.mig import ONE, mig_gpu, mig_offer, partition
from tests.plugin.mig.test_claims import GPU, World

KEY = partition(ONE, 0).key


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def refusal(world):
    with pytest.raises(PlacementTaken) as raised:
        world.prepare("gpu-0")
    return str(raised.value)


def test_an_instance_that_was_seen_is_removed_by_its_number(world):
    world.node.mig.modes[GPU] = True
    there = world.node.mig.add(GPU, KEY)
    gpu = mig_gpu()
    assert gpu.mig
    seen = replace(gpu.mig, instances=(there,))
    world.offers.last = world.offers.next = mig_offer(replace(gpu, mig=seen))
    mig = f"nvidia-smi mig -i {gpu.pci_bus_id}"
    typed = f"{mig} -dci -gi {there.gi} and {mig} -dgi -gi {there.gi}, or wait"
    assert typed in refusal(world)


def test_of_one_that_was_not_seen_it_is_said_where_its_number_is(world):
    world.node.mig.modes[GPU] = True
    world.node.mig.add(GPU, KEY)
    assert "-dci -gi <its id in nvidia-smi mig -lgi> and nvidia-smi mig" in refusal(world)
