"""What the fake API server stores: objects, their versions, and what happened to them.

It refuses what the real one refuses: stale versions, other UIDs, names that exist, slices that
break a rule. Objects of resource.k8s.io are kept in the shape of v1.
"""

import bisect
import copy
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.label_rules import label_problem
from tests.fakes.slice_rules import as_stored, refuse_slice

Object = dict[str, Any]
Key = tuple[str, str, str]  # resource, namespace, name

_SET_BY_SERVER = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
)
_DeviceKey = tuple[str, str, str, str]
MAX_GENERATED = 58  # names.maxGeneratedNameLength


@dataclass(frozen=True, slots=True)
class Resource:
    """A resource that the server knows."""

    plural: str
    kind: str
    group: str = ""
    namespaced: bool = True
    status: bool = False  # has the subresource "status"
    fields: tuple[str, ...] = ()  # selectable, beside metadata.name and metadata.namespace
    version: str = "v1"  # of resource.k8s.io there are several


RESOURCES = {
    each.plural: each
    for each in (
        Resource("nodes", "Node", namespaced=False, status=True, fields=("spec.unschedulable",)),
        Resource("namespaces", "Namespace", namespaced=False, status=True),
        Resource("pods", "Pod", status=True, fields=("spec.nodeName", "status.phase")),
        Resource("configmaps", "ConfigMap"),
        Resource(
            "events",
            "Event",
            fields=("involvedObject.kind", "involvedObject.name", "involvedObject.uid", "reason"),
        ),
        Resource(
            "resourceslices",
            "ResourceSlice",
            "resource.k8s.io",
            namespaced=False,
            fields=("spec.driver", "spec.nodeName"),
        ),
        Resource("resourceclaims", "ResourceClaim", "resource.k8s.io", status=True),
        Resource("resourceclaimtemplates", "ResourceClaimTemplate", "resource.k8s.io"),
        Resource("deviceclasses", "DeviceClass", "resource.k8s.io", namespaced=False),
        Resource(
            "nodeprofiles",
            "NodeProfile",
            "resource.nvidia.com",
            namespaced=False,
            status=True,
            version="v1beta1",
        ),
        Resource("controllerrevisions", "ControllerRevision", "apps"),
        Resource("leases", "Lease", "coordination.k8s.io"),
    )
}
CUSTOM = frozenset({"nodeprofiles"})  # defined by a CustomResourceDefinition


@dataclass(frozen=True, slots=True)
class Selector:
    """What a list or a watch is about."""

    fields: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str | None] = field(default_factory=dict)  # None: any value

    def matches(self, each: Object) -> bool:
        labels = each["metadata"].get("labels") or {}
        return all(_field(each, path) == value for path, value in self.fields.items()) and all(
            name in labels and value in (None, labels[name]) for name, value in self.labels.items()
        )


_EVERYTHING = Selector()


class Refusal(Exception):
    """An answer that is not a success."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason, self.message = code, reason, message


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that happened; ``before`` is None for what is new, ``after`` for what is gone."""

    version: int
    resource: str
    before: Object | None
    after: Object | None


