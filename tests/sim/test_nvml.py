"""Simulated NVML has pynvml's functions and refuses what hardware refuses."""

import inspect

import pynvml
import pytest

from dra_driver.node.nvml.api import NvmlFunctions
from dra_driver.sim.nvml import SimulatedNvml
from tests.fakes.simulated import Node, two_gpus

OURS = sorted(name for name in dir(SimulatedNvml) if name.startswith("nvml"))


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path, two_gpus())


@pytest.fixture
def nvml(node):
    node.functions.nvmlInit()
    return node.functions


def refused(error, call, *arguments):
    with pytest.raises(getattr(pynvml, f"NVMLError_{error}")):
        call(*arguments)


@pytest.mark.parametrize("name", OURS)
def test_every_function_has_the_parameters_that_pynvml_gives_it(name):
    real = list(inspect.signature(getattr(pynvml, name)).parameters)
    assert list(inspect.signature(getattr(SimulatedNvml, name)).parameters)[1:] == real


def test_it_has_every_function_that_we_use():
    assert {name for name in vars(NvmlFunctions) if name.startswith("nvml")} <= set(OURS)


@pytest.mark.parametrize(
    "ask",
    [
        lambda nvml: nvml.nvmlDeviceGetCount(),
        lambda nvml: nvml.nvmlDeviceGetHandleByIndex(0),
        lambda nvml: nvml.nvmlSystemGetDriverVersion(),
        lambda nvml: nvml.nvmlShutdown(),
    ],
)
def test_before_init_and_after_shutdown_nothing_answers(node, ask):
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        ask(node.functions)
    node.functions.nvmlInit()
    node.functions.nvmlShutdown()
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        ask(node.functions)


def test_init_and_shutdown_are_counted(nvml):
    nvml.nvmlInit()
    nvml.nvmlShutdown()
    assert nvml.nvmlDeviceGetCount() == 2


@pytest.mark.parametrize(
    ("driver", "error"),
    [
        ("not-loaded", pynvml.NVMLError_DriverNotLoaded),
        ("no-library", pynvml.NVMLError_LibraryNotFound),
    ],
)
def test_without_a_driver_there_is_no_init(node, driver, error):
    node.change(driver=driver)
    with pytest.raises(error):
        node.functions.nvmlInit()


@pytest.mark.parametrize("index", [-1, 2])
def test_an_index_beyond_the_last_gpu_is_invalid(nvml, index):
    refused("InvalidArgument", nvml.nvmlDeviceGetHandleByIndex, index)


@pytest.mark.parametrize("handle", [None, 0, "GPU-0"])
def test_what_is_no_handle_is_invalid(nvml, handle):
    refused("InvalidArgument", nvml.nvmlDeviceGetUUID, handle)


def test_a_handle_of_an_earlier_session_is_invalid(nvml):
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    nvml.nvmlShutdown()
    nvml.nvmlInit()
    refused("InvalidArgument", nvml.nvmlDeviceGetUUID, handle)


def test_a_board_without_mig_does_not_support_the_question(tmp_path):
    nvml = Node(tmp_path, {"gpus": [{"product": "T4", "bus_id": "0000:00:1e.0"}]}).functions
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    refused("NotSupported", nvml.nvmlDeviceGetMigMode, handle)
    refused("NotSupported", nvml.nvmlDeviceGetNvLinkState, handle, 0)


def test_mig_mode_is_told_as_current_and_pending(node, nvml):
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    assert nvml.nvmlDeviceGetMigMode(handle) == [0, 0]
    node.change(gpu=0, mig=True)
    assert nvml.nvmlDeviceGetMigMode(handle) == [1, 1]


def test_a_gpu_that_leaves_keeps_its_index_and_is_lost(node, nvml):
    node.change(gpu=0, present=False)
    assert nvml.nvmlDeviceGetCount() == 2
    refused("GpuIsLost", nvml.nvmlDeviceGetHandleByIndex, 0)


def test_a_fault_can_concern_one_function(node, nvml):
    node.change(gpu=0, fails={"nvmlDeviceGetName": "NVML_ERROR_TIMEOUT"})
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    assert nvml.nvmlDeviceGetUUID(handle).startswith("GPU-")
    refused("Timeout", nvml.nvmlDeviceGetName, handle)


def test_a_driver_that_was_replaced_does_not_match_its_library(node, nvml):
    node.change(driver_version="590.48.01")
    refused("LibRmVersionMismatch", nvml.nvmlSystemGetDriverVersion)


def test_identity_is_told_in_the_forms_of_nvml(nvml):
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    place = nvml.nvmlDeviceGetPciInfo(handle)
    assert (place.busId, place.busIdLegacy) == ("00000000:1B:00.0", "0000:1B:00.0")
    assert (place.domain, place.bus, place.device) == (0, 0x1B, 0)
    assert (place.pciDeviceId, place.pciSubSystemId) == (0x233010DE, 0x16C110DE)
    assert nvml.nvmlDeviceGetHandleByUUID(nvml.nvmlDeviceGetUUID(handle)) == handle
    assert len(nvml.nvmlDeviceGetSerial(handle)) == 13
    refused("NotFound", nvml.nvmlDeviceGetHandleByUUID, "GPU-0")


def test_processes_hold_memory(node, nvml):
    node.change(gpu=0, processes=[{"pid": 42, "memory_bytes": 1 << 30}])
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    (process,) = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    assert (process.pid, process.usedGpuMemory) == (42, 1 << 30)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    assert (memory.total, memory.used, memory.free) == (81559 << 20, 1 << 30, 80535 << 20)
    assert nvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).total == 81559 << 20


def test_links_lead_to_switches_up_to_the_last_link_of_the_board(nvml):
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    assert nvml.nvmlDeviceGetNvLinkState(handle, 17) == 1
    switch = pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
    assert nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, 17) == switch
    refused("InvalidArgument", nvml.nvmlDeviceGetNvLinkState, handle, 18)


def test_an_inactive_link_leads_nowhere(node, nvml):
    node.change(nvlink="none")
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    assert nvml.nvmlDeviceGetNvLinkState(handle, 0) == 0
    refused("NotSupported", nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, 0)
    refused("NotSupported", nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, 0)
