"""Devices are called after their GPU, whatever shape it is offered in."""

import pytest

from dra_driver.model.offer import Device, Exclusive, Monitor, Replica, board
from tests.fakes.values import SLICEABLE, gpu


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        (Exclusive(), "gpu-3"),
        (SLICEABLE, "gpu-3"),
        (Replica(2, 4, None), "gpu-3-2"),
        (Monitor(), "gpu-3-mon"),
    ],
    ids=["exclusive", "sliceable", "replica", "monitor"],
)
def test_a_device_is_called_after_its_gpu(shape, name):
    assert Device(gpu(3), shape).name == name
    assert board(name) == "gpu-3"
