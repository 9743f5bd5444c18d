"""Simulated GPUs tell of their health what the node file says, in the form of pynvml."""

import ctypes

import pynvml
import pytest

from tests.fakes.simulated import Node, h100, two_gpus

RECOVERY = pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
UNCORRECTABLE = pynvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL
CORRECTABLE = pynvml.NVML_FI_DEV_ECC_SBE_VOL_TOTAL
REPLAYS = pynvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER
ENERGY = pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION


@pytest.fixture
def node(tmp_path):
    node = Node(tmp_path, two_gpus())
    node.functions.nvmlInit()
    return node


def handle(node, index=0):
    return node.functions.nvmlDeviceGetHandleByIndex(index)


def fields(node, *ids, index=0):
    """By field: its value, or NVML's error."""
    values = node.functions.nvmlDeviceGetFieldValues(handle(node, index), ids)
    return {
        each.fieldId: pynvml.NVMLError(each.nvmlReturn)
        if each.nvmlReturn
        else each.value.ullVal
        if each.valueType == pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
        else each.value.uiVal
        for each in values
    }


def fabric(node, index=0):
    info = pynvml.c_nvmlGpuFabricInfoV_t()
    node.functions.nvmlDeviceGetGpuFabricInfoV(handle(node, index), ctypes.byref(info))
    return info


def test_a_gpu_is_well_when_the_file_says_nothing(node):
    assert node.functions.nvmlDeviceGetRemappedRows(handle(node)) == (0, 0, 0, 0)
    idle = pynvml.nvmlClocksEventReasonGpuIdle
    assert node.functions.nvmlDeviceGetCurrentClocksEventReasons(handle(node)) == idle
    ids = (RECOVERY, UNCORRECTABLE, CORRECTABLE, REPLAYS)
    assert fields(node, *ids) == dict.fromkeys(ids, 0)
    assert (fabric(node).state, fabric(node).status) == (pynvml.NVML_GPU_FABRIC_STATE_COMPLETED, 0)


@pytest.mark.parametrize(
    ("remap", "rows"), [("pending", (0, 1, 1, 0)), ("failed", (0, 1, 0, 1)), ("none", (0, 0, 0, 0))]
)
def test_rows_are_remapped_of_one_gpu_alone(node, remap, rows):
    node.change(gpu=0, remap=remap)
    assert node.functions.nvmlDeviceGetRemappedRows(handle(node)) == rows
    assert node.functions.nvmlDeviceGetRemappedRows(handle(node, 1)) == (0, 0, 0, 0)


def test_clocks_are_lowered_for_the_reasons_of_the_file(node):
    node.change(gpu=0, clocks=["thermal", "power-brake"])
    reasons = node.functions.nvmlDeviceGetCurrentClocksEventReasons(handle(node))
    assert reasons == (
        pynvml.nvmlClocksEventReasonHwThermalSlowdown
        | pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown
        | pynvml.nvmlClocksEventReasonHwSlowdown
    )


def test_the_last_links_are_down(node):
    node.change(gpu=1, nvlinks_down=2)
    states = [node.functions.nvmlDeviceGetNvLinkState(handle(node, 1), link) for link in range(18)]
    assert states == [1] * 16 + [0, 0]


@pytest.mark.parametrize(
    ("fault", "state", "status", "mask"),
    [
        ("not-started", pynvml.NVML_GPU_FABRIC_STATE_NOT_STARTED, 0, 0x1AA),
        ("in-progress", pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS, 0, 0x1AA),
        ("failed", pynvml.NVML_GPU_FABRIC_STATE_COMPLETED, pynvml.NVML_ERROR_UNKNOWN, 0x1AA),
        ("degraded-bandwidth", pynvml.NVML_GPU_FABRIC_STATE_COMPLETED, 0, 0x1A9),
        ("route-recovery", pynvml.NVML_GPU_FABRIC_STATE_COMPLETED, 0, 0x1A6),
        ("unhealthy-route", pynvml.NVML_GPU_FABRIC_STATE_COMPLETED, 0, 0x19A),
        ("access-timeout-recovery", pynvml.NVML_GPU_FABRIC_STATE_COMPLETED, 0, 0x16A),
        ("no-partition", pynvml.NVML_GPU_FABRIC_STATE_COMPLETED, 0, 0x4AA),
    ],
)
def test_the_fabric_has_a_fault(node, fault, state, status, mask):
    node.change(gpu=0, fabric=fault)
    info = fabric(node)
    assert (info.state, info.status, info.healthMask) == (state, status, mask)
    assert fabric(node, 1).healthMask == 0x1AA


