"""Answers the kubelet about the devices of containers: ``Allocate`` and ``PreStartContainer``.

What the kubelet gave to a container is prepared and recorded as a claim is. With ``Allocate`` the
pod is not known: all is done that the answer names. Before the container starts it is known, and
its limits are set; whoever had one of the devices before has ended by then. Nothing of the first
call is relied on: after a reboot or a lost record the kubelet uses its old answer, and all that it
names is made again.
"""

import concurrent.futures
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from cdi.encoding import from_text
from dra_driver.base.deadlines import Deadline, request_deadline
from dra_driver.base.errors import (
    ClaimError,
    ClaimInUse,
    DriverError,
    MpsAgentUnreachable,
    NodeError,
    TimedOut,
    UnknownDevice,
    join_problems,
)
from dra_driver.base.frozen import frozen
from dra_driver.base.threads import StandingThreads
from dra_driver.k8s.claims import ClaimRef, PodUid, PreparedDevice
from dra_driver.k8s.events import Event, Events, NodeRef, PodRef
from dra_driver.kubeletplugin.device_plugin.resources import (
    ContainerResponse,
    DeviceId,
    ResourceName,
)
from dra_driver.model.offer import Offer
from dra_driver.model.profiles import AllocationApi
from dra_driver.model.records import AllocationClaim, ClaimRecord, DeviceAllocation
from dra_driver.node.gpu_node import GpuNode
from dra_driver.node.state.ledger import Ledger
from dra_driver.plan.device_plugin.allocations import (
    allocation_claim,
    allocation_ref,
    held_claim,
)
from dra_driver.plan.device_plugin.container import (
    kept_answer_problems,
    response_ahead,
    response_by_files,
    response_by_names,
)
from dra_driver.plan.device_plugin.preferred import preferred
from dra_driver.plan.device_plugin.resources import ResourceNames
from dra_driver.plan.device_plugin.users import (
    AllocatedPod,
    as_recorded,
    names_files_of,
    needs_pod,
    of_same_containers,
    overlapping,
    pod_problems,
    server_problems,
    was_given_by_another_plugin,
)
from dra_driver.plan.node_api import ApiState
from dra_driver.plan.prepare.driver_spec import driver_spec
from dra_driver.plugin.claims.in_use import InUseCheck
from dra_driver.plugin.claims.prepared_claims import CallTimeouts
from dra_driver.plugin.claims.preparer import Preparer
from dra_driver.plugin.device_plugin.pods import AllocatedPods
from dra_driver.plugin.node_api.current import NodeApi
from dra_driver.plugin.publish.offers import OfferBuilder

log = logging.getLogger(__name__)

ClaimOf = Callable[[DeviceAllocation, Offer, ResourceNames, str], AllocationClaim]
"""``allocation_claim``, or ``held_claim`` for what a container has already."""

# All pods of the node wait for an Allocate, and the kubelet waits without an end.
_ALLOCATE_SECONDS: Final = 0.9
# Of that: for leases, locks and holders together, for holders, for the MPS agent, for undoing.
_WAITS, _HAND_OVER, _AGENT, _UNDOING = 0.67, 0.33, 0.78, 0.17
# So many times as long where it cannot answer ahead: an error there fails the pod for good, and an
# MPS server takes a second to start.
_WITHOUT_NAMES: Final = 4.0
_ALLOCATES_AT_ONCE: Final = 16
# The kubelet gives up PreStartContainer after 30 s, and asks again: nobody would read why.
_PRE_START_SECONDS: Final = 23.0
_UNDO_SECONDS: Final = 2.0  # after these, for what failed
_HAND_OVER_SECONDS, _OTHERS_SECONDS = 5.0, 20.0
_POLL_SECONDS: Final = 0.25
_NOT_READY: Final = "GPUNotReady"


