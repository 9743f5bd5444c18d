"""Who may compute on a GPU: its compute mode, read and set through NVML."""

import logging
from typing import Any, Final

from dra_driver.base.errors import NodeError, TimedOut
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.steps import ComputeMode
from dra_driver.node.nvml.api import (
    DRIVER_STATE_LOST,
    FUNCTION_NOT_FOUND,
    NOT_FOUND,
    NOT_SUPPORTED,
    NvmlFunctions,
    none_if_refused,
    nvml_error_code,
)
from dra_driver.node.nvml.client import Nvml

log = logging.getLogger(__name__)

_MODE_UNKNOWN: Final = (NOT_SUPPORTED, FUNCTION_NOT_FOUND)
_NOTHING_TO_RESTORE: Final = (*DRIVER_STATE_LOST, *_MODE_UNKNOWN, NOT_FOUND)


class ComputeModes:
    """The compute modes of the GPUs of *nvml*. Safe to use from several threads."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml

    def read(self, gpu: GpuUuid) -> ComputeMode | None:
        """The mode of *gpu* now; None: it does not say. NodeError: the GPU does not answer."""

        def call(functions: NvmlFunctions, handle: Any) -> int | None:
            return none_if_refused(
                lambda: functions.nvmlDeviceGetComputeMode(handle), *_MODE_UNKNOWN
            )

        mode = self._nvml.on_gpu(gpu, "reading its compute mode", call)
        if mode not in [mode.value for mode in ComputeMode]:
            log.info("a GPU does not say its compute mode", extra={"gpu": gpu, "answer": mode})
            return None
        return ComputeMode(mode)

    def set(self, gpu: GpuUuid, mode: ComputeMode) -> None:
        """Have *gpu* be in *mode*. One that has no modes stays as it is: none of them is needed.

        NodeError: it failed.
        """

        def call(functions: NvmlFunctions, handle: Any) -> None:
            functions.nvmlDeviceSetComputeMode(handle, mode.value)

        try:
            self._nvml.on_gpu(gpu, f"setting its compute mode to {mode.name}", call)
        except TimedOut:
            raise
        except NodeError as error:
            if nvml_error_code(error) in _MODE_UNKNOWN:
                log.warning("a GPU has no compute mode", extra={"gpu": gpu, "error": str(error)})
                return
            raise NodeError(
                f"{error}; setting a compute mode takes root on the node, and a GPU that "
                "nvidia-smi -c can set"
            ) from error.__cause__

    def restore(self, gpu: GpuUuid, mode: ComputeMode) -> None:
        """Like :meth:`set`, for what a claim leaves behind.

        A GPU that is gone, one that has no such mode and a driver that is not loaded any more have
        nothing left that could be restored: giving the claim back must not fail for ever.
        """
        try:
            self.set(gpu, mode)
        except TimedOut:
            raise
        except NodeError as error:
            if nvml_error_code(error) not in _NOTHING_TO_RESTORE and self._is_there(gpu):
                raise
            log.warning("no compute mode to restore", extra={"gpu": gpu, "error": str(error)})

    def _is_there(self, gpu: GpuUuid) -> bool:
        """Whether NVML lists *gpu*. A mode is forgotten with the GPU."""
        states = self._nvml.dynamic_states(range(self._nvml.system().gpus)).values()
        return any(
            nvml_error_code(state) not in _NOTHING_TO_RESTORE
            if isinstance(state, NodeError)
            else state.uuid == gpu
            for state in states
        )
