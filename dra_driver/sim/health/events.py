"""pynvml's functions that report events; who waits costs nothing while nothing happens.

Assumed of NVML: every event waits in its set until somebody takes it, and a set that has a GPU that
was lost says so once there is nothing else in it, until that GPU is registered again.
"""

# ruff: noqa: N802, N803 - the functions and their parameters keep NVML's names
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pynvml

from dra_driver.base.inotify import CREATED, DELETED, MODIFIED, MOVED_THERE, DirectoryChanges
from dra_driver.sim.health.readings import RECOVERY_ACTION_FROM
from dra_driver.sim.health.spec import SimulatedEvent, events_after, recovery_action_number
from dra_driver.sim.live_node import LiveNode
from dra_driver.sim.node_spec import KILLED, SimulatedGpu, SimulatedNode
from dra_driver.sim.nvml_handles import (
    EventSetHandle,
    GpuHandle,
    InstancePointers,
    kill_process,
    raise_nvml_error,
)

_WAIT: Final = "nvmlEventSetWait_v2"
_NO_INSTANCE: Final = 0xFFFFFFFF
_EVERY_DRIVER: Final[int] = (
    pynvml.nvmlEventTypeSingleBitEccError
    | pynvml.nvmlEventTypeDoubleBitEccError
    | pynvml.nvmlEventTypePState
    | pynvml.nvmlEventTypeXidCriticalError
    | pynvml.nvmlEventTypeClock
)
_NEWER_DRIVERS: Final[int] = (
    pynvml.nvmlEventTypeGpuUnavailableError | pynvml.nvmlEventTypeGpuRecoveryAction
)
_ECC_TYPES: Final[Mapping[str, int]] = {
    "correctable": pynvml.nvmlEventTypeSingleBitEccError,
    "uncorrectable": pynvml.nvmlEventTypeDoubleBitEccError,
}
_LOOKS_AGAIN_SECONDS: Final = 0.1  # where the kernel does not say that the file changed


class _EventData(pynvml.c_nvmlEventData_t):  # type: ignore[misc] # pynvml ships no types
    """With what stands for nvmlDevice_t."""

    device: Any = None


@dataclass(slots=True)
class _Registration:
    """One GPU in a set."""

    types: int
    known: tuple[SimulatedEvent, ...]  # what happened before, or was taken into the set
    is_lost: bool = False


@dataclass(slots=True)
class _EventSet:
    """What nvmlEventSet_t leads to."""

    changes: DirectoryChanges
    is_watched: bool  # else somebody has to look
    registered: dict[GpuHandle, _Registration] = field(default_factory=dict)
    events: deque[tuple[GpuHandle, SimulatedEvent]] = field(default_factory=deque)
    is_waited_for: bool = False
    is_free: bool = False

    def collect(self, node: SimulatedNode) -> None:
        """Take in what happened since the last time."""
        for handle, registration in self.registered.items():
            gpu = node.on_bus(handle.bus_id)
            if gpu is None or registration.is_lost:
                continue
            for event in events_after(registration.known, gpu.events):
                if _type_and_data(event)[0] & registration.types:
                    self.events.extend([(handle, event)] * event.times)
            registration.known = gpu.events

    def error(self, node: SimulatedNode) -> int | None:
        """Why nobody can wait."""
        for handle, registration in self.registered.items():
            gpu = node.on_bus(handle.bus_id)
            if gpu is None or not gpu.listed:
                registration.is_lost = True
            elif (error := gpu.error(_WAIT)) is not None:
                registration.is_lost |= error == pynvml.NVML_ERROR_GPU_IS_LOST
                return error
            elif gpu.kills(_WAIT, KILLED):
                kill_process()
            if registration.is_lost:
                return int(pynvml.NVML_ERROR_GPU_IS_LOST)
        return None


