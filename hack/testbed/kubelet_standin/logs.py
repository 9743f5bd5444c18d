"""The kubelet's answer to ``kubectl logs``: what a container has printed until now."""

import logging
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

log = logging.getLogger(__name__)

_ASK_SECONDS = 10
Find = Callable[[str, str, str], Path | None]  # namespace, pod, container: the file of its output


class LogServer:
    """Serves ``/containerLogs/<namespace>/<pod>/<container>`` on loopback, to the cluster's own.

    Of its parameters it knows ``tailLines`` and ``limitBytes``. It does not follow a log, and has
    no times of lines.
    """

    def __init__(self, pki: Path, find: Find) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pki / "kubelet-server.crt", pki / "kubelet-server.key")
        context.load_verify_locations(pki / "ca.crt")
        context.verify_mode = ssl.CERT_REQUIRED  # anybody on this machine can reach the port
        self._server = _Server(("127.0.0.1", 0), _answering(find))
        # The handshake is left to the thread of each connection: a slow one holds up nobody.
        self._server.socket = context.wrap_socket(
            self._server.socket, server_side=True, do_handshake_on_connect=False
        )
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def __enter__(self) -> "LogServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        log.info("a connection for logs failed", exc_info=True)  # a stranger's, most of the time


def _answering(find: Find) -> type[BaseHTTPRequestHandler]:
    class Answer(BaseHTTPRequestHandler):
        timeout = _ASK_SECONDS

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            match url.path.strip("/").split("/"):
                case ["containerLogs", namespace, pod, container]:
                    path = find(namespace, pod, container)
                case _:
                    path = None
            if path is None:
                self._say(404, f"no such log: {url.path}\n".encode())
                return
            self._say(200, _part(path, parse_qs(url.query)))

        def _say(self, code: int, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            log.debug("asked for a log: %s", format % args)

    return Answer


def _part(path: Path, query: dict[str, list[str]]) -> bytes:
    """The part of the output that is asked for; nothing where nothing was printed yet."""
    try:
        output = path.read_bytes()
    except FileNotFoundError:
        return b""
    if "tailLines" in query:
        lines = output.splitlines(keepends=True)
        output = b"".join(lines[max(0, len(lines) - int(query["tailLines"][0])) :])
    if "limitBytes" in query:
        output = output[: int(query["limitBytes"][0])]
    return output
