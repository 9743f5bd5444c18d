"""A node gets what it needs to cut before it does, and removes what was cut and nothing else."""

import logging

import pytest

from dra_driver.base.errors import NodeError
from dra_driver.model.gpus import GpuUuid, Partition
from dra_driver.model.steps import CreatePartition, RemovePartition
from dra_driver.sim.mig.identifiers import capability_minors
from tests.fakes.simulated import Node, h100, open_simulated

CONFIG = "dev/nvidia-caps/nvidia-cap1"


@pytest.fixture
def opened(tmp_path):
    """A node, where its host is, and the first partition of its GPU."""

    def make(**document):
        file = Node(tmp_path, {"gpus": [h100("1b", mig=True)], **document}).file
        context = open_simulated(file, tmp_path)
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
    node.carry_out(CreatePartition(gpu, key))
    assert (host / CONFIG).exists()
    (host / CONFIG).unlink()
    node.carry_out(RemovePartition(gpu, key))
    assert node.partitions(gpu) == ()


def test_the_device_nodes_of_an_instance_are_there_before_anybody_serves_in_it(opened):
    node, host, gpu, key = opened()
    node.carry_out(CreatePartition(gpu, key))
    there = node.instance(gpu, key)
    for minor in capability_minors(0, there.gi, there.ci):
        assert (host / f"dev/nvidia-caps/nvidia-cap{minor}").exists()


def test_without_device_nodes_the_driver_has_the_last_word_and_what_is_cut_can_go(opened, caplog):
    node, _, gpu, key = opened(nvidia_modprobe="fails")
    with caplog.at_level(logging.WARNING), pytest.raises(NodeError, match="run this as root, priv"):
        node.carry_out(CreatePartition(gpu, key))
    messages = [
        record.capability for record in caplog.records if record.msg.startswith("no device file")
    ]
    assert messages[0] == "mig/config"
    assert len(messages) == 2  # and of the GPU instance, in which nothing could be made
    assert node.partitions(gpu) == (key,)
    node.restore(RemovePartition(gpu, key))
    assert node.partitions(gpu) == ()
    assert (
        len([record for record in caplog.records if record.msg.startswith("no device file")]) == 2
    )


def test_a_step_removes_the_instance_that_was_cut_for_it_alone(opened):
    node, _, gpu, key = opened()
    node.carry_out(CreatePartition(gpu, key))
    there = node.instance(gpu, key)
    another = frozenset({there.uuid})
    for step in (
        RemovePartition(gpu, key, GpuUuid("MIG-another")),
        RemovePartition(gpu, key, unless=another),
    ):
        node.restore(step)
        node.carry_out(step)
        assert node.instance(gpu, key) == there
    node.restore(RemovePartition(gpu, key, there.uuid))
    assert node.partitions(gpu) == ()