@frozen
class AllocationDependencies:
    """What allocations are made with."""

    preparer: Preparer
    ledger: Ledger
    users: InUseCheck
    offers: OfferBuilder
    node: GpuNode
    pods: AllocatedPods
    api: NodeApi
    events: Events
    node_ref: Callable[[], NodeRef]
    observe: Callable[[str, str, float], None]  # operation, outcome, seconds
    takes_names: Callable[[], bool]  # whether the kubelet hands CDI names on
    names: ResourceNames
    driver: str
    pool: str
    host_root: Path


class Allocations:
    """The ``DevicePluginHandler`` of this node; for many threads."""

    def __init__(
        self,
        dependencies: AllocationDependencies,
        allocate_seconds: float = _ALLOCATE_SECONDS,
        pre_start_seconds: float = _PRE_START_SECONDS,
        others_seconds: float = _OTHERS_SECONDS,
    ) -> None:
        """*others_seconds*: for the last users of the devices of a container to end."""
        self._parts = dependencies
        self._preparer = dependencies.preparer
        self._ledger = dependencies.ledger
        self._allocate_seconds = allocate_seconds
        self._pre_start_seconds = pre_start_seconds
        self._others_seconds = others_seconds
        self._threads = StandingThreads("allocate", _ALLOCATES_AT_ONCE, standing=1)
        # Called with devices of a container for which nothing is prepared.
        self.prepare_soon: Callable[[], None] = lambda: None
        # Called when the kubelet asks for devices that are given out by nobody, or by others.
        self.refused: Callable[[ResourceName], None] = lambda resource: None

    def allocate(self, resource: ResourceName, ids: Sequence[DeviceId]) -> ContainerResponse:
        """Whatever hangs, the kubelet has its answer in time. What only takes longer is prepared
        before the container starts, if the answer can be given without it; what is prepared too
        late for any pod is taken back."""
        allocation = _allocation(resource, ids)
        seconds = self._allocate_seconds * (1 if self._parts.takes_names() else _WITHOUT_NAMES)
        with self._observed("allocate"):
            call = self._threads.submit(partial(self._allocate, allocation, seconds))
            try:
                return call.result(seconds)
            except concurrent.futures.TimeoutError:
                call.cancel()
                late: NodeError = TimedOut(
                    f"{_text(allocation)}: preparing this took more than "
                    f"{seconds:g} s, and all pods of the node wait for it; create the pod again, "
                    "and look at the log of the plugin if that does not help"
                )
            except (TimedOut, MpsAgentUnreachable) as e:
                late = e
            return self._answer_ahead(allocation, late)

    def _answer_ahead(self, allocation: DeviceAllocation, late: NodeError) -> ContainerResponse:
        """By what was offered last: the call may have waited before it came to look at that.
        ClaimError: a device is not healthy, or there are too many. *late*: it is not known then."""
        parts = self._parts
        if not parts.takes_names():
            raise late
        if parts.api.refusal(AllocationApi.DEVICE_PLUGIN) is None:
            if (offer := parts.offers.last_offer) is None:
                raise late
            try:
                allocation_claim(allocation, offer, parts.names, parts.pool)
            except UnknownDevice:  # another process may have listed what it has seen since
                raise late from None
        elif not self._is_prepared(allocation_ref(allocation)):
            raise self._refusal(allocation)
        facts = {"resource": allocation.resource, "ids": list(allocation.ids)}
        log.warning("devices are prepared later: %s", late, extra=facts)
        self.prepare_soon()
        return response_ahead(allocation_ref(allocation), len(allocation.ids), parts.driver)

    def _allocate(self, allocation: DeviceAllocation, seconds: float) -> ContainerResponse:
        ref = allocation_ref(allocation)
        timeouts = CallTimeouts(seconds * _WAITS, seconds * _HAND_OVER)
        with request_deadline(seconds * _AGENT, seconds * _UNDOING):
            if self._parts.api.refusal(AllocationApi.DEVICE_PLUGIN) is None:
                claim = self._claim(allocation_claim, allocation)
                return self._answer(ref, self._preparer.allocate(claim, timeouts))
            prepared = self._is_prepared(ref) and self._preparer.recorded(ref, timeouts.all)
            if not prepared:
                raise self._refusal(allocation)
            return self._answer(ref, prepared)

    def _refusal(self, allocation: DeviceAllocation) -> NodeError:
        self.refused(allocation.resource)
        refusal = self._parts.api.refusal(AllocationApi.DEVICE_PLUGIN)
        return NodeError(f"{_text(allocation)}: {refusal}")

    def _claim(self, claim_of: ClaimOf, allocation: DeviceAllocation) -> AllocationClaim:
        parts = self._parts
        try:
            return claim_of(allocation, parts.offers.now(), parts.names, parts.pool)
        except UnknownDevice:  # another process may have listed what it has seen since
            return claim_of(allocation, parts.offers.refresh(), parts.names, parts.pool)

    def _is_prepared(self, ref: ClaimRef) -> bool:
        known = self._ledger.known(ref.uid)
        return known is not None and known.completed

    def _answer(self, ref: ClaimRef, prepared: Sequence[PreparedDevice]) -> ContainerResponse:
        return response_by_names(prepared) if self._parts.takes_names() else self._files(ref)

    def _files(self, ref: ClaimRef) -> ContainerResponse:
        record = self._ledger.record(ref.uid)
        if record is None or record.spec is None:
            raise NodeError(f"{ref.name}: what was prepared was taken back at once; try again")
        # Hooks cannot be said to the kubelet: libraries are mounted where programs look for them.
        driver = driver_spec(self._parts.node.driver_files(), None, self._parts.driver)
        return response_by_files(driver, from_text(record.spec))

    def pre_start(self, resource: ResourceName, ids: Sequence[DeviceId]) -> None:
        """Refused with a reason where the container must not start now; the kubelet asks again."""
        allocation = _allocation(resource, ids)
        doing = f"{_text(allocation)}: preparing it again before its container starts"
        deadline = Deadline(self._pre_start_seconds, doing)
        with (
            self._observed("pre-start"),
            request_deadline(self._pre_start_seconds + _UNDO_SECONDS, _UNDO_SECONDS),
        ):
            pods, unknown = self._find_pods(allocation)
            if was_given_by_another_plugin(pods, allocation):
                facts = {"resource": resource, "ids": list(ids)}
                log.info("another device plugin gave these devices: left as they are", extra=facts)
                return
            try:
                if deadline.expired:
                    raise TimedOut(_found_too_late(allocation, deadline))
                record = self.prepare_again(allocation, deadline)
                self._wait_for_others(allocation, pods, deadline)
                if pods:
                    self._refuse_two_servers(record, allocation)
                    self._refuse_kept_answers(record, pods)
                    self.give_to(record, pods)
                else:
                    self._start_for_nobody(record, unknown)
            except DriverError as e:
                is_late = unknown and isinstance(e, TimedOut)
                error = TimedOut(f"{e}: {unknown}", f"{e.public}: {unknown}") if is_late else e
                self._tell(pods, allocation, error)
                raise error from e.__cause__

    def prepare_again(self, allocation: DeviceAllocation, deadline: Deadline) -> ClaimRecord:
        """See to it that all is there that the kubelet was answered, whatever became of it."""
        ref = allocation_ref(allocation)
        if not (self._is_prepared(ref) and self._preparer.recorded(ref, deadline.check())):
            api = self._parts.api
            if api.state(AllocationApi.DEVICE_PLUGIN) is ApiState.OFF:
                refusal = api.refusal(AllocationApi.DEVICE_PLUGIN)
                raise NodeError(f"{_text(allocation)}: {refusal}; delete the pod")
            seconds = deadline.check()
            timeouts = CallTimeouts(seconds, min(_HAND_OVER_SECONDS, seconds))
            self._preparer.allocate(self._claim(held_claim, allocation), timeouts)
        record = self._ledger.known(ref.uid)
        if record is None or not record.completed:
            raise NodeError(f"{_text(allocation)}: it was taken back at once; it is tried again")
        if record.namespaces and not self._preparer.prepared_claims.serve_again(ref.uid):
            raise NodeError(
                f"{_text(allocation)}: its MPS server is in another directory than the kubelet was "
                "answered; delete the pod"
            )
        return record

    def give_to(self, record: ClaimRecord, pods: Sequence[AllocatedPod]) -> None:
        """Record the pods that have it, and set their limits. ClaimError: they may not have it.
        NodeError: a limit that has to hold could not be set."""
        pods = [as_recorded(pod, record) for pod in pods]
        if problems := [problem for pod in pods for problem in pod_problems(record, pod)]:
            raise ClaimError("; ".join(problems))
        given = tuple(sorted(pod.pod for pod in pods))
        prepared_claims = self._preparer.prepared_claims
        if not prepared_claims.give_to(record.claim.uid, pods[0].namespace, given):
            raise NodeError(f"{record.claim.name}: it was taken back at once; it is tried again")

    def _refuse_two_servers(self, record: ClaimRecord, allocation: DeviceAllocation) -> None:
        """ClaimError: the container has devices besides that its program could not see."""
        given = of_same_containers(allocation, self._parts.pods.containers())
        others = [each for each in self._ledger.records() if each.allocation in given]
        if problems := list(server_problems(record, others)):
            raise ClaimError(join_problems(f"{record.claim.name}: ", problems))

    def _refuse_kept_answers(self, record: ClaimRecord, pods: Sequence[AllocatedPod]) -> None:
        """NodeError: by its old answer the kubelet would give the container something else."""
        kept = {answer for pod in pods for answer in pod.answers if names_files_of(answer, record)}
        now = self._files(record.claim) if kept else ContainerResponse()
        problems = [
            problem
            for answer in kept
            for problem in kept_answer_problems(answer, now, self._is_on_host)
        ]
        if problems:
            opening = (
                f"{record.claim.name}: the node has changed since the kubelet was answered, and it "
                "asks once for each pod; delete the pod: "
            )
            raise NodeError(join_problems(opening, problems))

    def _is_on_host(self, path: str) -> bool:
        return os.path.lexists(self._parts.host_root / path.lstrip("/"))

    def _find_pods(self, allocation: DeviceAllocation) -> tuple[Sequence[AllocatedPod], str]:
        """The pods of the container that starts, and why they are not known, or not their names."""
        try:
            pods = self._parts.pods.with_devices(allocation)
        except NodeError as e:
            return (), str(e)
        if not pods:
            return (), "the kubelet does not say which pod has these devices"
        unnamed = [pod.pod.uid for pod in pods if pod.spec is None]
        return pods, f"the API server does not tell of pod {', '.join(unnamed)}" if unnamed else ""

    def _wait_for_others(
        self, allocation: DeviceAllocation, pods: Sequence[AllocatedPod], deadline: Deadline
    ) -> None:
        """Until no process of another pod uses one of the devices: their last user may be ending.
        What has only ended users is taken back, and if it can, what the init containers of the same
        pod had."""
        uids = {pod.pod.uid for pod in pods}
        patience = Deadline(self._others_seconds, within=deadline)
        while problem := self._used_by_others(allocation, uids):
            if patience.expired:
                raise ClaimInUse(problem)
            time.sleep(_POLL_SECONDS)
        for record in overlapping(allocation, self._ledger.records()):
            if record.allocation != allocation:
                self._take_back(record)

    def _used_by_others(self, allocation: DeviceAllocation, uids: Collection[PodUid]) -> str:
        """By whom; empty: by nobody. *uids*: those who have the devices now."""
        for record in overlapping(allocation, self._ledger.records()):
            for pod in self._parts.users.pods_using(record):
                if pod.uid not in uids:
                    return (
                        f"{_text(allocation)}: pod {pod.name} still uses "
                        f"{_shared_text(allocation, record)}; this container waits for its end"
                    )
        return ""

    def _take_back(self, record: ClaimRecord) -> None:
        try:
            self._preparer.take_back_if(record.claim, lambda: True)
        except DriverError as e:  # the reconciler tries it again
            facts = {"uid": record.claim.uid, "error": str(e)}
            log.info("what a container had before is taken back later", extra=facts)

    def _start_for_nobody(self, record: ClaimRecord, unknown: str) -> None:
        """NodeError: it must not be. Else the pod is found later, and limited then."""
        if needs_pod(record):
            raise NodeError(
                f"{record.claim.name}: this node's profile says what has to hold for the pod "
                f"(memoryLimit: Strict, or mpsTenants), and which pod it is is not known: {unknown}"
            )
        message = (
            f"a container starts with {record.claim.name}, and its pod is not known: {unknown}"
        )
        log.warning(message, extra={"uid": record.claim.uid})
        if record.limited:
            message += "; its memory is limited once the pod is found"
            node = self._parts.node_ref()
            self._parts.events.emit(Event(node, "GPUPodUnknown", record.claim.uid, message))

    def _tell(
        self, pods: Sequence[AllocatedPod], allocation: DeviceAllocation, error: DriverError
    ) -> None:
        for pod in pods:
            if pod.namespace:
                regarding = PodRef(pod.namespace, pod.pod.name, pod.pod.uid)
                message = error.public
                if not message.startswith(allocation.resource):
                    message = f"{allocation.resource}: {message}"
                self._parts.events.emit(Event(regarding, _NOT_READY, allocation.resource, message))

    def preferred(
        self,
        resource: ResourceName,
        available: Sequence[DeviceId],
        must_include: Sequence[DeviceId],
        size: int,
    ) -> Sequence[DeviceId]:
        """Any of them where it is not known what is offered. If there are enough others, none that
        is recorded: its last pod may use it yet, and what held for that pod holds until it is taken
        back; a kubelet that has lost its checkpoint takes all for free."""
        try:
            offer = self._parts.offers.now()
        except DriverError:
            return tuple(dict.fromkeys((*must_include, *available)))[:size]
        allocations = (record.allocation for record in self._ledger.records())
        recorded = {id_ for each in allocations if each for id_ in each.ids} - {*must_include}
        unrecorded = [id_ for id_ in available if id_ not in recorded]
        available = unrecorded if len(unrecorded) >= size else available
        return preferred(offer, resource, available, must_include, size, self._parts.names)

    @contextmanager
    def _observed(self, operation: str) -> Iterator[None]:
        begun, outcome = time.monotonic(), "crashed"
        try:
            yield
            outcome = "ok"
        except DriverError as e:
            outcome = "refused" if isinstance(e, ClaimError) else "failed"
            raise
        finally:
            self._parts.observe(operation, outcome, time.monotonic() - begun)


def _allocation(resource: ResourceName, ids: Sequence[DeviceId]) -> DeviceAllocation:
    return DeviceAllocation(resource, tuple(sorted(set(ids))))


def _text(allocation: DeviceAllocation) -> str:
    return f"{allocation.resource} {', '.join(allocation.ids)}"


def _found_too_late(allocation: DeviceAllocation, deadline: Deadline) -> str:
    return f"{_text(allocation)}: finding its pod took more than {deadline.seconds:.3g} s"


def _shared_text(allocation: DeviceAllocation, record: ClaimRecord) -> str:
    """The devices of *allocation* that are of *record*, too, after ``_text`` has named all."""
    recorded = record.allocation.ids if record.allocation else ()
    shared = [id_ for id_ in allocation.ids if id_ in recorded]
    if len(shared) < len(allocation.ids):
        return ", ".join(shared)
    return "it" if len(shared) == 1 else "them"
