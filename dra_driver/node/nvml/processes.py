"""The processes that NVML sees on a GPU or a MIG instance, and how much memory each uses there.

NVML libraries of any age can list them.
"""

from functools import partial
from typing import Any, Final

from dra_driver.model.gpus import GpuUuid, is_mig_uuid
from dra_driver.model.processes import GpuProcess
from dra_driver.node.nvml.api import (
    FUNCTION_NOT_FOUND,
    NO_PERMISSION,
    NOT_SUPPORTED,
    NvmlFunctions,
    none_if_refused,
    nvml_error_code,
)
from dra_driver.node.nvml.client import Nvml

COMPUTE_LIST: Final = "nvmlDeviceGetComputeRunningProcesses"  # but for those of MPS
OTHER_LISTS: Final = (
    "nvmlDeviceGetGraphicsRunningProcesses",
    "nvmlDeviceGetMPSComputeRunningProcesses",
)


def list_processes(functions: NvmlFunctions, function: str, handle: Any) -> list[Any]:
    """What this function of NVML lists."""
    processes: list[Any]
    try:
        processes = getattr(functions, function)(handle)
    except Exception as error:  # pynvml asks for version 3, which came with driver 510
        if nvml_error_code(error) != FUNCTION_NOT_FOUND:
            raise
        processes = getattr(functions, f"{function}_v2")(handle)
    return processes


def list_processes_if_allowed(functions: NvmlFunctions, function: str, handle: Any) -> list[Any]:
    """Likewise; none where this board, driver or user cannot list them."""
    read = partial(list_processes, functions, function, handle)
    return none_if_refused(read, NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND) or []


_NO_INSTANCE: Final = 0xFFFFFFFF  # of a process that computes on the GPU itself


def gpu_processes(nvml: Nvml, gpu: GpuUuid) -> tuple[GpuProcess, ...]:
    """Every process on *gpu* that NVML lists, by number.

    A GPU in MIG mode lists those of its instances, too: they are not its own.

    A process can be in several of NVML's lists, each time with all that it uses. NVML does not
    know how much under confidential computing and on WSL. NodeError: the
    GPU does not answer.
    """

    def call(functions: NvmlFunctions, handle: Any) -> list[Any]:
        processes = list_processes(functions, COMPUTE_LIST, handle)
        for function in OTHER_LISTS:
            processes = processes + list_processes_if_allowed(functions, function, handle)
        if is_mig_uuid(gpu):
            return processes
        return [process for process in processes if not _of_instance(process)]

    used: dict[int, int | None] = {}
    for process in nvml.on_gpu(gpu, "listing its processes", call):
        sizes = (used.get(process.pid), process.usedGpuMemory)
        used[process.pid] = max((size for size in sizes if size is not None), default=None)
    return tuple(GpuProcess(pid, used[pid]) for pid in sorted(used))


def _of_instance(process: Any) -> bool:
    """Drivers without MIG have no such field."""
    return getattr(process, "gpuInstanceId", _NO_INSTANCE) != _NO_INSTANCE
