"""Ends the MPS clients of pods that are being deleted, shortly before the kubelet kills them.

A server ends a client once its work in flight is done. The kubelet does not wait for that, and a
process that is killed with work on the GPU takes the other clients of its server along.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from typing import Final

from dra_driver.base.errors import ApiServerError, NotFound
from dra_driver.base.frozen import frozen
from dra_driver.base.threads import BackgroundTask, BackgroundTasks
from dra_driver.k8s.claims import ClaimRef, Pod, PodUid
from dra_driver.k8s.pods import PodReader, PodSpec
from dra_driver.model.mps import MpsNamespaceName
from dra_driver.node.mps.agent_client import MpsAgentClient
from dra_driver.plan.mps.drain import (
    PodRead,
    ReadBudget,
    TerminatingPod,
    most_urgent,
    never_read,
    terminating_pod,
)
from dra_driver.plugin.metrics import MpsMetrics

log = logging.getLogger(__name__)

READS_A_SECOND, READS_AT_ONCE = 1.5, 8.0  # of pods; every node of a cluster does this
_SOONEST_SECONDS: Final = 0.05
_TOGETHER_SECONDS: Final = 2.0  # reads that are due so close together wait for each other
_STUCK_SECONDS: Final = 5.0  # between two tries at what does not end, though its time is over
_AGAIN_SECONDS: Final = 1.0  # until it is seen whether a pod has new clients, or a try is repeated


@frozen
class PodMpsClients:
    """The clients of one namespace that are of one pod."""

    claim: ClaimRef
    pod: Pod
    namespace: MpsNamespaceName
    pids: frozenset[int]


@frozen
class _DrainState:
    """What was found out about a pod, and when."""

    last_read: PodRead
    ending: TerminatingPod | None = None
    ended: frozenset[int] = field(default_factory=frozenset)  # the clients that servers ended


class MpsDrain:
    """Looks at the pods that have clients; one thread at a time may ``look``.

    What takes time, reading pods and ending clients, is done beside it: a pod whose time has come
    waits for nobody.
    """

    def __init__(
        self,
        pods: PodReader,
        agent: MpsAgentClient,
        tasks: BackgroundTasks,
        metrics: MpsMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pods = pods
        self._agent = agent
        self._tasks = tasks
        self._metrics = metrics
        self._clock = clock
        self._known: Mapping[PodUid, _DrainState] = {}
        self._lock = threading.Lock()  # of what is known: threads of tasks replace it
        self._budget = ReadBudget(READS_A_SECOND, READS_AT_ONCE, READS_AT_ONCE, clock())
        self._late = False
        self._error = ""
        self.on_ending: Callable[[], None] = lambda: None  # have ``look`` done soon
        self.on_read: Callable[[PodSpec], None] = lambda spec: None

    def look(self, users: Sequence[PodMpsClients]) -> float | None:
        """Do what is due for these. The seconds until there is more to do; None: not known."""
        self._follow({user.pod.uid for user in users})
        self._end_due(users)
        self._read_due(users)
        self._end_due(users)
        return min((self._until(self._known[user.pod.uid]) for user in users), default=None)

    def _follow(self, pods: Collection[PodUid]) -> None:
        """Begin with pods that are new; one without clients is forgotten when it would be due."""
        now = self._clock()
        with self._lock:
            self._known = dict.fromkeys(pods, _DrainState(never_read(now))) | {
                uid: state
                for uid, state in self._known.items()
                if uid in pods or not state.last_read.is_due(now)
            }

    def _change(self, uid: PodUid, change: Callable[[_DrainState], _DrainState]) -> None:
        with self._lock:
            if uid in self._known:
                self._known = {**self._known, uid: change(self._known[uid])}

    # Reading pods

    def _read_due(self, users: Sequence[PodMpsClients]) -> None:
        pods = {user.pod.uid: user for user in users}
        reads = {uid: self._known[uid].last_read for uid in sorted(pods)}
        due = most_urgent(reads, self._clock(), READS_A_SECOND)
        if due:
            read = partial(self._read_pods, [pods[uid] for uid in due])
            self._tasks.go("pods", [BackgroundTask("pods of MPS clients", read, _AGAIN_SECONDS)])
        elif not pods and self._late:
            self._in_time()

    def _read_pods(self, due: Sequence[PodMpsClients]) -> None:
        """As many as there may be; where one cannot be read, no more."""
        for index, user in enumerate(due):
            budget = self._budget.after_read(self._clock())
            if budget is None:
                self._put_off(due[index:])
                return
            self._budget = budget
            try:
                self._read(user)
            except ApiServerError as error:
                self._warn(str(error))
                return
        self._error = ""
        self._in_time()

    def _read(self, user: PodMpsClients) -> None:
        now = self._clock()
        try:
            spec = self._pods.read_cached(user.claim.namespace, user.pod.name)
        except ApiServerError as error:
            self._change(
                user.pod.uid,
                lambda state: replace(state, last_read=replace(state.last_read, at=now)),
            )
            if not isinstance(error, NotFound):
                raise
            return
        last_read = PodRead(now, spec.grace_seconds)
        deletion = spec.deletion if spec.uid == user.pod.uid else None

        def change(state: _DrainState) -> _DrainState:
            undeleted_at = state.last_read.at if state.last_read.seen else None
            return replace(
                state,
                last_read=last_read,
                ending=terminating_pod(deletion, now, undeleted_at, state.ending),
            )

        self._change(user.pod.uid, change)
        self.on_read(spec)
        if deletion is not None:
            self.on_ending()

    def _warn(self, error: str) -> None:
        if error != self._error:
            facts = {"error": error}
            log.warning("it cannot be seen which pods of MPS clients end", extra=facts)
        self._error = error

    def _put_off(self, due: Sequence[PodMpsClients]) -> None:
        """These have to wait. That is no harm unless it is for too long."""
        now, known = self._clock(), self._known
        waiting = (known[client.pod.uid] for client in due if client.pod.uid in known)
        late = sum(state.last_read.is_late(now) for state in waiting)
        self._metrics.mps_unread_pods(late)
        if late and not self._late:
            self._late = True
            facts = {"pods": len(known), "reads_a_second": READS_A_SECOND}
            log.warning(
                "too many pods have MPS clients to look at each within its grace period: those "
                "with a short one may be killed with work on the GPU",
                extra=facts,
            )

    def _in_time(self) -> None:
        self._metrics.mps_unread_pods(0)
        if self._late:
            log.info("pods with MPS clients are looked at in time again")
        self._late = False

    # Ending clients

    def _end_due(self, users: Sequence[PodMpsClients]) -> None:
        now = self._clock()
        for user in users:
            state = self._known[user.pod.uid]
            if state.ending is None or now < state.ending.due_at:
                continue
            if pids := user.pids - state.ended:
                name = f"drain {user.pod.name} of {user.claim} ({user.namespace})"
                end = partial(self._end, user, pids)
                self._tasks.go(name, [BackgroundTask(name, end, _AGAIN_SECONDS)])

    def _end(self, user: PodMpsClients, pids: frozenset[int]) -> None:
        """On a thread of its own: a server waits for what its clients have in flight."""
        self._agent.terminate(user.namespace, pids)
        self._change(user.pod.uid, lambda state: replace(state, ended=state.ended | pids))
        self._metrics.mps_drained(len(pids))
        facts = {"claim": str(user.claim), "pod": user.pod.name, "clients": len(pids)}
        log.info("ended the MPS clients of a pod that is being deleted", extra=facts)

    def end_now(self, users: Sequence[PodMpsClients]) -> None:
        """End these clients at once: the profile does not let their pods use the claim."""
        for user in users:
            name = f"keep {user.pod.name} out of {user.claim} ({user.namespace})"
            self._tasks.go(
                name, [BackgroundTask(name, partial(self._keep_out, user), _AGAIN_SECONDS)]
            )

    def _keep_out(self, user: PodMpsClients) -> None:
        self._agent.terminate(user.namespace, user.pids)
        facts = {"claim": str(user.claim), "pod": user.pod.name, "clients": len(user.pids)}
        log.warning("ended MPS clients of a pod that the profile keeps out", extra=facts)

    # When to come back

    def _until(self, state: _DrainState) -> float:
        now = self._clock()
        next_read = state.last_read.at + state.last_read.interval - now
        read_in = max(next_read, min(_TOGETHER_SECONDS, state.last_read.interval / 2))
        if state.ending is None:
            return read_in
        if now >= state.ending.ends_at + _STUCK_SECONDS:
            return _STUCK_SECONDS
        due_in = state.ending.due_at - now
        return min(read_in, max(_SOONEST_SECONDS, due_in) if due_in > 0 else _AGAIN_SECONDS)
