"""Keeps limits on the pods of prepared claims, also on pods that join a claim later.

The kubelet prepares a claim for its first pod. More can use it without another call. Any pod can
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
from typing import Final

from dra_driver.base.errors import DriverError, NodeError
from dra_driver.base.threads import UNTIL_WOKEN
from dra_driver.k8s.claims import ClaimReader, ClaimRef, ClaimUid, Pod, PodUid
from dra_driver.k8s.pods import ClaimName, Container, PodReader
from dra_driver.kubeletplugin.serve.pod_resources import PodResourcesClient
from dra_driver.model.records import ClaimRecord
from dra_driver.model.steps import PodMemoryShare
from dra_driver.node.memory.limits import NodeMemoryLimits
from dra_driver.plan.memory.pod_limits import pod_memory_shares
from dra_driver.plan.prepare.claim_users import records_with_pods
from dra_driver.plugin.claims.prepared_claims import PreparedClaims

log = logging.getLogger(__name__)

_PODS_AT_ONCE: Final = 8  # pods that one look reads: there may be many


class KubeletPods:
    """The pods of claims, as the kubelet lists them. One thread at a time may ``update``."""

    def __init__(
        self,
        records: Callable[[], Sequence[ClaimRecord]],
        kubelet: PodResourcesClient,
        pods: PodReader,
        bundles_hidden: Callable[[], bool],
    ) -> None:
        self._ledger_records = records
        self._kubelet = kubelet
        self._pods = pods
        self._bundles_hidden = bundles_hidden
        self._uids: Mapping[tuple[str, str], PodUid] = {}
        self._containers: tuple[Container, ...] = ()
        self._last: (
            tuple[Sequence[ClaimRecord], tuple[Container, ...], Sequence[ClaimRecord]] | None
        ) = None

    def records(self) -> Sequence[ClaimRecord]:
        """The claims with the pods that are listed; the same object where nothing changed."""
        records, containers = self._ledger_records(), self._containers
        if self._last is None or self._last[0] is not records or self._last[1] is not containers:
            self._last = (records, containers, records_with_pods(records, containers))
        return self._last[2]

    def update(self) -> None:
        """Ask the kubelet, where no bundle tells. What fails waits for the next time."""
        try:
            containers = tuple(self._listed()) if self._bundles_hidden() else ()
        except NodeError as error:
            log.info("which pods use a claim is not known", extra={"error": str(error)})
            return
        if containers != self._containers:  # else ``records`` stays the same object
            self._containers = containers

    def _listed(self) -> Iterator[Container]:
        limited = {
            ClaimName(record.claim.namespace, record.claim.name): record
            for record in self._ledger_records()
            if record.completed and record.limited and record.allocation is None
        }
        claims: dict[tuple[str, str], frozenset[ClaimUid]] = {}
        for pod in self._kubelet.pods() if limited else ():
            names = {name for claim_names in pod.containers.values() for name in claim_names}
            records = [limited[name] for name in names if name in limited]
            joined = frozenset(
                record.claim.uid
                for record in records
                if all(recorded.name != pod.name for recorded in record.pods)
            )
            if joined:
                claims[pod.namespace, pod.name] = joined
        self._read([name for name in sorted(claims) if name not in self._uids][:_PODS_AT_ONCE])
        self._uids = {name: uid for name, uid in self._uids.items() if name in claims}
        for (namespace, name), uid in sorted(self._uids.items()):
            yield Container("", "", namespace, Pod(name, uid), claims[namespace, name])

    def _read(self, names: Sequence[tuple[str, str]]) -> None:
        for namespace, name in names:
            try:
                uid = self._pods.read(namespace, name).uid
            except DriverError as error:
                log.info("a pod of a claim cannot be read", extra={"error": str(error)})
                continue
            self._uids = {**self._uids, (namespace, name): uid}


_UNREPORTED_SECONDS: Final = 5.0  # between reads where new pods are not reported
_CLAIMS_AT_ONCE: Final = 8  # claims from templates that one look reads: there may be many


class PodLimits:
    """Each of its methods is one thread's at a time, and costs nothing where no claim is limited
    or shared by MPS."""

    def __init__(
        self,
        records: Callable[[], Iterable[ClaimRecord]],
        claims: ClaimReader,
        prepared_claims: PreparedClaims,
        limits: NodeMemoryLimits,
    ) -> None:
        self._records = records
        self._claims = claims
        self._prepared_claims = prepared_claims
        self._limits = limits
        self._computed_from: tuple[object, object] = ((), ())  # records and containers
        self._pod_shares: tuple[PodMemoryShare, ...] = ()
        self._shared: Collection[ClaimUid] = ()  # the claims of several pods, at the last settle
        self._last_read: ClaimRef | None = None  # of the claims from templates
        self._new_pods_reported = False
        self._update_soon: Callable[[], None] = lambda: None
        self._settle_soon: Callable[[], None] = lambda: None

    def wake(self, update: Callable[[], None], settle: Callable[[], None]) -> None:
        """Call these, from now on, when one of the two is due before its time."""
        self._update_soon = update
        self._settle_soon = self._limits.on_owners_unknown = settle

    def update_pods(self) -> float | None:
        """Read the claims whose pods matter. What fails waits for the next time.

        Answers with the seconds until then where new pods are not reported.
        """
        records = [record for record in self._records() if _is_read(record)]
        shared = [record for record in records if not record.pod_claim_name]
        for record in (*shared, *self._next_from_templates(records)):
            self._update_pods_of(record)
        return _UNREPORTED_SECONDS if shared and not self._new_pods_reported else None

    def _next_from_templates(self, records: Iterable[ClaimRecord]) -> Iterable[ClaimRecord]:
        last = self._last_read
        waiting = sorted(
            (record for record in records if record.pod_claim_name),
            key=lambda record: (last is not None and record.claim <= last, record.claim),
        )[:_CLAIMS_AT_ONCE]
        if waiting:
            self._last_read = waiting[-1].claim
        return waiting

    def settle(self) -> float | None:
        """Make the limits what they should be, also those of containers that came meanwhile. Where
        no claim limits anything, there is nothing to do until a claim changed."""
        records = tuple(self._records())
        shared = frozenset(
            record.claim.uid for record in records if _is_read(record) and not record.pod_claim_name
        )
        reported = self._limits.report_new_pods(self._update_soon if shared else None)
        if reported and not (self._new_pods_reported and shared.issubset(self._shared)):
            self._update_soon()  # once for the pods that came before they were reported
        self._new_pods_reported, self._shared = reported, shared
        needed = self._limits.settle(self._shares, any(record.limited for record in records))
        return None if needed or shared else UNTIL_WOKEN

    def _shares(self, containers: Sequence[Container]) -> tuple[PodMemoryShare, ...]:
        """What every pod holds, with those of *containers* that were given claims."""
        records = tuple(self._records())
        if (records, containers) != self._computed_from:
            self._pod_shares = pod_memory_shares(records_with_pods(records, containers))
            self._computed_from = records, containers
        return self._pod_shares

    def _update_pods_of(self, record: ClaimRecord) -> None:
        facts = {"claim": str(record.claim)}
        try:
            claim = self._claims.read_cached(record.claim)
            if claim.pods != record.pods:  # what is a moment old may lack one that is recorded
                claim = self._claims.read(record.claim)
        except DriverError as e:
            log.info("which pods use a claim is not known now", extra=facts | {"error": str(e)})
            return
        try:
            if self._prepared_claims.note_pods(claim):
                self._settle_soon()
        except DriverError as e:
            log.warning("limits do not hold for the pods that use a claim now: %s", e, extra=facts)


def _is_read(record: ClaimRecord) -> bool:
    """Whether it matters before any container runs which pods come to it, prepared already. That of
    an allocation is known by then (``plugin.device_plugin``)."""
    if not record.completed or record.allocation is not None:
        return False
    return bool(record.namespaces) or (record.limited and not record.pod_claim_name)
