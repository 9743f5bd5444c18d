"""Devices are called after their GPU, whatever shape it is offered in."""

from dataclasses import replace

import pytest

from dra_driver.model.offer import AdminAccess, Device, Exclusive, Replica, gpu_name_of
from tests.builders import SLICEABLE, gpu
from tests.fakes.mig import ONE, partition_device


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        (Exclusive(), "gpu-3"),
        (SLICEABLE, "gpu-3"),
        (Replica(2, 4, None), "gpu-3-2"),
        (AdminAccess(), "gpu-3-mon"),
    ],
    ids=["exclusive", "sliceable", "replica", "monitor"],
)
def test_a_device_is_called_after_its_gpu(shape, name):
    assert Device(gpu(3), shape).name == name
    assert gpu_name_of(name) == "gpu-3"


@pytest.mark.parametrize(
    ("shape", "name"),
    [(Exclusive(), "gpu-0-mig-1g10gb-19-2"), (Replica(3, 4, None), "gpu-0-mig-1g10gb-19-2-3")],
    ids=["exclusive", "replica"],
)
def test_a_partition_is_called_after_its_profile_and_first_unit(shape, name):
    device = replace(partition_device(ONE, 2), shape=shape)

    assert (device.name, device.unit) == (name, "gpu-0-mig-1g10gb-19-2")
    assert gpu_name_of(device.name) == "gpu-0"
