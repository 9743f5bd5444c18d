"""One event set of NVML: which GPUs are registered in it, and what they tell."""

import ctypes
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final, TypeVar

from dra_driver.base.errors import NodeError, TimedOut
from dra_driver.base.frozen import frozen
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.health import GpuEvent, Problem
from dra_driver.node.driver.pci import canonical_bus_id
from dra_driver.node.nvml.api import (
    FUNCTION_NOT_FOUND,
    NOT_SUPPORTED,
    TIMEOUT,
    NvmlFunctions,
    nvml_error_code,
)
from dra_driver.node.nvml.health import recovery_action
from dra_driver.node.nvml.library import nvml_errors
from dra_driver.node.nvml.threads import CallThread

T = TypeVar("T")

# nvml.h, nvmlEventType*
SINGLE_BIT_ECC: Final = 0x1
DOUBLE_BIT_ECC: Final = 0x2
XID: Final = 0x8
SINGLE_BIT_ECC_STORM: Final = 0x200
GPU_UNAVAILABLE: Final = 0x4000
RECOVERY_ACTION: Final = 0x8000

_PROBLEMS: Final[Mapping[int, Problem]] = {
    SINGLE_BIT_ECC: Problem.CORRECTABLE_ECC,
    DOUBLE_BIT_ECC: Problem.UNCORRECTABLE_ECC,
    XID: Problem.XID,
    SINGLE_BIT_ECC_STORM: Problem.CORRECTABLE_ECC,
    GPU_UNAVAILABLE: Problem.LOST,
    RECOVERY_ACTION: Problem.RECOVERY_ACTION,
}
_ALL_TYPES: Final = sum(_PROBLEMS)
_NO_INSTANCE: Final = 0xFFFFFFFF
_REGISTER_SECONDS: Final = 5.0
_MOST_AT_ONCE: Final = 1000
NO_EVENTS: Final = "its driver tells no events of it"


@frozen
class RawEvent:
    """An event, and where its GPU is on the PCI bus."""

    event: GpuEvent
    bus_id: str


class Registrar:
    """Asks a GPU in time, one after the other. For one thread.

    One that hangs keeps its thread, and is refused until it answers; the others get another.
    """

    def __init__(self) -> None:
        self._thread = CallThread("nvml-register")
        self._hanging: dict[GpuUuid, CallThread] = {}

    @property
    def idle(self) -> bool:
        """Whether no call hangs."""
        return all(thread.idle for thread in self._hanging.values())

    def ask(self, gpu: GpuUuid, action: str, call: Callable[[], T]) -> T:
        """What *call* answers. NodeError: what it raised, or that it did not return in time."""
        if (thread := self._hanging.get(gpu)) is not None and thread.idle:
            thread.stop()
            del self._hanging[gpu]
        thread = self._hanging.get(gpu, self._thread)
        pending = thread.submit(action, call, _REGISTER_SECONDS)
        try:
            return pending.result()
        except TimedOut:
            if thread is self._thread:
                self._hanging[gpu], self._thread = thread, CallThread("nvml-register")
            raise

    def rest(self) -> None:
        """Keep no thread until something is asked again."""
        self._thread.stop()
        self._thread = CallThread("nvml-register")


class RegisteredGpus:
    """The GPUs of one event set, which is good until NVML is shut down. For one thread; NVML raises
    its own errors here."""

    def __init__(self, functions: NvmlFunctions, registrar: Registrar) -> None:
        self._functions = functions
        self._registrar = registrar
        self._set = functions.nvmlEventSetCreate()
        self._gpus: dict[object, tuple[GpuUuid, str]] = {}  # UUID and bus id by handle
        self.unmonitored: Mapping[GpuUuid, str] = {}
        self.failed = False  # some are unmonitored that may not be at the next attempt

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to wait for."""
        return not self._gpus

    def register(self, gpus: Iterable[GpuUuid]) -> None:
        """Have NVML tell the events of *gpus*. One that hangs keeps no other from it."""
        reasons = {gpu: self._register(gpu) for gpu in gpus}
        self.unmonitored = {gpu: reason for gpu, reason in reasons.items() if reason}
        self.failed = any(reason != NO_EVENTS for reason in self.unmonitored.values())
        self._registrar.rest()

    def events(self, seconds: float) -> list[RawEvent]:
        """What happens within *seconds*, as soon as anything does."""
        events: list[RawEvent] = []
        milliseconds = int(seconds * 1000)
        while len(events) < _MOST_AT_ONCE:
            try:
                data = self._functions.nvmlEventSetWait_v2(self._set, milliseconds)
            except Exception as error:
                if events or nvml_error_code(error) == TIMEOUT:
                    break  # the next wait says what is wrong
                raise
            if (event := self._event(data)) is not None:
                events.append(event)
            milliseconds = 0
        return events

    def free(self) -> None:
        """Have NVML forget the set, unless a call that hangs may still use it."""
        if self._registrar.idle:
            with suppress(NodeError), nvml_errors("freeing an event set"):
                self._functions.nvmlEventSetFree(self._set)

    def _register(self, gpu: GpuUuid) -> str:
        """Why its events are not told; empty: they are."""
        action = f"GPU {gpu}, registering for its events"
        try:
            place = self._registrar.ask(gpu, action, lambda: self._register_now(gpu, action))
        except NodeError as error:
            return str(error)
        if place is None:
            return NO_EVENTS
        handle, bus_id = place
        self._gpus[_key(handle)] = (gpu, bus_id)
        return ""

    def _register_now(self, gpu: GpuUuid, action: str) -> tuple[Any, str] | None:
        """Its handle and bus id; None: it does not tell events. On the registrar's thread."""
        functions = self._functions
        with nvml_errors(action):
            handle = functions.nvmlDeviceGetHandleByUUID(gpu)
            bus_id = canonical_bus_id(functions.nvmlDeviceGetPciInfo(handle).busId)
            try:
                types = functions.nvmlDeviceGetSupportedEventTypes(handle) & _ALL_TYPES
                if types:
                    functions.nvmlDeviceRegisterEvents(handle, types, self._set)
            except Exception as error:
                if nvml_error_code(error) not in (NOT_SUPPORTED, FUNCTION_NOT_FOUND):
                    raise
                return None
            return (handle, bus_id) if types else None

    def _event(self, data: Any) -> RawEvent | None:
        """None: it is of a GPU that is not registered, or of a kind that nobody asked for."""
        problem, place = _PROBLEMS.get(data.eventType), self._gpus.get(_key(data.device))
        if problem is None or place is None:
            return None
        gpu, bus_id = place
        # NVML names an instance for Xids alone.
        gi = None if problem is not Problem.XID else int(data.gpuInstanceId)
        if gi == _NO_INSTANCE:
            gi = None
        return RawEvent(GpuEvent(gpu, problem, _value(problem, int(data.eventData)), gi), bus_id)


def _value(problem: Problem, data: int) -> str:
    if problem is Problem.XID:
        return str(data)
    return recovery_action(data) if problem is Problem.RECOVERY_ACTION else ""


def _key(handle: Any) -> object:
    """A pointer compares by where it leads to; a simulation's handle by its value."""
    return ctypes.cast(handle, ctypes.c_void_p).value if _is_pointer(handle) else handle


def _is_pointer(handle: Any) -> bool:
    return isinstance(handle, ctypes._Pointer)
