"""Watches: the events of one, and the thread that goes on watching whatever happens.

:class:`Watcher` lists, watches, backs off and begins again: for the labels of the Node, for the
slices that the plugin publishes, and for whatever else is to be followed.
"""

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

from dra_driver.base.backoff import Backoff
from dra_driver.base.errors import ApiServerError, DriverError, Unreachable
from dra_driver.base.frozen import frozen
from dra_driver.k8s.api import Watch
from dra_driver.k8s.responses import MAX_RESPONSE_BYTES, RequestInfo, parse_json, watch_error

log = logging.getLogger(__name__)


class BrokenEvent(Unreachable):
    """An event that cannot be read. The same may come again from the same resource version."""


@frozen
class WatchIntervals:
    """How soon things happen again, in seconds."""

    watch: int = 300  # a watch lasts this long
    first_retry: float = 0.2
    last_retry: float = 10.0


class Watcher:
    """Follows what the API server has, on a thread of its own that no error ends.

    All three functions are called on that thread:

    * *look* lists what has to be listed and opens a watch of so many seconds. Where there is
      nothing to watch, it answers in how many seconds to look again (``math.inf``: once woken).
    * *see* takes an event. A number of seconds ends the watch, and it is looked again after them.
    * *failed* takes what went wrong; after Gone everything has to be listed again.
    """

    def __init__(
        self,
        name: str,
        look: Callable[[int], Watch | float],
        see: Callable[[dict[str, Any]], float | None],
        failed: Callable[[DriverError], None],
        intervals: WatchIntervals,
    ) -> None:
        self._look = look
        self._see = see
        self._failed = failed
        self._intervals = intervals
        self._backoff = Backoff(intervals.first_retry, intervals.last_retry, randomized=True)
        self._watch: Watch | None = None
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin; starting again changes nothing."""
        with self._lock:
            if self._thread.ident is None:
                self._thread.start()

    def wake(self) -> None:
        """Look again at once."""
        with self._lock:
            self._wake.set()
            if self._watch:
                self._watch.close()

    def stop(self, timeout_seconds: float) -> bool:
        """End the thread. Whether it ended in time."""
        self._stopping.set()
        self.wake()
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            self._wake.clear()  # before anything is asked: what changes from here on wakes again
            if self._stopping.is_set():
                return
            self._wake.wait(min(self._round(), threading.TIMEOUT_MAX))

    def _round(self) -> float:
        """Look once and follow the events: in how many seconds to look again."""
        began = time.monotonic()
        seconds: float | None = None
        failed = True
        try:
            seconds = self._follow()
            failed = False
        except DriverError as e:
            self._failed(e)
        except Exception as e:  # a fault of ours: the next time may go well
            log.exception("a watch failed unexpectedly", extra={"watch": self._thread.name})
            self._failed(ApiServerError(f"unexpected, please report: {e!r}"))
        lasted = time.monotonic() - began >= self._intervals.last_retry
        if lasted or seconds is not None:
            self._backoff.reset()
        if seconds is not None:
            return seconds
        return self._backoff.next_seconds() if failed or not lasted else 0.0

    def _follow(self) -> float | None:
        """In how many seconds to look again; None: the watch ended by itself."""
        watch = self._look(round(self._intervals.watch * random.uniform(0.9, 1.1)) or 1)
        if isinstance(watch, int | float):
            return watch
        with self._lock:
            self._watch = watch
            if self._wake.is_set():
                watch.close()
        try:
            for event in watch:
                if (seconds := self._see(event)) is not None:
                    return seconds
            return 0.0 if self._wake.is_set() else None
        finally:
            with self._lock:
                self._watch = None
            watch.close()


class WatchStream(Iterator[dict[str, Any]]):
    """Events, oldest first, as ``{"type": "ADDED", "object": {…}}``.

    They end when the watch's time is over, when the API server ends it, or when any thread closes
    it. Gone: list again. Unreachable: the connection broke.
    """

    def __init__(
        self,
        request: RequestInfo,
        chunks: Iterator[bytes],
        shut: Callable[[], None],
        drop: Callable[[], None],
    ) -> None:
        """*chunks* arrive as they are sent and end soon after *shut*; *drop* frees what is left."""
        self._request = request
        self._chunks = chunks
        self._shut = shut
        self._drop = drop
        self._closed = threading.Event()
        self._events = self._read()

    def __next__(self) -> dict[str, Any]:
        if self._closed.is_set():
            raise StopIteration
        try:
            return next(self._events)
        except (ValueError, AttributeError):
            # Another thread closes it at this moment: the generator is running there, or ssl has
            # lost its object under our hands.
            if self._closed.is_set():
                raise StopIteration from None
            raise

    def close(self) -> None:
        """End it, also while another thread waits for the next event. Closing again is nothing."""
        self._closed.set()
        # Closing a connection does not wake the thread that reads it, shutting it does. One that
        # has come to its end already has nothing to shut: ValueError, RuntimeError.
        with contextlib.suppress(ValueError, RuntimeError, OSError):
            self._shut()
        # ValueError: another thread is reading; it frees the connection itself when it is woken.
        with contextlib.suppress(ValueError):
            self._events.close()
            self._drop()

    def _read(self) -> Generator[dict[str, Any], None, None]:
        try:
            for line in _lines(self._chunks, self._request):
                if self._closed.is_set():
                    return
                yield self._event(line)
        except Unreachable:
            if not self._closed.is_set():
                raise
        finally:
            self._drop()

    def _event(self, line: bytes) -> dict[str, Any]:
        try:
            event: Any = parse_json(line)
        except ValueError as e:
            raise BrokenEvent(f"{self._request}: an event is cut off: {e}") from e
        if not isinstance(event, dict):
            raise BrokenEvent(f"{self._request}: an event is no JSON object")
        if event.get("type") == "ERROR":
            raise watch_error(self._request, event.get("object") or {})
        return event


def _lines(chunks: Iterator[bytes], request: RequestInfo) -> Iterator[bytes]:
    """The lines in *chunks*, each as soon as it is whole."""
    incomplete = b""
    for chunk in chunks:
        *lines, incomplete = (incomplete + chunk).split(b"\n")
        yield from (line for line in lines if line)
        if len(incomplete) > MAX_RESPONSE_BYTES:
            raise BrokenEvent(f"{request}: an event has more than {MAX_RESPONSE_BYTES >> 20} MiB")
