"""Compute modes are read, set and restored, and every refusal says what to change."""

import subprocess

import pynvml
import pytest

from dra_driver.base.errors import ClaimError, NodeError, TimedOut
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.steps import ComputeMode
from dra_driver.node.mig.geometry import GeometryCache
from dra_driver.node.nvml.client import Nvml
from dra_driver.node.nvml.compute_modes import ComputeModes
from dra_driver.sim.nvml import SimulatedComputeModes, SimulatedNvml
from tests.fakes.simulated import Node, two_gpus
from tests.fakes.user import let_in

NOBODY = 65534
DEFAULT, EXCLUSIVE = ComputeMode.DEFAULT, ComputeMode.EXCLUSIVE_PROCESS


class Modes(Node):
    """A node whose host keeps compute modes."""

    def __init__(self, directory, is_root=lambda: True):
        super().__init__(directory, two_gpus(), deadline_seconds=0.5)
        assert self.host
        host_modes = SimulatedComputeModes(self.root, is_root)
        self.nvml = Nvml(lambda: SimulatedNvml(self.live, modes=host_modes), GeometryCache, 0.5)
        self.modes = ComputeModes(self.nvml)
        self.gpu, self.second = (GpuUuid(str(gpu.uuid)) for gpu in self.live.current().gpus)

    def smi(self, *arguments, user=None):
        program = str(self.root / "usr/bin/nvidia-smi")
        return subprocess.run(
            [program, *arguments], capture_output=True, text=True, env={}, timeout=30, user=user
        )


@pytest.fixture
def node(tmp_path):
    simulated = Modes(tmp_path)
    yield simulated
    simulated.nvml.stop()


def test_a_mode_is_set_on_one_gpu_and_restored(node):
    assert node.modes.read(node.gpu) is DEFAULT
    node.modes.set(node.gpu, EXCLUSIVE)
    assert node.modes.read(node.gpu) is EXCLUSIVE
    assert node.modes.read(node.second) is DEFAULT
    node.modes.restore(node.gpu, DEFAULT)
    assert node.modes.read(node.gpu) is DEFAULT


def test_a_mode_outlives_the_process_that_set_it_and_goes_with_the_driver(node, tmp_path):
    node.modes.set(node.gpu, EXCLUSIVE)
    again = SimulatedComputeModes(node.root)
    gpu = node.live.current().gpus[0]
    assert again.get(node.live.current(), gpu) == EXCLUSIVE
    node.change(driver="not-loaded")
    node.live.current()
    node.change(driver="ready")
    assert again.get(node.live.current(), gpu) == DEFAULT


def test_only_root_may_set_a_mode(tmp_path):
    node = Modes(tmp_path, is_root=lambda: False)
    try:
        with pytest.raises(NodeError, match=r"Insufficient Permissions.*takes root") as caught:
            node.modes.set(node.gpu, EXCLUSIVE)
        assert not isinstance(caught.value, ClaimError)
        with pytest.raises(NodeError, match="Insufficient Permissions"):
            node.modes.restore(node.gpu, DEFAULT)
    finally:
        node.nvml.stop()


def test_a_gpu_without_modes_says_none_stays_as_it_is_and_has_none_to_restore(node, caplog):
    fails = {
        "nvmlDeviceGetComputeMode": "NOT_SUPPORTED",
        "nvmlDeviceSetComputeMode": "NOT_SUPPORTED",
    }
    node.change(gpu=0, fails=fails)
    assert node.modes.read(node.gpu) is None
    node.modes.set(node.gpu, EXCLUSIVE)
    assert "a GPU has no compute mode" in caplog.text
    node.modes.restore(node.gpu, DEFAULT)


@pytest.mark.parametrize(
    "change",
    [
        {"gpu": 0, "present": False},
        {"gpu": 0, "fails": "GPU_IS_LOST"},
        {"driver": "not-loaded"},
        {"driver": "no-library"},
    ],
)
@pytest.mark.parametrize("used_before", [True, False])
def test_what_is_gone_has_nothing_to_restore(node, change, used_before):
    if used_before:
        node.modes.set(node.gpu, EXCLUSIVE)
    node.change(**change)
    node.modes.restore(node.gpu, DEFAULT)


