"""A Kubernetes API server in memory that speaks real HTTP, for tests with the real client.

::

    with ApiServer() as server:
        server.put({"kind": "Node", "metadata": {"name": "n1"}})
        client = cluster.client.ApiServer(kubeconfig(server.kubeconfig(tmp_path / "kubeconfig")))
        ...
        assert server.count("POST", "resourceslices") == 1
        assert server.wait(lambda: len(server.objects("resourceslices")) == 2)

It knows nodes, pods, events, configmaps, namespaces, leases, controllerrevisions, NodeProfiles and
resource.k8s.io (slices, claims, claim templates, device classes) in the versions ``served``.
Versions, conflicts, generated names, preconditions, finalizers, the status subresource, selectors
of fields and labels, strategic merges, paging, watches with bookmarks and 410 behave like the real
one's, and slices are refused by its rules (``slice_rules``).

Faults: ``fail``, ``delay``, ``hang_up`` and ``deny`` for the next requests that match; ``disable``
turns a feature gate off; ``forget_history`` makes watches fall behind; ``refuse_connections`` and
``accept_connections`` take the server away and bring it back at the same address.
"""

import copy
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import yaml

from tests.fakes.api_http import Front
from tests.fakes.api_objects import CUSTOM, RESOURCES, Change, Object, Objects
from tests.fakes.api_requests import Fault, ServedRequest
from tests.fakes.api_shapes import write_as

GROUP = "resource.k8s.io"


