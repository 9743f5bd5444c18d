"""MIG mode of a simulated board: when it changes, when it waits for a reset, when it is refused."""

from dataclasses import replace
from typing import Final

import pynvml

from dra_driver.node.sim.handles import fail
from dra_driver.node.sim.mig.state import BoardState, keeps_mode
from dra_driver.node.sim.node import SimulatedGpu

_DONE: Final = int(pynvml.NVML_SUCCESS)


def switched(state: BoardState, gpu: SimulatedGpu, on: bool) -> tuple[BoardState, int]:
    """The board after ``nvmlDeviceSetMigMode``, and the activation status.

    Since Hopper the mode changes at once, or not at all: a board that is used is IN_USE. Before,
    what is wanted is pending from then on (nvml.h), and comes with the reset: the call's own, which
    a board that is used refuses and some machines have no means for, or that of the driver when it
    is loaded anew. A board that is passed through to a virtual machine does nothing else until then
    (seen on A100 of clouds), also where what was wanted is taken back. A vGPU has no mode to set.
    """
    if gpu.virtualization == "vgpu":
        fail(pynvml.NVML_ERROR_NOT_SUPPORTED)
    in_use = bool(gpu.processes) or bool(state.cuts)
    if state.on == on:
        return replace(state, pending=on), _DONE
    if not keeps_mode(gpu):
        if in_use:
            fail(pynvml.NVML_ERROR_IN_USE)
        return replace(state, on=on, pending=on), _DONE
    if gpu.virtualization == "passthrough":
        state = replace(state, pending=on, needs_reset=True)
        return state, int(pynvml.NVML_ERROR_RESET_REQUIRED)
    if gpu.mig_reset == "impossible":
        return replace(state, pending=on), int(pynvml.NVML_ERROR_RESET_REQUIRED)
    if in_use:
        return replace(state, pending=on), int(pynvml.NVML_ERROR_IN_USE)
    return replace(state, on=on, pending=on), _DONE
