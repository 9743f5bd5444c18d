"""Events on pods: what ``kubectl describe pod`` shows of what a node did to it.

They are told at best: whoever tells one goes on at once, and what the API server does not take in
time is lost. The same thing told again of the same pod is counted in one Event, as the kubelet and
other components do it.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from dra_driver.errors import DriverError, NotFound

log = logging.getLogger(__name__)

_MOST_WAITING: Final = 256  # what is told at once of all pods of a node
_COUNTED_FOR_SECONDS: Final = 3600.0  # the API server forgets events after an hour
_APART_SECONDS: Final = 10.0  # between two writes about the same thing; those in between count
_MOST_KNOWN: Final = 1024

Document = dict[str, Any]


class Api(Protocol):
    """What we use of the API server. Its errors are ClusterErrors, and every call ends."""

    def create(self, path: str, document: Document) -> Document: ...

    def patch(self, path: str, patch: Document) -> Document: ...


@dataclass(frozen=True, slots=True)
class PodRef:
    """The pod that an event is about."""

    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class Event:
    """Something that somebody should know of a pod."""

    pod: PodRef
    reason: str  # in one word, for programs: "GPUMemoryAboveShare"
    about: str  # what it is about; same pod, reason and this: one Event that counts
    message: str


@dataclass(frozen=True, slots=True)
class _Known:
    """An Event that is on the API server, and what was told since."""

    path: str
    count: int
    written: float


_Same = tuple[PodRef, str, str]


class PodEvents:
    """Writes events, one after another, on a thread of its own that begins with the first."""

    def __init__(
        self, api: Api, component: str, node: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """*component*: who says it, such as the driver's name."""
        self._api = api
        self._component = component
        self._node = node
        self._clock = clock
        self._known: dict[_Same, _Known] = {}  # of the thread alone
        self._waiting: queue.Queue[Event | None] = queue.Queue(_MOST_WAITING)
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def tell(self, event: Event) -> None:
        """Have *event* written soon. Never waits and never fails."""
        try:
            self._waiting.put_nowait(event)
        except queue.Full:
            log.warning("an event is lost: too many wait", extra=_facts(event))
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="events", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """End the thread after what it is writing; the rest is lost."""
        self._stopping.set()
        with contextlib.suppress(queue.Full):  # then it does not wait, and sees that it is to end
            self._waiting.put_nowait(None)

    def _run(self) -> None:
        while (event := self._waiting.get()) is not None and not self._stopping.is_set():
            try:
                self._write(event)
            except DriverError as error:
                log.warning("an event is lost", extra=_facts(event) | {"error": str(error)})

    def _write(self, event: Event) -> None:
        now = self._clock()
        self._forget(now)
        same = (event.pod, event.reason, event.about)
        known = self._known.get(same)
        if known is None:
            self._known[same] = _Known(self._create(event), 1, now)
            return
        counted = replace(known, count=known.count + 1)
        self._known[same] = counted
        if now - known.written < _APART_SECONDS:
            return
        try:
            self._api.patch(known.path, self._again(event, counted.count))
        except NotFound:
            del self._known[same]
            counted = _Known(self._create(event), 1, now)
        self._known[same] = replace(counted, written=now)

    def _create(self, event: Event) -> str:
        """Create it: the path that it has on the API server."""
        pod = event.pod
        collection = f"/api/v1/namespaces/{pod.namespace}/events"
        made = self._api.create(collection, self._document(event))
        return f"{collection}/{made['metadata']['name']}"

    def _document(self, event: Event) -> Document:
        pod = event.pod
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{pod.name}.", "namespace": pod.namespace},
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "Pod",
                "namespace": pod.namespace,
                "name": pod.name,
                "uid": pod.uid,
            },
            "reason": event.reason,
            "type": "Warning",
            "source": {"component": self._component, "host": self._node},
            "reportingComponent": self._component,
            "reportingInstance": self._node,
            "firstTimestamp": _timestamp(),
            **self._again(event, 1),
        }

    def _again(self, event: Event, count: int) -> Document:
        return {"count": count, "message": event.message, "lastTimestamp": _timestamp()}

    def _forget(self, now: float) -> None:
        """What the API server has forgotten; and, of very many, what was written first."""
        kept = {
            same: known
            for same, known in self._known.items()
            if now - known.written < _COUNTED_FOR_SECONDS
        }
        while len(kept) >= _MOST_KNOWN:
            del kept[next(iter(kept))]
        self._known = kept


def _timestamp() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _facts(event: Event) -> dict[str, str]:
    return {"pod": f"{event.pod.namespace}/{event.pod.name}", "reason": event.reason}
