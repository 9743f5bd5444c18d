"""Finds claims whose MIG instance is not there any more, and tells their pods.

The looks at the GPUs are what makes one suspect; asked is the GPU itself then, and at a moment when
nobody acts on the claim, since a claim that is just given back has none either. From then on the
record says that it is gone: what somebody else makes in its place can be called the same.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from dra_driver.cluster.events import Event, PodRef
from dra_driver.errors import NodeError
from dra_driver.kubeletplugin.claims import ClaimUid, PodUid
from dra_driver.model.devices import GpuUuid
from dra_driver.model.holdings import Holding, Record
from dra_driver.model.inventory import Inventory
from dra_driver.model.mig import Instance, PartitionKey
from dra_driver.plan.mig.gone import given_up, lost, message, partitions
from dra_driver.plugin.instance_at import instance_at

log = logging.getLogger(__name__)


class Node(Protocol):
    """What GPUs tell; ``dra_driver.node.node``."""

    def inventory(self) -> Inventory: ...  # as of the last look
    def partitions(self, gpu: GpuUuid) -> tuple[PartitionKey, ...]: ...  # also half of one
    def instance(self, gpu: GpuUuid, key: PartitionKey) -> Instance: ...


class Preparer(Protocol):
    """Who acts on claims; ``dra_driver.plugin.upkeep``."""

    def while_prepared(self, uid: ClaimUid, act: Callable[[Record], Record]) -> None: ...


class Events(Protocol):
    """Tells of pods without waiting; ``dra_driver.cluster.events``."""

    def tell(self, event: Event) -> None: ...


class Observer(Protocol):
    """Who counts; ``dra_driver.plugin.metrics``."""

    def mig_instances_gone(self, number: int) -> None: ...


_Lost = tuple[ClaimUid, GpuUuid]
"""What a claim has lost: an instance, by its UUID."""
_Told = set[PodUid]


class GoneInstances:
    """Remembers whose instance is gone. One thread at a time may ``look``."""

    def __init__(
        self,
        node: Node,
        records: Callable[[], Sequence[Record]],
        preparer: Preparer,
        events: Events,
        observer: Observer,
    ) -> None:
        """*records* gives the same object again where nothing changed."""
        self._node = node
        self._records = records
        self._preparer = preparer
        self._events = events
        self._observer = observer
        self._seen: Sequence[Record] = ()
        self._cut: tuple[Record, ...] = ()  # of these, the ones with partitions
        self._gone: dict[_Lost, _Told] = {}  # and which pods were told

    def look(self) -> None:
        """One look and what follows from it. Without claims on partitions it looks at nothing."""
        if (records := self._records()) is not self._seen:
            self._seen = records
            self._cut = tuple(one for one in records if partitions(one))
        if not self._cut and not self._gone:
            return
        gpus = self._node.inventory().gpus if self._cut else ()
        gone: dict[_Lost, _Told] = {}
        for record in self._cut:
            for holding in self._confirmed(record, lost(record, gpus)):
                told = gone.setdefault(_key(record, holding), self._before(record, holding))
                self._tell(record, holding, told)
        self._gone = gone
        self._observer.mig_instances_gone(len(gone))

    def _before(self, record: Record, holding: Holding) -> _Told:
        known = self._gone.get(_key(record, holding))
        if known is None:
            facts = {"claim": str(record.claim), "device": holding.device, "uuid": holding.uuid}
            log.error("the MIG instance of a claim is gone", extra=facts)
        return set() if known is None else known

    def _confirmed(self, record: Record, suspects: Iterable[Holding]) -> Iterator[Holding]:
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

    def _asked(self, record: Record, suspects: Sequence[Holding]) -> Sequence[Holding]:
        gone: list[Holding] = []

        def ask(now: Record) -> Record:
            gone.extend(one for one in suspects if one in now.holdings and self._is_gone(one))
            return given_up(now, filter(self._is_away, gone))

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

    def _tell(self, record: Record, holding: Holding, told: _Told) -> None:
        about = f"{holding.unit} {record.claim}"
        for pod in record.pods:
            if pod.uid not in told:
                told.add(pod.uid)
                ref = PodRef(record.claim.namespace, pod.name, pod.uid)
                self._events.tell(Event(ref, "MIGInstanceGone", about, message(record, holding)))


def _key(record: Record, holding: Holding) -> _Lost:
    return record.claim.uid, holding.uuid or GpuUuid("")
