"""Events on pods, claims, nodes and others: what ``kubectl describe`` shows of them.

They are written at best effort, and no caller waits. Events that the API server refuses are lost.
While it does not answer, up to 1024 different events wait; they end with this process, and of more
the oldest are lost. The same event of the same object is counted in one Event object, as other
components do it.
"""

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Protocol

from dra_driver.base.errors import DriverError, NotFound, Unreachable
from dra_driver.base.frozen import frozen
from dra_driver.k8s.api import Document, KubernetesApi
from dra_driver.k8s.claims import ClaimRef

log = logging.getLogger(__name__)

_MAX_QUEUED: Final = 256  # events of a node and all its pods at one moment
_COUNTED_FOR_SECONDS: Final = 3600.0  # the API server forgets events after an hour
_MIN_UPDATE_SECONDS: Final = 10.0
_MAX_REMEMBERED: Final = 1024  # different things, whether they wait or are written
_LONGEST_MESSAGE: Final = 1024  # characters, as events.k8s.io has it


@frozen
class PodRef:
    """The pod that an event is about."""

    namespace: str
    name: str
    uid: str


@frozen
class NodeRef:
    """The node that an event is about. Without a *uid* its name stands for that, as it does in the
    kubelet's events: ``kubectl describe node`` looks for both."""

    name: str
    uid: str = ""


@frozen
class ClusterObjectRef:
    """The object without a namespace that an event is about."""

    api_version: str
    kind: str
    name: str
    uid: str


Regarding = PodRef | ClaimRef | NodeRef | ClusterObjectRef


@frozen
class Event:
    """Something that users should know of an object."""

    regarding: Regarding
    reason: str  # in one word, for programs: "GPUMemoryAboveShare"
    about: str  # what it is about; same object, reason and this: one Event that counts
    message: str
    is_warning: bool = True


class Events(Protocol):
    """Where events go; :class:`EventRecorder` is one."""

    def emit(self, event: Event) -> None:
        """Have *event* written soon; never waits and never fails."""


@frozen
class _WrittenEvent:
    """An Event object, and what is not written of it yet."""

    path: str = ""  # on the API server; empty: it is not there yet
    count: int = 0
    written: float = -math.inf  # or tried the last time
    unwritten: Event | None = None


_EventKey = tuple[Regarding, str, str]


