"""Looks after what holds for the pods of prepared claims: those that come later, and their limits.

The kubelet prepares a claim for its first pod. More can use it, and nobody says so. Any pod can
join any claim that limits, and is limited as soon as one of its containers shows that it was given
the claim (`dra_driver.plan.claim_pods`). Claims that are meant for several pods are read again
besides, whenever a pod comes to this node, and from time to time, in case that was not seen: so
their limits are there before the first container. A claim from a template is meant for one pod: it
is read again only under MPS, where it matters who is on a server, some of them at once.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from dra_driver.errors import DriverError
from dra_driver.kubeletplugin.claims import Claim, ClaimRef, ClaimUid
from dra_driver.kubeletplugin.pods import Container
from dra_driver.model.holdings import Record
from dra_driver.model.shares import PodShare
from dra_driver.plan.claim_pods import with_pods
from dra_driver.plan.limits import pod_shares

log = logging.getLogger(__name__)

Records = Callable[[], Iterable[Record]]


class Claims(Protocol):
    """Where claims are read from."""

    def read(self, ref: ClaimRef) -> Claim: ...
    def glance(self, ref: ClaimRef) -> Claim: ...


class Preparer(Protocol):
    """Who acts when pods come and go."""

    def note_pods(self, claim: Claim) -> bool: ...


class Limits(Protocol):
    """What the GPUs' drivers enforce; ``dra_driver.node.memory_limits``."""

    on_unsettled: Callable[[], None]

    def settle(
        self, read: Callable[[Sequence[Container]], Iterable[PodShare]], joinable: bool
    ) -> None: ...
    def tell_of_pods(self, told: Callable[[], None] | None) -> bool: ...


@dataclass(frozen=True, slots=True)
class _Read:
    """What follows from the records, as long as they are these."""

    records: tuple[Record, ...] = ()
    containers: Sequence[Container] = ()
    shares: tuple[PodShare, ...] = ()


_NOT_TOLD_SECONDS: Final = 5.0  # between looks where nobody tells of new pods
_AT_ONCE: Final = 8  # claims from templates that one look reads: there may be many


class PodLimits:
    """Each of its looks is one thread's at a time, and costs nothing where no claim is limited or
    shared by MPS."""

    def __init__(
        self, records: Records, claims: Claims, preparer: Preparer, limits: Limits
    ) -> None:
        self._records = records
        self._claims = claims
        self._preparer = preparer
        self._limits = limits
        self._last = _Read()
        self._shared: Collection[ClaimUid] = ()  # as far as they were looked at
        self._turn: ClaimRef | None = None  # of the claims from templates, the last that was read
        self._told = False  # of pods as they come
        self._look_soon: Callable[[], None] = lambda: None
        self._settle_soon: Callable[[], None] = lambda: None

    def wake(self, look_for_pods: Callable[[], None], settle: Callable[[], None]) -> None:
        """Call these, from now on, when one of the looks is due before its time."""
        self._look_soon = look_for_pods
        self._settle_soon = self._limits.on_unsettled = settle

    def look_for_pods(self) -> float | None:
        """Read the claims of which it matters. What fails waits for the next look.

        Answers with the seconds until then where nobody tells of new pods.
        """
        read = [record for record in self._records() if _is_read(record)]
        shared = [record for record in read if not record.pod_claim_name]
        for record in (*shared, *self._in_turn(read)):
            self._note_pods(record)
        return _NOT_TOLD_SECONDS if shared and not self._told else None

    def _in_turn(self, records: Iterable[Record]) -> Iterable[Record]:
        """Of those from templates, the next ones."""
        waiting = sorted(
            (record for record in records if record.pod_claim_name),
            key=lambda one: (self._turn is not None and one.claim <= self._turn, one.claim),
        )[:_AT_ONCE]
        if waiting:
            self._turn = waiting[-1].claim
        return waiting

    def settle(self) -> None:
        """Make the limits what they should be, also those of containers that came meanwhile."""
        records = tuple(self._records())
        shared = frozenset(
            one.claim.uid for one in records if _is_read(one) and not one.pod_claim_name
        )
        told = self._limits.tell_of_pods(self._look_soon if shared else None)
        if told and not (self._told and shared.issubset(self._shared)):
            self._look_soon()  # once for those who came before they were told of
        self._told, self._shared = told, shared
        self._limits.settle(self._shares, any(record.limited for record in records))

    def _shares(self, containers: Sequence[Container]) -> tuple[PodShare, ...]:
        """What every pod holds, with those of *containers* that were given claims."""
        records = tuple(self._records())
        last = self._last
        if records != last.records or containers != last.containers:
            shares = pod_shares(with_pods(records, containers))
            self._last = last = _Read(records, containers, shares)
        return last.shares

    def _note_pods(self, record: Record) -> None:
        facts = {"claim": str(record.claim)}
        try:
            claim = self._claims.glance(record.claim)
            if claim.pods != record.pods:  # what is a moment old may lack one that is recorded
                claim = self._claims.read(record.claim)
        except DriverError as e:
            log.info("cannot tell which pods use a claim now", extra=facts | {"error": str(e)})
            return
        try:
            if self._preparer.note_pods(claim):
                self._settle_soon()
        except DriverError as e:
            log.warning(
                "limits do not hold for the pods that use a claim now: %s",
                e,
                extra=facts,
            )


def _is_read(record: Record) -> bool:
    """Whether it matters before any container runs which pods come to it, prepared already."""
    if not record.completed:
        return False
    return bool(record.spaces) or (record.limited and not record.pod_claim_name)
