"""The events of one watch, which another thread may end."""

import contextlib
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

from dra_driver.base.errors import Unreachable
from dra_driver.k8s.responses import MAX_RESPONSE_BYTES, RequestInfo, parse_json, watch_error


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
            raise Unreachable(f"{self._request}: an event is cut off: {e}") from e
        if not isinstance(event, dict):
            raise Unreachable(f"{self._request}: an event is no JSON object")
        if event.get("type") == "ERROR":
            raise watch_error(self._request, event.get("object") or {})
        return event


def _lines(chunks: Iterator[bytes], request: RequestInfo) -> Iterator[bytes]:
    """The lines in *chunks*, each as soon as it is whole."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line for line in lines if line)
        if len(rest) > MAX_RESPONSE_BYTES:
            raise Unreachable(f"{request}: an event has more than {MAX_RESPONSE_BYTES >> 20} MiB")
