"""NVML's events, read by one thread.

NVML tells them as long as it is open, so the thread registers the GPUs again whenever NVML was
started, and for a GPU that came back. It waits in NVML for two seconds at a time and then sees
whether it has to leave: NVML is not shut down under it.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from dra_driver.base.backoff import Backoff
from dra_driver.base.errors import NodeError
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.health import GpuEvent, Problem
from dra_driver.node.kernel_log import KernelLog
from dra_driver.node.nvml.api import NvmlFunctions
from dra_driver.node.nvml.client import Nvml
from dra_driver.node.nvml.event_sets import RawEvent, RegisteredGpus, Registrar
from dra_driver.node.nvml.library import nvml_errors

log = logging.getLogger(__name__)

DeliverEvents = Callable[[Sequence[GpuEvent]], object]
"""Is given what happened since it was called last. It returns soon and asks NVML nothing."""

WAIT_SECONDS: Final = 2.0
_PAUSE_SECONDS: Final = 0.2  # between two batches, so that a flood keeps nothing else from running
_FIRST_RETRY_SECONDS: Final = 1.0
_LAST_RETRY_SECONDS: Final = 60.0


class GpuEvents:
    """Delivers events of the GPUs that it was told to watch."""

    def __init__(self, nvml: Nvml, kernel_log: KernelLog) -> None:
        self._nvml = nvml
        self._kernel_log = kernel_log
        self._deliver: DeliverEvents = lambda _events: None
        self._watched: frozenset[GpuUuid] = frozenset()
        self._registered: frozenset[GpuUuid] = frozenset()  # of those, since they came
        self._unmonitored: Mapping[GpuUuid, str] = {}
        self._registrar = Registrar()
        self._lock = threading.Lock()  # of _watched and _registered
        self._stopping = threading.Event()
        self._came = threading.Event()  # a GPU that is not registered is watched
        self._thread: threading.Thread | None = None
        self._trouble = ""
        self._backoff = Backoff(_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS)
        self._again_at = float("inf")  # when GPUs are registered again that failed

    @property
    def unmonitored(self) -> Mapping[GpuUuid, str]:
        """The GPUs whose events are not told, and why."""
        return self._unmonitored

    def start(self, deliver: DeliverEvents) -> None:
        """Begin to deliver events, on a thread of its own."""
        self._deliver = deliver
        self._thread = threading.Thread(target=self._run, name="nvml-events", daemon=True)
        self._thread.start()

    def watch(self, gpus: Iterable[GpuUuid]) -> None:
        """These GPUs answer. One that did not the last time is registered again."""
        with self._lock:
            self._watched = frozenset(gpus)
            self._registered &= self._watched
            if self._watched - self._registered:
                self._came.set()

    def stop(self) -> None:
        """Deliver nothing more. The thread ends within two seconds; it is not waited for."""
        self._stopping.set()

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the thread to end. False: it has not."""
        if self._thread is not None:
            self._thread.join(timeout_seconds)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        self._kernel_log.open()
        while not self._stopping.is_set():
            with self._nvml.open.use(WAIT_SECONDS) as functions:
                if functions is not None:
                    self._listen(functions)
        self._kernel_log.close()

    def _listen(self, functions: NvmlFunctions) -> None:
        """Until NVML is to be closed, or this is to stop."""
        gpus: RegisteredGpus | None = None
        with self._lock:
            self._registered = frozenset()
        try:
            while self._goes_on():
                try:
                    with nvml_errors("waiting for events"):
                        gpus = self._registered_anew(functions, gpus)
                        self._wait(gpus)
                except NodeError as error:
                    self._note_trouble(str(error))
                except Exception as error:  # the thread must not end
                    log.exception("reading events failed")
                    self._note_trouble(str(error))
        finally:
            self._give_up(gpus)

    def _registered_anew(
        self, functions: NvmlFunctions, gpus: RegisteredGpus | None
    ) -> RegisteredGpus:
        """*gpus*, unless others came to them or some failed: then a new set of all.

        Events between are not lost; one may be seen twice.
        """
        self._came.clear()
        with self._lock:
            watched = self._watched
            is_complete = watched <= self._registered and time.monotonic() < self._again_at
            self._registered = watched
        if gpus is not None and is_complete:
            return gpus
        new = RegisteredGpus(functions, self._registrar)
        new.register(sorted(watched))
        if gpus is not None:
            with suppress(NodeError), nvml_errors("reading the last events of a set"):
                self._tell(gpus.events(0))
            gpus.free()
        self._note_unmonitored(new)
        return new

    def _note_unmonitored(self, gpus: RegisteredGpus) -> None:
        if gpus.unmonitored != self._unmonitored:
            for gpu, reason in gpus.unmonitored.items():
                if self._unmonitored.get(gpu) != reason:
                    log.warning("a GPU is not monitored", extra={"gpu": gpu, "reason": reason})
            self._unmonitored = gpus.unmonitored
        again = self._backoff.next_seconds() if gpus.failed else float("inf")
        self._again_at = time.monotonic() + again

    def _wait(self, gpus: RegisteredGpus) -> None:
        if gpus.is_empty:  # until the GPUs were read for the first time, or none can be registered
            self._came.wait(WAIT_SECONDS)
            return
        events = gpus.events(WAIT_SECONDS)
        self._kernel_log.read()
        if self._trouble:
            log.info("events are read again")
        self._trouble = ""
        if not gpus.failed:
            self._backoff.reset()
        if events:
            self._tell(events)
            self._stopping.wait(_PAUSE_SECONDS)

    def _tell(self, raw: Iterable[RawEvent]) -> None:
        """Equal events are delivered as one that says how many they were."""
        counts: Counter[GpuEvent] = Counter()
        for seen in raw:
            event = seen.event
            if event.problem is Problem.XID:
                event = replace(
                    event, pid=self._kernel_log.take(seen.bus_id, event.gi, event.value)
                )
            counts[event] += 1
        now = time.time()
        if not counts:
            return
        try:
            self._deliver([replace(event, count=n, at=now) for event, n in counts.items()])
        except Exception:  # the next events may fare better
            log.exception("events were not delivered")

    def _note_trouble(self, trouble: str) -> None:
        """A wait failed: maybe since one GPU is lost, which cannot be registered again, so the
        others are at once. What fails again and again is tried less and less often."""
        with self._lock:
            self._registered = frozenset()
        if self._trouble:
            self._pause(self._backoff.next_seconds())
        if trouble != self._trouble:
            log.warning("events are not read now", extra={"error": trouble})
        self._trouble = trouble

    def _give_up(self, gpus: RegisteredGpus | None) -> None:
        """A call that hangs in NVML keeps it from being closed, as it does on other threads."""
        if gpus is not None:
            while not self._registrar.idle and not self._stopping.wait(_PAUSE_SECONDS):
                pass
            gpus.free()
        with self._lock:
            self._registered = frozenset()

    def _pause(self, seconds: float) -> None:
        """As long as NVML is open."""
        until = time.monotonic() + seconds
        while self._goes_on() and (left := until - time.monotonic()) > 0:
            self._stopping.wait(min(left, WAIT_SECONDS))

    def _goes_on(self) -> bool:
        return self._nvml.open.is_open and not self._stopping.is_set()
