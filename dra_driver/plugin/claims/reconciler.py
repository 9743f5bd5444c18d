"""Claims that the kubelet will never ask about again: gone from the API, or with a damaged record.

The kubelet unprepares what it knows of. A claim that it forgot (its own state was lost, the node
was cleaned by hand) would hold its devices for ever; so every record is held against the API server
from time to time. A claim has to be missing at two looks: in between the kubelet's own clean-up,
once a minute, has its chance.
"""

import logging
from collections.abc import Callable, Iterable

from dra_driver.base.errors import ClaimError, DriverError
from dra_driver.k8s.claims import ClaimReader, ClaimRef, ClaimUid
from dra_driver.model.gpus import Gpu
from dra_driver.model.offer import gpu_name_of
from dra_driver.model.records import is_allocation
from dra_driver.node.state.ledger import Ledger
from dra_driver.node.state.ledger_files import DamagedRecord
from dra_driver.plugin.claims.stuck_claims import StuckClaims

log = logging.getLogger(__name__)

_MOST_PER_LOOK = 16  # requests to the API server; the rest has its turn at the next looks …
_LOOKS_FOR_ALL = 8  # … of which this many are enough, however many claims there are


class _ClaimUnknown:
    """The API server could not be asked."""


_UNKNOWN = _ClaimUnknown()


class ClaimReconciler:
    """Holds the ledger against the API server, a few claims at a look."""

    def __init__(
        self,
        ledger: Ledger,
        claims: ClaimReader,
        preparer: StuckClaims,
        pool: str,
        gpus: Callable[[], Iterable[Gpu]],
    ) -> None:
        """*gpus*: those of this node, by whose names the API server says what a claim holds."""
        self._ledger = ledger
        self._claims = claims
        self._preparer = preparer
        self._pool = pool
        self._gpus = gpus
        self._missed: set[ClaimUid] = set()
        self._last: ClaimRef | None = None

    def look(self) -> int:
        """One look: how many claims were put right. Errors are logged and wait for the next."""
        mended = self._settle_unreadable()
        for ref in self._next_claims():
            mended += self._check(ref)
        return mended

    def _next_claims(self) -> list[ClaimRef]:
        refs = [record.claim for record in self._ledger.records() if record.allocation is None]
        self._missed &= {ref.uid for ref in refs}
        last = self._last
        later = [ref for ref in refs if last is None or ref > last]
        earlier = refs[: len(refs) - len(later)]
        number = max(_MOST_PER_LOOK, -(-len(refs) // _LOOKS_FOR_ALL))
        chosen = [*later, *earlier][:number]
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
            # A deleted claim does not come back. Any other may have been allocated anew meanwhile,
            # so it is asked again where nobody else can act, and all who come wait for the answer.
            deleted = self._claims.is_deleted(ref)
            taken = self._preparer.take_back_if(
                ref, lambda: deleted or not self._claims.exists(ref)
            )
        except DriverError as e:
            log.warning("cannot reconcile a claim", extra={"claim": str(ref), "error": str(e)})
            return False
        self._missed.discard(ref.uid)
        if taken:
            log.warning("took back a claim that is gone", extra={"claim": str(ref), "uid": ref.uid})
        return taken

    def _settle_unreadable(self) -> int:
        """First find out what all of them hold: until then each of them is in the others' way."""
        # What one of another release holds stands in it, wherever its claim is allocated by now.
        asides = self._ledger.set_aside()
        unclear = [aside for aside in asides if not (aside.release and aside.names)]
        refs = [(aside, self._find(aside)) for aside in unclear]
        return sum(self._settle(aside, ref) for aside, ref in refs if ref is not _UNKNOWN)

    def _find(self, aside: DamagedRecord) -> ClaimRef | _ClaimUnknown | None:
        """The claim of an unreadable record; None: it holds nothing here any more."""
        if is_allocation(aside.uid):
            return None  # if a pod has it, it is prepared again (``plugin.device_plugin``)
        try:
            claim = self._claims.find_by_uid(aside.uid)
        except ClaimError:
            claim = None  # it is there, but not allocated, or nothing of it is ours
        except DriverError as e:
            log.warning("cannot settle an unreadable record yet", extra=_log_fields(aside, e))
            return _UNKNOWN
        allocations = claim.allocations if claim else ()
        names = {gpu_name_of(each.device) for each in allocations if each.pool == self._pool}
        if claim is None or not names:
            return None
        self._ledger.narrow(aside.uid, names, self._gpus())
        return claim.ref

    def _settle(self, aside: DamagedRecord, ref: ClaimRef | _ClaimUnknown | None) -> bool:
        """Prepare again what the API server says the record was of, or forget it; one of another
        release stays."""
        if aside.release:
            return False
        try:
            if isinstance(ref, ClaimRef):
                self._preparer.prepare(ref)
                log.warning(
                    "prepared again a claim with an unreadable record", extra=_log_fields(aside)
                )
                return True
            log.warning(
                "forgetting the unreadable record of a claim that is gone", extra=_log_fields(aside)
            )
            return self._preparer.take_back_if(
                ClaimRef("", "", aside.uid), lambda: self._find(aside) is None
            )
        except DriverError as e:
            log.warning("cannot settle an unreadable record yet", extra=_log_fields(aside, e))
            return False


def _log_fields(aside: DamagedRecord, error: DriverError | None = None) -> dict[str, str]:
    facts = {"uid": str(aside.uid), "path": str(aside.path), "reason": aside.reason}
    return facts | {"error": str(error)} if error else facts
