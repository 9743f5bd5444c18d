"""Reports the health of GPUs by events, metrics and logs.

Events are about the Node, and about the claims and pods that have a part of the GPU.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from dra_driver.base.errors import NodeError
from dra_driver.k8s.claims import PodUid
from dra_driver.k8s.events import Event, Events, NodeRef, PodRef, Regarding
from dra_driver.model.gpus import Gpu, GpuUuid, PartitionKey
from dra_driver.model.health import (
    DEFAULT_HEALTH_RULES,
    Effect,
    Fault,
    Faults,
    GpuEvent,
    Problem,
)
from dra_driver.model.processes import ContainerProcess
from dra_driver.model.records import ClaimRecord, Holding
from dra_driver.plan.health.messages import describe_event, describe_fault, meaning
from dra_driver.plan.health.problems import NO_ACTION, effect_of
from dra_driver.plan.health.state import RulesByGpu, partition_of
from dra_driver.plan.health.taints import share_memory
from dra_driver.plugin.metrics import HealthMetrics

log = logging.getLogger(__name__)

_OF_NODE = frozenset({Problem.UNMONITORED})  # nothing that who has the GPU should know
_FaultId = tuple[GpuUuid, Problem, str, PartitionKey | None]


class HealthReporter:
    """Reports what is new since the last time. For one thread."""

    def __init__(
        self,
        events: Events,
        metrics: HealthMetrics,
        node: Callable[[], NodeRef],
        records: Callable[[], Sequence[ClaimRecord]],
        find_process: Callable[[int], ContainerProcess | None],
    ) -> None:
        """*find_process*: of a number; NodeError: it cannot be read now."""
        self._events = events
        self._metrics = metrics
        self._node = node
        self._records = records
        self._find_process = find_process
        self._reported: dict[_FaultId, Fault] = {}

    def begin(self, faults: Faults) -> None:
        """*faults* were reported by an earlier process."""
        self._reported = {_id(fault): fault for fault in faults}
        self._metrics.faults(faults)

    def update(
        self, faults: Faults, events: Sequence[GpuEvent], gpus: Sequence[Gpu], rules: RulesByGpu
    ) -> None:
        """*faults*: what is wrong now; *events*: what happened since the last time."""
        by_uuid = {gpu.uuid: gpu for gpu in gpus}
        for event in events:
            self._metrics.event(event)
        for event, pod in self._without_effect(events, rules):
            self._report_event(event, pod, by_uuid)
        now = {_id(fault): fault for fault in faults}
        places = {(fault.gpu, fault.problem, fault.partition) for fault in faults}
        for fault_id, fault in now.items():
            if fault_id not in self._reported:
                self._report_fault(fault, by_uuid, _effect(fault, rules))
        for fault_id, fault in self._reported.items():
            is_over = (fault.gpu, fault.problem, fault.partition) not in places
            if fault_id not in now and (is_over or fault.problem is Problem.XID):
                self._report_end(fault, by_uuid, _effect(fault, rules))
        if now.keys() != self._reported.keys():
            self._metrics.faults(faults)
        self._reported = now

    def _report_fault(self, fault: Fault, gpus: Mapping[GpuUuid, Gpu], effect: Effect) -> None:
        message = f"{_name(fault.gpu, gpus)}: {describe_fault(fault)}"
        log.warning("something is wrong with a GPU: %s", message, extra={"effect": effect.value})
        reason = "GPUHealthEvent" if effect is Effect.NONE else "GPUUnhealthy"
        about = _about(fault.gpu, fault.problem, fault.value)
        records = () if fault.problem in _OF_NODE else self._records()
        holders = _holders(records, fault.gpu, fault.partition)
        self._emit(_objects(holders), reason, about, message)

    def _report_end(self, fault: Fault, gpus: Mapping[GpuUuid, Gpu], effect: Effect) -> None:
        what = meaning(fault.problem, fault.value)
        message = f"{_name(fault.gpu, gpus)}: it is over: {what}"
        log.info("a GPU is well again: %s", message)
        if effect is not Effect.NONE:
            about = _about(fault.gpu, fault.problem, fault.value)
            holders = _holders(self._records(), fault.gpu, fault.partition)
            self._emit(_objects(holders), "GPURecovered", about, message)

    def _without_effect(
        self, events: Iterable[GpuEvent], rules: RulesByGpu
    ) -> Iterable[tuple[GpuEvent, PodUid | None]]:
        """Those that leave no fault, and whose they are; of the processes of one pod, thousands of
        which may fail within a moment, as one that counts them. That no recovery action is needed
        any more is no event to tell of."""
        counted: dict[tuple[GpuEvent, PodUid | None], GpuEvent] = {}
        for event in events:
            is_over = (event.problem, event.value) == (Problem.RECOVERY_ACTION, NO_ACTION)
            if is_over or _effect(event, rules) is not Effect.NONE:
                continue
            pod = self._pod_of(event.pid)
            key = (replace(event, pid=None, count=0, at=0.0), pod)
            if (before := counted.get(key)) is not None:
                event = replace(event, pid=None, count=before.count + event.count)
            counted[key] = event
        return [(event, pod) for (_, pod), event in counted.items()]

    def _report_event(
        self, event: GpuEvent, pod: PodUid | None, gpus: Mapping[GpuUuid, Gpu]
    ) -> None:
        message = f"{_name(event.gpu, gpus)}: {describe_event(event)}"
        log.info("a GPU reported something: %s", message)
        partition = partition_of(gpus.get(event.gpu), event.gi)
        holders = list(_holders(self._records(), event.gpu, partition))
        of_pod = [record for record in holders if any(user.uid == pod for user in record.pods)]
        about = _about(event.gpu, event.problem, event.value)
        objects = _objects(of_pod, pod) if of_pod else _objects(holders)
        self._emit(objects, "GPUHealthEvent", about, message)

    def _pod_of(self, pid: int | None) -> PodUid | None:
        if pid is None:
            return None
        try:
            process = self._find_process(pid)
        except NodeError as error:
            log.debug("the pod of a process is not known", extra={"pid": pid, "error": str(error)})
            return None
        return process.pod if process is not None else None

    def _emit(self, regarding: Iterable[Regarding], reason: str, about: str, message: str) -> None:
        """Tell the Node, and *regarding*."""
        for each in dict.fromkeys((self._node(), *regarding)):
            is_warning = reason != "GPURecovered"
            self._events.emit(Event(each, reason, about, message, is_warning))


def _objects(holders: Iterable[ClaimRecord], only: PodUid | None = None) -> Iterator[Regarding]:
    """The claims and their pods; *only*: of the pods this one alone."""
    for record in holders:
        if record.allocation is None:  # else the API server has no such claim
            yield record.claim
        for pod in record.pods:
            if only in (None, pod.uid):
                yield PodRef(record.claim.namespace, pod.name, pod.uid)


def _id(fault: Fault) -> _FaultId:
    return fault.gpu, fault.problem, fault.value, fault.partition


def _effect(what: Fault | GpuEvent, rules: RulesByGpu) -> Effect:
    return effect_of(what.problem, what.value, rules.get(what.gpu, DEFAULT_HEALTH_RULES))


def _holders(
    records: Iterable[ClaimRecord], gpu: GpuUuid, partition: PartitionKey | None
) -> Iterator[ClaimRecord]:
    """The claims that have a part of the GPU, or of that partition."""
    for record in records:
        if any(_is_concerned(holding, gpu, partition) for holding in record.holdings):
            yield record


def _is_concerned(holding: Holding, gpu: GpuUuid, partition: PartitionKey | None) -> bool:
    is_of_gpu = holding.gpu == gpu and not holding.admin
    return is_of_gpu and share_memory(partition, holding.partition)


def _name(uuid: GpuUuid, gpus: Mapping[GpuUuid, Gpu]) -> str:
    return f"{gpus[uuid].name} ({uuid})" if uuid in gpus else uuid


def _about(gpu: GpuUuid, problem: Problem, value: str) -> str:
    """One event for each Xid; of another problem one for all its values."""
    return f"{gpu} {problem} {value if problem is Problem.XID else ''}".strip()
