"""Requests to the fake API server as values: what they name, what befalls them, what they see."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.fakes.api_objects import Change, Object, Resource, Selector


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


def event_of(change: Change, namespace: str, selector: Selector) -> tuple[str, Object] | None:
    """*change* as a watch with that selector sees it."""

    def selected(each: Object | None) -> bool:
        return bool(
            each
            and each["metadata"].get("namespace", "").startswith(namespace)
            and selector.matches(each)
        )

    if selected(change.after) and change.after:
        return ("MODIFIED" if selected(change.before) else "ADDED"), change.after
    if selected(change.before) and change.before:
        gone = {**change.before["metadata"], "resourceVersion": str(change.version)}
        return "DELETED", {**change.before, "metadata": gone}
    return None


def selector_of(query: Mapping[str, str]) -> Selector:
    """What *query* selects: of labels ``name``, ``name=value`` and ``name==value`` are known."""

    def parts(text: str) -> dict[str, str | None]:
        split = (part.partition("=") for part in text.split(",") if part)
        return {name: value.lstrip("=") if equals else None for name, equals, value in split}

    fields = {path: value or "" for path, value in parts(query.get("fieldSelector", "")).items()}
    return Selector(fields, parts(query.get("labelSelector", "")))


def merged(target: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(target, dict) or not isinstance(patch, dict):
        return patch
    unpatched = {key: value for key, value in target.items() if key not in patch}
    changed = {key: merged(target.get(key), patch[key]) for key in patch if patch[key] is not None}
    return {**unpatched, **changed}


_MERGE_KEYS = {  # of lists that a strategic merge does not replace: patchMergeKey of the Go types
    ("status", "conditions"): "type",
    ("status", "addresses"): "type",
    ("spec", "taints"): "key",
    ("metadata", "ownerReferences"): "uid",
}


def strategically_merged(target: Any, patch: Any, path: tuple[str, ...] = ()) -> Any:
    """A strategic merge patch: as RFC 7386, but some lists are merged, element by element."""
    if path in _MERGE_KEYS and isinstance(patch, list):
        key = _MERGE_KEYS[path]
        elements = {each[key]: each for each in target or ()}
        for each in patch:
            if each.get("$patch") == "delete":
                elements.pop(each[key], None)
            else:
                elements[each[key]] = merged(elements.get(each[key], {}), each)
        return list(elements.values())
    if not isinstance(target, dict) or not isinstance(patch, dict):
        return patch
    unpatched = {key: value for key, value in target.items() if key not in patch}
    changed = {
        key: strategically_merged(target.get(key), value, (*path, key))
        for key, value in patch.items()
        if value is not None
    }
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
