"""The audit log of the API server: what service accounts asked of it, and what it answered."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

# Of one file; one more is kept. All end-to-end tests together write a fifth of it.
LOG_MEGABYTES = 50


def policy() -> str:
    """Who asked for what, without the objects; of service accounts, which is what drivers are. The
    controllers of Kubernetes are accounts, too: those in kube-system."""
    rules: list[dict[str, object]] = [
        {"level": "None", "userGroups": ["system:serviceaccounts:kube-system"]},
        {"level": "Metadata", "userGroups": ["system:serviceaccounts"]},
    ]
    document = {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": rules,
    }
    return yaml.safe_dump(document)


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """One request of a service account."""

    account: str  # its name, without the namespace
    verb: str  # as RBAC has it
    resource: str  # "nodes/status", "resourceslices.resource.k8s.io"; else the path
    user_agent: str
    refusal: str  # why RBAC or an admission policy refused it; empty: neither did
    received: float  # seconds since the epoch

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}"


def read_requests(log: Path, since: float) -> list[ApiRequest]:
    """The requests that the API server received from *since* on, oldest first, also from the file
    that *log* replaced. FileNotFoundError: it writes no audit log."""
    replaced = sorted(log.parent.glob(f"{log.stem}-*{log.suffix}"))
    events: dict[str, dict[str, Any]] = {}
    for file in (*replaced, log):
        # A watch is there twice: when it begins and when it ends.
        events |= {event["auditID"]: event for event in _events(file)}
    requests = [_request(event) for event in events.values()]
    return sorted((each for each in requests if each.received >= since), key=_received)


def _received(request: ApiRequest) -> float:
    return request.received


def _events(file: Path) -> Iterator[dict[str, Any]]:
    for line in file.read_text().splitlines():
        if line.endswith("}"):  # else it is being written
            yield json.loads(line)


def _request(event: dict[str, Any]) -> ApiRequest:
    status = event.get("responseStatus") or {}
    message = str(status.get("message", ""))
    is_refused = status.get("code") == 403 or "denied request" in message
    return ApiRequest(
        account=event["user"]["username"].rpartition(":")[2],
        verb=event["verb"],
        resource=_resource(event.get("objectRef") or {}) or event["requestURI"].partition("?")[0],
        user_agent=event.get("userAgent", ""),
        refusal=message if is_refused else "",
        received=datetime.fromisoformat(event["requestReceivedTimestamp"]).timestamp(),
    )


def _resource(reference: dict[str, str]) -> str:
    """
    >>> _resource({"resource": "resourceclaims", "apiGroup": "resource.k8s.io", "name": "a"})
    'resourceclaims.resource.k8s.io'
    """
    subresource, group = reference.get("subresource"), reference.get("apiGroup")
    return (
        reference.get("resource", "")
        + (f"/{subresource}" if subresource else "")
        + (f".{group}" if group else "")
    )
