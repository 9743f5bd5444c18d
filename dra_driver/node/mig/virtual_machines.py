"""What cannot be changed of a GPU inside the virtual machine that has it."""

from typing import Any, Final

from dra_driver.model.mig import Fixed
from dra_driver.node.nvml_codes import SESSION_IS_OVER, code
from dra_driver.node.nvml_functions import Functions

# nvml.h, NVML_GPU_VIRTUALIZATION_MODE_*
PASSTHROUGH: Final = 1
VGPU: Final = 2
_SWITCHES_FROM: Final = 9  # Hopper (NVIDIA's MIG user guide)


def switches(major: int) -> bool:
    """Whether boards of this compute capability change their MIG mode without a reset."""
    return major >= _SWITCHES_FROM


def fixed(functions: Functions, handle: Any) -> Fixed:
    """Of a GPU that has a MIG mode. A driver that cannot tell is taken to run on the machine
    itself, and a change that is not possible then fails.

    A GPU that is passed through and needs a reset for its mode is not even asked for it: it says
    that it did as it was told, and computes no more until the machine is rebooted (seen on A100
    of clouds). In the guest of a vGPU, NVML supports neither the mode nor GPU instances.
    """
    try:
        found = int(functions.nvmlDeviceGetVirtualizationMode(handle))
    except Exception as error:
        if code(error) is None or code(error) in SESSION_IS_OVER:
            raise
        return Fixed.NOTHING
    if found == VGPU:
        return Fixed.ALL
    if found != PASSTHROUGH:
        return Fixed.NOTHING
    major, _ = functions.nvmlDeviceGetCudaComputeCapability(handle)
    return Fixed.NOTHING if switches(major) else Fixed.MODE
