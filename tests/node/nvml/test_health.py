"""What a GPU says of its health is read in one look, as far as it says it."""

from dataclasses import replace
from typing import Any

import pynvml
import pytest

from dra_driver.model.gpus import GpuUuid
from dra_driver.model.health import HealthReading
from dra_driver.node.nvml import health
from dra_driver.node.nvml.health import read_health, recovery_action
from tests.fakes.simulated import Node, two_gpus

GPU = GpuUuid("GPU-1")
HANDLE = object()


def refuse(number):
    raise pynvml.NVMLError(number)


def field(number, value=0, member="uiVal", error=0):
    kinds = {"uiVal": pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, "ullVal": 3}
    told = pynvml.c_nvmlFieldValue_t(fieldId=number, valueType=kinds[member], nvmlReturn=error)
    setattr(told.value, member, value)
    return told


class Board:
    """An H100 that is well."""

    c_nvmlGpuFabricInfoV_t = pynvml.c_nvmlGpuFabricInfoV_t  # noqa: N815
    fields: tuple[Any, ...] = (
        field(pynvml.NVML_FI_DEV_ECC_SBE_VOL_TOTAL, 7, "ullVal"),
        field(pynvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL, 1, "ullVal"),
        field(pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION, 1 << 40, "ullVal"),
        field(pynvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER, 3),
        field(pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, 0),
    )
    rows = (0, 0, 0, 0)
    clocks = pynvml.nvmlClocksEventReasonGpuIdle
    links = (1, 1, 0)
    state, status, mask = pynvml.NVML_GPU_FABRIC_STATE_COMPLETED, 0, 0

    def nvmlDeviceGetFieldValues(self, handle, ids):  # noqa: N802
        known = {told.fieldId for told in Board.fields}
        assert set(ids) in (known, known - {health.ENERGY})
        return [told for told in self.fields if told.fieldId in ids]

    def nvmlDeviceGetRemappedRows(self, device):  # noqa: N802
        return self.rows

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):  # noqa: N802
        return self.clocks

    def nvmlDeviceGetNvLinkState(self, device, link):  # noqa: N802
        return self.links[link] if link < len(self.links) else refuse(2)

    def nvmlDeviceGetGpuFabricInfoV(self, device, info):  # noqa: N802
        told = info._obj
        told.state, told.status, told.healthMask = self.state, self.status, self.mask
        return 0


def read(board, energy=True):
    return read_health(board, HANDLE, GPU, energy)


def test_all_that_it_tells_is_in_the_reading():
    assert read(Board()) == HealthReading(
        GPU,
        remap_pending=False,
        remap_failed=False,
        recovery_action="NONE",
        thermal_slowdown=False,
        power_brake=False,
        nvlinks=2,
        fabric="",
        pcie_replays=3,
        energy_mj=1 << 40,
        uncorrectable_ecc=1,
        correctable_ecc=7,
    )


def test_rows_that_wait_for_a_reset_and_that_failed_are_told_apart():
    board = Board()
    board.rows = (1, 2, 1, 0)
    assert (read(board).remap_pending, read(board).remap_failed) == (True, False)
    board.rows = (1, 2, 0, 1)
    assert (read(board).remap_pending, read(board).remap_failed) == (False, True)


@pytest.mark.parametrize(
    ("reason", "thermal", "brake"),
    [
        (pynvml.nvmlClocksEventReasonSwThermalSlowdown, True, False),
        (pynvml.nvmlClocksEventReasonHwThermalSlowdown, True, False),
        (pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown, False, True),
        (pynvml.nvmlClocksEventReasonSwPowerCap, False, False),
    ],
)
def test_why_clocks_are_low(reason, thermal, brake):
    board = Board()
    board.clocks = reason
    assert (read(board).thermal_slowdown, read(board).power_brake) == (thermal, brake)


COMPLETED = pynvml.NVML_GPU_FABRIC_STATE_COMPLETED


