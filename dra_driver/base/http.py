"""The HTTP server of ``/metrics``, ``/livez`` and ``/readyz``, for Prometheus and the kubelet.

Whoever reaches the port can send to it, so what clients can take is bounded: connections, what one
of them sends, and for how long. When there is no room for another connection, the oldest one is
closed. So a probe is answered, also while clients that send nothing hold all connections.
"""

import errno
import http.client
import io
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from dra_driver.base.deadlines import Deadline
from dra_driver.base.errors import AddressInUse, SettingsError
from dra_driver.base.threads import UNTIL_WOKEN, Loop

log = logging.getLogger(__name__)

HealthCheck = Callable[[], str | None]
HealthChecks = Mapping[str, HealthCheck]
"""By name, a question that answers with what is wrong, or None."""

_LAST_PORT: Final = 65535
MAX_CONNECTIONS: Final = 32  # each has a thread while it is open
MAX_REQUEST_BYTES: Final = 16 << 10  # the request line and all headers; a probe sends 200
CLIENT_SECONDS: Final = 10.0  # in which the request has to come, and then the answer be taken
_ROOM_SECONDS: Final = 0.1  # in which a connection that was closed makes room
_LIVE_SECONDS: Final = 1.0  # for which an answer of /livez is given again
_MAX_WAITING: Final = 8  # requests that wait for the same answer
_ANSWER_SECONDS: Final = 5.0  # for which they wait: as long as the kubelet does
_TRY_SECONDS: Final = 0.5  # the kubelet has to miss three probes in a row, and sends one in 2 s
_END_SECONDS: Final = 2.0  # in which a process that ends frees its port


class HttpServer:
    """Serves until ``stop``. *address*: ``host:port``; an empty host means every interface."""

    def __init__(
        self, address: str, registry: CollectorRegistry, client_seconds: float = CLIENT_SECONDS
    ) -> None:
        """Bind the address; requests are answered from ``start`` on. SettingsError: it is invalid.
        AddressInUse: another socket has it."""
        host, separator, port = address.rpartition(":")
        if not separator or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > _LAST_PORT:
            raise SettingsError(
                f"--http-address {address!r}: write host:port, for example 127.0.0.1:8080"
            )
        self._registry = registry
        self._client_seconds = client_seconds
        self._host = host.strip("[]")
        kind = _DualStack if _wants_ipv6(self._host) else _BoundedServer
        try:
            self._server = kind((self._host, int(port)), BaseHTTPRequestHandler)
        except OSError as e:
            kind_of_error = AddressInUse if e.errno == errno.EADDRINUSE else SettingsError
            raise kind_of_error(f"--http-address {address!r} cannot be served: {e.strerror}") from e
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(3600.0,), name="http", daemon=True
        )

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def start(self, live: HealthChecks, ready: HealthChecks) -> None:
        live_page = _Page(lambda: _checked(live), _LIVE_SECONDS, MAX_CONNECTIONS)
        pages = {
            "/metrics": _Page(lambda: (200, CONTENT_TYPE_LATEST, generate_latest(self._registry))),
            "/livez": live_page,
            "/healthz": live_page,
            "/readyz": _Page(lambda: _checked(ready)),
        }
        self._server.RequestHandlerClass = _handler(pages, self._client_seconds)
        self._thread.start()

    def stop(self) -> None:
        if not self._thread.is_alive():
            self._server.server_close()
            return
        stopping = threading.Thread(target=self._server.shutdown, daemon=True)
        stopping.start()
        with suppress(OSError):  # the server looks for the end only when something happens
            socket.create_connection((self._host or "localhost", self.port), timeout=1).close()
        stopping.join(2)
        self._server.server_close()


