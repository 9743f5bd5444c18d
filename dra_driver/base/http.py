"""The HTTP server of ``/metrics``, ``/livez`` and ``/readyz``, for Prometheus and the kubelet."""

import logging
import re
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from dra_driver.base.errors import SettingsError

log = logging.getLogger(__name__)

HealthCheck = Callable[[], str | None]
HealthChecks = Mapping[str, HealthCheck]
"""By name, a question that answers with what is wrong, or None."""


_LAST_PORT = 65535


class HttpServer:
    """Serves until ``stop``. *address*: ``host:port``; an empty host means every interface."""

    def __init__(self, address: str, registry: CollectorRegistry) -> None:
        """Bind the address; requests are answered from ``start`` on. SettingsError: it is invalid
        or in use."""
        host, separator, port = address.rpartition(":")
        if not separator or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > _LAST_PORT:
            raise SettingsError(
                f"--http-address {address!r}: write host:port, for example 127.0.0.1:8080"
            )
        self._registry = registry
        self._host = host.strip("[]")
        kind = _DualStack if _wants_ipv6(self._host) else ThreadingHTTPServer
        try:
            self._server = kind((self._host, int(port)), BaseHTTPRequestHandler)
        except OSError as e:
            raise SettingsError(f"--http-address {address!r} cannot be served: {e.strerror}") from e
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(3600.0,), name="http", daemon=True
        )

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def start(self, live: HealthChecks, ready: HealthChecks) -> None:
        self._server.RequestHandlerClass = _handler(self._registry, live, ready)
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


class _DualStack(ThreadingHTTPServer):
    """On every interface of both families, or on one IPv6 address."""

    address_family = socket.AF_INET6

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


def _wants_ipv6(host: str) -> bool:
    return ":" in host or (not host and socket.has_dualstack_ipv6())


def _handler(
    registry: CollectorRegistry, live: HealthChecks, ready: HealthChecks
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._answer(200, generate_latest(registry), CONTENT_TYPE_LATEST)
            elif path in ("/livez", "/healthz"):
                self._check(live)
            elif path == "/readyz":
                self._check(ready)
            else:
                self._answer(404, b"try /metrics, /livez or /readyz\n")

        def _check(self, checks: HealthChecks) -> None:
            problems = {name: check() for name, check in checks.items()}
            lines = [
                f"[{'-' if problem else '+'}] {name}: {problem or 'ok'}\n"
                for name, problem in problems.items()
            ]
            self._answer(503 if any(problems.values()) else 200, "".join(lines).encode())

        def _answer(
            self, status: int, body: bytes, kind: str = "text/plain; charset=utf-8"
        ) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            log.debug(format, *args)

    return Handler
