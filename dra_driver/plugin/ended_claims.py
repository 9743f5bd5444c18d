"""Gives claims back that were still used when the kubelet asked for it, once their users ended.

The kubelet asks again, but only after 10 s or more, and somebody may wait for the GPU by then. So
whoever used such a claim is looked at again and again. Only a claim that is deleted is given back:
of one that exists the kubelet would go on to believe that it is prepared.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from dra_driver.errors import DriverError
from dra_driver.kubeletplugin.claims import ClaimRef, ClaimUid
from dra_driver.model.holdings import Record

log = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.25
_AT_ONCE: Final = 16  # claims that one look is about; the others have their turn at the next
_ASK_SECONDS: Final = 2.0  # between two questions to the API server about one claim
_MOST_ASKED: Final = 30  # by then the kubelet has asked again; else it is the reconciler's


class Preparer(Protocol):
    """Who gives back."""

    def take_back_if(self, ref: ClaimRef, gone: Callable[[], bool]) -> bool: ...


class Users(Protocol):
    """Who still uses claims; ``dra_driver.plugin.claim_users``."""

    def refuse_while_used(self, record: Record) -> None: ...


class Claims(Protocol):
    """What the API server knows of claims; ``dra_driver.kubeletplugin.claim_reader``."""

    def is_deleted(self, ref: ClaimRef) -> bool: ...


@dataclass(slots=True)
class _Waiting:
    ref: ClaimRef
    asked: int = 0
    ask_at: float = 0.0


class EndedClaims:
    """``refused`` is for many threads, ``look`` for one."""

    def __init__(
        self,
        preparer: Preparer,
        users: Users,
        claims: Claims,
        known: Callable[[ClaimUid], Record | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """*known*: what is recorded of a claim; None: it holds nothing here."""
        self._preparer = preparer
        self._users = users
        self._claims = claims
        self._known = known
        self._clock = clock
        self._waiting: dict[ClaimUid, _Waiting] = {}  # who was looked at last comes last
        self._lock = threading.Lock()
        self.look_soon: Callable[[], None] = lambda: None

    def refused(self, ref: ClaimRef) -> None:
        """A process still used *ref* when it was to be given back."""
        with self._lock:
            self._waiting.setdefault(ref.uid, _Waiting(ref)).asked = 0
        self.look_soon()

    def look(self) -> float | None:
        """One look. Answers with the seconds until the next where claims wait."""
        with self._lock:
            chosen = list(self._waiting.values())[:_AT_ONCE]
        for waiting in chosen:
            done = self._check(waiting)
            with self._lock:
                del self._waiting[waiting.ref.uid]
                if not done:
                    self._waiting[waiting.ref.uid] = waiting
        return _LOOK_SECONDS if self._waiting else None

    def _check(self, waiting: _Waiting) -> bool:
        """Whether there is nothing more to do about it."""
        ref, now = waiting.ref, self._clock()
        if (record := self._known(ref.uid)) is None:
            return True
        try:
            self._users.refuse_while_used(record)
            if now < waiting.ask_at:
                return False
            waiting.asked, waiting.ask_at = waiting.asked + 1, now + _ASK_SECONDS
            if not self._claims.is_deleted(ref):
                return waiting.asked >= _MOST_ASKED
            # A deleted claim does not come back.
            self._preparer.take_back_if(ref, lambda: True)
        except DriverError:
            return False  # it is used, that cannot be told, or something cannot be undone yet
        log.info("gave back a claim that is deleted", extra={"claim": str(ref), "uid": ref.uid})
        return True
