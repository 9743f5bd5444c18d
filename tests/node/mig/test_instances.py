"""Instances that others create are read as they are: usable ones, and those in the way."""

import logging
from functools import partial

import pynvml
import pytest

from dra_driver.base.errors import MigInstanceNotFound, NodeError
from dra_driver.node.inventory.gpus import MIG_HIDDEN
from dra_driver.node.mig.instances import GpuInstances, compute_profiles
from dra_driver.sim.nvml import SimulatedNvml
from tests.fakes.mig_node import MigNode, board


def existing(profile, start, compute=None):
    instance = {"profile": profile, "start": start}
    return instance if compute is None else instance | {"compute": compute}


def made(tmp_path, *instances, **fields):
    return MigNode(tmp_path, board(mig=True, instances=list(instances), **fields))


def test_instances_come_by_profile_and_place(tmp_path):
    node = made(tmp_path, existing("1g.10gb", 5), existing("3g.40gb", 0), existing("1g.10gb", 4))
    assert node.instances == ["3g.40gb at 0", "1g.10gb at 4", "1g.10gb at 5"]
    assert len({instance.uuid for instance in node.dynamic.instances}) == 3


def test_instances_come_and_go_with_those_who_create_them(tmp_path):
    node = made(tmp_path)
    assert node.instances == []
    node.change(gpu=0, instances=[existing("1g.10gb", 2)])
    assert node.instances == ["1g.10gb at 2"]
    node.change(gpu=0, instances=[])
    assert node.instances == []


@pytest.mark.parametrize("compute", [[], [1], [1, 1, 1], [2, 1]])
def test_an_instance_that_is_not_whole_is_unusable(tmp_path, compute):
    node = made(tmp_path, existing("3g.40gb", 4, compute), existing("1g.10gb", 0))
    assert node.instances == ["1g.10gb at 0"]
    (unusable,) = node.dynamic.unusable
    assert (node.named(unusable.key), unusable.cis) == ("3g.40gb at 4", len(compute))


class Stale(SimulatedNvml):
    """Goes on listing the MIG devices that it listed once, as NVML does with those that another
    process removed."""

    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        self.listed = {}

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device, index):  # noqa: N802
        if index not in self.listed:
            handle = super().nvmlDeviceGetMigDeviceHandleByIndex(device, index)
            self.listed[index] = (handle, super().nvmlDeviceGetUUID(handle))
        return self.listed[index][0]

    def _remembered(self, device):
        return next((uuid for handle, uuid in self.listed.values() if handle == device), None)

    def nvmlDeviceGetUUID(self, handle):  # noqa: N802
        return self._remembered(handle) or super().nvmlDeviceGetUUID(handle)

    def nvmlDeviceGetGpuInstanceId(self, device):  # noqa: N802
        return device.gi

    def nvmlDeviceGetComputeInstanceId(self, device):  # noqa: N802
        return device.ci


def test_an_instance_that_nvml_still_lists_after_its_removal_does_not_exist(tmp_path):
    node = made(tmp_path, existing("3g.40gb", 0), existing("1g.10gb", 5))
    partitions = node.through(Stale(node.live, mig=node.mig))
    assert node.instances == ["3g.40gb at 0", "1g.10gb at 5"]
    node.change(gpu=0, instances=[existing("3g.40gb", 0, []), existing("1g.10gb", 5)])
    key = node.key("3g.40gb")
    node.nvml.on_gpu(node.gpu, "dividing it", lambda nvml, gpu: _empty(nvml, gpu, key))
    assert node.instances == ["1g.10gb at 5"]
    assert [instance.cis for instance in node.dynamic.unusable] == [0]
    with pytest.raises(MigInstanceNotFound):
        partitions.find(node.gpu, key)


def _empty(functions, handle, key):
    """As another process removes the compute instances of a partition."""
    gpu_instances = GpuInstances(functions, handle, partial(compute_profiles, functions))
    instance = gpu_instances.find(key)
    assert instance is not None
    for compute in gpu_instances.compute_instances(instance):
        functions.nvmlComputeInstanceDestroy(compute.handle)


def test_partitions_are_told_to_root_alone_and_others_see_none(tmp_path, caplog):
    node = made(tmp_path, existing("3g.40gb", 4))
    node.mig.is_root = lambda: False
    gpus = node.gpus(lambda minors: None)
    with caplog.at_level(logging.WARNING):
        scans = [gpus.scan() for _ in range(3)]
    (gpu,) = scans[0].gpus
    assert (gpu.mig.on, gpu.mig.profiles, gpu.mig.instances, gpu.mig.unusable) == (True, (), (), ())
    assert scans == [scans[0]] * 3
    assert scans[0].unavailable == ()
    assert [record.msg for record in caplog.records].count(MIG_HIDDEN) == 1


def test_nothing_is_asked_for_while_the_mode_is_off(tmp_path):
    class Silent(SimulatedNvml):
        def nvmlDeviceGetMaxMigDeviceCount(self, device):  # noqa: N802
            raise AssertionError("asked")

    node = MigNode(tmp_path, board())
    node.through(Silent(node.live, mig=node.mig))
    assert (node.dynamic.mig_on, node.dynamic.instances) == (False, ())


def test_an_instance_of_a_profile_that_the_driver_does_not_list_is_in_the_way(tmp_path):
    class Forgetful(SimulatedNvml):
        def nvmlDeviceGetGpuInstanceProfileInfo(self, device, profile, version=2):  # noqa: N802
            if profile == 2:  # of three slices
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return super().nvmlDeviceGetGpuInstanceProfileInfo(device, profile, version)

    node = made(tmp_path, existing("3g.40gb", 4))
    key = node.key("3g.40gb", 4)
    partitions = node.through(Forgetful(node.live, mig=node.mig))
    (unusable,) = node.dynamic.unusable
    assert (unusable.key.profile_id, unusable.key.placement) == (key.profile_id, key.placement)
    with pytest.raises(NodeError, match="profile 9 at 4"):
        partitions.create(node.gpu, node.key("1g.10gb", 4))


def test_an_instance_that_is_removed_while_it_is_read_is_left_out(tmp_path):
    class Racing(SimulatedNvml):
        def nvmlGpuInstanceGetInfo(self, gpuInstance):  # noqa: N802, N803
            node.change(gpu=0, instances=[])
            return super().nvmlGpuInstanceGetInfo(gpuInstance)

    node = made(tmp_path, existing("1g.10gb", 0), existing("2g.20gb", 4))
    node.through(Racing(node.live, mig=node.mig))
    assert (node.dynamic.instances, node.dynamic.unusable) == ((), ())
