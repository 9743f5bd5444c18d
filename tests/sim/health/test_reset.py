"""``nvidia-smi --gpu-reset`` cures a simulated GPU that nobody has open, a reboot all of them."""

import os
import subprocess
import time
from pathlib import Path

import pynvml
import pytest

from dra_driver.node.cgroups.procfs import boot_id
from dra_driver.sim.health.boots import follow_boot
from dra_driver.sim.host.directory import SimulatedHost
from dra_driver.sim.mig.host_files import open_mig_states
from dra_driver.sim.nvml import SimulatedComputeModes, SimulatedNvml
from tests.fakes.mps import mps_host
from tests.fakes.simulated import Node, h100, two_gpus

ENERGY = pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION
ECC = pynvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL
REPLAYS = pynvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER
ACTION = pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION


@pytest.fixture
def node(tmp_path):
    return opened(Node(tmp_path, two_gpus()))


def opened(node):
    """With a host that keeps what was done to the GPUs."""
    assert node.host
    node.functions = nvml_of(node)
    return node


def nvml_of(node):
    """Another process that has NVML."""
    mig = open_mig_states(node.root, lambda: True)
    return SimulatedNvml(node.live, modes=SimulatedComputeModes(node.root, lambda: True), mig=mig)


def reset(node, *arguments):
    return subprocess.run(
        [str(node.root / "usr/bin/nvidia-smi"), *arguments],
        capture_output=True,
        text=True,
        env={},
        timeout=60,
    )


def value(node, field, gpu=0):
    node.functions.nvmlInit()
    try:
        handle = node.functions.nvmlDeviceGetHandleByIndex(gpu)
        (answer,) = node.functions.nvmlDeviceGetFieldValues(handle, [field])
        return answer.value.ullVal
    finally:
        node.functions.nvmlShutdown()


def rows(node, gpu=0):
    """Whether a remapping is pending, and whether one failed."""
    node.functions.nvmlInit()
    try:
        handle = node.functions.nvmlDeviceGetHandleByIndex(gpu)
        return node.functions.nvmlDeviceGetRemappedRows(handle)[2:]
    finally:
        node.functions.nvmlShutdown()


def test_it_cures_that_gpu_alone_and_its_counters_begin_anew(node):
    sick = {
        "remap": "pending",
        "recovery_action": "GPU_RESET",
        "pcie_replays": 9,
        "events": [{"ecc": "uncorrectable"}],
    }
    node.change(0, **sick)
    node.change(1, **sick)
    loaded = time.time() - 1000
    os.utime(node.root / "proc/driver/nvidia/version", (loaded, loaded))
    before = value(node, ENERGY)
    done = reset(node, "--gpu-reset", "-i", "0")
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        "GPU 00000000:1B:00.0 was successfully reset.\nAll done.\n",
        "",
    )
    assert rows(node) == (0, 0)
    assert [value(node, field) for field in (ACTION, REPLAYS, ECC)] == [0, 0, 0]
    assert rows(node, gpu=1) == (1, 0)
    assert [value(node, field, gpu=1) for field in (ACTION, REPLAYS, ECC)] == [1, 9, 1]
    assert value(node, ENERGY) < before <= value(node, ENERGY, gpu=1)


def test_a_fault_comes_back_when_the_file_says_it_anew(node):
    node.change(0, remap="pending", events=[{"ecc": "uncorrectable"}])
    assert reset(node, "-r", "--id=0").returncode == 0
    node.change(0, events=[{"ecc": "uncorrectable"}, {"ecc": "uncorrectable", "times": 3}])
    assert (rows(node), value(node, ECC)) == ((0, 0), 3)
    node.change(0, remap="none")
    assert rows(node) == (0, 0)
    node.change(0, remap="pending")
    assert rows(node) == (1, 0)
    node.change(0, remap="failed")
    assert rows(node) == (0, 1)


def test_without_a_gpu_all_are_reset(node):
    node.change(0, remap="pending")
    node.change(1, remap="failed")
    assert reset(node, "--gpu-reset").returncode == 0
    assert rows(node) == rows(node, gpu=1) == (0, 0)


def test_it_is_refused_while_any_process_has_nvml_open(node):
    node.change(0, remap="pending")
    other = nvml_of(node)
    other.nvmlInit()
    refused = reset(node, "--gpu-reset", "-i", "0")
    assert refused.returncode == pynvml.NVML_ERROR_IN_USE
    assert "  GPU 00000000:1B:00.0: In use by another client\n" in refused.stdout
    assert rows(node) == (1, 0)
    other.nvmlShutdown()
    assert reset(node, "--gpu-reset", "-i", "0").returncode == 0
    assert rows(node) == (0, 0)


