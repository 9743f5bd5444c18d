"""The threads on which NVML is called: for the system, for each GPU, and for all GPUs together.

Together they are read as long as none of them hangs. A call may never return, so callers wait with
a deadline. While a GPU is being changed, the driver may serve nobody else on any GPU: deadlines
stand still meanwhile.
"""

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, Generic, TypeVar, cast

from dra_driver.base.deadlines import Deadline
from dra_driver.base.errors import NodeError, TimedOut

T = TypeVar("T")

Clock = Callable[[], float]

_POLL_SECONDS: Final = 0.1  # at a clock that may have stood still
_LONGEST_PAUSE_SECONDS: Final = 30.0  # at most, so that every wait ends


class PendingCall(Generic[T]):
    """An answer that may not have come yet. Safe to use from several threads.

    It is on the way of every claim, and takes half as long as with a ``Future``.
    """

    def __init__(self, action: str, deadline: Deadline) -> None:
        self.action: Final = action
        self.deadline: Final = deadline
        self._begun = threading.Lock()  # for ever that of the thread that begins it, or cancels it
        self._unanswered = threading.Lock()  # locked until the answer is there, or is not to come
        self._unanswered.acquire()
        self.done = False  # whether the answer is there, or is not to come
        self._answer: T | None = None
        self._error: Exception | None = None
        self._listeners: list[Callable[[], None]] = []

    def cancel(self) -> None:
        """Nobody waits for it any more: if it has not begun, it never will."""
        if self.begin():
            self._error = TimedOut(f"{self.action}: nobody waited for it any longer")
            self._end()

    def begin(self) -> bool:
        """Whether it may be carried out. False: it was cancelled."""
        return self._begun.acquire(blocking=False)

    def carry_out(self, call: Callable[[], T], finished: Callable[[], None]) -> None:
        """Have *call* answer, once it has begun; *finished* is called before that is told."""
        try:
            self._answer = call()
        except Exception as error:  # noqa: BLE001 - raised again where the answer is waited for
            self._error = error
        finished()
        self._end()

    def when_done(self, tell: Callable[[], None]) -> None:
        """Have *tell* called, once, when the answer is there or is not to come."""
        self._listeners.append(tell)
        if self.done:
            self._tell()

    def wait(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the answer is there or late. False: *stop*, which is called now and then, was
        true first; the call is cancelled, if it has not begun."""
        while not self.done and (seconds := self.deadline.remaining) > 0:
            if stop():
                self.cancel()
                return False
            if self._unanswered.acquire(timeout=min(seconds, _POLL_SECONDS)):
                self._unanswered.release()
        return True

    def result(self) -> T:
        """The answer, or what the call raised. TimedOut: it did not come before the deadline."""
        self.wait()
        if not self.done:
            self.cancel()
            raise TimedOut(f"{self.action}: no answer within {self.deadline.seconds:g} s")
        if self._error is not None:
            raise self._error
        return cast(T, self._answer)

    def _end(self) -> None:
        self.done = True
        self._unanswered.release()
        self._tell()

    def _tell(self) -> None:
        with suppress(IndexError):  # another thread has told that one
            while self._listeners:
                self._listeners.pop()()


class CallThread:
    """Runs calls one after another on a daemon thread; only the callers' wait is bounded.

    While a call is overdue every further one is refused at once instead of queueing behind it. When
    it returns after all, the worker is as good as new.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], PendingCall[Any]] | None]
        self._calls = queue.SimpleQueue()
        self._running: tuple[PendingCall[Any], float] | None = None  # and since when it does
        self._unfinished = 0  # guarded by _lock
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing waits to run."""
        return self._unfinished == 0

    def submit(
        self,
        action: str,
        call: Callable[[], T],
        deadline_seconds: float,
        clock: Clock = time.monotonic,
    ) -> PendingCall[T]:
        """Have *call* run, within *deadline_seconds* of *clock*. TimedOut: an earlier call is
        overdue."""
        if (running := self._running) is not None and running[0].deadline.expired:
            earlier, began = running
            since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began))
            raise TimedOut(
                f"{action}: an earlier call ({earlier.action}) has not returned since {since}"
            )
        with self._lock:
            self._unfinished += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        longest = Deadline(deadline_seconds + _LONGEST_PAUSE_SECONDS)
        deadline = Deadline(deadline_seconds, within=longest, clock=clock)
        pending: PendingCall[T] = PendingCall(action, deadline)
        self._calls.put((call, pending))
        return pending

    def stop(self) -> None:
        """End the thread once what was submitted is done. It does not wait for that."""
        self._calls.put(None)

    def _run(self) -> None:
        while (queued := self._calls.get()) is not None:
            call, pending = queued
            if pending.begin():
                self._running = pending, time.time()
                pending.carry_out(call, self._finished)
            else:
                self._finished()

    def _finished(self) -> None:
        self._running = None
        with self._lock:
            self._unfinished -= 1


class GpuBeingChanged(NodeError):
    """A GPU cannot be read now, since one is being changed, or this one is late for the first time.
    What was known of it still holds."""


class GpuChanges:
    """The changes of GPUs that are under way, and a clock that stands still meanwhile, so that no
    call is late that only waits for them. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[
            PendingCall[Any], tuple[int, float]
        ] = {}  # index of the GPU, until when
        self._settled = time.monotonic()
        self._stood = 0.0

    def begins(self, index: int, change: PendingCall[Any]) -> None:
        """A change of the GPU at *index* is under way, until it ends or is late."""
        with self._lock:
            self._settle()
            self._running[change] = (index, change.deadline.end)
        change.when_done(partial(self._ends, change))

    def under_way(self, index: int | None = None) -> bool:
        """Whether there are any; *index*: of this GPU."""
        now = time.monotonic()
        with self._lock:
            return any(
                until > now and index in (None, changed)
                for changed, until in self._running.values()
            )

    def clock(self) -> float:
        """Seconds, without those in which a change was under way."""
        with self._lock:
            return self._settle() - self._stood

    def _ends(self, change: PendingCall[Any]) -> None:
        with self._lock:
            self._settle()
            del self._running[change]

    def _settle(self) -> float:
        """Count the time since this was done last, in which nothing began or ended."""
        now = time.monotonic()
        end = min(now, max((until for _, until in self._running.values()), default=self._settled))
        self._stood += max(0.0, end - self._settled)
        self._settled = now
        return now


