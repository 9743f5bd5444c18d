"""Devices are called after their GPU, whatever shape it is offered in."""

import pytest

from dra_driver.model.offer import AdminAccess, Device, Exclusive, Replica, gpu_name_of
from tests.builders import SLICEABLE, gpu


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
