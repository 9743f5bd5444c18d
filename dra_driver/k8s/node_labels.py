"""The labels of one Node, as they are now: watched by a thread that outlives any outage."""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dra_driver.base.backoff import Backoff
from dra_driver.base.errors import ApiServerError, DriverError, Gone, NotFound

log = logging.getLogger(__name__)

_NODES = "/api/v1/nodes"

Labels = Mapping[str, str]


class NodeWatch(Protocol):
    """Events, oldest first; any thread may end it."""

    def __iter__(self) -> Iterator[dict[str, Any]]: ...

    def close(self) -> None: ...


class NodesApi(Protocol):
    """What we use of the API server; ``dra_driver.k8s.client.ApiServer`` is one."""

    def list(self, path: str, query: Mapping[str, str]) -> dict[str, Any]: ...

    def watch(self, path: str, query: Mapping[str, str], seconds: int) -> NodeWatch: ...


@dataclass(frozen=True, slots=True)
class WatchIntervals:
    """How soon things happen again, in seconds."""

    watch: int = 300  # a watch lasts this long
    first_retry: float = 0.2
    last_retry: float = 10.0


class NodeLabels:
    """Follows the labels of *node*. Any thread may call its methods."""

    def __init__(self, api: NodesApi, node: str, pace: WatchIntervals | None = None) -> None:
        self._api = api
        self._node = node
        self._pace = pace or WatchIntervals()
        self._retry = Backoff(self._pace.first_retry, self._pace.last_retry, randomized=True)
        self._labels: Labels | None = None
        self._uid = ""
        self._only = {"fieldSelector": f"metadata.name={node}"}
        self._since = ""  # where the last watch ended; empty: it did not, or failed
        self._error: DriverError = ApiServerError(f"the labels of node {node} were not read yet")
        self._logged = ""
        self._listeners: tuple[Callable[[], None], ...] = ()
        self._lock = threading.Lock()
        self._watch: NodeWatch | None = None
        self._tried = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node-labels", daemon=True)

    def start(self, on_change: Callable[[], None], wait_seconds: float) -> None:
        """Begin, and wait until they were read or could not be; at most so long.

        *on_change* is called in our thread after every change. Who comes later joins.
        """
        with self._lock:
            self._listeners = (*self._listeners, on_change)
            if self._thread.ident is None:
                self._thread.start()
        self._tried.wait(wait_seconds)

    def stop(self, timeout_seconds: float = 1.0) -> bool:
        """End the thread. Whether it ended in time."""
        self._stopping.set()
        with self._lock:
            if self._watch:
                self._watch.close()
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def now(self) -> Labels:
        """The labels, in an outage those that were last seen. ClusterError: none were, and why."""
        labels = self._labels
        if labels is None:
            raise ApiServerError(str(self._error)) from self._error
        return labels

    @property
    def node(self) -> str:
        """Whose labels."""
        return self._node

    @property
    def uid(self) -> str:
        """What the API server knows the Node by, as last seen; empty: it was not yet."""
        return self._uid

    def _run(self) -> None:
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                self._follow()
            except Gone:
                pass  # the watch fell too far behind, which happens
            except DriverError as e:
                self._failed(e)
            except Exception as e:  # a fault of ours: the next try may go well
                log.exception("the node's labels cannot be followed")
                self._failed(ApiServerError(f"unexpected, please report: {e!r}"))
            self._pause(time.monotonic() - began)

    def _pause(self, seconds: float) -> None:
        """Before the next try; ever longer where tries end after few *seconds*, well or not."""
        if seconds >= self._pace.last_retry:
            self._retry.reset()
            return
        self._stopping.wait(self._retry.next_seconds())

    def _follow(self) -> None:
        """Follow the labels until the watch ends: from where the last one did, if it ended well."""
        since, self._since = self._since or self._read(), ""
        query = self._only | {"resourceVersion": since, "allowWatchBookmarks": "true"}
        watch = self._api.watch(
            _NODES, query, round(self._pace.watch * random.uniform(0.9, 1.1)) or 1
        )
        with self._lock:
            self._watch = watch
            if self._stopping.is_set():
                watch.close()
        try:
            for event in watch:
                since = str(event["object"]["metadata"]["resourceVersion"])
                # A Node that is deleted registers again, and its labels come back with it.
                if event.get("type") in ("ADDED", "MODIFIED"):
                    self._see(event["object"])
        finally:
            with self._lock:
                self._watch = None
            watch.close()
        self._since = since

    def _read(self) -> str:
        """See the Node as it is now: the version of it from which to watch."""
        found = self._api.list(_NODES, self._only)
        if not found["items"]:
            raise NotFound(f"node {self._node} has to register with the API server first")
        self._see(found["items"][0])
        return str(found.get("metadata", {}).get("resourceVersion", ""))

    def _see(self, node: Mapping[str, Any]) -> None:
        labels = dict(node["metadata"].get("labels") or {})
        changed = labels != self._labels
        self._labels = labels
        self._uid = str(node["metadata"].get("uid") or "")
        self._logged = ""
        self._tried.set()
        if changed:
            self._tell()

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()

    def _failed(self, error: DriverError) -> None:
        """An outage is logged when it begins, not with every try."""
        if str(error) != self._logged:
            log.warning("cannot watch the node's labels, trying again: %s", error)
            self._logged = str(error)
        news = self._labels is None and str(error) != str(self._error)
        self._error = error
        self._tried.set()
        if news:
            self._tell()
