"""A node gets the device files that it needs to create partitions, and removes its own alone."""

import logging
from contextlib import ExitStack

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
        node = contexts.enter_context(open_simulated(file, tmp_path))
        (gpu,) = node.refresh().gpus
        assert gpu.mig
        profile = gpu.mig.profiles[0]
        return node, tmp_path / "sim", gpu.uuid, Partition(profile, profile.placements[0]).key

    with ExitStack() as contexts:
        yield make


def test_the_device_node_for_creating_is_made_first_and_again_when_it_is_gone(opened):
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
    instance = node.instance(gpu, key)
    for minor in capability_minors(0, instance.gi, instance.ci):
        assert (host / f"dev/nvidia-caps/nvidia-cap{minor}").exists()


def test_without_device_nodes_nvml_decides_and_partitions_can_be_removed(opened, caplog):
    node, _, gpu, key = opened(nvidia_modprobe="fails")
    with caplog.at_level(logging.WARNING), pytest.raises(NodeError, match="run this as root, priv"):
        node.carry_out(CreatePartition(gpu, key))
    assert node.partitions(gpu) == (key,)
    node.restore(RemovePartition(gpu, key))
    assert node.partitions(gpu) == ()
    capabilities = [
        record.capability for record in caplog.records if record.msg.startswith("no device file")
    ]
    assert capabilities[0] == "mig/config"
    assert len(capabilities) == 2  # and of the GPU instance, in which nothing could be created


def test_a_step_removes_only_the_instance_that_was_created_for_it(opened):
    node, _, gpu, key = opened()
    node.carry_out(CreatePartition(gpu, key))
    instance = node.instance(gpu, key)
    for step in (
        RemovePartition(gpu, key, GpuUuid("MIG-another")),
        RemovePartition(gpu, key, unless=frozenset({instance.uuid})),
    ):
        node.restore(step)
        node.carry_out(step)
        assert node.instance(gpu, key) == instance
    node.restore(RemovePartition(gpu, key, instance.uuid))
    assert node.partitions(gpu) == ()
