"""A thread of its own for calls that may never return."""

import concurrent.futures
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from dra_driver.errors import TimedOut

T = TypeVar("T")

Clock = Callable[[], float]

_LOOK_AGAIN_SECONDS: Final = 0.1  # at a clock that may have stood still
_STANDS_SECONDS: Final = 30.0  # at most, so that every wait ends


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment on a clock that may stand still for a while."""

    seconds: float
    until: float
    clock: Clock
    end: float  # on the monotonic clock: it is not later than that

    @property
    def left(self) -> float:
        return min(self.until - self.clock(), self.end - time.monotonic())


def deadline(seconds: float, clock: Clock = time.monotonic) -> Deadline:
    """*seconds* from now."""
    end = time.monotonic() + seconds + _STANDS_SECONDS
    return Deadline(seconds, clock() + seconds, clock, end)


@dataclass(frozen=True, slots=True)
class _Job:
    doing: str
    call: Callable[[], Any]
    deadline: Deadline
    future: Future[Any]


@dataclass(frozen=True, slots=True)
class _Running:
    doing: str
    deadline: Deadline
    since: str  # as people read it


@dataclass(frozen=True, slots=True)
class Pending(Generic[T]):
    """An answer that may not have come yet."""

    doing: str
    future: Future[T]
    deadline: Deadline

    def wait(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Until the answer is there, or late. False: *stop*, which is asked now and then, said so
        before; then nobody waits for it any more."""
        while not self.future.done() and (left := self.deadline.left) > 0:
            if stop():
                self.future.cancel()
                return False
            concurrent.futures.wait([self.future], min(left, _LOOK_AGAIN_SECONDS))
        return True

    def result(self) -> T:
        """The answer, or what the call raised. TimedOut: it did not come before the deadline."""
        self.wait()
        if not self.future.done():
            self.future.cancel()  # if it has not begun, nobody waits for it any more
            raise TimedOut(f"{self.doing}: no answer within {self.deadline.seconds:g} s")
        return self.future.result()


class Worker:
    """Runs calls one after another on a daemon thread; only the callers' wait is bounded.

    While a call is overdue every further one is refused at once instead of queueing behind it. When
    it returns after all, the worker is as good as new.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._running: _Running | None = None
        self._unfinished = 0  # guarded by _lock
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing waits to run."""
        return self._unfinished == 0

    def submit(
        self,
        doing: str,
        call: Callable[[], T],
        deadline_seconds: float,
        clock: Clock = time.monotonic,
    ) -> Pending[T]:
        """Have *call* run, within *deadline_seconds* of *clock*. TimedOut: an earlier call is
        overdue."""
        running = self._running
        if running is not None and running.deadline.left <= 0:
            raise TimedOut(
                f"{doing}: an earlier call ({running.doing}) has not returned since {running.since}"
            )
        future: Future[T] = Future()
        with self._lock:
            self._unfinished += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        until = deadline(deadline_seconds, clock)
        self._jobs.put(_Job(doing, call, until, future))
        return Pending(doing, future, until)

    def stop(self) -> None:
        """End the thread once what was submitted is done. It does not wait for that."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if job.future.set_running_or_notify_cancel():
                self._carry_out(job)
            else:
                self._finished()

    def _carry_out(self, job: _Job) -> None:
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._running = _Running(job.doing, job.deadline, since)
        try:
            answer = job.call()
        except Exception as error:  # noqa: BLE001 - raised again where the answer is waited for
            self._finished()
            job.future.set_exception(error)
        else:
            self._finished()
            job.future.set_result(answer)

    def _finished(self) -> None:
        self._running = None
        with self._lock:
            self._unfinished -= 1
