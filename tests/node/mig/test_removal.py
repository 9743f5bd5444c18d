"""What is removed is what was meant: where NVML does not say what lies there, it stays for now."""

import threading

import pynvml
import pytest

from dra_driver.base.errors import NodeError
from dra_driver.model.gpus import GpuUuid
from dra_driver.node.mig.gpu_locks import DeviceBusy
from dra_driver.sim.nvml import SimulatedNvml
from tests.fakes.mig_node import MigNode, board

OTHER = GpuUuid("MIG-another")


class Silent(SimulatedNvml):
    """Says no name of compute instances, from this one on, while it is silent."""

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


def silent(node):
    """The functions, and partitions of who asks them."""
    functions = Silent(node.live, mig=node.mig)
    return functions, node.through(functions)


def taken(node):
    return [
        node.named(instance.key) for instance in (*node.dynamic.instances, *node.dynamic.unusable)
    ]


@pytest.mark.parametrize("known", ["uuid", "unless"])
def test_while_nvml_says_no_name_nothing_goes_that_may_be_anothers(tmp_path, known):
    node = MigNode(tmp_path)
    made = node.partitions.create(node.gpu, node.key("2g.20gb"))
    functions, partitions = silent(node)
    meant = {"uuid": made.uuid} if known == "uuid" else {"unless": frozenset({OTHER})}

    with pytest.raises(DeviceBusy, match=r"GPU instance 3 .* from another's: it is tried again$"):
        partitions.remove(node.gpu, made.key, **meant)
    assert taken(node) == ["2g.20gb at 0"]

    functions.silent = False
    partitions.remove(node.gpu, made.key, **meant)
    assert taken(node) == []


def test_one_that_nvml_names_a_moment_later_goes_then(tmp_path):
    node = MigNode(tmp_path, patience=5.0)
    made = node.partitions.create(node.gpu, node.key("2g.20gb"))
    functions, partitions = silent(node)
    timer = threading.Timer(0.1, lambda: setattr(functions, "silent", False))
    timer.start()
    partitions.remove(node.gpu, made.key, made.uuid)
    timer.join()
    assert taken(node) == []


def test_where_nothing_is_known_of_it_no_name_is_needed(tmp_path):
    node = MigNode(tmp_path)
    made = node.partitions.create(node.gpu, node.key("2g.20gb"))
    _, partitions = silent(node)
    partitions.remove(node.gpu, made.key)
    assert taken(node) == []


def test_what_is_called_like_one_of_others_stays(tmp_path):
    node = MigNode(tmp_path)
    made = node.partitions.create(node.gpu, node.key("2g.20gb"))
    for uuid in (None, made.uuid):
        node.partitions.remove(node.gpu, made.key, uuid, unless=frozenset({made.uuid, OTHER}))
        assert node.dynamic.instances == (made,)


@pytest.mark.parametrize("meant", [{"uuid": OTHER}, {"unless": frozenset({OTHER})}])
def test_a_gpu_instance_alone_has_no_name_and_goes(tmp_path, meant):
    half = {"profile": "1g.10gb", "start": 3, "compute": []}
    node = MigNode(tmp_path, board(mig=True, instances=[half]))
    assert taken(node) == ["1g.10gb at 3"]
    node.partitions.remove(node.gpu, node.key("1g.10gb", 3), **meant)
    assert taken(node) == []


class HalfSilent(Silent):
    """Names the first compute instance alone."""

    first = 1


def divided(directory):
    """One whose GPU instance has two compute instances, the name of one of them said."""
    unmanaged = {"profile": "3g.40gb", "start": 4, "compute": [2, 1]}
    node = MigNode(directory, board(mig=True, instances=[unmanaged]))
    return node, node.through(HalfSilent(node.live, mig=node.mig)), node.key("3g.40gb", 4)


def named(node, partitions, key):
    """The name that is said."""
    with pytest.raises(NodeError) as refused:
        partitions.create(node.gpu, key, new=True)
    (uuid,) = [word for word in str(refused.value).replace(":", ",").split(", ") if "MIG-" in word]
    return GpuUuid(uuid)


@pytest.mark.parametrize("known", ["uuid", "unless"])
def test_of_one_that_is_divided_every_name_is_needed(tmp_path, known):
    node, partitions, key = divided(tmp_path)
    meant = {"uuid": OTHER} if known == "uuid" else {"unless": frozenset({OTHER})}
    with pytest.raises(DeviceBusy):
        partitions.remove(node.gpu, key, **meant)
    assert taken(node) == ["3g.40gb at 4"]


def test_unless_the_one_that_is_said_is_enough(tmp_path):
    node, partitions, key = divided(tmp_path)
    uuid = named(node, partitions, key)
    partitions.remove(node.gpu, key, unless=frozenset({uuid}))
    assert taken(node) == ["3g.40gb at 4"]
    partitions.remove(node.gpu, key, uuid)
    assert taken(node) == []
