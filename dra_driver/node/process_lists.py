"""NVML's lists of the processes of a GPU, from libraries of any age."""

from collections.abc import Callable
from typing import Any, Final

from dra_driver.node.nvml_codes import (
    FUNCTION_NOT_FOUND,
    NO_PERMISSION,
    NOT_SUPPORTED,
    code,
)
from dra_driver.node.nvml_functions import Functions

ProcessesOf = Callable[[Any], list[Any]]
"""What it lists of a handle."""

NOT_LISTED: Final = (NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND)
"""Not every board, driver or user can list every kind of process."""


def computing(functions: Functions) -> ProcessesOf:
    """Processes that compute, but for those of MPS."""
    return _newest(
        functions.nvmlDeviceGetComputeRunningProcesses,
        lambda handle: functions.nvmlDeviceGetComputeRunningProcesses_v2(handle),
    )


def drawing(functions: Functions) -> ProcessesOf:
    """Processes that draw."""
    return _newest(
        functions.nvmlDeviceGetGraphicsRunningProcesses,
        lambda handle: functions.nvmlDeviceGetGraphicsRunningProcesses_v2(handle),
    )


def sharing(functions: Functions) -> ProcessesOf:
    """Processes that compute by MPS."""
    return _newest(
        functions.nvmlDeviceGetMPSComputeRunningProcesses,
        lambda handle: functions.nvmlDeviceGetMPSComputeRunningProcesses_v2(handle),
    )


KINDS: Final = (computing, drawing, sharing)


def _newest(newest: ProcessesOf, before: ProcessesOf) -> ProcessesOf:
    """pynvml asks for the third version, which libraries before driver 510 do not have."""

    def ask(handle: Any) -> list[Any]:
        try:
            return newest(handle)
        except Exception as error:
            if code(error) != FUNCTION_NOT_FOUND:
                raise
            return before(handle)

    return ask
