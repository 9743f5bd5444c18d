"""Ends the clients of pods that are being deleted, in time and in order.

A server ends a client when its work in flight is done. The kubelet does not wait for that, and what
it kills on the GPU takes its neighbours along. So this is done shortly before the kubelet does it,
to those who are still there.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol

from dra_driver.errors import ClusterError, NotFound
from dra_driver.kubeletplugin.claims import ClaimRef, Pod, PodUid
from dra_driver.kubeletplugin.pods import PodSpec
from dra_driver.model.mps import SpaceName
from dra_driver.plan.mps_drain import Ending, ending
from dra_driver.plugin.errands import Errand, Errands

log = logging.getLogger(__name__)

_READ_SECONDS: Final = 5.0  # between two looks at the same pod
_SOONEST_SECONDS: Final = 0.05
_AGAIN_SECONDS: Final = 1.0  # until it is seen whether a pod has new clients, or a try is repeated


class Pods(Protocol):
    """Where pods are read from; ``dra_driver.kubeletplugin.pod_reader``."""

    def read(self, namespace: str, name: str) -> PodSpec: ...


class Agent(Protocol):
    """Who ends clients; ``dra_driver.node.mps.agent``."""

    def terminate(self, name: SpaceName, pids: Collection[int]) -> None: ...


class Observer(Protocol):
    """Who counts; ``dra_driver.plugin.mps_metrics``."""

    def mps_drained(self, clients: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Clock:
    """*steady* for what is between two moments; *epoch* for those that others tell."""

    steady: Callable[[], float] = time.monotonic
    epoch: Callable[[], float] = time.time


@dataclass(frozen=True, slots=True)
class PodClients:
    """The clients of one space that are of one pod."""

    claim: ClaimRef
    pod: Pod
    space: SpaceName
    pids: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Read:
    """What was found out about a pod, and when."""

    at: float
    ending: Ending | None = None


class MpsDrain:
    """Looks at the pods that have clients; one thread at a time may ``look``."""

    def __init__(
        self,
        pods: Pods,
        agent: Agent,
        errands: Errands,
        observer: Observer,
        clock: Clock | None = None,
    ) -> None:
        self._pods = pods
        self._agent = agent
        self._errands = errands
        self._observer = observer
        self._clock = clock or Clock()
        self._read: dict[PodUid, _Read] = {}
        self._ended: dict[PodUid, frozenset[int]] = {}  # the clients that servers ended
        self._lock = threading.Lock()  # of what was ended: threads of errands write it
        self._error = ""

    def look(self, wanted: Sequence[PodClients]) -> float | None:
        """Do what is due for these. The seconds until there is more to do; None: nobody knows."""
        now = self._clock.steady()
        users = {one.pod.uid for one in wanted}
        self._read = {
            uid: read
            for uid, read in self._read.items()
            if uid in users or now - read.at < _READ_SECONDS
        }
        with self._lock:
            self._ended = {uid: its for uid, its in self._ended.items() if uid in self._read}
        self._end_due(wanted)  # the API server may take its time
        self._read_pods(wanted, now)
        self._end_due(wanted)
        return min((self._until(one, now) for one in wanted), default=None)

    def _read_pods(self, wanted: Sequence[PodClients], now: float) -> None:
        """Those that were not read for a while, the longest first; where that fails, no more."""
        pods = {one.pod.uid: one for one in wanted}
        due = {uid: one for uid, one in pods.items() if self._read_in(uid, now) <= 0}
        for uid, one in sorted(due.items(), key=lambda item: self._read_in(item[0], now)):
            before = self._read.get(uid, _Read(now))
            try:
                spec = self._pods.read(one.claim.namespace, one.pod.name)
            except NotFound:
                self._read[uid] = replace(before, at=now)
            except ClusterError as error:
                self._read[uid] = replace(before, at=now)
                self._warn(str(error))
                return
            else:
                ends_at = spec.ends_at if spec.uid == uid else None
                found = ending(ends_at, self._clock.epoch(), before.ending)
                self._read[uid] = replace(before, at=now, ending=found)
        if due:
            self._error = ""

    def _warn(self, error: str) -> None:
        if error != self._error:
            facts = {"error": error}
            log.warning("it cannot be seen which pods of MPS clients end", extra=facts)
        self._error = error

    def _end_due(self, wanted: Sequence[PodClients]) -> None:
        now = self._clock.epoch()
        for one in wanted:
            read = self._read.get(one.pod.uid)
            if read is None or read.ending is None or now < read.ending.due_at:
                continue
            if pids := one.pids - self._ended.get(one.pod.uid, frozenset()):
                name = f"drain {one.pod.name} of {one.claim} ({one.space})"
                end = partial(self._end, one, pids)
                self._errands.go(name, [Errand(name, end, _AGAIN_SECONDS)])

    def _end(self, one: PodClients, pids: frozenset[int]) -> None:
        """On a thread of its own: a server waits for what its clients have in flight."""
        self._agent.terminate(one.space, pids)
        with self._lock:
            self._ended[one.pod.uid] = self._ended.get(one.pod.uid, frozenset()) | pids
        self._observer.mps_drained(len(pids))
        facts = {"claim": str(one.claim), "pod": one.pod.name, "clients": len(pids)}
        log.info("ended the MPS clients of a pod that is being deleted", extra=facts)

    def _until(self, one: PodClients, now: float) -> float:
        read = self._read.get(one.pod.uid)
        if read is None:
            return _AGAIN_SECONDS
        read_in = max(_AGAIN_SECONDS, self._read_in(one.pod.uid, now))
        if read.ending is None:
            return read_in
        epoch = self._clock.epoch()
        if epoch >= read.ending.ends_at + _READ_SECONDS:  # what is left of it does not end
            return _READ_SECONDS
        due_in = read.ending.due_at - epoch
        return min(read_in, max(_SOONEST_SECONDS, due_in) if due_in > 0 else _AGAIN_SECONDS)

    def _read_in(self, uid: PodUid, now: float) -> float:
        read = self._read.get(uid)
        return read.at + _READ_SECONDS - now if read is not None else -_READ_SECONDS
