"""What the API server's answers mean: a request in RBAC's words, and the error that an answer is.

Pure: neither the network nor a client library is known here, so every message is a value to test.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dra_driver.cluster.parsing import parse
from dra_driver.errors import (
    ClusterError,
    Conflict,
    Forbidden,
    Gone,
    NotFound,
    Refused,
    Unreachable,
)

_VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}

_ERRORS: Mapping[int, type[ClusterError]] = {
    401: Forbidden,
    403: Forbidden,
    404: NotFound,
    408: Unreachable,
    409: Conflict,
    410: Gone,
    429: Unreachable,
}


@dataclass(frozen=True, slots=True)
class Request:
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


def describe(method: str, path: str, watch: bool = False) -> Request:
    """The request that *method* on *path* is.

    Paths are ``/api/v1/…`` or ``/apis/<group>/<version>/…``, with
    ``[namespaces/<namespace>/]<resource>[/<name>[/<subresource>]]`` behind it.
    """
    verb = _VERBS[method]
    parts = path.strip("/").split("/")
    group, rest = ("", parts[2:]) if parts[0] == "api" else ("".join(parts[1:2]), parts[3:])
    if not rest:
        return Request(verb, path)
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    resource = "/".join((rest[0], *rest[2:]))
    name = "".join(rest[1:2])
    if verb == "get" and not name:
        verb = "watch" if watch else "list"
    return Request(verb, path, group, resource, namespace, name)


def refusal(request: Request, status: int, body: bytes) -> ClusterError:
    """The error for an answer with *status* (4xx, 5xx) and the ``Status`` or text in *body*."""
    kind = _ERRORS.get(status, Unreachable if status >= 500 else Refused)
    reason, message = _status(body)
    said = " ".join(part for part in (str(status), reason) if part)
    text = f"{request}: the API server answered {said}"
    if message:
        text += f": {message}"
    mend = _mend(request, status, message)
    return kind(f"{text}; {mend}" if mend else text)


def event_refusal(request: Request, status: Mapping[str, Any]) -> ClusterError:
    """The error for an ``ERROR`` event of a watch, whose object is a ``Status``."""
    return refusal(request, int(status.get("code") or 500), json.dumps(dict(status)).encode())


def _status(body: bytes) -> tuple[str, str]:
    """Reason and message of a ``Status`` object; of anything else the first line."""
    text = body.decode("utf-8", "replace").strip()
    try:
        status = parse(body)
    except ValueError:
        return "", text.partition("\n")[0][:300]
    if not isinstance(status, dict):
        return "", text[:300]
    return str(status.get("reason") or ""), str(status.get("message") or "")


def _mend(request: Request, status: int, message: str) -> str:
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