class Objects:
    """The store. ``changed`` is notified after every change."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.disabled: set[str] = set()  # feature gates that are off
        self._objects: dict[Key, Object] = {}
        self._memory: dict[Key, Object] | None = None  # where that is behind
        self._changes: list[Change] = []
        self._version = 1000
        self._compacted = 0
        self._pages: dict[str, tuple[str, list[Object]]] = {}  # by the token that continues a list
        self._names = itertools.count()
        self._applied: dict[tuple[Key, str], frozenset[_DeviceKey]] = {}  # by whom, to what

    @property
    def version(self) -> str:
        return str(self._version)

    @property
    def first_version(self) -> int:
        """From which on it is known what happened."""
        return self._compacted

    def compact(self) -> None:
        """Forget what happened: a watch that starts before now is told 410."""
        with self.changed:
            self._version += 1
            self._compacted = self._version
            self._pages.clear()
            self._changes.clear()

    def has(self, key: Key) -> bool:
        with self.changed:
            return key in self._objects

    def get(self, key: Key, in_memory: bool = False) -> Object:
        with self.changed:
            objects = self._objects if self._memory is None or not in_memory else self._memory
            if key not in objects:
                raise Refusal(404, "NotFound", f'{_kind(key[0])} "{key[2]}" not found')
            return copy.deepcopy(objects[key])

    def hold_memory(self) -> None:
        """What is read with ``resourceVersion=0`` stays as it is now."""
        with self.changed:
            self._memory = copy.deepcopy(self._objects)

    def page(self, documents: Iterable[Object], limit: int) -> tuple[Object, list[Object]]:
        """The first of *documents*, as they are now, and the metadata of that page."""
        with self.changed:
            return self._page(self.version, list(documents), limit)

    def next_page(self, token: str, limit: int) -> tuple[Object, list[Object]]:
        """What follows the page that had *token*. Refusal 410: that is forgotten."""
        with self.changed:
            if token not in self._pages:
                message = "The provided continue parameter is too old to display a consistent list"
                raise Refusal(410, "Expired", message)
            return self._page(*self._pages[token], limit)

    def _page(
        self, version: str, documents: list[Object], limit: int
    ) -> tuple[Object, list[Object]]:
        metadata: Object = {"resourceVersion": version}
        if 0 < limit < len(documents):
            metadata["continue"] = f"page-{next(self._names)}"
            metadata["remainingItemCount"] = len(documents) - limit
            self._pages[metadata["continue"]] = version, documents[limit:]
        return metadata, documents[: limit or None]

    def list(self, resource: str, namespace: str, selector: Selector = _EVERYTHING) -> list[Object]:
        """As they are stored: they are never changed, but replaced."""
        refuse_selector(RESOURCES[resource], selector.fields)
        with self.changed:
            return [
                self._objects[key]
                for key in sorted(self._objects)
                if key[0] == resource
                and key[1].startswith(namespace)
                and selector.matches(self._objects[key])
            ]

    def create(self, resource: str, namespace: str, document: Object, dry: bool = False) -> Object:
        with self.changed:
            made = copy.deepcopy(document)
            known = RESOURCES[resource]
            metadata = made.setdefault("metadata", {})
            if metadata.get("resourceVersion"):
                raise Refusal(400, "BadRequest", "resourceVersion should not be set on create")
            if known.namespaced:
                metadata["namespace"] = namespace
            metadata["name"] = metadata.get("name") or self._generated_name(metadata)
            key = (resource, namespace if known.namespaced else "", metadata["name"])
            if key in self._objects:
                raise Refusal(409, "AlreadyExists", f'{resource} "{key[2]}" already exists')
            metadata.setdefault("uid", f"uid-{self._version}-{next(self._names)}")
            metadata["creationTimestamp"] = _now()
            metadata["generation"] = 1
            made["kind"] = known.kind
            made.pop("apiVersion", None)  # an object has one in every version it is shown in
            refuse_labels(known, made)
            refuse_spec(known, made, None)
            if resource in CUSTOM:
                made.pop("status", None)  # it is written apart, or not at all
            if resource == "resourceslices":
                made = self._checked_slice(made, None)
            return self._store(key, None, made, dry)

    def _generated_name(self, metadata: Object) -> str:
        if not metadata.get("generateName"):
            raise Refusal(422, "Invalid", "name or generateName is required")
        return str(metadata["generateName"])[:MAX_GENERATED] + f"{next(self._names):05x}"

    def update(self, key: Key, document: Object, part: str = "") -> Object:
        """Replace all but the status, or with *part* ``status`` only that."""
        with self.changed:
            before = self.get(key)
            self._refuse_stale(key, before, document.get("metadata", {}))
            made = copy.deepcopy(document)
            if part == "status":
                # The labels and annotations of a Node can be changed through its status, too.
                rest = made if key[0] == "nodes" else before
                metadata = {**before["metadata"], **rest["metadata"]}
                made = {**before, "metadata": metadata, "status": made.get("status")}
            elif RESOURCES[key[0]].status and "status" in before:
                made["status"] = before["status"]
            fixed = {k: v for k, v in before["metadata"].items() if k in _SET_BY_SERVER}
            metadata = {**made["metadata"], **fixed}
            made = {**made, "metadata": metadata, "kind": RESOURCES[key[0]].kind}
            made.pop("apiVersion", None)
            refuse_labels(RESOURCES[key[0]], made)
            refuse_spec(RESOURCES[key[0]], made, before)
            if key[0] == "resourceslices":
                made = self._checked_slice(made, before)
            if _counted(key[0], made) != _counted(key[0], before):
                metadata["generation"] += 1
            if made == before:
                return made
            if metadata.get("deletionTimestamp") and not metadata.get("finalizers"):
                return self._remove(key, made)
            return self._store(key, before, made)

    def apply_devices(self, key: Key, document: Object, manager: str) -> Object:
        """Server-side apply of what the status of a claim says of devices, by force."""
        with self.changed:
            before = self.get(key)
            refuse_patch(RESOURCES[key[0]], before, document)
            status = before.get("status") or {}
            applied = {_device_key(each): each for each in document["status"].get("devices") or ()}
            allocation = (status.get("allocation") or {}).get("devices") or {}
            allocated = {_device_key(each) for each in allocation.get("results") or ()}
            if not applied.keys() <= allocated:
                raise Refusal(422, "Invalid", "status.devices[0]: Invalid value: not allocated")
            replaced = self._applied.get((key, manager), frozenset()) | applied.keys()
            self._applied[key, manager] = frozenset(applied)
            kept = [
                each for each in status.get("devices") or () if _device_key(each) not in replaced
            ]
            devices = [*kept, *applied.values()]
            rest = {name: value for name, value in status.items() if name != "devices"}
            made = {**rest, "devices": devices} if devices else rest
            return self.update(key, {**before, "status": made}, "status")

    def delete(self, key: Key, preconditions: Mapping[str, str] | None = None) -> Object:
        with self.changed:
            before = self.get(key)
            self._refuse_stale(key, before, preconditions or {})
            if before["metadata"].get("finalizers"):
                after = copy.deepcopy(before)
                after["metadata"].setdefault("deletionTimestamp", _now())
                return self._store(key, before, after)
            return self._remove(key, before)

    def collect_garbage(self) -> None:
        """Delete what is owned by an object that is not there, as the controller manager does."""
        with self.changed:
            uids = {each["metadata"]["uid"] for each in self._objects.values()}
            for key, each in tuple(self._objects.items()):
                owners = each["metadata"].get("ownerReferences") or ()
                if any(owner["uid"] not in uids for owner in owners):
                    self._remove(key, each)

    def since(self, version: int, resource: str) -> Iterator[Change]:
        """What happened to *resource* after *version*. Refusal 410: that is forgotten."""
        with self.changed:
            if version < self._compacted:
                raise Refusal(410, "Expired", f"too old resource version: {version}")
            first = bisect.bisect_right(self._changes, version, key=lambda each: each.version)
            newer = self._changes[first:]
            yield from [each for each in newer if each.resource == resource]

    def wait(self, predicate: Callable[[], bool], seconds: float) -> bool:
        """Wait until *predicate* holds; it is asked after every change and every request."""
        with self.changed:
            return self.changed.wait_for(predicate, seconds)

    def _checked_slice(self, made: Object, before: Object | None) -> Object:
        stored = as_stored(made, before, self.disabled)
        if problem := refuse_slice(stored["spec"], before and before["spec"]):
            name = made["metadata"]["name"]
            message = f'ResourceSlice.resource.k8s.io "{name}" is invalid: {problem}'
            raise Refusal(422, "Invalid", message)
        return stored

    def _refuse_stale(self, key: Key, before: Object, metadata: Mapping[str, Any]) -> None:
        for name in ("uid", "resourceVersion"):
            expected, actual = metadata.get(name), before["metadata"][name]
            if expected and expected != actual:
                raise Refusal(
                    409, "Conflict", f'{key[0]} "{key[2]}": {name} is {actual}, not {expected}'
                )

    def _store(self, key: Key, before: Object | None, after: Object, dry: bool = False) -> Object:
        if dry:
            return after
        self._version += 1
        after["metadata"]["resourceVersion"] = str(self._version)
        self._objects[key] = after
        self._changes.append(Change(self._version, key[0], before, after))
        self.changed.notify_all()
        return copy.deepcopy(after)

    def _remove(self, key: Key, before: Object) -> Object:
        self._version += 1
        gone = copy.deepcopy(before)
        gone["metadata"]["resourceVersion"] = str(self._version)
        del self._objects[key]
        self._changes.append(Change(self._version, key[0], gone, None))
        self.changed.notify_all()
        return gone


def refuse_labels(resource: Resource, made: Object) -> None:
    metadata = made["metadata"]
    if problem := label_problem(metadata.get("labels") or {}):
        name = f'{resource.kind} "{metadata["name"]}" is invalid: metadata.labels'
        raise Refusal(422, "Invalid", f"{name}: {problem}")


def refuse_spec(resource: Resource, made: Object, before: Object | None) -> None:
    """The rules of ControllerRevisions, Leases and Events."""
    if before is None:
        refuse_event(resource, made)
    problem = ""
    if resource.plural == "controllerrevisions":
        problem = _revision_problem(made, before)
    if resource.plural == "leases":
        seconds = (made.get("spec") or {}).get("leaseDurationSeconds")
        if seconds is not None and seconds <= 0:
            problem = f"spec.leaseDurationSeconds: Invalid value: {seconds}: must be greater than 0"
    if problem:
        name = made["metadata"]["name"]
        raise Refusal(422, "Invalid", f'{resource.kind} "{name}" is invalid: {problem}')


def _revision_problem(made: Object, before: Object | None) -> str:
    if not isinstance(made.get("data"), dict):
        return "data: Required value: data is mandatory"
    if before and before["data"] != made["data"]:
        return f"data: Invalid value: {made['data']}: field is immutable"
    if made.get("revision", 0) < 0:
        return f"revision: Invalid value: {made['revision']}: must be at least 0"
    return ""


def _device_key(device: Object) -> _DeviceKey:
    """By which entries of ``status.devices`` are told apart, and results of an allocation."""
    return device["driver"], device["pool"], device["device"], device.get("shareID", "")


def refuse_patch(resource: Resource, before: Object, patch: Object) -> Object:
    """The *patch* as it is applied."""
    metadata = patch.get("metadata") or {}
    uid = metadata.get("uid")
    if uid and uid != before["metadata"]["uid"]:
        if resource.plural not in CUSTOM:
            message = f'metadata.uid: Invalid value: "{uid}": field is immutable'
            raise Refusal(422, "Invalid", message)
        kept = {name: value for name, value in metadata.items() if name != "uid"}
        return {**patch, "metadata": kept}
    if resource.plural == "controllerrevisions":
        # Whatever it changes: the API server compares the patched data with another form of it.
        raise Refusal(422, "Invalid", "data: Invalid value: field is immutable")
    return patch


def refuse_no_version(resource: Resource, document: Object) -> None:
    """Some objects are replaced only by who says which version of them he read."""
    version = document.get("metadata", {}).get("resourceVersion")
    if resource.plural in {*CUSTOM, "leases"} and not version:
        message = "metadata.resourceVersion: Invalid value: 0: must be specified for an update"
        raise Refusal(422, "Invalid", message)


def refuse_event(resource: Resource, made: Object) -> None:
    """What has no namespace has its events in "default"."""
    if resource.plural != "events":
        return
    metadata = made["metadata"]
    about = made.get("involvedObject", {}).get("namespace", "")
    if metadata["namespace"] != (about or "default"):
        problem = f'involvedObject.namespace: Invalid value: "{about}": does not match'
        message = f'Event "{metadata["name"]}" is invalid: {problem} event.namespace'
        raise Refusal(422, "Invalid", message)


def refuse_selector(resource: Resource, selector: Mapping[str, str]) -> None:
    known = ("metadata.name", "metadata.namespace", *resource.fields)
    for path in selector:
        if path not in known:
            raise Refusal(400, "BadRequest", f"field label not supported: {path}")


def _field(each: Any, path: str) -> str:
    for part in path.split("."):
        each = (each or {}).get(part)
    return str(each) if each is not None else ""


def _counted(resource: str, each: Object) -> Any:
    """The part of an object whose changes its generation counts."""
    if resource not in CUSTOM:
        return each.get("spec")
    return {key: value for key, value in each.items() if key not in ("metadata", "status")}


def _kind(resource: str) -> str:
    group = RESOURCES[resource].group
    return f"{resource}.{group}" if group else resource


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
