"""Who holds a board is named, by NVML's lists and by who has its device file open."""

import doctest
import os
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest

from dra_driver.base.errors import NodeError
from dra_driver.model.gpus import GpuUuid
from dra_driver.node.mig import gpu_holders
from dra_driver.node.mig.gpu_holders import (
    GpuHolder,
    GpuHolders,
    describe_holders,
    name_holders,
    process_command,
)
from dra_driver.node.nvml.processes import gpu_processes
from dra_driver.sim.nvml import SimulatedNvml
from tests.fakes.mig_node import MigNode, board

TTY = 5  # the major number of /dev/tty, whose minor number is that of the first GPU


@pytest.fixture
def opened(tmp_path):
    """A process that has the device of the first GPU open, under another name, and one that has
    only a file open that is called so."""
    false = tmp_path / "dev/nvidia0"
    false.parent.mkdir()
    false.touch()
    device = os.open("/dev/tty", os.O_PATH)  # without asking its driver
    processes = []
    for file in (device, os.open(false, os.O_RDONLY)):
        process = subprocess.Popen(
            [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            pass_fds=[file],
        )
        os.close(file)
        assert process.stdout
        process.stdout.readline()
        processes.append(process)
    yield processes[0]
    for process in processes:
        process.kill()
        process.communicate()


class Old(SimulatedNvml):
    """A library before driver 510: it lacks the functions that pynvml calls."""

    def nvmlDeviceGetComputeRunningProcesses(self, handle):  # noqa: N802
        raise pynvml.NVMLLibraryMismatchError("Unversioned function called")

    nvmlDeviceGetGraphicsRunningProcesses = nvmlDeviceGetComputeRunningProcesses  # noqa: N815
    nvmlDeviceGetMPSComputeRunningProcesses = nvmlDeviceGetComputeRunningProcesses  # noqa: N815


def test_an_older_library_is_asked_by_its_own_functions(tmp_path):
    node = MigNode(tmp_path)
    kinds = (("compute", 4), ("graphics", 5), ("mps", 6))
    processes = [{"pid": pid, "memory_bytes": 1, "kinds": [kind]} for kind, pid in kinds]
    node.through(Old(node.live, mig=node.mig))
    assert gpu_processes(node.nvml, node.gpu) == ()
    node.change(gpu=0, processes=processes)
    assert [process.pid for process in gpu_processes(node.nvml, node.gpu)] == [4, 5, 6]
    assert [holder.pid for holder in GpuHolders(node.nvml, node.proc).of(node.gpu)] == [4, 5, 6]


def test_a_library_without_any_list_names_nobody_and_says_nothing_of_an_idle_gpu(tmp_path):
    class Older(Old):
        nvmlDeviceGetComputeRunningProcesses_v2 = Old.nvmlDeviceGetComputeRunningProcesses  # noqa: N815
        nvmlDeviceGetGraphicsRunningProcesses_v2 = Old.nvmlDeviceGetComputeRunningProcesses  # noqa: N815
        nvmlDeviceGetMPSComputeRunningProcesses_v2 = Old.nvmlDeviceGetComputeRunningProcesses  # noqa: N815

    node = MigNode(tmp_path)
    node.through(Older(node.live, mig=node.mig))
    assert GpuHolders(node.nvml, node.proc).of(node.gpu) == ()
    with pytest.raises(NodeError, match="Unversioned function called"):
        gpu_processes(node.nvml, node.gpu)


def test_a_process_with_the_device_open_is_named_whatever_its_file_is_called(tmp_path, opened):
    node = MigNode(tmp_path)
    ours = os.open("/dev/tty", os.O_PATH)
    holders = GpuHolders(node.nvml, major=TTY).of(node.gpu)
    os.close(ours)
    commands = {holder.pid: holder.command for holder in holders}
    assert commands[opened.pid]
    assert os.getpid() not in commands
    others = {pid for pid in commands if pid != opened.pid}
    assert all(_has_a_terminal(pid) for pid in others), others


def _has_a_terminal(pid):
    """Another process on this machine may have it open."""
    try:
        return "/dev/tty" in {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()}
    except OSError:
        return True


def test_a_process_in_several_lists_of_nvml_is_named_once(tmp_path):
    process = {"pid": 4_194_301, "memory_bytes": 1, "kinds": ["compute", "graphics"]}
    node = MigNode(tmp_path, board(processes=[process]))
    assert GpuHolders(node.nvml).of(node.gpu) == (GpuHolder(4_194_301, ""),)


def test_only_processes_in_an_instance_hold_it(tmp_path, opened):
    processes = [{"pid": 4_194_290 + gi, "memory_bytes": 1, "gi": gi} for gi in (7, 8)]
    node = MigNode(tmp_path, board(mig=True, processes=processes))
    assert [holder.pid for holder in GpuHolders(node.nvml).of(node.gpu, 8)] == [4_194_298]


def test_a_gpu_that_does_not_answer_names_nobody(tmp_path):
    assert GpuHolders(MigNode(tmp_path).nvml).of(GpuUuid("GPU-x")) == ()


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        pytest.param(
            "nvidia_drm 122880 0 - Live\nnvidia 9 1 nvidia_drm,\n", "nvidia_drm is loaded"
        ),
        pytest.param("nvidia 9433088 2 nvidia_uvm,nvidia_drmx, Live\n", "such as DCGM"),
        pytest.param(None, "such as DCGM", id="not to be read"),
    ],
)
def test_where_no_process_is_seen_what_may_hold_the_gpu_is_named(tmp_path, modules, expected):
    node = MigNode(tmp_path)
    node.proc.mkdir()
    if modules is not None:
        (node.proc / "modules").write_text(modules)
    holders = GpuHolders(node.nvml, node.proc)
    assert expected in holders.in_words(holders.of(node.gpu))


def test_the_doc_is_true():
    assert doctest.testmod(gpu_holders).failed == 0


def test_a_process_has_the_name_that_it_gave_itself_and_none_where_it_is_not_seen(tmp_path):
    pid = os.getpid()
    assert process_command(pid) == Path(f"/proc/{pid}/comm").read_text().strip()
    assert process_command(pid, tmp_path) == ""
    (tmp_path / "7").mkdir()
    (tmp_path / "7/comm").write_bytes(b"a\nb\x1b[31m\xff\n")
    assert process_command(7, tmp_path) == "a?b?[31m\ufffd"


def test_of_many_holders_the_first_are_named_and_the_others_counted():
    few = [GpuHolder(pid, "") for pid in range(1, 9)]
    assert name_holders(few).endswith("process 8")
    many = (*few, GpuHolder(9, "a"), GpuHolder(10, "b"))
    assert describe_holders(many) == f"held by {name_holders(few)} and 2 more"