@pytest.mark.parametrize(
    ("state", "status", "mask", "told"),
    [
        (pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED, 0, 0, None),
        (pynvml.NVML_GPU_FABRIC_STATE_NOT_STARTED, 0, 0, "registration not started"),
        (pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS, 0, 0, "registration in progress"),
        (
            pynvml.NVML_GPU_FABRIC_STATE_COMPLETED,
            999,
            0,
            "registration failed with NVML's error 999",
        ),
        (COMPLETED, 0, 0b10101010 | 1 << 8, ""),
        (
            pynvml.NVML_GPU_FABRIC_STATE_COMPLETED,
            0,
            0b00010001,
            "degraded bandwidth, unhealthy route",
        ),
        (COMPLETED, 0, 5 << 8, "insufficient NVLinks"),
        (COMPLETED, 0, 15 << 8, "wrong configuration 15"),
    ],
)
def test_what_is_wrong_with_its_place_in_the_fabric(state, status, mask, told):
    board = Board()
    board.state, board.status, board.mask = state, status, mask
    assert read(board).fabric == told


def test_a_driver_that_tells_nothing_leaves_all_of_it_out():
    class Old(Board):
        def nvmlDeviceGetFieldValues(self, handle, ids):  # noqa: N802
            refuse(pynvml.NVML_ERROR_NOT_SUPPORTED)

        def nvmlDeviceGetRemappedRows(self, device):  # noqa: N802
            refuse(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)

        def nvmlDeviceGetCurrentClocksEventReasons(self, handle):  # noqa: N802
            raise AttributeError("pynvml is older")

        def nvmlDeviceGetNvLinkState(self, device, link):  # noqa: N802
            refuse(pynvml.NVML_ERROR_NOT_SUPPORTED)

        def nvmlDeviceGetGpuFabricInfoV(self, device, info):  # noqa: N802
            refuse(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)

    assert read(Old()) == HealthReading(GPU)


def test_each_field_may_be_missing_alone():
    board = Board()
    board.fields = (
        field(pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, error=pynvml.NVML_ERROR_NOT_SUPPORTED),
        field(pynvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER, 3),
    )
    reading = read(board)
    assert (reading.recovery_action, reading.pcie_replays, reading.energy_mj) == (None, 3, None)


def test_without_its_energy_all_else_is_in_the_reading():
    assert read(Board(), energy=False) == replace(read(Board()), energy_mj=None)


def test_a_gpu_that_is_lost_is_no_reading():
    class Lost(Board):
        def nvmlDeviceGetCurrentClocksEventReasons(self, handle):  # noqa: N802
            refuse(pynvml.NVML_ERROR_GPU_IS_LOST)

    with pytest.raises(pynvml.NVMLError, match="lost"):
        read(Lost())


def test_recovery_actions_have_nvmls_names():
    prefix = "NVML_GPU_RECOVERY_ACTION_"
    names = {
        number: name.removeprefix(prefix)
        for name, number in vars(pynvml).items()
        if name.startswith(prefix)
    }
    assert {number: recovery_action(number) for number in names} == names
    assert recovery_action(99) == "ACTION_99"


def test_the_numbers_are_those_of_nvml():
    fields = (
        ("ECC_SBE_VOL_TOTAL", health.CORRECTABLE_ECC),
        ("ECC_DBE_VOL_TOTAL", health.UNCORRECTABLE_ECC),
        ("TOTAL_ENERGY_CONSUMPTION", health.ENERGY),
        ("PCIE_REPLAY_COUNTER", health.PCIE_REPLAYS),
        ("GET_GPU_RECOVERY_ACTION", health.RECOVERY_ACTION),
    )
    for name, number in fields:
        assert getattr(pynvml, f"NVML_FI_DEV_{name}") == number
    assert pynvml.NVML_GPU_FABRIC_STATE_COMPLETED == health.FABRIC_COMPLETED


def test_of_a_node_each_gpu_has_a_reading_or_says_why_not(tmp_path):
    node = Node(tmp_path, two_gpus())
    first, second = (GpuUuid(str(gpu.uuid)) for gpu in node.live.current().gpus)
    node.nvml.system()
    node.change(gpu=1, present=False)

    readings = health.health_readings(node.nvml, [first, second], [first])

    reading = readings[first]
    assert isinstance(reading, HealthReading)
    assert reading.energy_mj is not None
    assert f"GPU {second}, reading its health" in str(readings[second])
    node.nvml.stop()