def test_a_gpu_that_was_never_there_has_nothing_to_restore_and_cannot_be_set(node):
    absent = GpuUuid("GPU-gone")
    node.modes.restore(absent, DEFAULT)
    with pytest.raises(NodeError, match="GPU-gone"):
        node.modes.set(absent, DEFAULT)


def test_a_gpu_that_hangs_is_waited_for_no_longer_than_that(node):
    node.modes.read(node.gpu)
    node.change(gpu=0, hangs=True)
    for call in (node.modes.set, node.modes.restore):
        with pytest.raises(TimedOut):
            call(node.gpu, DEFAULT)
    node.change(gpu=0, hangs=False)


def test_an_error_that_is_none_of_those_is_not_swallowed(node):
    node.change(gpu=0, fails={"nvmlDeviceSetComputeMode": "UNKNOWN"})
    with pytest.raises(NodeError, match="Unknown Error"):
        node.modes.restore(node.gpu, DEFAULT)


@pytest.mark.parametrize(
    ("mode", "error"),
    [(1, pynvml.NVML_ERROR_NOT_SUPPORTED), (4, pynvml.NVML_ERROR_INVALID_ARGUMENT)],
)
def test_a_mode_that_no_driver_makes_any_more_is_refused(node, mode, error):
    current = node.live.current()
    with pytest.raises(pynvml.NVMLError) as caught:
        SimulatedComputeModes(node.root).set(current, current.gpus[0], mode)
    assert caught.value.value == error


def test_nvml_without_a_host_can_keep_no_mode(node):
    modes = ComputeModes(Nvml(lambda: node.functions, GeometryCache, 0.5))
    assert modes.read(node.gpu) is DEFAULT
    modes.set(node.gpu, EXCLUSIVE)
    assert modes.read(node.gpu) is DEFAULT


def test_nvidia_smi_and_nvml_show_what_the_other_has_set(node):
    node.modes.set(node.gpu, EXCLUSIVE)
    query = ("--query-gpu=compute_mode", "--format=csv,noheader")
    assert node.smi(*query).stdout.splitlines() == ["Exclusive_Process", "Default"]
    assert "<compute_mode>Exclusive_Process</compute_mode>" in node.smi("-q", "-x").stdout
    rows = [line for line in node.smi().stdout.splitlines() if "MiB" in line]
    assert [row.split("|")[-2].split("%")[-1].strip() for row in rows] == ["E. Process", "Default"]
    assert {len(row) for row in rows} == {
        len("+" + "-" * 41 + "+" + "-" * 24 + "+" + "-" * 22 + "+")
    }

    done = node.smi("-i", "1", "-c", "PROHIBITED")
    assert done.stdout.splitlines() == [
        "Set compute mode to PROHIBITED for GPU 00000000:43:00.0.",
        "All done.",
    ]
    assert node.modes.read(node.second) is ComputeMode.PROHIBITED
    assert node.smi("--compute-mode=0").returncode == 0
    assert [node.modes.read(gpu) for gpu in (node.gpu, node.second)] == [DEFAULT, DEFAULT]


def test_nvidia_smi_refuses_what_it_cannot_set(node):
    assert node.smi("-c", "7").returncode == 2
    assert node.smi("-c").returncode == 2
    let_in(node.root)
    done = node.smi("-c", "3", user=NOBODY)
    assert done.returncode in (4, 126)
    node.change(gpu=0, fails={"nvmlDeviceSetComputeMode": "NOT_SUPPORTED"})
    node.live.current()
    done = node.smi("-i", "0", "-c", "3")
    assert done.returncode == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert "Unable to set the compute mode for GPU 00000000:1B:00.0: Not Supported" in done.stdout
    assert node.modes.read(node.gpu) is DEFAULT