def test_it_is_refused_while_a_process_computes_on_it(node):
    node.change(0, processes=[{"pid": 7, "memory_bytes": 1}])
    assert reset(node, "--gpu-reset", "-i", "0").returncode == pynvml.NVML_ERROR_IN_USE
    assert reset(node, "--gpu-reset", "-i", "1").returncode == 0


def test_it_is_refused_while_a_server_of_mps_is_on_it():
    document = {"driver_version": "615.71.09", "cuda_version": "13.4"}
    with mps_host({**document, "gpus": [h100("1b"), h100("43")]}) as host:
        host.start3()
        assert reset(host.node, "-r", "-i", "0").returncode == pynvml.NVML_ERROR_IN_USE
        assert reset(host.node, "-r", "-i", "1").returncode == 0
        host.output("server", "delete", "gpu")
        assert reset(host.node, "-r", "-i", "0").returncode == 0


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ({"fails": "GPU_IS_LOST"}, pynvml.NVML_ERROR_GPU_IS_LOST, "GPU is lost"),
        ({"fails": {"gpu-reset": "TIMEOUT"}}, pynvml.NVML_ERROR_TIMEOUT, "Timeout"),
        ({"virtualization": "passthrough"}, pynvml.NVML_ERROR_NOT_SUPPORTED, "Not Supported"),
    ],
)
def test_some_gpus_cannot_be_reset(node, fault, error, words):
    node.change(0, **fault)
    node.live.current()
    refused = reset(node, "-r", "-i", "0")
    assert refused.returncode == error
    assert f"  GPU 00000000:1B:00.0: {words}\n" in refused.stdout


def test_it_is_for_the_host_and_for_gpus_that_are_there(node):
    assert reset(node, "-r", "-i", "7").returncode == 6
    (node.root / "run/nvidia-simulated/580.95.05").rename(node.root / "elsewhere")
    assert reset(node, "-r").returncode == pynvml.NVML_ERROR_NO_PERMISSION


def test_settings_and_instances_go_and_a_pending_mode_comes(tmp_path):
    a100 = {"product": "A100-40-SXM", "bus_id": "0000:07:00.0"}
    hopper = h100("1b", mig=True, instances=[{"profile": "1g.10gb", "start": 0}])
    node = opened(Node(tmp_path, {"gpus": [a100, hopper]}))
    node.functions.nvmlInit()
    ampere = node.functions.nvmlDeviceGetHandleByIndex(0)
    node.functions.nvmlDeviceSetComputeMode(ampere, pynvml.NVML_COMPUTEMODE_PROHIBITED)
    node.functions.nvmlShutdown()
    node.change(0, processes=[{"pid": 7, "memory_bytes": 1}])
    node.functions.nvmlInit()
    node.functions.nvmlDeviceSetMigMode(node.functions.nvmlDeviceGetHandleByIndex(0), 1)
    node.functions.nvmlShutdown()
    node.change(0, processes=[])

    assert reset(node, "-r", "-i", "0").returncode == 0

    node.functions.nvmlInit()
    ampere, hopper = map(node.functions.nvmlDeviceGetHandleByIndex, range(2))
    assert node.functions.nvmlDeviceGetMigMode(ampere) == [1, 1]
    assert node.functions.nvmlDeviceGetComputeMode(ampere) == pynvml.NVML_COMPUTEMODE_DEFAULT
    assert node.functions.nvmlDeviceGetMigMode(hopper) == [1, 1]


def test_a_reboot_is_a_reset_of_every_gpu(node):
    node.change(0, remap="pending", mig=True, events=[{"ecc": "uncorrectable"}])
    node.change(1, remap="failed")
    loaded = time.time() - 1000
    os.utime(node.root / "proc/driver/nvidia/version", (loaded, loaded))
    before = value(node, ENERGY)
    follow_boot(node.root, node.live.current(), "another")
    assert rows(node) == rows(node, gpu=1) == (0, 0)
    assert (value(node, ECC), value(node, ENERGY) < before) == (0, True)


def test_as_long_as_the_kernel_runs_nothing_is_forgotten(node):
    node.change(0, remap="pending")
    SimulatedHost(node.live, node.root)
    follow_boot(node.root, node.live.current(), boot_id(Path("/")))
    assert rows(node) == (1, 0)
