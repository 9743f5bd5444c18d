"""What a real nvidia-smi says of time-slice intervals; it is read and never set."""

import pytest

from dra_driver.base.errors import NodeError
from dra_driver.model.steps import TimeSliceInterval
from dra_driver.node.driver.time_slices import TimeSlices

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture
def listed(ask_smi) -> str:
    """The real list of compute policies."""
    try:
        return str(ask_smi("compute-policy", "-l"))
    except NodeError as e:
        pytest.skip(f"this GPU's nvidia-smi has no compute policies to list: {e}")


def test_the_interval_of_every_gpu_is_understood(driver, document, listed, report, tmp_path):
    report(["nvidia-smi compute-policy -l:", *listed.splitlines()])
    slices = TimeSlices(driver, tmp_path, "boot")
    for gpu in document.gpus:
        assert slices.read(gpu.uuid) in tuple(TimeSliceInterval), listed


def test_reading_changes_nothing(driver, document, listed, ask_smi, tmp_path):
    slices = TimeSlices(driver, tmp_path, "boot")
    for gpu in document.gpus:
        slices.read(gpu.uuid)
    assert ask_smi("compute-policy", "-l") == listed