def test_a_board_without_switches_is_in_no_fabric(node):
    node.change(nvlink="none")
    assert fabric(node).state == pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED


def test_the_fabric_is_told_in_the_version_that_was_asked_for(node):
    info = pynvml.c_nvmlGpuFabricInfoV_t()
    info.version = 7
    with pytest.raises(pynvml.NVMLError_ArgumentVersionMismatch):
        node.functions.nvmlDeviceGetGpuFabricInfoV(handle(node), ctypes.byref(info))
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        node.functions.nvmlDeviceGetGpuFabricInfoV(handle(node), None)


def test_the_driver_asks_for_a_recovery_action(node):
    node.change(gpu=0, recovery_action="DRAIN_AND_RESET")
    asked = pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET
    assert fields(node, RECOVERY) == {RECOVERY: asked}
    assert fields(node, RECOVERY, index=1) == {RECOVERY: 0}


def test_errors_and_replays_are_counted(node):
    events = [{"ecc": "correctable", "times": 1000}, {"ecc": "uncorrectable"}, {"xid": 79}]
    node.change(gpu=0, events=events, pcie_replays=12)
    expected = {CORRECTABLE: 1000, UNCORRECTABLE: 1, REPLAYS: 12}
    assert fields(node, *expected) == expected
    assert fields(node, *expected, index=1) == dict.fromkeys(expected, 0)


def test_energy_only_grows(node):
    before, after = fields(node, ENERGY)[ENERGY], fields(node, ENERGY)[ENERGY]
    assert 0 <= before <= after


def test_one_field_can_fail_and_an_unknown_one_is_not_supported(node):
    node.change(gpu=0, fails={"NVML_FI_DEV_PCIE_REPLAY_COUNTER": "UNKNOWN"})
    values = fields(node, REPLAYS, (RECOVERY, 0), 99999)
    assert isinstance(values[REPLAYS], pynvml.NVMLError_Unknown)
    assert values[RECOVERY] == 0
    assert isinstance(values[99999], pynvml.NVMLError_NotSupported)


def test_an_old_driver_knows_no_recovery_action(tmp_path):
    node = Node(tmp_path, two_gpus() | {"driver_version": "550.54.15"})
    node.functions.nvmlInit()
    assert isinstance(fields(node, RECOVERY)[RECOVERY], pynvml.NVMLError_NotSupported)


def test_old_boards_tell_less(tmp_path):
    node = Node(tmp_path, {"gpus": [{"product": "P4", "bus_id": "0000:00:1e.0"}]})
    node.functions.nvmlInit()
    with pytest.raises(pynvml.NVMLError_NotSupported):
        node.functions.nvmlDeviceGetRemappedRows(handle(node))
    with pytest.raises(pynvml.NVMLError_NotSupported):
        fabric(node)
    assert isinstance(fields(node, ENERGY)[ENERGY], pynvml.NVMLError_NotSupported)


@pytest.mark.parametrize(
    ("field", "problem"),
    [
        ({"events": [{"xid": 79, "ecc": "correctable"}]}, "an event is one of xid, ecc"),
        ({"events": [{}]}, "an event is one of xid, ecc"),
        ({"events": [{"xid": 31, "ci": 1}]}, "name its GPU instance"),
        ({"events": [{"ecc": "correctable", "pid": 7}]}, "of an xid alone"),
        ({"remap": "soon"}, "remap"),
        ({"recovery_action": "REST"}, "recovery_action"),
        ({"fabric": "torn"}, "fabric"),
    ],
)
def test_the_file_is_refused_where_it_says_something_else(tmp_path, field, problem):
    with pytest.raises(Exception, match=problem):
        Node(tmp_path, {"gpus": [h100("1b", **field)]})
