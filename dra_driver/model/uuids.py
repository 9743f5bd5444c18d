"""How NVML and CUDA_VISIBLE_DEVICES know a GPU, or a MIG instance of one."""

from typing import NewType

GpuUuid = NewType("GpuUuid", str)  # as NVML prints it: "GPU-…", of a MIG instance "MIG-…"


def is_instance(uuid: GpuUuid) -> bool:
    """Whether it is a MIG instance.

    >>> is_instance(GpuUuid("MIG-5c1b")), is_instance(GpuUuid("GPU-5c1b"))
    (True, False)
    """
    return uuid.startswith("MIG-")
