"""Keeps limits on the pods of prepared claims, also on pods that join a claim later.

The kubelet prepares a claim for its first pod. More can use it, and nobody says so. Any pod can
join any claim that limits memory, and is limited as soon as one of its containers shows that it was
given the claim (`dra_driver.plan.prepare.claim_users`). Claims that are meant for several pods are
read again besides, whenever a pod comes to this node, and from time to time, in case that was
missed: so their limits are there before the first container. A claim from a template is meant for
one pod: it is read again only under MPS, where it matters who is on a server, a few at a time.

Where no container's bundle can be found, the kubelet lists which pods use which claims. The list
has names, so each pod's UID is read from the API server.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from dra_driver.base.errors import DriverError, NodeError
from dra_driver.k8s.claims import Claim, ClaimRef, ClaimUid, Pod, PodUid
from dra_driver.k8s.pods import ClaimName, Container, KubeletPod, PodSpec
from dra_driver.model.records import ClaimRecord
from dra_driver.model.steps import PodMemoryShare
from dra_driver.plan.memory.pod_limits import pod_memory_shares
from dra_driver.plan.prepare.claim_users import records_with_pods

log = logging.getLogger(__name__)

_PODS_AT_ONCE: Final = 8  # pods that one look reads: there may be many

ClaimRecords = Callable[[], Sequence[ClaimRecord]]


class KubeletPodLister(Protocol):
    """Knows which container of which pod uses which claims."""

    def pods(self) -> Sequence[KubeletPod]: ...


class PodSource(Protocol):
    """Where pods are read from; ``dra_driver.k8s.pods``."""

    def read(self, namespace: str, name: str) -> PodSpec: ...


class KubeletPods:
    """One thread at a time may ``look``."""

    def __init__(
        self,
        ledger: ClaimRecords,
        kubelet: KubeletPodLister,
        pods: PodSource,
        hidden: Callable[[], bool],
    ) -> None:
        """*hidden*: whether containers' bundles are nowhere to be found."""
        self._ledger = ledger
        self._kubelet = kubelet
        self._pods = pods
        self._hidden = hidden
        self._uids: Mapping[tuple[str, str], PodUid] = {}
        self._found: tuple[Container, ...] = ()
        self._last: (
            tuple[Sequence[ClaimRecord], tuple[Container, ...], Sequence[ClaimRecord]] | None
        ) = None

    def records(self) -> Sequence[ClaimRecord]:
        """The claims with the pods that are listed; the same object where nothing changed."""
        records, found = self._ledger(), self._found
        if self._last is None or self._last[0] is not records or self._last[1] is not found:
            self._last = (records, found, records_with_pods(records, found))
        return self._last[2]

    def look(self) -> None:
        """Ask the kubelet, where nobody else tells. What fails waits for the next look."""
        try:
            found = tuple(self._listed()) if self._hidden() else ()
        except NodeError as error:
            log.info("which pods use a claim is not known", extra={"error": str(error)})
            return
        if found != self._found:
            self._found = found

    def _listed(self) -> Iterator[Container]:
        limited = {
            ClaimName(record.claim.namespace, record.claim.name): record
            for record in self._ledger()
            if record.completed and record.limited
        }
        wanted: dict[tuple[str, str], frozenset[ClaimUid]] = {}
        for pod in self._kubelet.pods() if limited else ():
            named = {name for names in pod.containers.values() for name in names}
            its = [limited[name] for name in named if name in limited]
            new = [one for one in its if pod.name not in {known.name for known in one.pods}]
            if new:
                wanted[pod.namespace, pod.name] = frozenset(one.claim.uid for one in new)
        self._read([name for name in sorted(wanted) if name not in self._uids][:_PODS_AT_ONCE])
        self._uids = {name: uid for name, uid in self._uids.items() if name in wanted}
        for (namespace, name), uid in sorted(self._uids.items()):
            yield Container("", "", namespace, Pod(name, uid), wanted[namespace, name])

    def _read(self, names: Sequence[tuple[str, str]]) -> None:
        for namespace, name in names:
            try:
                uid = self._pods.read(namespace, name).uid
            except DriverError as error:
                log.info("a pod of a claim cannot be read", extra={"error": str(error)})
                continue
            self._uids = {**self._uids, (namespace, name): uid}


RecordSource = Callable[[], Iterable[ClaimRecord]]


class CachedClaimSource(Protocol):
    """Where claims are read from."""

    def read(self, ref: ClaimRef) -> Claim: ...
    def glance(self, ref: ClaimRef) -> Claim: ...


class PodUpdater(Protocol):
    """Who acts when pods come and go."""

    def note_pods(self, claim: Claim) -> bool: ...


class PodLimitBackend(Protocol):
    """What the GPUs' drivers enforce; ``dra_driver.node.memory.limits``."""

    on_unsettled: Callable[[], None]

    def settle(
        self, read: Callable[[Sequence[Container]], Iterable[PodMemoryShare]], joinable: bool
    ) -> None: ...
    def tell_of_pods(self, told: Callable[[], None] | None) -> bool: ...


@dataclass(frozen=True, slots=True)
class _KnownShares:
    """What follows from the records, as long as they are these."""

    records: tuple[ClaimRecord, ...] = ()
    containers: Sequence[Container] = ()
    shares: tuple[PodMemoryShare, ...] = ()


_NOT_TOLD_SECONDS: Final = 5.0  # between looks where nobody tells of new pods
_CLAIMS_AT_ONCE: Final = 8  # claims from templates that one look reads: there may be many


class PodLimits:
    """Each of its looks is one thread's at a time, and costs nothing where no claim is limited or
    shared by MPS."""

    def __init__(
        self,
        records: RecordSource,
        claims: CachedClaimSource,
        preparer: PodUpdater,
        limits: PodLimitBackend,
    ) -> None:
        self._records = records
        self._claims = claims
        self._preparer = preparer
        self._limits = limits
        self._last = _KnownShares()
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

    def _in_turn(self, records: Iterable[ClaimRecord]) -> Iterable[ClaimRecord]:
        """Of those from templates, the next ones."""
        waiting = sorted(
            (record for record in records if record.pod_claim_name),
            key=lambda one: (self._turn is not None and one.claim <= self._turn, one.claim),
        )[:_CLAIMS_AT_ONCE]
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

    def _shares(self, containers: Sequence[Container]) -> tuple[PodMemoryShare, ...]:
        """What every pod holds, with those of *containers* that were given claims."""
        records = tuple(self._records())
        last = self._last
        if records != last.records or containers != last.containers:
            shares = pod_memory_shares(records_with_pods(records, containers))
            self._last = last = _KnownShares(records, containers, shares)
        return last.shares

    def _note_pods(self, record: ClaimRecord) -> None:
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


def _is_read(record: ClaimRecord) -> bool:
    """Whether it matters before any container runs which pods come to it, prepared already."""
    if not record.completed:
        return False
    return bool(record.namespaces) or (record.limited and not record.pod_claim_name)
