"""A node allows itself to cut before it does, and removes what was cut and nothing else."""

import pytest

from dra_driver.errors import NodeError
from dra_driver.model.devices import GpuUuid
from dra_driver.model.mig import Partition
from dra_driver.model.steps import CutPartition, RemovePartition
from dra_driver.node.machine import open_node
from dra_driver.node.place import Place
from tests.fakes.simulated import Node, h100

CONFIG = "dev/nvidia-caps/nvidia-cap1"


@pytest.fixture
def opened(tmp_path):
    """A node, where its host is, and the first partition of its GPU."""

    def make(**document):
        file = Node(tmp_path, {"gpus": [h100("1b", mig=True)], **document}).file
        context = open_node(Place(sim=str(file)), tmp_path / "sim")
        node = context.__enter__()
        contexts.append(context)
        (gpu,) = node.refresh().gpus
        assert gpu.mig
        profile = gpu.mig.profiles[0]
        return node, tmp_path / "sim", gpu.uuid, Partition(profile, profile.placements[0]).key

    contexts = []
    yield make
    for context in contexts:
        context.__exit__(None, None, None)


def test_the_device_node_that_lets_cut_is_made_first_and_again_when_it_is_gone(opened):
    node, host, gpu, key = opened()
    assert not (host / CONFIG).exists()
    node.carry_out(CutPartition(gpu, key))
    assert (host / CONFIG).exists()
    (host / CONFIG).unlink()
    node.carry_out(RemovePartition(gpu, key))
    assert node.partitions(gpu) == ()


def test_where_it_cannot_be_made_that_is_said_and_nothing_is_cut(opened):
    node, _, gpu, key = opened(nvidia_modprobe="fails")
    with pytest.raises(NodeError, match=r"/dev/nvidia-caps/nvidia-cap1 \(mig/config\)"):
        node.carry_out(CutPartition(gpu, key))
    assert node.partitions(gpu) == ()


def test_a_step_removes_the_instance_that_was_cut_for_it_alone(opened):
    node, _, gpu, key = opened()
    node.carry_out(CutPartition(gpu, key))
    there = node.instance(gpu, key)
    node.restore(RemovePartition(gpu, key, GpuUuid("MIG-another")))
    assert node.instance(gpu, key) == there
    node.restore(RemovePartition(gpu, key, there.uuid))
    assert node.partitions(gpu) == ()
