"""Threads and what keeps them apart: locks by name, standing threads, background tasks, loops."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, ParamSpec, Protocol, TypeVar

from dra_driver.base.deadlines import Deadline
from dra_driver.base.errors import DriverError, TimedOut
from dra_driver.base.frozen import frozen


class NamedLocks:
    """A lock for each name: a claim, a device, a GPU. It exists while a thread holds it or waits.

    The kubelet may ask again while its earlier call runs; claims on different devices are served in
    parallel.
    """

    def __init__(self, busy: str, error: type[DriverError] = TimedOut) -> None:
        """*busy*: the message of *error*, with ``{name}`` and ``{seconds}``."""
        self._busy = busy
        self._error = error
        self._guard = threading.Lock()
        self._locks: dict[str, tuple[threading.Lock, int]] = {}  # and how many hold it or wait

    @contextmanager
    def hold(self, names: Iterable[str], timeout_seconds: float) -> Iterator[None]:
        """Hold all of *names*, taken in a fixed order; the *error* if one was not free in time."""
        deadline = Deadline(timeout_seconds)
        locked: list[str] = []
        try:
            for name in sorted(set(names)):
                if not self._join(name).acquire(timeout=deadline.remaining):
                    self._leave(name)
                    raise self._error(self._busy.format(name=name, seconds=f"{timeout_seconds:g}"))
                locked.append(name)
            yield
        finally:
            for name in reversed(locked):
                self._locks[name][0].release()
                self._leave(name)

    def __len__(self) -> int:
        return len(self._locks)

    def _join(self, name: str) -> threading.Lock:
        with self._guard:
            lock, waiting = self._locks.get(name) or (threading.Lock(), 0)
            self._locks[name] = (lock, waiting + 1)
            return lock

    def _leave(self, name: str) -> None:
        with self._guard:
            lock, waiting = self._locks.pop(name)
            if waiting > 1:
                self._locks[name] = (lock, waiting - 1)


log = logging.getLogger(__name__)

_T = TypeVar("_T")
_R = TypeVar("_R")
_P = ParamSpec("_P")


def in_parallel(act: Callable[[_T], _R], arguments: Sequence[_T], max_threads: int = 8) -> list[_R]:
    """The results of *act* for *arguments*, in their order; each is called, whatever fails.

    Once all have ended, the error of the first that failed is raised.
    """
    if len(arguments) < 2:
        return [act(argument) for argument in arguments]
    with ThreadPoolExecutor(max_threads) as threads:
        results = [threads.submit(act, argument) for argument in arguments]
    return [result.result() for result in results]


_Call = tuple[Future[Any], Callable[[], Any]]
_AfterCall = Callable[[], object]


class _ThisThread(threading.local):
    after_call: list[_AfterCall] | None = None  # None: it is none of StandingThreads


_this_thread = _ThisThread()


def after_call(act: _AfterCall) -> None:
    """Have *act* done on this thread once the call that it carries out has returned, and nobody
    waits for it any more; at once, where this is no thread of ``StandingThreads``."""
    if _this_thread.after_call is None:
        act()
    else:
        _this_thread.after_call.append(act)


class StandingThreads(Executor):
    """At most *most* threads, each begun when none is free; then some stand and wait for more.

    They are daemons, where ``ThreadPoolExecutor`` keeps the process alive until its calls end. A
    call for which no thread can be had waits for one, and can be cancelled until then.

    The thread that became free last gets the next call. With one queue for all, the thread that
    takes a call from it wakes the next one, which finds nothing.
    """

    def __init__(self, name: str, most: int, standing: int = 8) -> None:
        self._name = name
        self._most = most
        self._standing = standing
        self._guard = threading.Lock()
        self._calls: deque[_Call] = deque()  # those for which no thread is free
        self._free: list[SimpleQueue[_Call]] = []  # one of each thread that waits for a call
        self._threads = 0

    def submit(self, fn: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_R]:
        future: Future[_R] = Future()
        call = (future, partial(fn, *args, **kwargs))
        with self._guard:
            if self._free:
                self._free.pop().put(call)
                return future
            self._calls.append(call)
            if self._threads < self._most:
                self._begin_thread()
        return future

    def _begin_thread(self) -> None:
        try:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        except RuntimeError:  # the limit of processes is reached: the call waits for another thread
            log.exception("no further thread", extra={"threads": self._threads})
        else:
            self._threads += 1

    def _run(self) -> None:
        calls: SimpleQueue[_Call] = SimpleQueue()
        after_call = _this_thread.after_call = []
        while True:
            with self._guard:
                if self._calls:
                    calls.put(self._calls.popleft())
                elif len(self._free) < self._standing:
                    self._free.append(calls)
                else:
                    self._threads -= 1
                    return
            _carry_out(*calls.get())
            while after_call:
                _try(after_call.pop(0))


def _try(act: _AfterCall) -> None:
    try:
        act()
    except Exception:  # nobody waits for it, and the thread has to live on
        log.exception("what comes after a call failed")


def _carry_out(future: Future[Any], call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - whoever waits for the result gets it
        future.set_exception(error)
    else:
        future.set_result(result)


_FAILURE_REMEMBERED_SECONDS: Final = 600.0  # so that the same error is not logged again

StartThread = Callable[[Callable[[], None]], None]


@frozen
class BackgroundTask:
    """A call that may take long. Its name says in logs what fails."""

    name: str
    act: Callable[[], object]
    again_seconds: float  # until it may be tried again after it failed


@frozen
class _FailedTask:
    at: float
    error: str
    again_at: float


def start_thread(work: Callable[[], None]) -> None:
    """On a thread that does not keep the process from ending."""
    threading.Thread(target=work, name="background-task", daemon=True).start()


class BackgroundTasks:
    """Carries tasks out beside a loop, which goes on with what is urgent.

    Tasks of one lane are carried out one after another, lanes in parallel.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, start: StartThread = start_thread
    ):
        self._clock = clock
        self._start = start
        self._busy: set[str] = set()
        self._failures: dict[str, _FailedTask] = {}
        self._lock = threading.Lock()

    def go(self, lane: str, tasks: Sequence[BackgroundTask]) -> bool:
        """Begin with *tasks*. False: the lane is busy, or none of them may be tried now."""
        now = self._clock()
        with self._lock:
            self._failures = {
                name: failure
                for name, failure in self._failures.items()
                if now - failure.at < _FAILURE_REMEMBERED_SECONDS
            }
            due = [task for task in tasks if self._is_due(task.name, now)]
            if lane in self._busy or not due:
                return False
            self._busy.add(lane)
        self._start(lambda: self._do(lane, due))
        return True

    def _is_due(self, name: str, now: float) -> bool:
        return name not in self._failures or now >= self._failures[name].again_at

    def _do(self, lane: str, tasks: Sequence[BackgroundTask]) -> None:
        try:
            for task in tasks:
                self._try(task)
        finally:
            with self._lock:
                self._busy.discard(lane)

    def _try(self, task: BackgroundTask) -> None:
        try:
            task.act()
        except DriverError as error:
            self._failed(task, str(error))
            return
        with self._lock:
            self._failures.pop(task.name, None)

    def _failed(self, task: BackgroundTask, error: str) -> None:
        now = self._clock()
        with self._lock:
            previous = self._failures.get(task.name)
            self._failures[task.name] = _FailedTask(now, error, now + task.again_seconds)
        if previous is None or previous.error != error:
            facts = {"task": task.name, "error": error, "seconds": task.again_seconds}
            log.warning("will try again", extra=facts)


