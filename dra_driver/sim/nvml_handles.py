"""What stands for NVML's handles, and how pynvml's out-parameters are filled."""

import ctypes
import os
import signal
import threading
from typing import Any, NoReturn

import pynvml

from dra_driver.base.frozen import frozen
from dra_driver.model.gpus import Placement


@frozen
class GpuHandle:
    """What stands for nvmlDevice_t: good until NVML is shut down."""

    session: int
    bus_id: str


@frozen
class MigHandle:
    """What stands for nvmlDevice_t of a MIG device: good as long as its compute instance is."""

    session: int
    bus_id: str
    gi: int
    ci: int
    born: int  # of the compute instance


@frozen
class InstanceHandle:
    """What a pointer to a GPU instance or a compute instance leads to."""

    session: int
    bus_id: str
    gi: int
    born: int
    ci: int | None = None  # None: the GPU instance itself


@frozen
class EventSetHandle:
    """What nvmlEventSet_t leads to."""

    session: int
    number: int


_Handle = GpuHandle | InstanceHandle | EventSetHandle


class InstancePointers:
    """Opaque pointers, one for each instance and event set, and for a GPU that an instance tells
    of. One that leads nowhere is refused."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_handle: dict[_Handle, int] = {}
        self._by_address: dict[int, _Handle] = {}

    def to(self, handle: _Handle, kind: Any) -> Any:
        """As pynvml hands it out; *kind*: c_nvmlGpuInstance_t, c_nvmlComputeInstance_t,
        c_nvmlDevice_t, or c_nvmlEventSet_t."""
        with self._lock:
            address = self._by_handle.setdefault(handle, (len(self._by_handle) + 1) << 4)
            self._by_address[address] = handle
        return ctypes.cast(ctypes.c_void_p(address), kind)

    def read(self, pointer: Any, kind: Any) -> InstanceHandle:
        """Where *pointer* leads."""
        instance = self._at(pointer, kind)
        if not isinstance(instance, InstanceHandle):
            raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if (instance.ci is None) != (kind is pynvml.c_nvmlGpuInstance_t):
            raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return instance

    def device(self, device: Any) -> Any:
        """The handle of a GPU that *device* is, or leads to."""
        instance = self._at(device, pynvml.c_nvmlDevice_t)
        return instance if isinstance(instance, GpuHandle) else device

    def event_set(self, pointer: Any) -> EventSetHandle:
        """Where *pointer* leads."""
        event_set = self._at(pointer, pynvml.c_nvmlEventSet_t)
        if not isinstance(event_set, EventSetHandle):
            raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return event_set

    def _at(self, pointer: Any, kind: Any) -> _Handle | None:
        address = ctypes.cast(pointer, ctypes.c_void_p).value if isinstance(pointer, kind) else None
        return self._by_address.get(address or 0)


def dereference(reference: Any) -> Any:
    """What a byref(), a pointer or an array is about; None: it is NULL. Anything else would have
    the library read or write where nobody said."""
    if reference is None or isinstance(reference, ctypes.Array):
        return reference
    if hasattr(reference, "_obj"):  # byref()
        return reference._obj
    if hasattr(reference, "contents"):
        return reference.contents
    raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)


def placement_of(reference: Any) -> Placement | None:
    """The placement that *reference* is about; None: it is NULL."""
    structure = dereference(reference)
    return None if structure is None else Placement(int(structure.start), int(structure.size))


def fill_list(values: list[Any], reference: Any, count: Any) -> None:
    """Put *values* into an array and their number into *count*, as NVML's lists are read. NULL for
    the array: only the number."""
    array, number = dereference(reference), dereference(count)
    if number is None:
        raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    if array is not None and not isinstance(array, ctypes.Array):
        array = reference  # a pointer to the first: nobody knows how many there are
    if isinstance(array, ctypes.Array) and len(array) < len(values):
        raise_nvml_error(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
    for place, value in enumerate(values if array is not None else ()):
        array[place] = value
    number.value = len(values)


def raise_nvml_error(error: int) -> NoReturn:
    raise pynvml.NVMLError(error)


def kill_process() -> None:
    """As by the kernel's hand: nothing is cleared up."""
    os.kill(os.getpid(), signal.SIGKILL)