SubmitToGpu = Callable[[int, str, Callable[[], Any]], PendingCall[Any]]
"""Has something run on the thread of the GPU at an index."""

_DEADLINE_SHARE_PER_GPU: Final = 0.2  # of the deadline
_DEADLINE_SHARE_TOGETHER: Final = 0.2
_READ_GRACE_SECONDS: Final = 1.0  # a scan waits so long for GPUs that are kept by changes of others


class NvmlThreads:
    """A GPU that hangs keeps its own thread. *deadline_seconds*: what reading may take, besides the
    time that changes of GPUs take meanwhile."""

    def __init__(self, deadline_seconds: float) -> None:
        self._deadline_seconds = deadline_seconds
        self._system = CallThread("nvml-system")
        self._all_gpus = CallThread("nvml-gpus")
        self._gpus: list[CallThread] = []
        self.changes: Final = GpuChanges()

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing waits to run."""
        return all(worker.idle for worker in (self._system, self._all_gpus, *self._gpus))

    def read_system(self, action: str, call: Callable[[], T]) -> PendingCall[T]:
        """Have *call* run on the system's thread."""
        return self._system.submit(action, call, self._deadline_seconds, self.changes.clock)

    def run_system(self, action: str, call: Callable[[], T], seconds: float | None = None) -> T:
        """What *call* answers on the system's thread, in time whatever else goes on."""
        return self._system.submit(action, call, seconds or self._deadline_seconds).result()

    def read(
        self, index: int, action: str, call: Callable[[], T], boards: int = 0
    ) -> PendingCall[T]:
        """Have *call* run on the thread of the GPU at *index*. *boards*: how many are read at the
        same time, where the driver serves them one after the other."""
        seconds = self._deadline_seconds * (1 + _DEADLINE_SHARE_PER_GPU * boards)
        return self._gpu(index).submit(action, call, seconds, self.changes.clock)

    def read_together(self, action: str, call: Callable[[], T]) -> PendingCall[T]:
        """Have *call* run that reads several GPUs, one after the other: a thread for each costs
        most of the time of a read. TimedOut: one of them hangs."""
        return self._all_gpus.submit(
            action, call, self._deadline_seconds * _DEADLINE_SHARE_TOGETHER, self.changes.clock
        )

    def is_free(self, index: int) -> bool:
        """Whether no call on the GPU at *index* is under way."""
        return index >= len(self._gpus) or self._gpus[index].idle

    def change(
        self, index: int, action: str, call: Callable[[], T], seconds: float
    ) -> PendingCall[T]:
        """Like :meth:`read`, for what changes the GPU, within *seconds*."""
        pending = self._gpu(index).submit(action, call, seconds)
        self.changes.begins(index, pending)
        return pending

    def give_up(self) -> Callable[[], bool]:
        """Whether to stop waiting and use what is known: a change is under way for a moment."""
        deadline = Deadline(_READ_GRACE_SECONDS)
        return lambda: deadline.expired and self.changes.under_way()

    def stop(self) -> None:
        """End the threads once what was submitted is done, and begin with new ones."""
        for worker in (self._system, self._all_gpus, *self._gpus):
            worker.stop()
        self._system, self._gpus = CallThread("nvml-system"), []
        self._all_gpus = CallThread("nvml-gpus")

    def _gpu(self, index: int) -> CallThread:
        while len(self._gpus) <= index:
            self._gpus.append(CallThread(f"nvml-gpu-{len(self._gpus)}"))
        return self._gpus[index]
