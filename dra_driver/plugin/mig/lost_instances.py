"""Finds claims whose MIG instance is not there any more, and tells their pods.

The looks at the GPUs raise the suspicion; then the GPU itself is asked, at a moment when nobody
acts on the claim, since a claim that is being given back has no instance either. From then on the
record says that it is gone: what somebody else creates in its place can have the same UUID.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

from dra_driver.base.errors import NodeError
from dra_driver.k8s.claims import ClaimUid, PodUid
from dra_driver.k8s.events import Event, EventRecorder, PodRef
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.records import ClaimRecord, Holding
from dra_driver.node.gpu_node import GpuNode
from dra_driver.plan.mig.claims import (
    computed_partitions,
    lost_instance_message,
    lost_instances,
    with_lost_instances,
)
from dra_driver.plugin.claims.partitions import instance_at
from dra_driver.plugin.claims.prepared_claims import PreparedClaims
from dra_driver.plugin.metrics import Metrics

log = logging.getLogger(__name__)


_LostInstance = tuple[ClaimUid, GpuUuid]
"""What a claim has lost, by its UUID."""
_NotifiedPods = set[PodUid]


class LostInstances:
    """Remembers whose instance is gone. One thread at a time may ``look``."""

    def __init__(
        self,
        node: GpuNode,
        records: Callable[[], Sequence[ClaimRecord]],
        prepared_claims: PreparedClaims,
        events: EventRecorder,
        metrics: Metrics,
    ) -> None:
        """*records* gives the same object again where nothing changed."""
        self._node = node
        self._records = records
        self._prepared_claims = prepared_claims
        self._events = events
        self._metrics = metrics
        self._last_records: Sequence[ClaimRecord] = ()
        self._with_partitions: tuple[ClaimRecord, ...] = ()  # of these
        self._lost: dict[_LostInstance, _NotifiedPods] = {}

    def look(self) -> None:
        """One look and what follows from it. Without claims on partitions it looks at nothing."""
        if (records := self._records()) is not self._last_records:
            self._last_records = records
            self._with_partitions = tuple(
                record for record in records if computed_partitions(record)
            )
        if not self._with_partitions and not self._lost:
            return
        gpus = self._node.inventory().gpus if self._with_partitions else ()
        lost: dict[_LostInstance, _NotifiedPods] = {}
        for record in self._with_partitions:
            for holding in self._confirmed(record, lost_instances(record, gpus)):
                notified = lost.setdefault(
                    _key(record, holding), self._notified_before(record, holding)
                )
                self._notify_pods(record, holding, notified)
        self._lost = lost
        self._metrics.mig_instances_lost(len(lost))

    def _notified_before(self, record: ClaimRecord, holding: Holding) -> _NotifiedPods:
        notified = self._lost.get(_key(record, holding))
        if notified is None:
            facts = {"claim": str(record.claim), "device": holding.device, "uuid": holding.uuid}
            log.error("the MIG instance of a claim is gone", extra=facts)
            return set()
        return notified

    def _confirmed(self, record: ClaimRecord, suspects: Iterable[Holding]) -> Iterator[Holding]:
        """What was found to be gone once is so until a look finds it. Where half an instance is
        left, it is asked again, since nobody knows yet what becomes of it."""
        unconfirmed = []
        for suspect in suspects:
            if _key(record, suspect) in self._lost and not suspect.created_for_claims:
                yield suspect
            else:
                unconfirmed.append(suspect)
        if unconfirmed:
            yield from self._ask_gpu(record, unconfirmed)

    def _ask_gpu(self, record: ClaimRecord, suspects: Sequence[Holding]) -> Sequence[Holding]:
        gone: list[Holding] = []

        def ask(current: ClaimRecord) -> ClaimRecord:
            gone.extend(
                suspect
                for suspect in suspects
                if suspect in current.holdings and self._is_gone(suspect)
            )
            return with_lost_instances(current, filter(self._is_completely_gone, gone))

        try:
            self._prepared_claims.while_prepared(record.claim.uid, ask)
        except NodeError as e:  # the next look asks again
            facts = {"claim": str(record.claim), "error": str(e)}
            log.debug("an instance cannot be looked for, or given up", extra=facts)
        return gone

    def _is_gone(self, holding: Holding) -> bool:
        if holding.instance is None:
            return False
        current = instance_at(self._node, holding.gpu, holding.instance.key)
        return current is None or current.uuid != holding.instance.uuid

    def _is_completely_gone(self, holding: Holding) -> bool:
        """Of one that is gone: no half of it is left, which would have to be removed."""
        if holding.instance is None:
            return False
        keys = self._node.partitions(holding.gpu)
        current = instance_at(self._node, holding.gpu, holding.instance.key)
        return current is not None or holding.instance.key not in keys

    def _notify_pods(self, record: ClaimRecord, holding: Holding, notified: _NotifiedPods) -> None:
        about = f"{holding.unit} {record.claim}"
        message = lost_instance_message(record, holding)
        for pod in record.pods:
            if pod.uid not in notified:
                notified.add(pod.uid)
                ref = PodRef(record.claim.namespace, pod.name, pod.uid)
                self._events.emit(Event(ref, "MIGInstanceGone", about, message))


def _key(record: ClaimRecord, holding: Holding) -> _LostInstance:
    return record.claim.uid, holding.uuid or GpuUuid("")
