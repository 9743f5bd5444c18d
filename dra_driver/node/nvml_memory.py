"""The memory limits that a driver keeps for cgroups, through NVML (driver 615 and newer).

NVML: ``nvmlDeviceSetMemoryLimits_v1`` and ``nvmlDeviceGetMemoryLimits_v1``. A limit concerns all
processes of a cgroup together. Only the hard limit is used: a soft one promises memory, and what it
promises stays with the parents of a cgroup that is removed.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dra_driver.errors import NodeError
from dra_driver.model.devices import GpuUuid
from dra_driver.node.nvml import Nvml
from dra_driver.node.nvml_codes import NOT_SUPPORTED, code
from dra_driver.node.nvml_functions import Functions

OLDEST_DRIVER: Final = 615
_NO_LIMIT: Final = 2**64 - 1  # NVML_DEVICE_MEMORY_LIMIT_MAX


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """What holds for a cgroup on one GPU."""

    hard_bytes: int | None  # None: as much as there is
    used_bytes: int


def set_memory_limit(nvml: Nvml, gpu: GpuUuid, cgroup: Path, hard_bytes: int | None) -> None:
    """Let the processes of *cgroup* use so much of *gpu*; None: as much as there is. NodeError."""

    def call(functions: Functions, handle: Any) -> None:
        limits = _struct(functions, "c_nvmlSetMemoryLimits_v1_t", cgroup)
        limits.softLimit = 0
        limits.hardLimit = _NO_LIMIT if hard_bytes is None else hard_bytes
        functions.nvmlDeviceSetMemoryLimits_v1(handle, limits)

    nvml.on_gpu(gpu, f"limiting the GPU memory of {cgroup}", call)


def memory_limit(nvml: Nvml, gpu: GpuUuid, cgroup: Path) -> MemoryLimit:
    """What *cgroup* may use of *gpu*, by its own limit or a parent's. NodeError."""

    def call(functions: Functions, handle: Any) -> MemoryLimit:
        limits = _struct(functions, "c_nvmlGetMemoryLimits_v1_t", cgroup)
        functions.nvmlDeviceGetMemoryLimits_v1(handle, limits)
        hard = int(limits.hardLimit)
        return MemoryLimit(None if hard == _NO_LIMIT else hard, int(limits.currentUsed))

    try:
        return nvml.on_gpu(gpu, f"reading the GPU memory limit of {cgroup}", call)
    except NodeError as error:
        if code(error) == NOT_SUPPORTED:  # what is said where no limit was ever set
            return MemoryLimit(None, 0)
        raise


def _struct(functions: Functions, name: str, cgroup: Path) -> Any:
    struct = getattr(functions, name, None)
    if struct is None:
        raise NodeError(
            f"this pynvml has no memory limits: nvidia-ml-py 13.{OLDEST_DRIVER} or newer is needed"
        )
    limits = struct()
    limits.nameSpace = str(cgroup).encode()
    return limits
