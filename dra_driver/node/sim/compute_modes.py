"""The compute modes that a simulated driver keeps, in the settings of its host.

They outlive the process that set them, and go with the driver or the GPU.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

import pynvml

from dra_driver.node.sim.node import Node, SimulatedGpu
from dra_driver.node.sim.tools import COMPUTE_MODE, SETTINGS

DEFAULT_MODE: Final = int(pynvml.NVML_COMPUTEMODE_DEFAULT)
_CAN_BE_SET: Final = frozenset(
    {
        DEFAULT_MODE,
        pynvml.NVML_COMPUTEMODE_PROHIBITED,
        pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS,
    }
)


class SimulatedComputeModes:
    """What the driver of the simulated host in *host* keeps."""

    def __init__(self, host: Path, is_root: Callable[[], bool] = lambda: os.geteuid() == 0) -> None:
        self._host = host
        self._is_root = is_root

    def get(self, node: Node, gpu: SimulatedGpu) -> int:
        """``nvmlDeviceGetComputeMode``."""
        try:
            return int(self._file(node, gpu).read_text())
        except FileNotFoundError:
            return DEFAULT_MODE

    def set(self, node: Node, gpu: SimulatedGpu, mode: int) -> None:
        """``nvmlDeviceSetComputeMode``."""
        if mode == pynvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD:  # CUDA 8 took it away
            _fail(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if mode not in _CAN_BE_SET:
            _fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if not self._is_root():
            _fail(pynvml.NVML_ERROR_NO_PERMISSION)
        file = self._file(node, gpu)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{mode}\n")

    def _file(self, node: Node, gpu: SimulatedGpu) -> Path:
        return self._host / SETTINGS / node.driver_version / f"{gpu.uuid}{COMPUTE_MODE}"


def _fail(error: int) -> NoReturn:
    raise pynvml.NVMLError(error)
