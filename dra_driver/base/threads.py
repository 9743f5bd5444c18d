"""Something done again and again on a thread of its own, which no error ends.

Locks by name, for what one thread at a time may work on: a claim, a device.

The kubelet may ask again while its earlier call runs; claims on different devices go side by side.

Things done for several GPUs at once: each may take seconds, and a call has few of them.

Calls that may take long, done beside a loop so that it goes on with what is urgent.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

from dra_driver.base.deadlines import Deadline
from dra_driver.base.errors import DriverError, TimedOut


class NamedLocks:
    """A lock for every name, which exists only while somebody wants it."""

    def __init__(self, busy: str) -> None:
        """*busy*: what TimedOut says, with ``{name}`` and ``{seconds}``."""
        self._busy = busy
        self._guard = threading.Lock()
        self._locks: dict[str, tuple[threading.Lock, int]] = {}  # with how many want it

    @contextmanager
    def hold(self, names: Iterable[str], timeout_seconds: float) -> Iterator[None]:
        """Hold all of *names*, taken in a fixed order. TimedOut: one was not free in time."""
        deadline = Deadline(timeout_seconds)
        taken: list[str] = []
        try:
            for name in sorted(set(names)):
                if not self._join(name).acquire(timeout=deadline.remaining):
                    self._leave(name)
                    raise TimedOut(self._busy.format(name=name, seconds=f"{timeout_seconds:g}"))
                taken.append(name)
            yield
        finally:
            for name in reversed(taken):
                self._locks[name][0].release()
                self._leave(name)

    def __len__(self) -> int:
        return len(self._locks)

    def _join(self, name: str) -> threading.Lock:
        with self._guard:
            lock, wanted = self._locks.get(name) or (threading.Lock(), 0)
            self._locks[name] = (lock, wanted + 1)
            return lock

    def _leave(self, name: str) -> None:
        with self._guard:
            lock, wanted = self._locks.pop(name)
            if wanted > 1:
                self._locks[name] = (lock, wanted - 1)


_T = TypeVar("_T")
_R = TypeVar("_R")

_MAX_THREADS = 8


def in_parallel(act: Callable[[_T], _R], things: Sequence[_T]) -> list[_R]:
    """What *act* answers for each of *things*, in their order; all are begun, whatever fails.

    Raises what the first of them raised that failed, once all have ended.
    """
    if len(things) < 2:
        return [act(thing) for thing in things]
    with ThreadPoolExecutor(_MAX_THREADS) as threads:
        answers = [threads.submit(act, thing) for thing in things]
    return [answer.result() for answer in answers]


log = logging.getLogger(__name__)

_FAILURE_REMEMBERED_SECONDS: Final = (
    600.0  # what was last wrong, so that it is not logged again and again
)

StartThread = Callable[[Callable[[], None]], None]


@dataclass(frozen=True, slots=True)
class BackgroundTask:
    """One such call. Its name says what fails, and the same name is not tried again too soon."""

    name: str
    act: Callable[[], object]
    again_seconds: float  # after it failed


@dataclass(frozen=True, slots=True)
class _FailedTask:
    at: float
    error: str
    again_at: float


def start_thread(work: Callable[[], None]) -> None:
    """On a thread that does not keep the process from ending."""
    threading.Thread(target=work, name="errand", daemon=True).start()


class BackgroundTasks:
    """Lanes of errands: those of one lane go one after another, lanes go side by side."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, start: StartThread = start_thread
    ):
        self._clock = clock
        self._start = start
        self._busy: set[str] = set()
        self._failures: dict[str, _FailedTask] = {}
        self._lock = threading.Lock()

    def go(self, lane: str, errands: Sequence[BackgroundTask]) -> bool:
        """Begin with them. False: the lane is busy, or none of them is to be tried now."""
        now = self._clock()
        with self._lock:
            self._failures = {
                name: one
                for name, one in self._failures.items()
                if now - one.at < _FAILURE_REMEMBERED_SECONDS
            }
            due = [one for one in errands if self._is_due(one.name, now)]
            if lane in self._busy or not due:
                return False
            self._busy.add(lane)
        self._start(lambda: self._do(lane, due))
        return True

    def _is_due(self, name: str, now: float) -> bool:
        return name not in self._failures or now >= self._failures[name].again_at

    def _do(self, lane: str, errands: Sequence[BackgroundTask]) -> None:
        try:
            for errand in errands:
                self._try(errand)
        finally:
            with self._lock:
                self._busy.discard(lane)

    def _try(self, errand: BackgroundTask) -> None:
        try:
            errand.act()
        except DriverError as error:
            self._failed(errand, str(error))
            return
        with self._lock:
            self._failures.pop(errand.name, None)

    def _failed(self, errand: BackgroundTask, error: str) -> None:
        now = self._clock()
        with self._lock:
            before = self._failures.get(errand.name)
            self._failures[errand.name] = _FailedTask(now, error, now + errand.again_seconds)
        if before is None or before.error != error:
            facts = {"errand": errand.name, "error": error, "seconds": errand.again_seconds}
            log.warning("will try again", extra=facts)


class Loop:
    """Does *step* every so many *seconds*, and at once when asked to.

    A step that answers with a number of seconds is done again sooner than usual.
    """

    def __init__(self, name: str, step: Callable[[], float | None], seconds: float) -> None:
        self._step = step
        self._seconds = seconds
        self._stopping = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """The first time at once."""
        self._thread.start()

    def soon(self) -> None:
        """Do it without waiting for the time to be over."""
        self._wake.set()

    def stop(self) -> None:
        """Not once more; what runs is not waited for."""
        self._stopping = True
        self._wake.set()

    def join(self, timeout_seconds: float) -> None:
        """Wait for the end of what runs."""
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

    def _do(self) -> float:
        """One time; the seconds until the next."""
        try:
            return min(self._seconds, self._step() or self._seconds)
        except DriverError as e:
            log.warning("will try again", extra={"error": str(e), "seconds": self._seconds})
        except Exception:  # the next time may go better; the process must not lose its loops
            log.exception("a regular look failed")
        return self._seconds
