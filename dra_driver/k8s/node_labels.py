"""Labels and annotations of one Node, as they are now: in an outage, as they were last seen.

What its status says is known from when the Node was read as a whole, which somebody has to ask for:
the kubelet writes it every few seconds.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import Any

from dra_driver.base.errors import ApiServerError, DriverError, Gone, NotFound
from dra_driver.base.frozen import frozen
from dra_driver.k8s.api import KubernetesApi, Watch
from dra_driver.k8s.watch import Watcher, WatchIntervals

log = logging.getLogger(__name__)

_NODES = "/api/v1/nodes"

Labels = Mapping[str, str]


@frozen
class NodeStatus:
    """What the status of a Node says."""

    kubelet_version: str = ""  # "v1.36.3"
    allocatable: Mapping[str, str] = field(default_factory=dict)  # by resource: how much
    capacity: Mapping[str, str] = field(default_factory=dict)


class NodeLabels:
    """Follows the labels of *node*. Any thread may call its methods."""

    def __init__(
        self,
        api: KubernetesApi,
        node: str,
        intervals: WatchIntervals | None = None,
        annotations: Iterable[str] = (),
    ) -> None:
        """*annotations*: the names of those that are followed, too."""
        self._api = api
        self._node = node
        self._names = tuple(annotations)
        self._labels: Labels | None = None
        self._annotations: Mapping[str, str] = {}
        self._uid = ""
        self._status: NodeStatus | None = None
        self._selector = {"fieldSelector": f"metadata.name={node}"}
        self._since = ""  # the resource version from which to watch; empty: the Node is read first
        self._error: DriverError = ApiServerError(f"the labels of node {node} were not read yet")
        self._logged = ""
        self._listeners: tuple[Callable[[], None], ...] = ()
        self._lock = threading.Lock()
        self._tried = threading.Event()
        self._watcher = Watcher(
            "node-labels", self._look, self._see, self._failed, intervals or WatchIntervals()
        )

    def start(self, on_change: Callable[[], None], wait_seconds: float) -> None:
        """Begin, and wait until they were read or could not be; at most so long.

        *on_change* is called in our thread after every change, and when another Node of this name
        took the place of the one before. Who comes later joins.
        """
        with self._lock:
            self._listeners = (*self._listeners, on_change)
        self._watcher.start()
        self._tried.wait(wait_seconds)

    def stop(self, timeout_seconds: float = 1.0) -> bool:
        """End the thread. Whether it ended in time."""
        return self._watcher.stop(timeout_seconds)

    def now(self) -> Labels:
        """The labels, in an outage those that were last seen. ApiServerError: none were, and
        why."""
        labels = self._labels
        if labels is None:
            raise ApiServerError(str(self._error)) from self._error
        return labels

    def annotations(self) -> Mapping[str, str]:
        """Those that are followed, as far as the Node has them. ApiServerError: like ``now``."""
        self.now()
        return self._annotations

    @property
    def status(self) -> NodeStatus | None:
        """The status, as of when the Node was read last; None: it was not yet."""
        return self._status

    def read_status(self) -> NodeStatus:
        """The status, read now. ApiServerError: it cannot be."""
        self._status = _status(self._api.get(f"{_NODES}/{self._node}"))
        return self._status

    @property
    def node(self) -> str:
        """Whose labels."""
        return self._node

    @property
    def uid(self) -> str:
        """What the API server knows the Node by, as last seen; empty: it was not yet."""
        return self._uid

    def _look(self, seconds: int) -> Watch:
        self._since = self._since or self._read()
        query = {"resourceVersion": self._since, "allowWatchBookmarks": "true"}
        # The kubelet writes the status every few seconds, with all images of the node.
        return self._api.watch(_NODES, self._selector | query, seconds, metadata_only=True)

    def _read(self) -> str:
        """Read the Node as it is now: the version of it from which to watch."""
        nodes = self._api.list(_NODES, self._selector)
        if not nodes["items"]:
            raise NotFound(f"node {self._node} has to register with the API server first")
        self._status = _status(nodes["items"][0])
        self._keep(nodes["items"][0])
        return str(nodes.get("metadata", {}).get("resourceVersion", ""))

    def _see(self, event: Mapping[str, Any]) -> None:
        self._since = str(event["object"]["metadata"]["resourceVersion"])
        # A Node that is deleted registers again, and its labels come back with it.
        if event.get("type") in ("ADDED", "MODIFIED"):
            self._keep(event["object"])

    def _keep(self, node: Mapping[str, Any]) -> None:
        metadata = node["metadata"]
        before = self._labels, self._annotations, self._uid
        every = metadata.get("annotations") or {}
        self._annotations = {name: every[name] for name in self._names if name in every}
        self._uid = str(metadata.get("uid") or "")
        self._labels = dict(metadata.get("labels") or {})  # last: who sees them sees all of it
        self._logged = ""
        self._tried.set()
        if before != (self._labels, self._annotations, self._uid):
            self._notify()

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()

    def _failed(self, error: DriverError) -> None:
        """An outage is logged when it begins, not with every attempt."""
        self._since = ""
        if isinstance(error, Gone):  # the watch fell too far behind, which happens
            return
        if str(error) != self._logged:
            log.warning("cannot watch the node's labels, trying again: %s", error)
            self._logged = str(error)
        is_new = self._labels is None and str(error) != str(self._error)
        self._error = error
        self._tried.set()
        if is_new:
            self._notify()


def _status(node: Mapping[str, Any]) -> NodeStatus:
    status = node.get("status") or {}
    version = (status.get("nodeInfo") or {}).get("kubeletVersion") or ""
    allocatable, capacity = status.get("allocatable") or {}, status.get("capacity") or {}
    return NodeStatus(str(version), allocatable, capacity)
