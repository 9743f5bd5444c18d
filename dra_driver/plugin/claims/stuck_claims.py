"""Tells the pods of claims that cannot be given back yet, and the Node, why that is."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from dra_driver.base.errors import ClaimInUse, DriverError, DriverUnusable
from dra_driver.k8s.claims import ClaimRef, ClaimUid, PreparedDevice
from dra_driver.k8s.events import Event, Events, NodeRef, PodRef
from dra_driver.model.records import ClaimRecord
from dra_driver.plugin.claims.preparer import Preparer

log = logging.getLogger(__name__)

_REASON: Final = "ClaimNotGivenBack"


class StuckClaims:
    """Does as *preparer* does, and tells of claims of which it cannot undo something. For many
    threads."""

    def __init__(
        self,
        preparer: Preparer,
        known: Callable[[ClaimUid], ClaimRecord | None],
        events: Events,
        node: Callable[[], NodeRef],
        in_use: Callable[[ClaimRef], None],
    ) -> None:
        """*known*: what is recorded of a claim; None: it holds nothing here. *in_use* is called
        with each claim that a process still uses."""
        self._preparer = preparer
        self._known = known
        self._events = events
        self._node = node
        self._in_use = in_use
        self._messages: dict[ClaimUid, str] = {}  # the last one of each claim
        self._lock = threading.Lock()

    def prepare(self, ref: ClaimRef) -> Sequence[PreparedDevice]:
        return self._preparer.prepare(ref)

    def unprepare(self, ref: ClaimRef) -> None:
        """A driver that broke keeps no pod from ending: nobody can use its GPUs meanwhile. The
        claim holds its devices until the reconciler could give it back."""
        try:
            self._preparer.unprepare(ref)
        except DriverUnusable as e:
            log.warning("a claim is given back later", extra={"claim": str(ref), "error": str(e)})
            return
        except DriverError as e:
            self._emit(ref, e)
            raise
        with self._lock:
            self._messages.pop(ref.uid, None)

    def take_back_if(self, ref: ClaimRef, gone: Callable[[], bool]) -> bool:
        """Events are about claims that are still used only: whoever asks knows of the others."""
        try:
            return self._preparer.take_back_if(ref, gone)
        except ClaimInUse as e:
            self._emit(ref, e)
            raise

    def _emit(self, ref: ClaimRef, error: DriverError) -> None:
        """One event for each change of the message: the kubelet tries again and again."""
        record, why = self._known(ref.uid), str(error)
        with self._lock:  # others may have been given back without the kubelet
            messages = {uid: message for uid, message in self._messages.items() if self._known(uid)}
            is_new = record is not None and messages.get(ref.uid) != why
            self._messages = messages | ({ref.uid: why} if record is not None else {})
        if isinstance(error, ClaimInUse):
            self._in_use(ref)
        if record is None or not is_new:
            return
        for regarding in _concerned(record, self._node(), error):
            reason = why if isinstance(regarding, NodeRef) else error.public
            message = f"claim {record.claim} cannot be given back yet: {reason}"
            self._events.emit(Event(regarding, _REASON, str(record.claim), message))


def _concerned(
    record: ClaimRecord, node: NodeRef, error: DriverError
) -> Iterator[PodRef | NodeRef]:
    for pod in record.pods:
        yield PodRef(record.claim.namespace, pod.name, pod.uid)
    if isinstance(error, ClaimInUse):
        yield node
