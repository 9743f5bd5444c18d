"""Holds what is recorded of containers' devices against what the kubelet and the API server say.

The kubelet tells nobody when a pod has ended. And it uses its old answers after a reboot or when
our records are lost: what they name is made again before it is needed.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Final

from dra_driver.base.deadlines import Deadline
from dra_driver.base.errors import ClaimInUse, DriverError
from dra_driver.base.threads import UNTIL_WOKEN
from dra_driver.k8s.claims import ClaimRef, ClaimUid, PodUid
from dra_driver.kubeletplugin.device_plugin.resources import AllocatedContainer
from dra_driver.model.profiles import AllocationApi
from dra_driver.model.records import ClaimRecord, DeviceAllocation, is_allocation
from dra_driver.node.state.ledger import Ledger
from dra_driver.plan.device_plugin.allocations import allocation_uid
from dra_driver.plan.device_plugin.resources import ResourceNames
from dra_driver.plan.device_plugin.users import (
    Giver,
    Pods,
    Use,
    by_giver,
    have_gone,
    held_allocations,
    holding_pods,
    pods_with,
    uids_with,
    unrecorded,
    use_of,
)
from dra_driver.plan.node_api import ApiState
from dra_driver.plugin.claims.preparer import Preparer
from dra_driver.plugin.device_plugin.allocations import Allocations
from dra_driver.plugin.device_plugin.pods import AllocatedPods
from dra_driver.plugin.node_api.current import NodeApi

log = logging.getLogger(__name__)

Given = Mapping[Giver, Sequence[AllocatedContainer]]
"""The containers with devices, by who gave them these."""

_OFTEN_SECONDS, _OFTEN_FOR_SECONDS = 1.0, 10.0
_DRAINING_SECONDS: Final = 5.0  # the node waits for pods to end, and nothing more is given out
_WAITING_SECONDS: Final = 30.0  # it waits for pods with GPUs by another device plugin
_PREPARE_SECONDS: Final = 12.0
# Until what pods had that are gone is taken back: the API server may tell from a cache that is some
# seconds old.
_GONE_SECONDS: Final = 15.0
_SOON_SECONDS: Final = 0.5


class AllocationReconciler:
    """One thread at a time may ``look``."""

    def __init__(  # noqa: PLR0913 - who says what is so, and who makes it so
        self,
        allocations: Allocations,
        preparer: Preparer,
        ledger: Ledger,
        pods: AllocatedPods,
        api: NodeApi,
        names: ResourceNames,
        missing_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """*missing_seconds*: for how long no pod is seen with devices until they are taken back; at
        most, where the pods that had them are known to be gone."""
        self.allocations: Final = allocations
        self._preparer = preparer
        self._ledger = ledger
        self._pods = pods
        self._api = api
        self._names = names
        self._missing_seconds = missing_seconds
        self._clock = clock
        self._often_until = float("-inf")
        # Since when no pod is seen with it, and what pods the kubelet named since.
        self._missing_since: dict[ClaimUid, tuple[float, frozenset[PodUid]]] = {}
        self._again_at: float | None = None  # when something will have been missing for long enough
        self.held: frozenset[DeviceAllocation] = frozenset()  # as the kubelet said at the last look
        self.questions = 0  # for what containers have, that were begun …
        self.answered = 0  # … and the last one that *held* answers
        # Pods that have GPUs by another device plugin, then, or by one that is not known.
        self.others: tuple[str, ...] = ()
        self.others_gone: Callable[[], None] = lambda: None  # called when there are none any more
        self.ready = False  # a first look has seen what containers have, or could not
        self.ready_changed: Callable[[], None] = lambda: None
        # When the last look began, if it saw all that containers have, and what this driver gave of
        # that is recorded.
        self._knew_all_at: float | None = None
        self.mended = 0  # how often something was put right

    def look_often(self) -> None:
        """For a while: something was given out that is not prepared."""
        self._often_until = self._clock() + _OFTEN_FOR_SECONDS

    def knows_all(self, since: float = float("-inf")) -> bool:
        """Whether the ledger has all that this driver gave to containers, by a look that began at
        *since* or later."""
        knew_all_at = self._knew_all_at
        return knew_all_at is not None and knew_all_at >= since

    def look(self) -> float | None:
        """One look; the seconds until the next. NodeError: nothing is known now."""
        state, others = self._api.state(AllocationApi.DEVICE_PLUGIN), self.others
        try:
            seconds = self._look(state)
            if others and not self.others:
                self.others_gone()
            return seconds
        except BaseException:  # whatever it is, a bug, too: the next look comes all the same
            self._knew_all_at = None
            raise
        finally:
            self._note_ready(state)

    def _note_ready(self, state: ApiState) -> None:
        before, self.ready = self.ready, state is not ApiState.OFF
        if self.ready != before:
            self.ready_changed()

    def _look(self, state: ApiState) -> float | None:
        if state is ApiState.OFF and not self._recorded():
            self._knew_all_at = None
            return UNTIL_WOKEN
        began = self._clock()
        given, pods = self._given_and_pods()
        self._note_ready(state)  # to prepare something again can take long
        lost = unrecorded(given[Giver.US], self._recorded(), pods, self._names)
        if lost and state is not ApiState.OFF:
            for allocation in lost:
                self._prepare_again(allocation)
            given, pods = self._given_and_pods()  # they may be others by now
        ours = given[Giver.US]
        maybe_ours = (*ours, *given[Giver.UNKNOWN])
        missing = unrecorded(maybe_ours, self._recorded(), pods, self._names)
        self._knew_all_at = None if missing else began
        self._forget_damaged({allocation_uid(allocation) for allocation in missing})
        records = self._recorded()
        self._missing_since = {
            uid: since
            for uid, since in self._missing_since.items()
            if any(record.claim.uid == uid for record in records)
        }
        self._again_at = None
        for record in records:
            self._look_at(record, ours, pods)
        return self._next_look(state)

    def _next_look(self, state: ApiState) -> float | None:
        if self._clock() < self._often_until:
            return _OFTEN_SECONDS
        choice = self._api.choice
        # Beside another device plugin nothing is given out for weeks: only who leaves looks often.
        if choice.wanted not in (None, choice.serving):
            if state is ApiState.DRAINING:
                return _DRAINING_SECONDS
            if self.others:
                return _WAITING_SECONDS
        return (
            None if self._again_at is None else max(self._again_at - self._clock(), _SOON_SECONDS)
        )

    def _given_and_pods(self) -> tuple[Given, Pods | None]:
        self.questions += 1
        containers = self._pods.containers()
        pods = self._pods.pods() if containers or self._recorded() else {}
        self.held = held_allocations(containers, pods, self._names)
        self.answered = self.questions
        given = self._by_giver(containers)
        self.others = holding_pods((*given[Giver.OTHER], *given[Giver.UNKNOWN]), pods, self._names)
        return given, pods

    def _by_giver(self, containers: Sequence[AllocatedContainer]) -> Given:
        return by_giver(containers, self._recorded(), bool(self._api.choice.other_plugin))

    def _forget_damaged(self, missing: Collection[ClaimUid]) -> None:
        """Of a record that cannot be read nothing is known but the devices that containers have:
        what these have is recorded again by now, or *missing*, also where nobody knows who gave
        it."""
        for aside in self._ledger.set_aside():
            if is_allocation(aside.uid) and not aside.release and aside.uid not in missing:
                facts = {"uid": aside.uid, "path": str(aside.path), "reason": aside.reason}
                try:
                    self._preparer.take_back_if(
                        ClaimRef("", "", aside.uid), partial(self._is_unknown, aside.uid)
                    )
                except DriverError as e:
                    facts["error"] = str(e)
                    log.warning("cannot settle an unreadable record yet", extra=facts)
                else:
                    self.mended += 1
                    log.warning("forgot an unreadable record that no pod needs", extra=facts)

    def _is_unknown(self, uid: ClaimUid) -> bool:
        """Whether it was not recorded anew meanwhile, as it was given out again."""
        return self._ledger.known(uid) is None

    def _recorded(self) -> Sequence[ClaimRecord]:
        return [record for record in self._ledger.records() if record.allocation is not None]

    def _prepare_again(self, allocation: DeviceAllocation) -> None:
        facts = {"resource": allocation.resource, "ids": list(allocation.ids)}
        try:
            deadline = Deadline(_PREPARE_SECONDS, "preparing it again")
            self.allocations.prepare_again(allocation, deadline)
        except DriverError as e:
            facts["error"] = str(e)
            log.warning("what a container has cannot be prepared again yet", extra=facts)
            return
        self.mended += 1
        log.warning("prepared again what a container has", extra=facts)

    def _look_at(
        self, record: ClaimRecord, containers: Sequence[AllocatedContainer], pods: Pods | None
    ) -> None:
        uid, allocation = record.claim.uid, record.allocation
        if allocation is None:
            return
        use, uids = use_of(allocation, containers, pods), uids_with(allocation, containers)
        if use is Use.USED:
            self._missing_since.pop(uid, None)
            self._give_to_pods(record, allocation, containers, pods)
            return
        if use is Use.MISSING:
            since, named = self._missing_since.get(uid, (self._clock(), uids))
            if not uids <= named:  # a new pod has the same devices, and may be seen soon
                since, named = self._clock(), uids
            self._missing_since[uid] = since, named
            patience = self._missing_seconds
            if have_gone(record, named, pods):
                patience = min(patience, _GONE_SECONDS)
            if self._clock() - since < patience:
                self._look_again_at(since + patience)
                return
        self._take_back(record, allocation, uids)

    def _look_again_at(self, moment: float) -> None:
        self._again_at = moment if self._again_at is None else min(self._again_at, moment)

    def _give_to_pods(
        self,
        record: ClaimRecord,
        allocation: DeviceAllocation,
        containers: Sequence[AllocatedContainer],
        pods: Pods | None,
    ) -> None:
        """A container may have started before its pod was known."""
        found = pods_with(allocation, containers, pods or {})
        uids = {pod.pod.uid for pod in found}
        if not record.completed or (
            uids == {pod.uid for pod in record.pods} and record.claim.namespace
        ):
            return
        try:
            self.allocations.give_to(record, found)
        except DriverError as e:
            facts = {"uid": record.claim.uid, "error": str(e)}
            log.warning("what holds for a pod with devices does not hold yet", extra=facts)

    def _take_back(
        self, record: ClaimRecord, allocation: DeviceAllocation, ended: frozenset[PodUid]
    ) -> None:
        """*ended*: the pods that had it, as the kubelet said."""
        facts = {"claim": str(record.claim), "ids": list(allocation.ids)}

        def gone() -> bool:  # the kubelet may have given it to a new pod meanwhile
            ours = self._by_giver(self._pods.containers())[Giver.US]
            return uids_with(allocation, ours) <= ended

        try:
            taken = self._preparer.take_back_if(record.claim, gone)
        except ClaimInUse as e:
            log.debug("devices are used yet", extra=facts | {"error": str(e)})
            return
        except DriverError as e:
            log.warning("devices cannot be taken back yet", extra=facts | {"error": str(e)})
            return
        if taken:
            self.mended += 1
            log.info("took back what a container had", extra=facts)
