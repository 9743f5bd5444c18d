"""The processes that NVML sees on a GPU or a MIG instance, and how much memory each uses there."""

from typing import Any, Final

from dra_driver.model.devices import GpuUuid
from dra_driver.model.processes import GpuProcess
from dra_driver.model.uuids import is_instance
from dra_driver.node.nvml import Nvml
from dra_driver.node.nvml_codes import unless_refused
from dra_driver.node.nvml_functions import Functions
from dra_driver.node.process_lists import (
    NOT_LISTED,
    ProcessesOf,
    computing,
    drawing,
    sharing,
)

_NO_INSTANCE: Final = 0xFFFFFFFF  # of a process that computes on the GPU itself


def gpu_processes(nvml: Nvml, gpu: GpuUuid) -> tuple[GpuProcess, ...]:
    """Every process on *gpu* that NVML lists, by number.

    A GPU in MIG mode lists those of its instances, too: they are not its own.

    A process can be in several of NVML's lists, each time with all that it uses. Where NVML does
    not tell how much (confidential computing, WSL), it says so for each process. NodeError: the
    GPU does not answer.
    """

    def call(functions: Functions, handle: Any) -> list[Any]:
        listed = [
            *computing(functions)(handle),
            *_if_there_are(drawing(functions), handle),
            *_if_there_are(sharing(functions), handle),
        ]
        return listed if is_instance(gpu) else [one for one in listed if not _of_instance(one)]

    used: dict[int, int | None] = {}
    for one in nvml.on_gpu(gpu, "listing its processes", call):
        told = [bytes_ for bytes_ in (used.get(one.pid), one.usedGpuMemory) if bytes_ is not None]
        used[one.pid] = max(told, default=None)
    return tuple(GpuProcess(pid, used[pid]) for pid in sorted(used))


def _of_instance(process: Any) -> bool:
    """A driver that knows no MIG says nothing of instances."""
    return getattr(process, "gpuInstanceId", _NO_INSTANCE) != _NO_INSTANCE


def _if_there_are(processes: ProcessesOf, handle: Any) -> list[Any]:
    return unless_refused(lambda: processes(handle), *NOT_LISTED) or []
