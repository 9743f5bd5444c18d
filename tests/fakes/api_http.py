"""The HTTP side of the fake API server: requests in, answers and watch events out."""

import http.server
import json
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dra_driver.k8s.api import APPLY_PATCH
from tests.fakes.api_objects import (
    CUSTOM,
    RESOURCES,
    Object,
    Refusal,
    Selector,
    refuse_no_version,
    refuse_patch,
)
from tests.fakes.api_requests import (
    Fault,
    ServedRequest,
    Target,
    event_of,
    merged,
    metadata_of,
    selector_of,
    status_of,
    strategically_merged,
)
from tests.fakes.api_shapes import read_as, write_as

if TYPE_CHECKING:
    from tests.fakes.api_server import ApiServer

GROUP = "resource.k8s.io"


class Front:
    """A listening socket and the threads behind it."""

    def __init__(self, server: "ApiServer", port: int) -> None:
        front = self

        class Handler(_Handler):
            def setup(self) -> None:
                self.server_state = server
                self.front = front
                with front.lock:
                    front.connections.add(self.request)
                super().setup()

            def finish(self) -> None:
                with front.lock:
                    front.connections.discard(self.request)
                    front.watching.discard(self.request)
                super().finish()

        self.lock = threading.Lock()
        self.connections: set[socket.socket] = set()
        self.watching: set[socket.socket] = set()
        self.stopping = threading.Event()
        self._http = _Http(("127.0.0.1", port), Handler)
        self.port = int(self._http.server_address[1])
        self._thread = threading.Thread(
            target=self._http.serve_forever, args=(0.005,), name="fake API server", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.stopping.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
        self._shut(self.connections)

    def end_watches(self) -> None:
        self._shut(self.watching)

    def _shut(self, connections: set[socket.socket]) -> None:
        with self.lock:
            for each in connections:
                try:
                    each.shutdown(socket.SHUT_RDWR)
                except OSError:  # it is closed already
                    continue


class _Http(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no error here."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # headers and body in one packet
    disable_nagle_algorithm = True
    server_state: "ApiServer"
    front: Front

    def log_message(self, format: str, *args: Any) -> None:
        """The log of requests is ``ApiServer.requests``."""

    def do_GET(self) -> None:
        self._serve()

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET  # noqa: N815

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        raw = self.rfile.read(length)
        split = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(split.query))
        method = "WATCH" if query.get("watch") == "true" else self.command
        request = ServedRequest(
            method, split.path, query, dict(self.headers), json.loads(raw) if raw else None
        )
        fault = self._note(request)
        try:
            if fault and not self._survives(fault):
                return
            self._refuse_stranger()
            self._answer(request)
        except Refusal as e:
            self._status(e.code, e.reason, e.message)

    def _note(self, request: ServedRequest) -> Fault | None:
        state = self.server_state
        with state._objects.changed:
            state._requests.append(request)
            state._objects.changed.notify_all()
            for fault in state._faults:
                if fault.times and request.concerns(fault.method, fault.path):
                    fault.times -= 1
                    return fault
        return None

    def _survives(self, fault: Fault) -> bool:
        """Whether the request is answered as usual after *fault*."""
        if fault.hang_up:
            self.close_connection = True
            self.request.shutdown(socket.SHUT_RDWR)
            return False
        if fault.seconds:
            self.front.stopping.wait(fault.seconds)
        if not fault.status:
            return True
        reason = {403: "Forbidden", 409: "Conflict", 410: "Expired"}.get(fault.status, "Fault")
        extra = {"Retry-After": str(fault.retry_after)} if fault.retry_after is not None else {}
        self._status(fault.status, reason, fault.message, extra)
        return False

    def _refuse_stranger(self) -> None:
        accepted = self.server_state.tokens
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if accepted is not None and token not in accepted:
            raise Refusal(401, "Unauthorized", "Unauthorized")

    def _answer(self, request: ServedRequest) -> None:
        if request.path == f"/apis/{GROUP}" and self.server_state.served:
            versions = [
                {"groupVersion": f"{GROUP}/{version}", "version": version}
                for version in self.server_state.served
            ]
            self._json(200, {"kind": "APIGroup", "name": GROUP, "versions": versions})
            return
        if request.path == "/version":
            self._json(200, {"major": "1", "minor": "36", "gitVersion": "v1.36.3"})
            return
        target = self._target(request.path)
        if target is None:
            self._text(404, "404 page not found\n")
            return
        selector = selector_of(request.query)
        if request.method == "WATCH":
            self._watch(target, request.query, selector)
        elif request.method == "GET" and not target.name:
            self._list(target, request.query, selector)
        else:
            code, made = self._one(target, request)
            self._json(code, write_as(target.api_version, made))

    def _target(self, path: str) -> Target | None:
        parts = path.strip("/").split("/")
        if len(parts) < 3 or parts[0] not in ("api", "apis"):
            return None
        if parts[0] == "api":
            group, version, segments = "", parts[1], parts[2:]
        else:
            group, version, segments = parts[1], parts[2], parts[3:]
        namespace = ""
        if segments[:1] == ["namespaces"] and len(segments) > 2:
            namespace, segments = segments[1], segments[2:]
        resource = RESOURCES.get("".join(segments[:1]))
        if resource is None or resource.group != group:
            return None
        served = self.server_state.served if group == GROUP else [resource.version]
        if version not in served or resource.plural in self.server_state.removed:
            return None
        name, part = "".join(segments[1:2]), "".join(segments[2:3])
        return Target(resource, version, namespace, name, part)

    def _one(self, target: Target, request: ServedRequest) -> tuple[int, Object]:
        objects, body = self.server_state._objects, request.body or {}
        if request.method == "GET":
            return 200, objects.get(
                target.key, in_memory=request.query.get("resourceVersion") == "0"
            )
        if request.method == "DELETE":
            return 200, objects.delete(target.key, body.get("preconditions"))
        if request.method == "PATCH":
            if request.headers.get("Content-Type") == APPLY_PATCH and target.part == "status":
                return 200, objects.apply_devices(target.key, body, request.query["fieldManager"])
            merge = self._merge(target, request.headers.get("Content-Type", ""))
            with objects.changed:
                before = objects.get(target.key)
                patch = refuse_patch(target.resource, before, body)
                return 200, objects.update(target.key, merge(before, patch), target.part)
        document = read_as(target.api_version, target.resource.kind, body)
        if request.method == "PUT":
            refuse_no_version(target.resource, document)
            return 200, objects.update(target.key, document, target.part)
        dry = request.query.get("dryRun") == "All"
        return 201, objects.create(target.resource.plural, target.namespace, document, dry)

    def _merge(self, target: Target, kind: str) -> Callable[[Object, Object], Object]:
        if kind == "application/merge-patch+json":
            return merged
        if kind == "application/strategic-merge-patch+json" and target.key[0] not in CUSTOM:
            return strategically_merged
        raise Refusal(415, "UnsupportedMediaType", f"{kind} is not supported here")

    def _list(self, target: Target, query: Mapping[str, str], selector: Selector) -> None:
        objects, limit = self.server_state._objects, int(query.get("limit", 0))
        with objects.changed:
            if token := query.get("continue"):
                metadata, documents = objects.next_page(token, limit)
            else:
                everything = objects.list(target.resource.plural, target.namespace, selector)
                metadata, documents = objects.page(everything, limit)
        items = [write_as(target.api_version, each) for each in documents]
        for each in items:  # the items of a list do not say what they are
            each.pop("kind", None)
            each.pop("apiVersion", None)
        self._json(
            200,
            {
                "kind": f"{target.resource.kind}List",
                "apiVersion": target.api_version,
                "metadata": metadata,
                "items": items,
            },
        )

    def _watch(self, target: Target, query: Mapping[str, str], selector: Selector) -> None:
        with self.front.lock:
            self.front.watching.add(self.request)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()
        metadata_only = "as=PartialObjectMetadata;g=meta.k8s.io;v=v1" in self.headers["Accept"]
        try:
            for kind, document in self._events(target, query, selector):
                each = metadata_of(document) if metadata_only else document
                self._chunk(json.dumps({"type": kind, "object": each}).encode() + b"\n")
        except Refusal as e:
            status = status_of(e.code, e.reason, e.message)
            self._chunk(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
        self._chunk(b"")
        with self.front.lock:
            self.front.watching.discard(self.request)

    def _events(
        self, target: Target, query: Mapping[str, str], selector: Selector
    ) -> Iterator[tuple[str, Object]]:
        objects, plural = self.server_state._objects, target.resource.plural
        since = int(query.get("resourceVersion") or 0)
        if not since:
            with objects.changed:
                since = int(objects.version)
                existing = objects.list(plural, target.namespace, selector)
            yield from (("ADDED", write_as(target.api_version, each)) for each in existing)
        ends_at = time.monotonic() + float(query.get("timeoutSeconds", 3600))
        bookmark_at = time.monotonic() + self.server_state.bookmark_seconds
        while (now := time.monotonic()) < ends_at and not self._is_over(plural):
            for change in objects.since(since, plural):
                since = change.version
                if event := event_of(change, target.namespace, selector):
                    yield event[0], write_as(target.api_version, event[1])
            if now >= bookmark_at and query.get("allowWatchBookmarks") == "true":
                bookmark_at = now + self.server_state.bookmark_seconds
                yield "BOOKMARK", {"metadata": {"resourceVersion": objects.version}}
            until = min(ends_at, bookmark_at)
            with objects.changed:
                if int(objects.version) <= since or not any(objects.since(since, plural)):
                    objects.changed.wait(max(0.0, min(until - time.monotonic(), 0.5)))

    def _is_over(self, plural: str) -> bool:
        return self.front.stopping.is_set() or plural in self.server_state.removed

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _status(
        self, code: int, reason: str, message: str, extra: Mapping[str, str] | None = None
    ) -> None:
        self._json(code, status_of(code, reason, message), extra)

    def _json(self, code: int, document: Object, extra: Mapping[str, str] | None = None) -> None:
        self._send(code, "application/json", json.dumps(document).encode(), extra or {})

    def _text(self, code: int, text: str) -> None:
        self._send(code, "text/plain", text.encode(), {})

    def _send(self, code: int, kind: str, body: bytes, extra: Mapping[str, str]) -> None:
        self.send_response(code)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            **extra,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()
