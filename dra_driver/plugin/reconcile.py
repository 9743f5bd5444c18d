"""Claims that the kubelet will never ask about again: gone from the API, or with a damaged record.

The kubelet unprepares what it knows of. A claim that it forgot (its own state was lost, the node
was cleaned by hand) would hold its devices for ever; so every record is held against the API server
from time to time. A claim has to be missing at two looks: in between the kubelet's own clean-up,
once a minute, has its chance.
"""

import logging
from collections.abc import Sequence
from itertools import islice
from typing import Protocol

from dra_driver.errors import ClaimError, DriverError
from dra_driver.kubeletplugin.claims import Claim, ClaimRef, ClaimUid, PreparedDevice
from dra_driver.node.ledger import Ledger, SetAside

log = logging.getLogger(__name__)

_MOST_PER_LOOK = 16  # requests to the API server; the rest has its turn at the next look


class Claims(Protocol):
    """What the API server knows of claims. Every call may raise ClusterError: not known now."""

    def exists(self, ref: ClaimRef) -> bool: ...
    def find_by_uid(self, uid: ClaimUid) -> Claim | None: ...


class Preparer(Protocol):
    """Who undoes, and does again."""

    def prepare(self, ref: ClaimRef) -> Sequence[PreparedDevice]: ...
    def unprepare(self, ref: ClaimRef) -> None: ...


class Reconciler:
    """Holds the ledger against the API server, a few claims at a look."""

    def __init__(self, ledger: Ledger, claims: Claims, preparer: Preparer) -> None:
        self._ledger = ledger
        self._claims = claims
        self._preparer = preparer
        self._missed: set[ClaimUid] = set()
        self._last: ClaimRef | None = None

    def look(self) -> int:
        """One look; how many claims were put right. Errors are logged and wait for the next
        look."""
        mended = 0
        for aside in self._ledger.set_aside():
            mended += self._settle(aside)
        for ref in self._next_claims():
            mended += self._check(ref)
        return mended

    def _next_claims(self) -> list[ClaimRef]:
        refs = [record.claim for record in self._ledger.records()]
        last = self._last
        later = [ref for ref in refs if last is None or ref > last]
        chosen = list(islice([*later, *(ref for ref in refs if ref not in later)], _MOST_PER_LOOK))
        self._last = chosen[-1] if chosen else None
        return chosen

    def _check(self, ref: ClaimRef) -> bool:
        try:
            if self._claims.exists(ref):
                self._missed.discard(ref.uid)
                return False
            if ref.uid not in self._missed:
                self._missed.add(ref.uid)
                return False
            log.warning(
                "taking back a claim that is gone", extra={"claim": str(ref), "uid": ref.uid}
            )
            self._preparer.unprepare(ref)
        except DriverError as e:
            log.warning("cannot reconcile a claim", extra={"claim": str(ref), "error": str(e)})
            return False
        self._missed.discard(ref.uid)
        return True

    def _settle(self, aside: SetAside) -> bool:
        """Prepare again what the API server says the damaged record was of, or forget it."""
        facts = {"uid": aside.uid, "path": str(aside.path), "reason": aside.reason}
        try:
            claim = self._find(aside.uid)
            if claim is None:
                log.warning("forgetting an unreadable record of a claim that is gone", extra=facts)
                self._preparer.unprepare(ClaimRef("", "", aside.uid))
            else:
                log.warning("preparing again a claim whose record was unreadable", extra=facts)
                self._preparer.prepare(claim.ref)
        except DriverError as e:
            log.warning("cannot settle an unreadable record yet", extra=facts | {"error": str(e)})
            return False
        return True

    def _find(self, uid: ClaimUid) -> Claim | None:
        try:
            return self._claims.find_by_uid(uid)
        except ClaimError:  # it is there, but holds nothing of ours any more
            return None
