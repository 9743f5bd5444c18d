"""Only the instance that is meant is removed: while NVML does not tell its UUID, it stays."""

import threading

import pynvml
import pytest

from dra_driver.base.errors import NodeError
from dra_driver.model.gpus import GpuUuid
from dra_driver.node.mig.gpu_locks import DeviceBusy
from dra_driver.sim.nvml import SimulatedNvml
from tests.fakes.mig_node import MigNode, board

OTHER = GpuUuid("MIG-another")
ANOTHER = [{"uuid": OTHER}, {"unless": frozenset({OTHER})}]


class Silent(SimulatedNvml):
    """Tells no UUID of compute instances, from the *first* one on, while it is silent."""

    silent = True
    first = 0

    def _hides(self, ci):
        return self.silent and ci >= self.first

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802 - NVML's names
        if "/" in uuid and self._hides(int(uuid.split("/")[2])):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return super().nvmlDeviceGetHandleByUUID(uuid)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device, index):  # noqa: N802
        if self.silent:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return super().nvmlDeviceGetMigDeviceHandleByIndex(device, index)


class Scene:
    """A GPU with a 2g.20gb, whose UUID NVML does not tell for now."""

    def __init__(self, directory, patience=0.0):
        self.node = MigNode(directory, patience=patience)
        self.created = self.node.partitions.create(self.node.gpu, self.node.key("2g.20gb"))
        self.nvml = Silent(self.node.live, mig=self.node.mig)
        self.partitions = self.node.through(self.nvml)

    def remove(self, **target):
        self.partitions.remove(self.node.gpu, self.created.key, **target)


def present(node):
    """The GPU instances, whole or not."""
    return [
        node.named(instance.key) for instance in (*node.dynamic.instances, *node.dynamic.unusable)
    ]


@pytest.mark.parametrize("known", ["uuid", "unless"])
def test_an_instance_without_a_uuid_stays_until_nvml_tells_it(tmp_path, known):
    scene = Scene(tmp_path)
    target = {"uuid": scene.created.uuid} if known == "uuid" else {"unless": frozenset({OTHER})}

    with pytest.raises(DeviceBusy, match=r"GPU instance 3 .* from another's: it is tried again$"):
        scene.remove(**target)
    assert present(scene.node) == ["2g.20gb at 0"]

    scene.nvml.silent = False
    scene.remove(**target)
    assert present(scene.node) == []


def test_an_instance_whose_uuid_nvml_tells_a_moment_later_is_removed_then(tmp_path):
    scene = Scene(tmp_path, patience=5.0)
    timer = threading.Timer(0.1, lambda: setattr(scene.nvml, "silent", False))
    timer.start()
    scene.remove(uuid=scene.created.uuid)
    timer.join()
    assert present(scene.node) == []


def test_where_any_instance_is_meant_no_uuid_is_needed(tmp_path):
    scene = Scene(tmp_path)
    scene.remove()
    assert present(scene.node) == []


def test_an_instance_with_a_uuid_of_another_claim_stays(tmp_path):
    scene = Scene(tmp_path)
    scene.nvml.silent = False
    created = scene.created
    for uuid in (None, created.uuid):
        scene.remove(uuid=uuid, unless=frozenset({created.uuid, OTHER}))
        assert scene.node.dynamic.instances == (created,)


@pytest.mark.parametrize("target", ANOTHER)
def test_a_gpu_instance_alone_has_no_uuid_and_is_removed(tmp_path, target):
    half = {"profile": "1g.10gb", "start": 3, "compute": []}
    node = MigNode(tmp_path, board(mig=True, instances=[half]))
    assert present(node) == ["1g.10gb at 3"]
    node.partitions.remove(node.gpu, node.key("1g.10gb", 3), **target)
    assert present(node) == []


class HalfSilent(Silent):
    """Tells the UUID of the first compute instance alone."""

    first = 1


@pytest.fixture
def divided(tmp_path):
    """A GPU instance with two compute instances, and the UUID of one of them."""
    unmanaged = {"profile": "3g.40gb", "start": 4, "compute": [2, 1]}
    node = MigNode(tmp_path, board(mig=True, instances=[unmanaged]))
    partitions, key = node.through(HalfSilent(node.live, mig=node.mig)), node.key("3g.40gb", 4)
    with pytest.raises(NodeError) as refused:
        partitions.create(node.gpu, key, new=True)
    (uuid,) = [word for word in str(refused.value).replace(":", ",").split(", ") if "MIG-" in word]
    return node, partitions, key, GpuUuid(uuid)


@pytest.mark.parametrize("target", ANOTHER)
def test_of_a_divided_instance_every_uuid_is_needed(divided, target):
    node, partitions, key, _ = divided
    with pytest.raises(DeviceBusy):
        partitions.remove(node.gpu, key, **target)
    assert present(node) == ["3g.40gb at 4"]


def test_unless_the_uuid_that_is_told_is_enough(divided):
    node, partitions, key, uuid = divided
    partitions.remove(node.gpu, key, unless=frozenset({uuid}))
    assert present(node) == ["3g.40gb at 4"]
    partitions.remove(node.gpu, key, uuid)
    assert present(node) == []
