"""Responses of the API server: requests in RBAC's words, errors, and JSON of any depth.

Neither the network nor a client library is known here, so every message is a value to test. An
opaque configuration may be nested 5,000 levels deep: the API server takes it. It must not keep the
driver from reading a list of all claims.
"""

import gc
import json
import re
from collections.abc import Mapping
from typing import Any

from dra_driver.base.errors import (
    ApiServerError,
    Conflict,
    Forbidden,
    Gone,
    NotFound,
    Refused,
    Unreachable,
)
from dra_driver.base.frozen import frozen

MAX_RESPONSE_BYTES = 16 << 20  # bytes; of a watch: of one event
_MAX_DEPTH = 100  # levels; no object of Kubernetes that we read has half as many
_CHUNK = 512  # bytes that are looked at together: almost all are shallow, or deep, as a whole
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_STEPS = tuple({ord(c): 1 for c in "[{"}.get(b, -1 if chr(b) in "]}" else 0) for b in range(256))


class ResponseTooLarge(ApiServerError):
    """A response that is too large to be read to its end."""


def parse_json(text: bytes) -> Any:
    """The value of *text*, with null for parts that are nested too deeply.

    ValueError: it is no JSON, or has integers of thousands of digits.
    """
    try:
        return _load(text)
    except RecursionError:
        return _parse_shallow(text)


def _load(text: bytes) -> Any:
    """JSON has no cycles: with a hundred thousand lists, the search for some took most time."""
    gc.disable()
    try:
        return json.loads(text)
    finally:
        gc.enable()


def _parse_shallow(text: bytes) -> Any:
    try:
        return _load(_without_deep_values(text))
    except RecursionError as e:  # it is no JSON either: brackets are left open
        raise ValueError("it is nested too deeply") from e


def _without_deep_values(text: bytes) -> bytes:
    no_strings = _STRING.sub(lambda string: b" " * len(string[0]), text)
    parts: list[bytes] = []
    depth = kept_from = 0
    for start in range(0, len(text), _CHUNK):
        chunk = no_strings[start : start + _CHUNK]
        opened = chunk.count(b"[") + chunk.count(b"{")
        closed = chunk.count(b"]") + chunk.count(b"}")
        if depth + opened < _MAX_DEPTH or depth - closed >= _MAX_DEPTH:  # all shallow, or all deep
            depth += opened - closed
            continue
        for index, byte in enumerate(chunk, start):
            previous_depth, depth = depth, depth + _STEPS[byte]
            if previous_depth < depth == _MAX_DEPTH:
                parts += (text[kept_from:index], b"null")
            elif previous_depth == _MAX_DEPTH > depth:
                kept_from = index + 1
    if depth >= _MAX_DEPTH:
        raise ValueError("its brackets are left open")
    return b"".join((*parts, text[kept_from:]))


_VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}

_ERRORS: Mapping[int, type[ApiServerError]] = {
    401: Forbidden,
    403: Forbidden,
    404: NotFound,
    408: Unreachable,
    409: Conflict,
    410: Gone,
    429: Unreachable,
}


@frozen
class RequestInfo:
    """A request as RBAC sees it. Paths that are no resource, like discovery, have none."""

    verb: str
    path: str
    group: str = ""
    resource: str = ""  # with its subresource: "resourceclaims/status"
    namespace: str = ""
    name: str = ""

    def __str__(self) -> str:
        if not self.resource:
            return f"{self.verb} {self.path}"
        kind = f"{self.resource}.{self.group}" if self.group else self.resource
        name = "/".join(part for part in (self.namespace, self.name) if part)
        return f"{self.verb} {kind} {name}".rstrip()


def request_info(method: str, path: str, watch: bool = False) -> RequestInfo:
    """The request that *method* on *path* is.

    Paths are ``/api/v1/…`` or ``/apis/<group>/<version>/…``, with
    ``[namespaces/<namespace>/]<resource>[/<name>[/<subresource>]]`` behind it.
    """
    verb = _VERBS[method]
    parts = path.strip("/").split("/")
    group, segments = ("", parts[2:]) if parts[0] == "api" else ("".join(parts[1:2]), parts[3:])
    if not segments:
        return RequestInfo(verb, path)
    namespace = ""
    if segments[0] == "namespaces" and len(segments) > 2:
        namespace, segments = segments[1], segments[2:]
    resource = "/".join((segments[0], *segments[2:]))
    name = "".join(segments[1:2])
    if verb == "get" and not name:
        verb = "watch" if watch else "list"
    return RequestInfo(verb, path, group, resource, namespace, name)


def response_error(request: RequestInfo, status: int, body: bytes) -> ApiServerError:
    """The error for an answer with *status* (4xx, 5xx) and the ``Status`` or text in *body*."""
    kind = _ERRORS.get(status, Unreachable if status >= 500 else Refused)
    reason, message = _status(body)
    answer = " ".join(part for part in (str(status), reason) if part)
    text = f"{request}: the API server answered {answer}"
    if message:
        text += f": {message}"
    remedy = _remedy(request, status, message)
    return kind(f"{text}; {remedy}" if remedy else text)


def watch_error(request: RequestInfo, status: Mapping[str, Any]) -> ApiServerError:
    """The error for an ``ERROR`` event of a watch, whose object is a ``Status``."""
    return response_error(
        request, int(status.get("code") or 500), json.dumps(dict(status)).encode()
    )


def _status(body: bytes) -> tuple[str, str]:
    """Reason and message of a ``Status`` object; of anything else the first line."""
    text = body.decode("utf-8", "replace").strip()
    try:
        status = parse_json(body)
    except ValueError:
        return "", text.partition("\n")[0][:300]
    if not isinstance(status, dict):
        return "", text[:300]
    return str(status.get("reason") or ""), str(status.get("message") or "")


def _remedy(request: RequestInfo, status: int, message: str) -> str:
    if status == 401:
        return "check the service account token or the kubeconfig's user: it was not accepted"
    # An admission policy forbids too; only RBAC says "cannot <verb>".
    if status == 403 and request.resource and f"cannot {request.verb}" in message:
        return (
            f'a role bound to this user has to allow the verb "{request.verb}" on '
            f'"{request.resource}" in API group "{request.group}"'
        )
    if status == 429:
        return "the API server is busy"
    return ""
