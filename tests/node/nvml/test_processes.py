"""Every process on a GPU is found once, with what it uses."""

from types import SimpleNamespace
from typing import Any

import pytest

from dra_driver.base.errors import NodeError
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.processes import GpuProcess
from dra_driver.node.mig.geometry import GeometryCache
from dra_driver.node.nvml.client import Nvml
from dra_driver.node.nvml.processes import gpu_processes
from dra_driver.sim.nvml import SimulatedNvml
from tests.fakes.simulated import Node, h100

GPU = GpuUuid("GPU-11111111-0000-0000-0000-000000000000")


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path, {"gpus": [h100("1b", uuid=str(GPU)), h100("43")]})


def process(pid, memory_bytes, *kinds):
    return {"pid": pid, "memory_bytes": memory_bytes, "kinds": list(kinds or ["compute"])}


def test_an_idle_gpu_has_none(node):
    assert gpu_processes(node.nvml, GPU) == ()


def test_processes_of_every_kind_are_found(node):
    node.change(
        gpu=0,
        processes=[process(9, 3, "mps"), process(4, 1, "compute"), process(7, 2, "graphics")],
    )

    assert gpu_processes(node.nvml, GPU) == (
        GpuProcess(4, 1),
        GpuProcess(7, 2),
        GpuProcess(9, 3),
    )


def test_a_process_in_several_lists_counts_once(node):
    node.change(gpu=0, processes=[process(4, 10, "compute", "graphics", "mps")])

    assert gpu_processes(node.nvml, GPU) == (GpuProcess(4, 10),)


@pytest.mark.parametrize(
    ("compute", "graphics", "used"),
    [
        pytest.param(10, 12, 12, id="the later list says more"),
        pytest.param(12, 10, 12, id="the later list says less"),
        pytest.param(None, 10, 10, id="only the later list says it"),
        pytest.param(10, None, 10, id="only the earlier list says it"),
    ],
)
def test_a_process_that_allocates_between_two_lists_uses_the_most_that_was_told(
    node, compute, graphics, used
):
    class Lists(SimulatedNvml):
        def nvmlDeviceGetComputeRunningProcesses(self, handle):  # noqa: N802
            return [SimpleNamespace(pid=4, usedGpuMemory=compute)]

        def nvmlDeviceGetGraphicsRunningProcesses(self, handle):  # noqa: N802
            return [SimpleNamespace(pid=4, usedGpuMemory=graphics)]

    functions = Lists(node.live)
    nvml = Nvml(lambda: functions, GeometryCache)
    assert gpu_processes(nvml, GPU) == (GpuProcess(4, used),)
    nvml.stop()


MIG = GpuUuid("MIG-22222222-0000-0000-0000-000000000000")
NO_INSTANCE = 0xFFFFFFFF


class Listed:
    """NVML, asked about whatever; all that it lists of processes is *processes*."""

    def __init__(self, *processes):
        self.processes = processes
        self.gpus = []

    def on_gpu(self, gpu, doing, call):
        self.gpus.append(gpu)
        return call(self, "handle")

    def nvmlDeviceGetComputeRunningProcesses(self, handle):  # noqa: N802
        return [SimpleNamespace(**process) for process in self.processes]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle):  # noqa: N802
        return []

    nvmlDeviceGetMPSComputeRunningProcesses = nvmlDeviceGetGraphicsRunningProcesses  # noqa: N815


def listed(pid, *instance):
    """None of *instance*: a driver that says nothing of instances."""
    return {"pid": pid, "usedGpuMemory": pid} | ({"gpuInstanceId": instance[0]} if instance else {})


def test_the_processes_of_instances_are_not_those_of_the_whole_gpu():
    nvml: Any = Listed(listed(1, 0), listed(2, NO_INSTANCE), listed(3), listed(4, 9))

    assert gpu_processes(nvml, GPU) == (GpuProcess(2, 2), GpuProcess(3, 3))


def test_an_instance_is_asked_about_by_its_uuid_and_has_all_that_nvml_lists_there():
    nvml: Any = Listed(listed(1, 9), listed(2, 9))

    assert gpu_processes(nvml, MIG) == (GpuProcess(1, 1), GpuProcess(2, 2))
    assert nvml.gpus == [MIG]


def test_what_nvml_does_not_tell_is_not_known(node):
    node.change(gpu=0, processes=[process(4, None), process(5, 0)])

    assert gpu_processes(node.nvml, GPU) == (GpuProcess(4, None), GpuProcess(5, 0))


@pytest.mark.parametrize("error", ["NOT_SUPPORTED", "NO_PERMISSION", "FUNCTION_NOT_FOUND"])
def test_a_kind_of_process_that_cannot_be_listed_here_is_left_out(node, error):
    fails = {
        "nvmlDeviceGetGraphicsRunningProcesses": error,
        "nvmlDeviceGetMPSComputeRunningProcesses": error,
    }
    node.change(gpu=0, processes=[process(4, 1), process(5, 2, "graphics")], fails=fails)

    assert gpu_processes(node.nvml, GPU) == (GpuProcess(4, 1),)


@pytest.mark.parametrize("function", ["Compute", "Graphics", "MPSCompute"])
def test_a_gpu_that_fails_is_an_error(node, function):
    node.change(gpu=0, fails={f"nvmlDeviceGet{function}RunningProcesses": "GPU_IS_LOST"})

    with pytest.raises(NodeError, match="listing its processes"):
        gpu_processes(node.nvml, GPU)


@pytest.mark.parametrize("error", ["NOT_SUPPORTED", "NO_PERMISSION", "FUNCTION_NOT_FOUND"])
def test_what_computes_is_not_taken_for_nothing_where_it_cannot_be_listed(node, error):
    lists = [f"nvmlDeviceGetComputeRunningProcesses{version}" for version in ("", "_v2")]
    node.change(gpu=0, processes=[process(4, 1)], fails=dict.fromkeys(lists, error))

    with pytest.raises(NodeError, match="listing its processes"):
        gpu_processes(node.nvml, GPU)