class EventFunctions(ABC):
    """Event sets, of which each is for one thread."""

    _live: LiveNode
    _pointers: InstancePointers
    _session: int

    def __init__(self) -> None:
        self._event_sets: dict[EventSetHandle, _EventSet] = {}
        self._event_lock = threading.Lock()
        self._event_sets_made = 0

    @abstractmethod
    def _node(self) -> SimulatedNode: ...

    @abstractmethod
    def _gpu(self, handle: Any, function: str) -> SimulatedGpu: ...

    def nvmlDeviceGetSupportedEventTypes(self, handle: Any) -> int:
        gpu = self._gpu(handle, "nvmlDeviceGetSupportedEventTypes")
        if not gpu.events_supported:
            return 0
        newer = self._node().major_version >= RECOVERY_ACTION_FROM
        return _EVERY_DRIVER | (_NEWER_DRIVERS if newer else 0)

    def nvmlEventSetCreate(self) -> Any:
        self._node()
        changes = DirectoryChanges(MODIFIED | MOVED_THERE | CREATED | DELETED)
        is_watched = changes.watch(_directories(self._live.path))
        with self._event_lock:
            self._event_sets_made += 1
            handle = EventSetHandle(self._session, self._event_sets_made)
            self._event_sets[handle] = _EventSet(changes, is_watched)
        return self._pointers.to(handle, pynvml.c_nvmlEventSet_t)

    def nvmlDeviceRegisterEvents(self, handle: Any, eventTypes: int, eventSet: Any) -> None:
        gpu = self._gpu(handle, "nvmlDeviceRegisterEvents")
        event_set = self._event_set(eventSet)
        if eventTypes & ~self.nvmlDeviceGetSupportedEventTypes(handle) or not gpu.events_supported:
            raise_nvml_error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        handle = self._pointers.device(handle)
        with self._event_lock:
            before = event_set.registered.get(handle)
            if before is None or before.is_lost:
                event_set.registered[handle] = _Registration(eventTypes, gpu.events)
            else:
                before.types |= eventTypes

    def nvmlEventSetWait_v2(self, eventSet: Any, timeoutms: int) -> pynvml.c_nvmlEventData_t:
        event_set = self._event_set(eventSet)
        event_set.is_waited_for = True
        try:
            handle, event = self._next_event(event_set, time.monotonic() + timeoutms / 1000)
        finally:
            with self._event_lock:
                event_set.is_waited_for = False
                if event_set.is_free:
                    event_set.changes.close()
        data = _EventData()
        data.device = handle
        data.eventType, data.eventData = _type_and_data(event)
        data.gpuInstanceId = _NO_INSTANCE if event.gi is None else event.gi
        data.computeInstanceId = _NO_INSTANCE if event.ci is None else event.ci
        return data

    def nvmlEventSetFree(self, eventSet: Any) -> None:
        event_set = self._event_set(eventSet)
        with self._event_lock:
            self._event_sets = {h: s for h, s in self._event_sets.items() if s is not event_set}
            _free(event_set)

    def _free_event_sets(self) -> None:
        """They go with the session."""
        with self._event_lock:
            for event_set in self._event_sets.values():
                _free(event_set)
            self._event_sets = {}

    def _next_event(
        self, event_set: _EventSet, deadline: float
    ) -> tuple[GpuHandle, SimulatedEvent]:
        while True:
            event_set.changes.clear()
            node = self._node()
            with self._event_lock:
                if event_set.is_free:
                    raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
                event_set.collect(node)
                if event_set.events:
                    return event_set.events.popleft()
                error = event_set.error(node)
            if error is not None:
                raise_nvml_error(error)
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise_nvml_error(pynvml.NVML_ERROR_TIMEOUT)
            if not event_set.is_watched:
                remaining = min(remaining, _LOOKS_AGAIN_SECONDS)
            event_set.changes.wait(remaining)

    def _event_set(self, pointer: Any) -> _EventSet:
        self._node()
        event_set = self._event_sets.get(self._pointers.event_set(pointer))
        if event_set is None:
            raise_nvml_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return event_set


def _free(event_set: _EventSet) -> None:
    """Who waits for it, which NVML forbids, is woken and told."""
    event_set.is_free = True
    event_set.changes.set()
    if not event_set.is_waited_for:
        event_set.changes.close()


def _directories(path: Path) -> set[Path]:
    """Where something happens when the file changes, or a link that leads to it."""
    return {path.absolute().parent, path.resolve().parent}


def _type_and_data(event: SimulatedEvent) -> tuple[int, int]:
    """``eventType`` and ``eventData``."""
    if event.xid is not None:
        return int(pynvml.nvmlEventTypeXidCriticalError), event.xid
    if event.ecc is not None:
        return _ECC_TYPES[event.ecc], 0
    if event.recovery_action is not None:
        number = recovery_action_number(event.recovery_action)
        return int(pynvml.nvmlEventTypeGpuRecoveryAction), number
    return int(pynvml.nvmlEventTypeGpuUnavailableError), 0
