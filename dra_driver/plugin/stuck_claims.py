"""Tells pods of claims that cannot be given back: the kubelet makes no event of it.

Such a pod stays in Terminating until what holds its devices has ended.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from dra_driver.cluster.events import Event, PodRef
from dra_driver.errors import DriverError
from dra_driver.kubeletplugin.claims import ClaimRef, ClaimUid, PreparedDevice
from dra_driver.model.holdings import Record

_REASON = "ClaimNotGivenBack"


class Driver(Protocol):
    """Who prepares claims; ``dra_driver.plugin.prepare``."""

    def prepare(self, ref: ClaimRef) -> Sequence[PreparedDevice]: ...
    def unprepare(self, ref: ClaimRef) -> None: ...


class Events(Protocol):
    """Tells of pods without waiting; ``dra_driver.cluster.events``."""

    def tell(self, event: Event) -> None: ...


class StuckClaims:
    """Does as *driver* does, and tells the pods of claims of which it cannot undo something. For
    many threads."""

    def __init__(
        self, driver: Driver, known: Callable[[ClaimUid], Record | None], events: Events
    ) -> None:
        """*known*: what is recorded of a claim; None: it holds nothing here."""
        self._driver = driver
        self._known = known
        self._events = events
        self._told: dict[ClaimUid, str] = {}  # the words
        self._lock = threading.Lock()

    def prepare(self, ref: ClaimRef) -> Sequence[PreparedDevice]:
        return self._driver.prepare(ref)

    def unprepare(self, ref: ClaimRef) -> None:
        try:
            self._driver.unprepare(ref)
        except DriverError as e:
            self._tell(ref, str(e))
            raise
        with self._lock:
            self._told.pop(ref.uid, None)

    def _tell(self, ref: ClaimRef, why: str) -> None:
        """Once for each change of the words: the kubelet tries again and again."""
        record = self._known(ref.uid)
        with self._lock:  # others may have been given back without the kubelet
            told = {uid: words for uid, words in self._told.items() if self._known(uid)}
            is_new = record is not None and told.get(ref.uid) != why
            self._told = told | ({ref.uid: why} if record is not None else {})
        if record is None or not is_new:
            return
        message = f"claim {record.claim} cannot be given back yet: {why}"
        for pod in record.pods:
            where = PodRef(record.claim.namespace, pod.name, pod.uid)
            self._events.tell(Event(where, _REASON, str(record.claim), message))
