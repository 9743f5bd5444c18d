"""The one client of the API server: JSON documents in and out, our own errors, repeated reads.

Documents are plain dicts, never typed models: those lag behind the API and lose the fields they do
not know.
"""

import contextlib
import email.utils
import json
import math
import threading
import time
import urllib.parse
import weakref
from collections.abc import Iterator
from typing import TypeVar

import urllib3

from dra_driver.base.backoff import Retrying
from dra_driver.base.deadlines import Deadline, within_request
from dra_driver.base.errors import Forbidden, Unreachable
from dra_driver.base.frozen import frozen
from dra_driver.k8s.access import ApiServerAccess, TokenFile
from dra_driver.k8s.api import Document, Query
from dra_driver.k8s.connections import open_connections
from dra_driver.k8s.responses import (
    MAX_RESPONSE_BYTES,
    RequestInfo,
    ResponseTooLarge,
    parse_json,
    request_info,
    response_error,
)
from dra_driver.k8s.watch import WatchStream


class RetryAfter(Unreachable):
    """The API server says how long to wait before the next attempt."""

    def __init__(self, message: str, status: int, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds
        # Nothing was done; with a 504 something may have been.
        self.is_turned_away = status in (429, 503)


def is_unreachable(error: BaseException) -> bool:
    """Whether a read may be repeated after *error*."""
    return isinstance(error, Unreachable)


def is_throttled(error: BaseException) -> bool:
    """Whether any request may be repeated: nothing was done, and the API server says when."""
    return isinstance(error, RetryAfter) and error.is_turned_away


def _asked_wait(error: BaseException) -> float | None:
    """How long the API server said to wait; None: it did not."""
    return error.seconds if isinstance(error, RetryAfter) else None


Answer = TypeVar("Answer")

MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"

_NO_QUERY: Query = {}
_UNAUTHORIZED = 401
_NO_RETRIES = urllib3.Retry(False, redirect=False)  # ``Retrying`` makes them
_LEAST_SECONDS = 0.1  # that a try is given, however little of its deadline remains
_PAGE = "500"  # objects per answer, as client-go's reflectors ask for


_JSON = "application/json"
# Objects as PartialObjectMetadata, where that is known (Kubernetes API concepts); else as they are.
_METADATA = f"{_JSON};as=PartialObjectMetadata;g=meta.k8s.io;v=v1,{_JSON}"


@frozen
class ApiTimeouts:
    """How long one try of a request may take, and the wait before the next, in seconds."""

    connect: float = 3.0
    read: float = 3.0  # it is tried again then, on another connection
    write: float = 10.0  # nobody tries it again here
    watch: float = 10.0  # until it is open
    retry: float = 0.2  # at most, before a read is tried again; then twice that


@frozen
class _ApiCall:
    method: str
    path: str
    query: Query
    connect_seconds: float
    answer_seconds: float
    body: Document | None = None
    content_type: str = _JSON
    watch: bool = False
    accept: str = _JSON

    @property
    def request(self) -> RequestInfo:
        return request_info(self.method, self.path, self.watch)


class ApiClient:
    """A connection to one API server, for use by many threads.

    Every method raises ``dra_driver.base.errors``: NotFound, Conflict, Gone, Forbidden, Refused or
    Unreachable. Reads are tried up to three times within their deadline while the API server is
    Unreachable. Writes and watches are tried again only where it turned them away and said when to
    come back: whether anything else may be repeated, only their caller knows.

    A connection can die in silence, and those that idle beside it mostly died with it. So where an
    answer does not come in time, all of them are dropped, and the next try opens another.
    """

    def __init__(
        self,
        access: ApiServerAccess,
        timeouts: ApiTimeouts | None = None,
        user_agent: str = "dra-driver",
    ) -> None:
        """Connects at the first request. SettingsError: what *access* says cannot be used."""
        self._timeouts = timeouts or ApiTimeouts()
        self._access = access
        self._token_file = TokenFile(access.token_file) if access.token_file else None
        connections = open_connections(access)
        self._url, self._manager = connections.url, connections.pool
        self._token_of_program = connections.token
        self._pool = self._manager.connection_from_url(self._url)
        parts = urllib3.util.parse_url(self._url)
        # A proxy is told the whole URL, unless the connection through it is encrypted.
        is_whole = self._pool.proxy is not None and parts.scheme == "http"
        self._target = self._url if is_whole else parts.path or ""
        self._headers = {"User-Agent": user_agent}
        self._lock = threading.Lock()
        self._watches: weakref.WeakSet[WatchStream] = weakref.WeakSet()
        self._closed = threading.Event()
        self._retrying = Retrying(self._timeouts.retry, self._closed, _asked_wait)
        self._date = ("", 0.0)  # of the last answer, and when (monotonic) it was asked for

    @property
    def url(self) -> str:
        """Where the API server is."""
        return self._url

    def now(self) -> float | None:
        """What the API server's clock shows, in seconds of the epoch, up to one behind: it tells
        whole ones. None: no answer said it."""
        date, asked_at = self._date
        with contextlib.suppress(ValueError):
            shown = email.utils.parsedate_to_datetime(date).timestamp()
            return shown + time.monotonic() - asked_at
        return None

    def get(self, path: str, query: Query = _NO_QUERY, deadline_seconds: float = 8.0) -> Document:
        """The document at *path*; sooner than the deadline if this thread serves a request that has
        to be answered sooner."""
        call = _ApiCall("GET", path, query, self._timeouts.connect, self._timeouts.read)
        deadline = within_request(deadline_seconds)
        return self._retrying.call(
            lambda: self._document(call, deadline), is_unreachable, deadline.seconds
        )

    def pages(
        self, path: str, query: Query = _NO_QUERY, deadline_seconds: float = 8.0
    ) -> Iterator[Document]:
        """The list at *path*, 500 objects a page, fewer where they are large, each page within the
        deadline. Gone: start again."""
        query = {"limit": _PAGE, **query}
        while True:
            try:
                page = self.get(path, query, deadline_seconds)
            except ResponseTooLarge:
                # Whoever fills claims to the brim keeps nobody from listing them.
                if int(query["limit"]) < 10:
                    raise
                query = {**query, "limit": str(int(query["limit"]) // 10)}
                continue
            yield page
            following = page.get("metadata", {}).get("continue")
            if not following:
                return
            query = {**query, "continue": following}

    def list(self, path: str, query: Query = _NO_QUERY, deadline_seconds: float = 8.0) -> Document:
        """All of the list at *path*; its ``metadata.resourceVersion`` is where to watch from."""
        pages = tuple(self.pages(path, query, deadline_seconds))
        return {**pages[-1], "items": [item for page in pages for item in page.get("items") or ()]}

    def create(self, path: str, document: Document, query: Query = _NO_QUERY) -> Document:
        """Create *document* in the collection at *path*: what the API server made of it."""
        return self._write("POST", path, query, document)

    def update(self, path: str, document: Document, query: Query = _NO_QUERY) -> Document:
        """Replace the object at *path*. Conflict: its ``resourceVersion`` is not the newest."""
        return self._write("PUT", path, query, document)

    def patch(
        self,
        path: str,
        patch: Document,
        query: Query = _NO_QUERY,
        content_type: str = MERGE_PATCH,
    ) -> Document:
        """Change the object at *path* by *patch*."""
        return self._write("PATCH", path, query, patch, content_type)

    def delete(self, path: str, uid: str = "", resource_version: str = "") -> None:
        """Delete the object at *path*. Conflict: it is another one, or changed, than was meant."""
        meant = {"uid": uid, "resourceVersion": resource_version}
        options: Document = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "preconditions": {key: value for key, value in meant.items() if value},
        }
        self._write("DELETE", path, _NO_QUERY, options)

    def watch(
        self, path: str, query: Query, seconds: int, *, metadata_only: bool = False
    ) -> WatchStream:
        """What happens to the collection at *path*, since *query*'s ``resourceVersion``.

        It ends after *seconds*. Opening it raises like a write. *metadata_only*: of each object
        no more than that is sent.
        """
        query = {**query, "watch": "true", "timeoutSeconds": str(seconds)}
        timeouts = self._timeouts
        accept = _METADATA if metadata_only else _JSON
        call = _ApiCall(
            "GET", path, query, timeouts.connect, timeouts.watch, watch=True, accept=accept
        )
        response, _ = self._retrying.call(
            lambda: self._exchange(call), is_throttled, timeouts.connect + timeouts.watch
        )
        _be_patient(response, seconds + timeouts.watch)
        chunks = self._chunks(call, response)
        watch = WatchStream(call.request, chunks, response.shutdown, response.close)
        with self._lock:
            self._watches.add(watch)
        if self._closed.is_set():
            watch.close()
        return watch

    def close(self) -> None:
        """End all watches at once and refuse further requests; one under way ends by itself."""
        self._closed.set()
        with self._lock:
            watches = tuple(self._watches)
        for watch in watches:
            watch.close()
        self._drop_connections()

    def _drop_connections(self) -> None:
        """Those in use go when they are given back."""
        self._manager.clear()
        self._pool = self._manager.connection_from_url(self._url)

    def _write(
        self,
        method: str,
        path: str,
        query: Query,
        body: Document,
        content_type: str = _JSON,
    ) -> Document:
        timeouts = self._timeouts
        call = _ApiCall(method, path, query, timeouts.connect, timeouts.write, body, content_type)
        # All attempts together, with the waits, take no longer than one may.
        seconds = timeouts.connect + timeouts.write
        deadline = Deadline(seconds)
        return self._retrying.call(lambda: self._document(call, deadline), is_throttled, seconds)

    def _document(self, call: _ApiCall, deadline: Deadline) -> Document:
        _, body = self._exchange(call, max(_LEAST_SECONDS, deadline.remaining))
        try:
            document = parse_json(body)
        except ValueError as e:
            raise Unreachable(f"{call.request}: {self.url} did not answer with JSON: {e}") from e
        if not isinstance(document, dict):
            raise Unreachable(f"{call.request}: {self.url} did not answer with a JSON object")
        return document

    def _exchange(
        self, call: _ApiCall, seconds: float = math.inf
    ) -> tuple[urllib3.BaseHTTPResponse, bytes]:
        """One try: the answer and its body if it is a success, otherwise the error that it is. Of a
        watch the body is yet to come. *seconds*: that connection and answer each may take at most,
        whatever *call* says."""
        if self._closed.is_set():
            raise Unreachable(
                f"{call.request}: not sent, because the connection to {self.url} was closed"
            )
        token = self._token(call)
        headers = self._headers | {"Accept": call.accept}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        if call.body is not None:
            headers["Content-Type"] = call.content_type
        query = f"?{urllib.parse.urlencode(call.query)}" if call.query else ""
        asked_at = time.monotonic()
        with self._network_errors(call):
            response: urllib3.BaseHTTPResponse = self._pool.urlopen(
                call.method,
                f"{self._target}{call.path}{query}",
                body=None if call.body is None else json.dumps(call.body),
                headers=headers,
                timeout=urllib3.Timeout(
                    connect=min(call.connect_seconds, seconds),
                    read=min(call.answer_seconds, seconds),
                ),
                preload_content=False,
                retries=_NO_RETRIES,
                redirect=False,
                assert_same_host=False,
            )
            self._date = (response.headers.get("Date", ""), asked_at)
            if 200 <= response.status < 300:
                return response, b"" if call.watch else _body(response, call)
            body = _body(response, call)
        if response.status == _UNAUTHORIZED and self._token(call, refused=token) != token:
            return self._exchange(call, seconds)
        error = response_error(call.request, response.status, body)
        wait = _retry_after(response)
        if isinstance(error, Unreachable) and wait is not None:
            raise RetryAfter(str(error), response.status, wait)
        raise error

    def _token(self, call: _ApiCall, refused: str = "") -> str:
        """The one to send, empty where there is none. *refused*: one that was not accepted."""
        if self._token_file is None:
            return self._access.token or self._token_of_program
        try:
            return self._token_file.token(refused)
        except OSError as e:
            raise Forbidden(
                f"{call.request}: the token file {self._access.token_file} cannot be read: {e}"
            ) from e

    def _chunks(self, call: _ApiCall, response: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
        """What arrives of a streamed answer, as it arrives."""
        with self._network_errors(call):
            yield from response.stream(65536)

    @contextlib.contextmanager
    def _network_errors(self, call: _ApiCall) -> Iterator[None]:
        url = self.url
        try:
            yield
        except urllib3.exceptions.NewConnectionError as e:  # a ConnectTimeoutError by its class
            raise Unreachable(f"{call.request}: {url} cannot be reached: {e.__cause__ or e}") from e
        except urllib3.exceptions.ConnectTimeoutError as e:
            raise Unreachable(f"{call.request}: {url} did not take the connection in time") from e
        except urllib3.exceptions.TimeoutError as e:
            self._drop_connections()
            raise Unreachable(f"{call.request}: {url} did not answer in time") from e
        except urllib3.exceptions.SSLError as e:
            raise Unreachable(
                f"{call.request}: no trusted connection to {url}: {e}; "
                "check the CA in the kubeconfig or service account"
            ) from e
        except (urllib3.exceptions.HTTPError, OSError) as e:
            raise Unreachable(f"{call.request}: {url} cannot be reached: {e}") from e


def _body(response: urllib3.BaseHTTPResponse, call: _ApiCall) -> bytes:
    """All of it, and the connection is free again. ResponseTooLarge: it is more than anything has
    that we ask for. It is not compressed, since we do not ask for that."""
    body = response.read(MAX_RESPONSE_BYTES + 1, decode_content=False)
    if len(body) > MAX_RESPONSE_BYTES:
        response.close()
        raise ResponseTooLarge(
            f"{call.request}: the API server answered with more than {MAX_RESPONSE_BYTES >> 20} MiB"
        )
    if response.length_remaining:
        response.close()
        raise Unreachable(f"{call.request}: the answer of the API server is cut off")
    return body


def _be_patient(response: urllib3.BaseHTTPResponse, seconds: float) -> None:
    """The server ends a watch; this long wait notices a connection that died in silence. Whoever
    closes the connection after each answer, as some proxies do, has the watch opened anew when
    nothing happens."""
    connected = getattr(response.connection, "sock", None)
    if connected is not None:
        connected.settimeout(seconds)


def _retry_after(response: urllib3.BaseHTTPResponse) -> float | None:
    """In seconds, also where the answer has a date; None: it does not say."""
    with contextlib.suppress(urllib3.exceptions.InvalidHeader):
        return urllib3.Retry().get_retry_after(response)
    return None