class Wake(Protocol):
    """What a loop waits for: a ``threading.Event``, or what is set by more than the loop."""

    def set(self) -> None: ...
    def clear(self) -> None: ...
    def wait(self, timeout: float | None, /) -> bool: ...


UNTIL_WOKEN: Final = math.inf
"""What a loop's step returns where only somebody who calls ``soon`` can give it work."""


class Loop:
    """Does *step* every so many *seconds* on a thread of its own, which no error ends.

    A step that returns a number of seconds is done again after these, if that is sooner, and one
    that returns UNTIL_WOKEN once ``soon`` is called.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[], float | None],
        seconds: float,
        wake: Wake | None = None,
    ) -> None:
        self._step = step
        self._seconds = seconds
        self._stopping = False
        self._wake = wake or threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Do the step for the first time, at once."""
        self._thread.start()

    def soon(self) -> None:
        """Do the step again without waiting for the time to be over."""
        self._wake.set()

    def stop(self) -> None:
        """Do no further step; one that runs is not waited for."""
        self._stopping = True
        self._wake.set()

    def join(self, timeout_seconds: float) -> None:
        """Wait for the end of a step that runs."""
        self._thread.join(timeout_seconds)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping:
            self._wake.clear()
            seconds = self._do()
            if not self._stopping:
                self._wake.wait(seconds)

    def _do(self) -> float | None:
        """One step; the seconds until the next. None: until it is woken."""
        try:
            seconds = self._step() or self._seconds
            return None if seconds == UNTIL_WOKEN else min(self._seconds, seconds)
        except DriverError as e:
            log.warning("will try again", extra={"error": str(e), "seconds": self._seconds})
        except Exception:  # the next time may go better; the process must not lose its loops
            log.exception("a step of a loop failed", extra={"loop": self._thread.name})
        return self._seconds