class ApiServer:
    """See the module. All methods may be called by any thread."""

    def __init__(self, served: Sequence[str] = ("v1", "v1beta2", "v1beta1")) -> None:
        self.served = list(served)  # versions of resource.k8s.io, may be changed while it runs
        self.removed: set[str] = set()  # resources whose CustomResourceDefinition is not there
        self.tokens: set[str] | None = None  # the only ones accepted, where set
        self.bookmark_seconds = 60.0
        self._objects = Objects()
        self._requests: list[ServedRequest] = []
        self._faults: list[Fault] = []
        self._front: Front | None = None
        self._port = 0

    def start(self) -> "ApiServer":
        """Listen on a port of 127.0.0.1; after ``stop`` on the same one."""
        assert self._front is None, "it is running"
        self._front = Front(self, self._port)
        self._port = self._front.port
        self._front.start()
        return self

    def stop(self) -> None:
        """Stop listening and end every connection. What is stored stays."""
        if self._front is not None:
            self._front.stop()
            self._front = None

    def __enter__(self) -> "ApiServer":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def kubeconfig(self, path: pathlib.Path, **user: str) -> pathlib.Path:
        """Write a kubeconfig for this server to *path*; *user* may have token, tokenFile, …"""
        path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
                    "users": [{"name": "me", "user": user}],
                    "contexts": [{"name": "it", "context": {"cluster": "fake", "user": "me"}}],
                    "current-context": "it",
                }
            )
        )
        return path

    def put(self, document: Object) -> Object:
        """Create or replace an object by its kind and name, whatever version it has: as stored.

        Its status is stored too, and no fault applies.
        """
        resource = next(each for each in RESOURCES.values() if each.kind == document["kind"])
        metadata = document["metadata"]
        namespace = metadata.get("namespace", "default") if resource.namespaced else ""
        key = (resource.plural, namespace, metadata.get("name", ""))
        with self._objects.changed:
            if not self._objects.has(key):
                created = self._objects.create(resource.plural, namespace, document)
                if resource.plural not in CUSTOM or "status" not in document:
                    return created
                key = (*key[:2], created["metadata"]["name"])
            fresh = {k: v for k, v in metadata.items() if k not in ("resourceVersion", "uid")}
            stored = self._objects.update(key, {**document, "metadata": fresh})
            if resource.status and document.get("status") != stored.get("status"):
                return self._objects.update(key, {**document, "metadata": fresh}, "status")
            return stored

    def objects(self, resource: str) -> list[Object]:
        """All objects of *resource* (its plural), by namespace and name, in the shape of v1."""
        known = RESOURCES[resource]
        version = f"{known.group}/{known.version}" if known.group else known.version
        stored = copy.deepcopy(self._objects.list(resource, ""))
        return [write_as(version, each) for each in stored]

    def changes(self, resource: str) -> tuple[Change, ...]:
        """What happened to *resource*, since the history was forgotten."""
        return tuple(self._objects.since(self._objects.first_version, resource))

    def remove(self, resource: str, name: str, namespace: str = "") -> None:
        """Delete one object, as somebody else would."""
        self._objects.delete((resource, namespace, name))

    def remove_crd(self, resource: str) -> None:
        """Delete a CustomResourceDefinition, and with it all objects that it defines."""
        with self._objects.changed:
            for each in self._objects.list(resource, ""):
                self.remove(resource, each["metadata"]["name"])
            self.removed.add(resource)
            self._objects.compact()
            self._objects.changed.notify_all()

    def add_crd(self, resource: str) -> None:
        """Bring a CustomResourceDefinition back that was removed."""
        self.removed.discard(resource)

    def collect_garbage(self) -> None:
        """Delete what belongs to objects that are gone."""
        self._objects.collect_garbage()

    @property
    def requests(self) -> tuple[ServedRequest, ...]:
        """Every request so far, in order: method, path, query, body, status."""
        with self._objects.changed:
            return tuple(self._requests)

    def count(self, method: str = "", path: str = "") -> int:
        """How many requests so far had *method* and *path* in their path; WATCH is a method."""
        return sum(each.concerns(method, path) for each in self.requests)

    def forget_requests(self) -> None:
        """Begin the log of requests anew."""
        with self._objects.changed:
            self._requests.clear()

    def wait(self, predicate: Callable[[], bool], seconds: float = 60.0) -> bool:
        """Wait until *predicate* holds, asked after every change and request: whether it does."""
        return self._objects.wait(predicate, seconds)

    def fail(
        self,
        status: int,
        method: str = "",
        path: str = "",
        times: int = 1,
        retry_after: int | str | None = None,
        message: str = "a fault of the test",
    ) -> None:
        """Answer the next *times* requests that match with *status*."""
        fault = Fault(method, path, times, status=status, retry_after=retry_after)
        self._fault(replace(fault, message=message))

    def delay(self, seconds: float, method: str = "", path: str = "", times: int = 1) -> None:
        """Let the next *times* requests that match wait before they are answered."""
        self._fault(Fault(method, path, times, seconds=seconds))

    def hang_up(self, method: str = "", path: str = "", times: int = 1) -> None:
        """Close the connection instead of answering the next *times* requests that match."""
        self._fault(Fault(method, path, times, hang_up=True))

    def deny(self, verb: str, resource: str) -> None:
        """Take the right for *verb* (list, watch, …) on *resource* away, as RBAC would."""
        methods = {"get": "GET", "list": "GET", "watch": "WATCH", "create": "POST"}
        methods |= {"update": "PUT", "patch": "PATCH", "delete": "DELETE"}
        group = RESOURCES[resource].group
        message = (
            f'{resource} is forbidden: User "system:serviceaccount:gpu:driver" cannot {verb} '
            f'resource "{resource}" in API group "{group}" at the cluster scope'
        )
        self._fault(Fault(methods[verb], resource, 10**9, status=403, message=message))

    def heal(self) -> None:
        """Forget all faults and denials."""
        with self._objects.changed:
            self._faults.clear()

    def disable(self, *gates: str) -> None:
        """Turn feature gates off, like DRADeviceTaints: their fields are dropped from now on."""
        self._objects.disabled.update(gates)

    def enable(self, *gates: str) -> None:
        """Turn feature gates on again."""
        self._objects.disabled.difference_update(gates)

    def forget_history(self) -> None:
        """Compact: watches that start before now are told 410."""
        self._objects.compact()

    def hold_memory(self) -> None:
        """Fall behind: a GET with ``resourceVersion=0`` is answered as things are now."""
        self._objects.hold_memory()

    def end_watches(self) -> None:
        """Break the connections of all watches under way."""
        if self._front is not None:
            self._front.end_watches()

    refuse_connections = stop
    accept_connections = start

    def _fault(self, fault: Fault) -> None:
        with self._objects.changed:
            self._faults.append(fault)
