"""Finds claims whose MIG instance is not there any more, and tells their pods.

An instance that the last look at the GPUs did not see is a suspect. Then the GPU itself is asked,
at a moment when nobody acts on the claim, since a claim that is being given back has no instance
either. From then on the record says that the instance is gone: an instance that somebody else
creates in its place can have the same UUID.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

from dra_driver.base.errors import NodeError
from dra_driver.base.threads import UNTIL_WOKEN
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

_LostInstance = tuple[ClaimUid, GpuUuid]  # a claim, and the UUID of the instance that it lost
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
        self._node = node
        self._records = records
        self._prepared_claims = prepared_claims
        self._events = events
        self._metrics = metrics
        self._lost: dict[_LostInstance, _NotifiedPods] = {}

    def look(self) -> float | None:
        """Find lost instances, and tell the pods that were not told yet. Where no claim has any,
        there is nothing to look for until a claim changed."""
        records = [record for record in self._records() if computed_partitions(record)]
        if not records and not self._lost:
            return UNTIL_WOKEN
        gpus = self._node.inventory().gpus if records else ()
        lost: dict[_LostInstance, _NotifiedPods] = {}
        for record in records:
            for holding in self._confirmed(record, lost_instances(record, gpus)):
                key = _key(record, holding)
                if key not in self._lost:
                    facts = {"claim": str(record.claim), "device": holding.device}
                    log.error(
                        "the MIG instance of a claim is gone", extra=facts | {"uuid": holding.uuid}
                    )
                notified = lost.setdefault(key, self._lost.get(key, set()))
                self._notify_pods(record, holding, notified)
        self._lost = lost
        self._metrics.mig_instances_lost(len(lost))
        return None

    def _confirmed(self, record: ClaimRecord, suspects: Iterable[Holding]) -> Iterator[Holding]:
        """An instance that was gone once stays gone until a look sees it. Where half of it still
        exists, the GPU is asked again."""
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
        """Of one that is gone: no half of it exists, which would have to be removed."""
        if holding.instance is None:
            return False
        key, keys = holding.instance.key, self._node.partitions(holding.gpu)
        return key not in keys or instance_at(self._node, holding.gpu, key) is not None

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
