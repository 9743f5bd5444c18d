"""Tells pods and the Node of claims that cannot be given back: the kubelet makes no event of it.

Such a pod stays in Terminating until what holds its devices has ended. One that was force-deleted
is gone by then: if a process of it lives on, the Node is told.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from dra_driver.cluster.events import Event, NodeRef, PodRef
from dra_driver.errors import DriverError, InUse
from dra_driver.kubeletplugin.claims import ClaimRef, ClaimUid, PreparedDevice
from dra_driver.model.holdings import Record

_REASON = "ClaimNotGivenBack"


class Driver(Protocol):
    """Who prepares claims; ``dra_driver.plugin.prepare``."""

    def prepare(self, ref: ClaimRef) -> Sequence[PreparedDevice]: ...
    def unprepare(self, ref: ClaimRef) -> None: ...
    def take_back_if(self, ref: ClaimRef, gone: Callable[[], bool]) -> bool: ...


class Events(Protocol):
    """Tells of pods without waiting; ``dra_driver.cluster.events``."""

    def tell(self, event: Event) -> None: ...


@dataclass(frozen=True, slots=True)
class Listeners:
    """Who is told: *in_use* of each claim that a process still uses."""

    events: Events
    node: Callable[[], NodeRef]
    in_use: Callable[[ClaimRef], None]


class StuckClaims:
    """Does as *driver* does, and tells of claims of which it cannot undo something. For many
    threads."""

    def __init__(
        self, driver: Driver, known: Callable[[ClaimUid], Record | None], listeners: Listeners
    ) -> None:
        """*known*: what is recorded of a claim; None: it holds nothing here."""
        self._driver = driver
        self._known = known
        self._listeners = listeners
        self._told: dict[ClaimUid, str] = {}  # the words
        self._lock = threading.Lock()

    def prepare(self, ref: ClaimRef) -> Sequence[PreparedDevice]:
        return self._driver.prepare(ref)

    def unprepare(self, ref: ClaimRef) -> None:
        try:
            self._driver.unprepare(ref)
        except DriverError as e:
            self._tell(ref, e)
            raise
        with self._lock:
            self._told.pop(ref.uid, None)

    def take_back_if(self, ref: ClaimRef, gone: Callable[[], bool]) -> bool:
        """Here only claims that are used are told of: to whoever asks, the others are no news."""
        try:
            return self._driver.take_back_if(ref, gone)
        except InUse as e:
            self._tell(ref, e)
            raise

    def _tell(self, ref: ClaimRef, error: DriverError) -> None:
        """Once for each change of the words: the kubelet tries again and again."""
        record, why = self._known(ref.uid), str(error)
        with self._lock:  # others may have been given back without the kubelet
            told = {uid: words for uid, words in self._told.items() if self._known(uid)}
            is_new = record is not None and told.get(ref.uid) != why
            self._told = told | ({ref.uid: why} if record is not None else {})
        if isinstance(error, InUse):
            self._listeners.in_use(ref)
        if record is None or not is_new:
            return
        for regarding in _concerned(record, self._listeners.node(), error):
            words = why if isinstance(regarding, NodeRef) else error.public
            message = f"claim {record.claim} cannot be given back yet: {words}"
            self._listeners.events.tell(Event(regarding, _REASON, str(record.claim), message))


def _concerned(record: Record, node: NodeRef, error: DriverError) -> Iterator[PodRef | NodeRef]:
    for pod in record.pods:
        yield PodRef(record.claim.namespace, pod.name, pod.uid)
    if isinstance(error, InUse):
        yield node
