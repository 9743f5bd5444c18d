"""Requests to the fake API server as values: what they name, what befalls them, what they see."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.fakes.api_objects import Change, Object, Resource, matches


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """One request as it came."""

    method: str  # WATCH for a GET that watches
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: Object | None

    def concerns(self, method: str, path: str) -> bool:
        return method in ("", self.method) and path in self.path


@dataclass(slots=True)
class Fault:
    """What happens to the next ``times`` requests that match."""

    method: str
    path: str
    times: int
    status: int = 0
    seconds: float = 0.0
    hang_up: bool = False
    retry_after: int | str | None = None
    message: str = "a fault of the test"


@dataclass(frozen=True, slots=True)
class Target:
    """What a path names."""

    resource: Resource
    version: str
    namespace: str
    name: str
    part: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.resource.plural, self.namespace, self.name)

    @property
    def api_version(self) -> str:
        return f"{self.resource.group}/{self.version}" if self.resource.group else self.version


def metadata_of(document: Object) -> Object:
    """All that is sent of *document* to who asks for metadata."""
    head = {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1"}
    return {**head, "metadata": document["metadata"]}


def event_of(
    change: Change, namespace: str, selector: Mapping[str, str]
) -> tuple[str, Object] | None:
    """*change* as a watch with that selector sees it."""

    def selected(each: Object | None) -> bool:
        return bool(
            each
            and each["metadata"].get("namespace", "").startswith(namespace)
            and matches(each, selector)
        )

    if selected(change.after) and change.after:
        return ("MODIFIED" if selected(change.before) else "ADDED"), change.after
    if selected(change.before) and change.before:
        gone = {**change.before["metadata"], "resourceVersion": str(change.version)}
        return "DELETED", {**change.before, "metadata": gone}
    return None


def selector_of(text: str) -> dict[str, str]:
    parts = (part.partition("=") for part in text.split(",") if part)
    return {path: value.lstrip("=") for path, _, value in parts}


def merged(target: Any, patch: Any) -> Any:
    """RFC 7386; strategic merges are the same where no list is patched."""
    if not isinstance(target, dict) or not isinstance(patch, dict):
        return patch
    unpatched = {key: value for key, value in target.items() if key not in patch}
    changed = {key: merged(target.get(key), patch[key]) for key in patch if patch[key] is not None}
    return {**unpatched, **changed}


def status_of(code: int, reason: str, message: str) -> Object:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }
