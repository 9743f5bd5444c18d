"""The processes that NVML sees on a GPU or a MIG instance, and how much memory each uses there.

NVML libraries of any age can list them.
"""

from collections.abc import Callable
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

ListProcesses = Callable[[Any], list[Any]]
"""What it lists of a handle."""

LIST_REFUSED: Final = (NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND)
"""Not every board, driver or user can list every kind of process."""


def compute_processes(functions: NvmlFunctions) -> ListProcesses:
    """Processes that compute, but for those of MPS."""
    return _newest_version(
        functions.nvmlDeviceGetComputeRunningProcesses,
        lambda handle: functions.nvmlDeviceGetComputeRunningProcesses_v2(handle),
    )


def graphics_processes(functions: NvmlFunctions) -> ListProcesses:
    """Processes that draw."""
    return _newest_version(
        functions.nvmlDeviceGetGraphicsRunningProcesses,
        lambda handle: functions.nvmlDeviceGetGraphicsRunningProcesses_v2(handle),
    )


def mps_compute_processes(functions: NvmlFunctions) -> ListProcesses:
    """Processes that compute by MPS."""
    return _newest_version(
        functions.nvmlDeviceGetMPSComputeRunningProcesses,
        lambda handle: functions.nvmlDeviceGetMPSComputeRunningProcesses_v2(handle),
    )


PROCESS_LISTS: Final = (compute_processes, graphics_processes, mps_compute_processes)


def _newest_version(newest: ListProcesses, before: ListProcesses) -> ListProcesses:
    """pynvml asks for the third version, which libraries before driver 510 do not have."""

    def ask(handle: Any) -> list[Any]:
        try:
            return newest(handle)
        except Exception as error:
            if nvml_error_code(error) != FUNCTION_NOT_FOUND:
                raise
            return before(handle)

    return ask


_NO_INSTANCE: Final = 0xFFFFFFFF  # of a process that computes on the GPU itself


def gpu_processes(nvml: Nvml, gpu: GpuUuid) -> tuple[GpuProcess, ...]:
    """Every process on *gpu* that NVML lists, by number.

    A GPU in MIG mode lists those of its instances, too: they are not its own.

    A process can be in several of NVML's lists, each time with all that it uses. Where NVML does
    not tell how much (confidential computing, WSL), it says so for each process. NodeError: the
    GPU does not answer.
    """

    def call(functions: NvmlFunctions, handle: Any) -> list[Any]:
        listed = [
            *compute_processes(functions)(handle),
            *_none_if_unlisted(graphics_processes(functions), handle),
            *_none_if_unlisted(mps_compute_processes(functions), handle),
        ]
        return (
            listed
            if is_mig_uuid(gpu)
            else [process for process in listed if not _of_instance(process)]
        )

    used: dict[int, int | None] = {}
    for process in nvml.on_gpu(gpu, "listing its processes", call):
        sizes = [
            size for size in (used.get(process.pid), process.usedGpuMemory) if size is not None
        ]
        used[process.pid] = max(sizes, default=None)
    return tuple(GpuProcess(pid, used[pid]) for pid in sorted(used))


def _of_instance(process: Any) -> bool:
    """A driver that knows no MIG says nothing of instances."""
    return getattr(process, "gpuInstanceId", _NO_INSTANCE) != _NO_INSTANCE


def _none_if_unlisted(processes: ListProcesses, handle: Any) -> list[Any]:
    return none_if_refused(lambda: processes(handle), *LIST_REFUSED) or []
