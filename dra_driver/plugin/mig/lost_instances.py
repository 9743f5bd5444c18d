"""Finds claims whose MIG instance is not there any more, and tells their pods.

The looks at the GPUs are what makes one suspect; asked is the GPU itself then, and at a moment when
nobody acts on the claim, since a claim that is just given back has none either. From then on the
record says that it is gone: what somebody else makes in its place can be called the same.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from dra_driver.base.errors import NodeError
from dra_driver.k8s.claims import ClaimUid, PodUid
from dra_driver.k8s.events import Event, Events, PodRef
from dra_driver.model.gpus import GpuUuid, Inventory, MigInstance, PartitionKey
from dra_driver.model.records import ClaimRecord, Holding
from dra_driver.plan.mig.claims import (
    computed_partitions,
    lost_instance_message,
    lost_instances,
    with_lost_instances,
)
from dra_driver.plugin.claims.partitions import instance_at

log = logging.getLogger(__name__)


class LostInstanceNode(Protocol):
    """What GPUs tell; ``dra_driver.node.gpu_node``."""

    def inventory(self) -> Inventory: ...  # as of the last look
    def partitions(self, gpu: GpuUuid) -> tuple[PartitionKey, ...]: ...  # also half of one
    def instance(self, gpu: GpuUuid, key: PartitionKey) -> MigInstance: ...


class PreparedClaimUpdater(Protocol):
    """Who acts on claims; ``dra_driver.plugin.claims.prepared_claims``."""

    def while_prepared(self, uid: ClaimUid, act: Callable[[ClaimRecord], ClaimRecord]) -> None: ...


class LostInstanceMetrics(Protocol):
    """Who counts; ``dra_driver.plugin.metrics``."""

    def mig_instances_gone(self, number: int) -> None: ...


_LostKey = tuple[ClaimUid, GpuUuid]
"""What a claim has lost: an instance, by its UUID."""
_ToldPods = set[PodUid]


class LostInstances:
    """Remembers whose instance is gone. One thread at a time may ``look``."""

    def __init__(
        self,
        node: LostInstanceNode,
        records: Callable[[], Sequence[ClaimRecord]],
        preparer: PreparedClaimUpdater,
        events: Events,
        observer: LostInstanceMetrics,
    ) -> None:
        """*records* gives the same object again where nothing changed."""
        self._node = node
        self._records = records
        self._preparer = preparer
        self._events = events
        self._observer = observer
        self._seen: Sequence[ClaimRecord] = ()
        self._cut: tuple[ClaimRecord, ...] = ()  # of these, the ones with partitions
        self._gone: dict[_LostKey, _ToldPods] = {}  # and which pods were told

    def look(self) -> None:
        """One look and what follows from it. Without claims on partitions it looks at nothing."""
        if (records := self._records()) is not self._seen:
            self._seen = records
            self._cut = tuple(one for one in records if computed_partitions(one))
        if not self._cut and not self._gone:
            return
        gpus = self._node.inventory().gpus if self._cut else ()
        gone: dict[_LostKey, _ToldPods] = {}
        for record in self._cut:
            for holding in self._confirmed(record, lost_instances(record, gpus)):
                told = gone.setdefault(_key(record, holding), self._before(record, holding))
                self._tell(record, holding, told)
        self._gone = gone
        self._observer.mig_instances_gone(len(gone))

    def _before(self, record: ClaimRecord, holding: Holding) -> _ToldPods:
        known = self._gone.get(_key(record, holding))
        if known is None:
            facts = {"claim": str(record.claim), "device": holding.device, "uuid": holding.uuid}
            log.error("the MIG instance of a claim is gone", extra=facts)
        return set() if known is None else known

    def _confirmed(self, record: ClaimRecord, suspects: Iterable[Holding]) -> Iterator[Holding]:
        """What was found to be gone once is so until a look finds it. Of half a one that is left,
        nobody knows yet what becomes."""
        new = []
        for one in suspects:
            if _key(record, one) in self._gone and not one.cut:
                yield one
            else:
                new.append(one)
        if new:
            yield from self._asked(record, new)

    def _asked(self, record: ClaimRecord, suspects: Sequence[Holding]) -> Sequence[Holding]:
        gone: list[Holding] = []

        def ask(now: ClaimRecord) -> ClaimRecord:
            gone.extend(one for one in suspects if one in now.holdings and self._is_gone(one))
            return with_lost_instances(now, filter(self._is_away, gone))

        try:
            self._preparer.while_prepared(record.claim.uid, ask)
        except NodeError as e:  # the next look asks again
            facts = {"claim": str(record.claim), "error": str(e)}
            log.debug("an instance cannot be looked for, or given up", extra=facts)
        return gone

    def _is_gone(self, holding: Holding) -> bool:
        if holding.gpu is None or holding.instance is None:
            return False
        found = instance_at(self._node, holding.gpu, holding.instance.key)
        return found is None or found.uuid != holding.instance.uuid

    def _is_away(self, holding: Holding) -> bool:
        """Of one that is gone: no half of it is left, which would have to be removed."""
        if holding.gpu is None or holding.instance is None:
            return False
        there = self._node.partitions(holding.gpu)
        found = instance_at(self._node, holding.gpu, holding.instance.key)
        return found is not None or holding.instance.key not in there

    def _tell(self, record: ClaimRecord, holding: Holding, told: _ToldPods) -> None:
        about = f"{holding.unit} {record.claim}"
        for pod in record.pods:
            if pod.uid not in told:
                told.add(pod.uid)
                ref = PodRef(record.claim.namespace, pod.name, pod.uid)
                self._events.tell(
                    Event(ref, "MIGInstanceGone", about, lost_instance_message(record, holding))
                )


def _key(record: ClaimRecord, holding: Holding) -> _LostKey:
    return record.claim.uid, holding.uuid or GpuUuid("")
