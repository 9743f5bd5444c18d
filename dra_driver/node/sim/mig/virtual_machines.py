"""Simulated boards in virtual machines: as what a machine has one, and what it does no more."""

from typing import Final

import pynvml

from dra_driver.node.sim.mig.state import MigStates
from dra_driver.node.sim.node import Node, SimulatedGpu

VIRTUALIZATION_MODES: Final = {
    "none": int(pynvml.NVML_GPU_VIRTUALIZATION_MODE_NONE),
    "passthrough": int(pynvml.NVML_GPU_VIRTUALIZATION_MODE_PASSTHROUGH),
    "vgpu": int(pynvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU),
}
_STILL_ANSWERED: Final = frozenset(
    f"nvmlDevice{name}"
    for name in (
        "GetHandleByIndex",
        "GetHandleByUUID",
        "GetUUID",
        "GetMinorNumber",
        "GetName",
        "GetPciInfo",
        "GetMigMode",
        "SetMigMode",
        "GetVirtualizationMode",
    )
)


def needs_reset(mig: MigStates, node: Node, gpu: SimulatedGpu, function: str) -> bool:
    """Whether *function* is refused, since the board was told to change a mode that takes a reset,
    for which its machine has no means."""
    if gpu.virtualization != "passthrough" or gpu.geometry is None or function in _STILL_ANSWERED:
        return False
    return mig.read(node, gpu).needs_reset