class SharedHttpPort:
    """An address that several processes of ours want: one serves it, and the next one takes it when
    that one ends. Meanwhile it answers the probes of all."""

    def __init__(
        self, address: str, registry: CollectorRegistry, is_ours: Callable[[], bool]
    ) -> None:
        """*is_ours*: whether a process of ours can have the address. SettingsError: it cannot be
        served. AddressInUse: somebody else has it."""
        self._address = address
        self._registry = registry
        self._server = self._open(is_ours)
        self._loop = Loop("http-port", self._take_over, _TRY_SECONDS)

    def start(
        self,
        live: HealthChecks,
        ready: HealthChecks,
        on_serving: Callable[[], None] = lambda: None,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        """*on_serving* is called once it serves, *while_waiting* every half second before."""
        self._live, self._ready = live, ready
        self._on_serving, self._while_waiting = on_serving, while_waiting
        if self._server is not None:
            self._serve(self._server)
            return
        log.info("another process of ours has the HTTP port", extra={"address": self._address})
        self._loop.start()

    def stop(self) -> None:
        self._loop.stop()
        if self._loop.alive:
            self._loop.join(1.0)
        if self._server is not None:
            self._server.stop()

    def _open(self, is_ours: Callable[[], bool]) -> HttpServer | None:
        """None: a process of ours has it."""
        deadline = Deadline(_END_SECONDS)
        while True:
            try:
                return HttpServer(self._address, self._registry)
            except AddressInUse:
                if is_ours():
                    return None
                if deadline.expired:
                    raise
            time.sleep(0.1)

    def _serve(self, server: HttpServer) -> None:
        self._server = server
        server.start(self._live, self._ready)
        self._on_serving()

    def _take_over(self) -> float | None:
        try:
            server = HttpServer(self._address, self._registry)
        except AddressInUse:
            self._while_waiting()
            return None
        self._serve(server)
        return UNTIL_WOKEN


class _BoundedServer(ThreadingHTTPServer):
    """Has MAX_CONNECTIONS at most. For another one, the oldest that waits for its client goes."""

    daemon_threads = True
    request_queue_size = 128  # connections that come at once, until each gets its thread

    def __init__(self, *arguments: Any) -> None:
        self._room = threading.Semaphore(MAX_CONNECTIONS)
        self._waiting: dict[socket.socket, None] = {}  # for their clients, the oldest first
        self._lock = threading.Lock()  # a connection that another thread closes is not touched
        super().__init__(*arguments)

    @contextmanager
    def answering(self, connection: socket.socket) -> Iterator[None]:
        """It does not wait for its client meanwhile."""
        with self._lock:
            self._waiting.pop(connection, None)
        yield
        with self._lock:
            self._waiting[connection] = None

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError:
            time.sleep(0.1)  # until a file descriptor is free; it is tried again at once
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._make_room():
            self.shutdown_request(request)
            return
        with self._lock:
            self._waiting[request] = None
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._waiting.pop(request, None)
            super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.exception("an HTTP request failed", extra={"client": str(client_address)})

    def _make_room(self) -> bool:
        if self._room.acquire(blocking=False):
            return True
        with self._lock, suppress(OSError):  # its thread sees the end, and closes it
            oldest = next(iter(self._waiting), None)
            if oldest is not None:
                del self._waiting[oldest]
                oldest.shutdown(socket.SHUT_RDWR)
        return self._room.acquire(timeout=_ROOM_SECONDS)


class _DualStack(_BoundedServer):
    """On every interface of both families, or on one IPv6 address."""

    address_family = socket.AF_INET6

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


def _wants_ipv6(host: str) -> bool:
    return ":" in host or (not host and socket.has_dualstack_ipv6())


_Answer = tuple[int, str, bytes]  # status, Content-Type, body
_TEXT: Final = "text/plain; charset=utf-8"
_NOT_FOUND: Final[_Answer] = (404, _TEXT, b"try /metrics, /livez or /readyz\n")
_BUSY: Final[_Answer] = (503, _TEXT, b"busy: ask again later\n")


class _Page:
    """An answer that one thread makes at a time, for all requests that came before it began.

    *seconds*: for which it is given again. *waiting*: how many requests may wait for it.
    """

    def __init__(
        self, make: Callable[[], _Answer], seconds: float = 0.0, waiting: int = _MAX_WAITING
    ) -> None:
        self._make = make
        self._seconds = seconds
        self._waiting = threading.Semaphore(waiting)
        self._making = threading.Lock()
        self._began = float("-inf")
        self._answer = _BUSY

    def answer(self) -> _Answer:
        """It began when the request had come, or at most *seconds* before. Busy: too many wait, or
        it takes too long. RuntimeError: it cannot be made."""
        oldest = time.monotonic() - self._seconds
        if not self._waiting.acquire(blocking=False):
            return _BUSY
        try:
            if not self._making.acquire(timeout=_ANSWER_SECONDS):
                return _BUSY
            try:
                return self._since(oldest)
            except OSError as e:  # which would look like one of the connection
                raise RuntimeError("the answer cannot be made") from e
            finally:
                self._making.release()
        finally:
            self._waiting.release()

    def _since(self, oldest: float) -> _Answer:
        if self._began < oldest:
            began = time.monotonic()
            self._answer = self._make()
            self._began = began
        return self._answer


def _checked(checks: HealthChecks) -> _Answer:
    problems = {name: check() for name, check in checks.items()}
    lines = [
        f"[{'-' if problem else '+'}] {name}: {problem or 'ok'}\n"
        for name, problem in problems.items()
    ]
    return 503 if any(problems.values()) else 200, _TEXT, "".join(lines).encode()


class _Request(io.RawIOBase):
    """What a client sends. It has *seconds* for all of it; a timeout of the socket alone would give
    it as much for each byte."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection = connection
        self._deadline = Deadline(seconds)
        self._left = MAX_REQUEST_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        """TimeoutError: it took too long. HTTPException: it is too long."""
        if not self._left:
            raise http.client.HTTPException(f"longer than {MAX_REQUEST_BYTES} bytes")
        self._connection.settimeout(max(self._deadline.remaining, 0.001))
        size = self._connection.recv_into(memoryview(buffer)[: self._left])
        self._left -= size
        return size


def _handler(pages: Mapping[str, _Page], client_seconds: float) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server: _BoundedServer
        server_version = "dra-driver"
        sys_version = ""

        def setup(self) -> None:
            super().setup()
            self.rfile.close()
            self.rfile = io.BufferedReader(_Request(self.connection, client_seconds))

        def handle(self) -> None:
            try:
                super().handle()
            except (OSError, http.client.HTTPException) as e:  # the client went, or sent too much
                log.debug("an HTTP client was not answered", extra={"error": str(e)})

        def do_GET(self) -> None:
            page = pages.get(self.path.partition("?")[0])
            with self.server.answering(self.connection):
                status, kind, body = page.answer() if page else _NOT_FOUND
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.connection.settimeout(client_seconds)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            log.debug(format, *args)

    return Handler
