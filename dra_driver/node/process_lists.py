"""NVML's lists of the processes of a GPU, from libraries of any age."""

from collections.abc import Callable
from typing import Any, Final

from dra_driver.node.nvml_codes import FUNCTION_NOT_FOUND, code
from dra_driver.node.nvml_functions import Functions

List = Callable[[Any], list[Any]]
"""What it lists of a handle."""


def computing(functions: Functions) -> List:
    """Processes that compute, but for those of MPS."""
    return _newest(
        functions.nvmlDeviceGetComputeRunningProcesses,
        lambda handle: functions.nvmlDeviceGetComputeRunningProcesses_v2(handle),
    )


def drawing(functions: Functions) -> List:
    """Processes that draw."""
    return _newest(
        functions.nvmlDeviceGetGraphicsRunningProcesses,
        lambda handle: functions.nvmlDeviceGetGraphicsRunningProcesses_v2(handle),
    )


def sharing(functions: Functions) -> List:
    """Processes that compute by MPS."""
    return _newest(
        functions.nvmlDeviceGetMPSComputeRunningProcesses,
        lambda handle: functions.nvmlDeviceGetMPSComputeRunningProcesses_v2(handle),
    )


KINDS: Final = (computing, drawing, sharing)


def _newest(newest: List, before: List) -> List:
    """pynvml asks for the third version, which libraries before driver 510 do not have."""

    def ask(handle: Any) -> list[Any]:
        try:
            return newest(handle)
        except Exception as error:
            if code(error) != FUNCTION_NOT_FOUND:
                raise
            return before(handle)

    return ask