class EventRecorder:
    """Writes events, one after another, on a thread of its own that begins with the first."""

    def __init__(
        self,
        api: KubernetesApi,
        component: str,
        node: str,
        clock: Callable[[], float] = time.monotonic,
        min_update_seconds: float = _MIN_UPDATE_SECONDS,
    ) -> None:
        """*component*: the source, such as the driver's name. *min_update_seconds*: between two
        writes of the same event; those in between are counted, and the last message is written."""
        self._api = api
        self._component = component
        self._node = node
        self._clock = clock
        self._min_update_seconds = min_update_seconds
        self._known: dict[_EventKey, _WrittenEvent] = {}  # of the thread alone, like the next
        self._is_away = False
        self._is_losing = False
        self._waiting: queue.Queue[Event | None] = queue.Queue(_MAX_QUEUED)
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def emit(self, event: Event) -> None:
        """Have *event* written soon; never waits and never fails."""
        try:
            self._waiting.put_nowait(event)
        except queue.Full:
            log.warning("an event is lost: too many wait", extra=_log_fields(event))
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
        while True:
            has_unwritten = any(written_event.unwritten for written_event in self._known.values())
            event = None
            with contextlib.suppress(queue.Empty):
                event = self._waiting.get(
                    timeout=self._min_update_seconds if has_unwritten else None
                )
            if event is not None:
                self._note(event)
            self._write_due()
            if self._stopping.is_set():
                return

    def _note(self, event: Event) -> None:
        self._forget(self._clock())
        key = (event.regarding, event.reason, event.about)
        if key not in self._known:
            self._make_room()
        written_event = self._known.get(key, _WrittenEvent())
        self._known[key] = replace(written_event, count=written_event.count + 1, unwritten=event)

    def _write_due(self) -> None:
        """Write the events whose last write is long enough ago."""
        now = self._clock()
        for key, written_event in tuple(self._known.items()):
            event = written_event.unwritten
            if event is None or now - written_event.written < self._min_update_seconds:
                continue
            if self._stopping.is_set():
                return
            try:
                self._known[key] = self._written(event, written_event, now)
            except Unreachable as error:
                del self._known[key]  # others come first the next time
                self._known[key] = replace(written_event, written=now)
                if not self._is_away:
                    log.warning("events wait for the API server", extra={"error": str(error)})
                self._is_away = True
                return
            except DriverError as error:
                log.warning("an event is lost", extra=_log_fields(event) | {"error": str(error)})
                del self._known[key]
            self._is_away = self._is_losing = False

    def _written(self, event: Event, written_event: _WrittenEvent, now: float) -> _WrittenEvent:
        if not written_event.path:
            return _WrittenEvent(self._create(event, written_event.count), written_event.count, now)
        try:
            self._api.patch(written_event.path, self._again(event, written_event.count))
        except NotFound:
            return _WrittenEvent(self._create(event, 1), 1, now)
        return replace(written_event, written=now, unwritten=None)

    def _create(self, event: Event, count: int) -> str:
        """Create it: the path that it has on the API server."""
        collection = f"/api/v1/namespaces/{_namespace(event.regarding)}/events"
        document = self._api.create(collection, self._document(event, count))
        return f"{collection}/{document['metadata']['name']}"

    def _document(self, event: Event, count: int) -> Document:
        regarding = event.regarding
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{regarding.name}.", "namespace": _namespace(regarding)},
            "involvedObject": _reference(regarding),
            "reason": event.reason,
            "type": "Warning" if event.is_warning else "Normal",
            "source": {"component": self._component, "host": self._node},
            "reportingComponent": self._component,
            "reportingInstance": self._node,
            "firstTimestamp": timestamp(),
            **self._again(event, count),
        }

    def _again(self, event: Event, count: int) -> Document:
        message = event.message
        if len(message) > _LONGEST_MESSAGE:
            message = f"{message[: _LONGEST_MESSAGE - 1]}…"
        return {"count": count, "message": message, "lastTimestamp": timestamp()}

    def _forget(self, now: float) -> None:
        """Forget the events that the API server has removed by now."""
        self._known = {
            key: written_event
            for key, written_event in self._known.items()
            if written_event.unwritten or now - written_event.written < _COUNTED_FOR_SECONDS
        }

    def _make_room(self) -> None:
        """Of too many events, forget the first that is written, or else the first."""
        if len(self._known) < _MAX_REMEMBERED:
            return
        written = (key for key, written_event in self._known.items() if not written_event.unwritten)
        lost_event = self._known.pop(next(written, next(iter(self._known)))).unwritten
        if lost_event is not None and not self._is_losing:  # logged once: thousands may follow
            log.warning(
                "an event is lost: too many wait to be written", extra=_log_fields(lost_event)
            )
            self._is_losing = True


def _namespace(regarding: Regarding) -> str:
    """Events of objects without a namespace have to be in ``default``."""
    return regarding.namespace if isinstance(regarding, PodRef | ClaimRef) else "default"


def _reference(regarding: Regarding) -> Document:
    if isinstance(regarding, ClusterObjectRef):
        version, kind = regarding.api_version, regarding.kind
        return {"apiVersion": version, "kind": kind, "name": regarding.name, "uid": regarding.uid}
    reference = {"apiVersion": "v1", "name": regarding.name, "uid": regarding.uid or regarding.name}
    if isinstance(regarding, PodRef):
        return reference | {"kind": "Pod", "namespace": regarding.namespace}
    if isinstance(regarding, ClaimRef):
        claim = {"apiVersion": "resource.k8s.io/v1", "namespace": regarding.namespace}
        return reference | claim | {"kind": "ResourceClaim"}
    return reference | {"kind": "Node"}


def timestamp() -> str:
    """This moment as Kubernetes writes one (metav1.Time)."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _log_fields(event: Event) -> dict[str, str]:
    regarding = event.regarding
    if isinstance(regarding, PodRef):
        return {"pod": f"{regarding.namespace}/{regarding.name}", "reason": event.reason}
    if isinstance(regarding, ClaimRef):
        return {"claim": str(regarding), "reason": event.reason}
    if isinstance(regarding, ClusterObjectRef):
        return {regarding.kind: regarding.name, "reason": event.reason}
    return {"node": regarding.name, "reason": event.reason}
