"""Events on pods and nodes: what ``kubectl describe`` shows of what happened to them.

They are told at best: whoever tells one goes on at once. What the API server refuses is lost; what
it does not answer to waits, up to 1024 different things, and is lost with this process; of more the
oldest are lost. The same thing told again of the same object is counted in one Event, as the
kubelet and other components do it.
"""

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

from dra_driver.base.errors import DriverError, NotFound, Unreachable
from dra_driver.k8s.api import Document, KubernetesApi

log = logging.getLogger(__name__)

_MAX_QUEUED: Final = 256  # what is told at once of a node and all its pods
_COUNTED_FOR_SECONDS: Final = 3600.0  # the API server forgets events after an hour
_MIN_UPDATE_SECONDS: Final = 10.0
_MAX_REMEMBERED: Final = 1024  # different things, whether they wait or are written


@dataclass(frozen=True, slots=True)
class PodRef:
    """The pod that an event is about."""

    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class NodeRef:
    """The node that an event is about. Without a *uid* its name stands for that, as it does in the
    kubelet's events: ``kubectl describe node`` looks for both."""

    name: str
    uid: str = ""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that somebody should know of a pod or a node."""

    regarding: PodRef | NodeRef
    reason: str  # in one word, for programs: "GPUMemoryAboveShare"
    about: str  # what it is about; same object, reason and this: one Event that counts
    message: str
    is_warning: bool = True


class Events(Protocol):
    """Where events go; :class:`EventRecorder` is one."""

    def tell(self, event: Event) -> None:
        """Have *event* written soon. Never waits and never fails."""


@dataclass(frozen=True, slots=True)
class _WrittenEvent:
    """An Event, and what was told since it was written."""

    path: str = ""  # on the API server; empty: it is not there yet
    count: int = 0
    written: float = -math.inf  # or tried the last time
    unwritten: Event | None = None


_EventKey = tuple[PodRef | NodeRef, str, str]


class EventRecorder:
    """Writes events, one after another, on a thread of its own that begins with the first."""

    def __init__(
        self,
        api: KubernetesApi,
        component: str,
        node: str,
        clock: Callable[[], float] = time.monotonic,
        apart_seconds: float = _MIN_UPDATE_SECONDS,
    ) -> None:
        """*component*: who says it, such as the driver's name. *apart_seconds*: between two writes
        about the same thing; those in between count, and the last words are written."""
        self._api = api
        self._component = component
        self._node = node
        self._clock = clock
        self._apart_seconds = apart_seconds
        self._known: dict[_EventKey, _WrittenEvent] = {}  # of the thread alone, like the next
        self._is_away = False
        self._is_losing = False
        self._waiting: queue.Queue[Event | None] = queue.Queue(_MAX_QUEUED)
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
        while True:
            late = any(known.unwritten for known in self._known.values())
            event = None
            with contextlib.suppress(queue.Empty):
                event = self._waiting.get(timeout=self._apart_seconds if late else None)
            if event is not None:
                self._note(event)
            self._write_due()
            if self._stopping.is_set():
                return

    def _note(self, event: Event) -> None:
        self._forget(self._clock())
        same = (event.regarding, event.reason, event.about)
        if same not in self._known:
            self._make_room()
        known = self._known.get(same, _WrittenEvent())
        self._known[same] = replace(known, count=known.count + 1, unwritten=event)

    def _write_due(self) -> None:
        """What was told and not written, where the last time is long enough ago."""
        now = self._clock()
        for same, known in tuple(self._known.items()):
            event = known.unwritten
            if event is None or now - known.written < self._apart_seconds:
                continue
            if self._stopping.is_set():
                return
            try:
                self._known[same] = self._written(event, known, now)
            except Unreachable as error:
                del self._known[same]  # others come first the next time
                self._known[same] = replace(known, written=now)
                self._wait(error)
                return
            except DriverError as error:
                self._lose(same, event, error)
            self._is_away = self._is_losing = False

    def _written(self, event: Event, known: _WrittenEvent, now: float) -> _WrittenEvent:
        if not known.path:
            return _WrittenEvent(self._create(event, known.count), known.count, now)
        try:
            self._api.patch(known.path, self._again(event, known.count))
        except NotFound:
            return _WrittenEvent(self._create(event, 1), 1, now)
        return replace(known, written=now, unwritten=None)

    def _wait(self, error: DriverError) -> None:
        if not self._is_away:
            log.warning("events wait for the API server", extra={"error": str(error)})
        self._is_away = True

    def _lose(self, same: _EventKey, event: Event, error: DriverError) -> None:
        log.warning("an event is lost", extra=_facts(event) | {"error": str(error)})
        del self._known[same]

    def _create(self, event: Event, count: int) -> str:
        """Create it: the path that it has on the API server."""
        collection = f"/api/v1/namespaces/{_namespace(event.regarding)}/events"
        made = self._api.create(collection, self._document(event, count))
        return f"{collection}/{made['metadata']['name']}"

    def _document(self, event: Event, count: int) -> Document:
        one = event.regarding
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{one.name}.", "namespace": _namespace(one)},
            "involvedObject": _reference(one),
            "reason": event.reason,
            "type": "Warning" if event.is_warning else "Normal",
            "source": {"component": self._component, "host": self._node},
            "reportingComponent": self._component,
            "reportingInstance": self._node,
            "firstTimestamp": _timestamp(),
            **self._again(event, count),
        }

    def _again(self, event: Event, count: int) -> Document:
        return {"count": count, "message": event.message, "lastTimestamp": _timestamp()}

    def _forget(self, now: float) -> None:
        """What the API server has forgotten."""
        self._known = {
            same: known
            for same, known in self._known.items()
            if known.unwritten or now - known.written < _COUNTED_FOR_SECONDS
        }

    def _make_room(self) -> None:
        """For one more: of very many the first goes that is written, else the first."""
        if len(self._known) < _MAX_REMEMBERED:
            return
        written = (same for same, known in self._known.items() if not known.unwritten)
        lost = self._known.pop(next(written, next(iter(self._known)))).unwritten
        if lost is not None and not self._is_losing:  # told once: thousands may follow
            log.warning("an event is lost: too many wait to be written", extra=_facts(lost))
            self._is_losing = True


def _namespace(one: PodRef | NodeRef) -> str:
    """Events of what has no namespace are in this one: the API server takes them in no other."""
    return one.namespace if isinstance(one, PodRef) else "default"


def _reference(one: PodRef | NodeRef) -> Document:
    if isinstance(one, NodeRef):
        return {"apiVersion": "v1", "kind": "Node", "name": one.name, "uid": one.uid or one.name}
    pod = {"namespace": one.namespace, "name": one.name, "uid": one.uid}
    return {"apiVersion": "v1", "kind": "Pod"} | pod


def _timestamp() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _facts(event: Event) -> dict[str, str]:
    one = event.regarding
    name = f"{one.namespace}/{one.name}" if isinstance(one, PodRef) else one.name
    return {"pod" if isinstance(one, PodRef) else "node": name, "reason": event.reason}
