"""NVML over a simulated node whose GPUs tell what a test says they do."""

# ruff: noqa: N802, N803 - the functions keep NVML's names

import queue
import threading
from types import SimpleNamespace
from typing import Any

import pynvml

from dra_driver.sim.nvml import SimulatedNvml

XID_AND_ECC = pynvml.nvmlEventTypeXidCriticalError | pynvml.nvmlEventTypeDoubleBitEccError
NO_INSTANCE = 0xFFFFFFFF


class EventSet:
    """What nvmlEventSetCreate hands out."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.registered: dict[str, int] = {}  # the types by UUID
        self.waits: list[int] = []  # the milliseconds of each
        self.is_free = False


class EventNvml(SimulatedNvml):
    """Its events are what ``happens`` says, told to every set in which the GPU is registered."""

    supported = XID_AND_ECC

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.sets: list[EventSet] = []
        self.refused: dict[str, int] = {}  # NVML's error at registration, by UUID
        self.hanging: dict[str, threading.Event] = {}  # registration waits for it, by UUID
        self.wait_error: int | None = None
        self.waiting = 0
        self.shut_down_under_a_wait = False

    @property
    def live_sets(self) -> list[EventSet]:
        return [events for events in self.sets if not events.is_free]

    def happens(self, uuid: str, kind: int, data: int = 0, gi: int = NO_INSTANCE) -> None:
        event = SimpleNamespace(
            device=self.nvmlDeviceGetHandleByUUID(uuid),
            eventType=kind,
            eventData=data,
            gpuInstanceId=gi,
            computeInstanceId=NO_INSTANCE,
        )
        for events in self.live_sets:
            if events.registered.get(uuid, 0) & kind:
                events.events.put(event)

    def nvmlShutdown(self) -> None:
        self.shut_down_under_a_wait |= self.waiting > 0
        super().nvmlShutdown()
        for events in self.sets:
            events.is_free = True

    def nvmlDeviceGetSupportedEventTypes(self, handle: Any) -> int:
        self._gpu(handle, "nvmlDeviceGetSupportedEventTypes")
        return self.supported

    def nvmlDeviceRegisterEvents(self, handle: Any, eventTypes: int, eventSet: Any) -> None:
        uuid = self.nvmlDeviceGetUUID(handle)
        if uuid in self.hanging:
            self.hanging[uuid].wait(30)
        if uuid in self.refused:
            raise pynvml.NVMLError(self.refused[uuid])
        eventSet.registered[uuid] = eventTypes

    def nvmlEventSetCreate(self) -> EventSet:
        self._node()
        self.sets.append(EventSet())
        return self.sets[-1]

    def nvmlEventSetWait_v2(self, eventSet: Any, timeoutms: int) -> Any:
        assert not eventSet.is_free
        eventSet.waits.append(timeoutms)
        if self.wait_error is not None:
            raise pynvml.NVMLError(self.wait_error)
        self.waiting += 1
        try:
            return eventSet.events.get(timeout=timeoutms / 1000)
        except queue.Empty:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT) from None
        finally:
            self.waiting -= 1

    def nvmlEventSetFree(self, eventSet: Any) -> None:
        eventSet.is_free = True
