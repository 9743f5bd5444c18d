"""NVIDIA's library as pynvml loads it, and what it raises as our errors."""

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pynvml

from dra_driver.base.errors import NodeError
from dra_driver.model.gpus import reset_instructions
from dra_driver.node.nvml.api import NvmlFunctions

_REMEDIES: Final[Mapping[int, str]] = {
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "load the NVIDIA kernel driver; nvidia-smi has to work",
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "install the NVIDIA driver, or point to its driver root",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the driver was changed in use: reboot the node",
    pynvml.NVML_ERROR_GPU_IS_LOST: "it fell off the bus: drain and reboot the node",
    pynvml.NVML_ERROR_RESET_REQUIRED: reset_instructions("..."),
    pynvml.NVML_ERROR_INSUFFICIENT_POWER: "check its power cables",
    pynvml.NVML_ERROR_CORRUPTED_INFOROM: "its infoROM is damaged: replace the board",
    pynvml.NVML_ERROR_NO_PERMISSION: "run this as root, privileged, with access to device nodes",
}


def load_nvml(library: Path | None) -> NvmlFunctions:
    """pynvml over *library* (``libnvidia-ml.so.1`` of the driver root), or what the linker finds.

    In a container the library is not where the linker looks. It is loaded by the path it resolves
    to, so that another driver's library, installed while this process runs, is taken at the next
    start of NVML. NodeError: it cannot be loaded.
    """
    if library is not None:
        path = str(library.resolve())
        if pynvml.nvmlLib is None or pynvml.nvmlLib._name != path:
            try:
                loaded = ctypes.CDLL(path)
            except OSError as error:
                raise NodeError(
                    f"cannot load NVML from {library}: {error}; is the driver complete?"
                ) from error
            pynvml._nvmlGetFunctionPointer_cache.clear()
            pynvml.nvmlLib = loaded
    return pynvml  # type: ignore[no-any-return]


@contextmanager
def nvml_errors(action: str) -> Iterator[None]:
    """What NVML raises becomes a NodeError: what was being done, and what to do about it."""
    try:
        yield
    except pynvml.NVMLError as error:
        remedy = f"; {_REMEDIES[error.value]}" if error.value in _REMEDIES else ""
        raise NodeError(f"{action}: NVML says {error}{remedy}") from error
    except pynvml.NVMLLibraryMismatchError as error:
        raise NodeError(
            f"{action}: {error}; {_REMEDIES[pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH]}"
        ) from error
