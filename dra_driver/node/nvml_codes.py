"""NVML's own numbers for what it refuses (``nvmlReturn_t``), where a refusal is an answer."""

from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

UNINITIALIZED: Final = 1
INVALID_ARGUMENT: Final = 2
NOT_SUPPORTED: Final = 3
NO_PERMISSION: Final = 4
NOT_FOUND: Final = 6
DRIVER_NOT_LOADED: Final = 9
LIBRARY_NOT_FOUND: Final = 12
FUNCTION_NOT_FOUND: Final = 13  # the driver is older than the question
GPU_IS_LOST: Final = 15
RESET_REQUIRED: Final = 16
LIB_RM_VERSION_MISMATCH: Final = 18
IN_USE: Final = 19
INSUFFICIENT_RESOURCES: Final = 23
ARGUMENT_VERSION_MISMATCH: Final = 25

# After these, nothing that NVML said before holds: start it again.
NEW_SESSION: Final = (UNINITIALIZED, DRIVER_NOT_LOADED, LIB_RM_VERSION_MISMATCH)
# Said of the GPU or the driver, whatever was asked.
SESSION_IS_OVER: Final = (UNINITIALIZED, DRIVER_NOT_LOADED, GPU_IS_LOST, LIB_RM_VERSION_MISMATCH)
# A GPU that is gone, and a driver that is not loaded any more, keep nothing of what was set.
NOTHING_IS_KEPT: Final = (DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, GPU_IS_LOST)


# pynvml's errors without a number. This one: it asks for a newer version than the library has.
_WITHOUT_NUMBER: Final = {"NVMLLibraryMismatchError": FUNCTION_NOT_FOUND}


def code(error: BaseException) -> int | None:
    """NVML's number of *error* or of what caused it; None: it is none of NVML's."""
    for one in (error, error.__cause__):
        found = getattr(one, "value", _WITHOUT_NUMBER.get(type(one).__name__))
        if isinstance(found, int):
            return found
    return None


def unless_refused(read: Callable[[], T], *codes: int) -> T | None:
    """What *read* answers; None: NVML refuses it with one of *codes*."""
    try:
        return read()
    except Exception as error:
        if code(error) in codes:
            return None
        raise
