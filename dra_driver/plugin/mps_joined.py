"""Tells pods that joined a prepared claim under MPS of containers that it does not serve.

The kubelet asks nothing about such pods, so nothing can be refused: their containers run, beside
their MPS server or on another one than they think. Whom the profile keeps out of MPS is said here
too, to have its clients ended.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, Protocol

from dra_driver.cluster.events import Event, PodRef
from dra_driver.errors import NotFound
from dra_driver.kubeletplugin.claims import ClaimUid, PodUid
from dra_driver.kubeletplugin.pods import PodSpec
from dra_driver.model.holdings import Record
from dra_driver.plan.mps_drain import Budget
from dra_driver.plan.mps_joined import Given, Joined, given, kept_out, not_served, to_look_at
from dra_driver.plan.mps_watch import claim_spaces
from dra_driver.plan.mps_words import pod_not_served
from dra_driver.plugin.errands import Errand, Errands

log = logging.getLogger(__name__)

READS_A_SECOND, READS_AT_ONCE = 0.5, 4.0  # of pods; every node of a cluster does this
_AGAIN_SECONDS: Final = 30.0  # after one could not be read


class Pods(Protocol):
    """Where pods are read from; ``dra_driver.kubeletplugin.pod_reader``."""

    def read(self, namespace: str, name: str) -> PodSpec: ...
    def glance(self, namespace: str, name: str) -> PodSpec: ...


class Ledger(Protocol):
    """What claims were given; ``dra_driver.node.ledger``."""

    def record(self, uid: ClaimUid) -> Record | None: ...


class Events(Protocol):
    """Tells of pods without waiting; ``dra_driver.cluster.events``."""

    def tell(self, event: Event) -> None: ...


class MpsJoined:
    """Reads each pod once, beside whoever looks, and is told of changes that others saw; one thread
    at a time may ``look``."""

    def __init__(
        self,
        ledger: Ledger,
        pods: Pods,
        events: Events,
        errands: Errands,
        clock: Callable[[], float],
    ) -> None:
        self._ledger = ledger
        self._pods = pods
        self._events = events
        self._errands = errands
        self._clock = clock
        self._budget = Budget(READS_A_SECOND, READS_AT_ONCE, READS_AT_ONCE, clock())
        self._specs: Mapping[PodUid, PodSpec | None] = {}  # None: it is gone
        self._given: Mapping[ClaimUid, Sequence[Given]] = {}
        self._changed = False  # what is known of a pod, since the last look
        self._lock = threading.Lock()  # of these three: the threads of errands write them
        self._told: frozenset[tuple[PodUid, str]] = frozenset()
        self._settled: Sequence[Record] | None = None  # the records of which all is told
        self._kept_out: frozenset[tuple[ClaimUid, PodUid]] = frozenset()

    def look(self, records: Sequence[Record]) -> None:
        """Costs nothing as long as nothing changes: *records* are the same object then."""
        with self._lock:
            changed, self._changed = self._changed, False
        if records is self._settled and not changed:
            return
        joined = to_look_at(records)
        self._forget_all_but(joined)
        if new := [one for one in joined if not self._knows(one)]:
            name = "pods that joined claims under MPS"
            self._errands.go(name, [Errand(name, partial(self._read, new), _AGAIN_SECONDS)])
        told, out = set(), set()
        known = [one for one in joined if self._knows(one)]
        for one in known:
            if spec := self._specs[one.pod.uid]:
                uid = one.record.claim.uid
                told |= self._tell(one, not_served(one, spec, self._given[uid], records))
                out |= {(uid, spec.uid)} if kept_out(one, spec) else set()
        self._told, self._kept_out = frozenset(told), frozenset(out)
        self._settled = records if len(known) == len(joined) else None

    def saw(self, spec: PodSpec) -> None:
        """Somebody read a pod, for another reason: ephemeral containers come while it runs."""
        with self._lock:
            known = self._specs.get(spec.uid)
            if known is not None and known.containers != spec.containers:
                self._specs = {**self._specs, spec.uid: spec}
                self._changed = True

    def keeps_out(self, claim: ClaimUid, pod: PodUid) -> bool:
        """Whether the profile does not let the pod use the claim, as far as its spec was read."""
        return (claim, pod) in self._kept_out

    def _knows(self, one: Joined) -> bool:
        return one.pod.uid in self._specs and one.record.claim.uid in self._given

    def _forget_all_but(self, joined: Sequence[Joined]) -> None:
        pods = {one.pod.uid for one in joined}
        claims = {one.record.claim.uid for one in joined}
        with self._lock:
            self._specs = {uid: spec for uid, spec in self._specs.items() if uid in pods}
            self._given = {uid: its for uid, its in self._given.items() if uid in claims}

    def _tell(self, one: Joined, problems: Sequence[str]) -> set[tuple[PodUid, str]]:
        """Once for each pod and claim, as long as it is the same."""
        if not problems:
            return set()
        claim = one.record.claim
        message = pod_not_served(claim_spaces([one.record]), problems)
        if (one.pod.uid, message) not in self._told:
            facts = {"claim": str(claim), "pod": one.pod.name, "problems": list(problems)}
            log.warning("a pod that joined a claim is not served by its MPS server", extra=facts)
            pod = PodRef(claim.namespace, one.pod.name, one.pod.uid)
            self._events.tell(Event(pod, "MPSNotServed", str(claim), message))
        return {(one.pod.uid, message)}

    def _read(self, new: Sequence[Joined]) -> None:
        """As many pods as may be read; the others at the next look."""
        for one in new:
            claim, pod = one.record.claim, one.pod.uid
            if claim.uid not in self._given:
                record = self._ledger.record(claim.uid)
                with self._lock:
                    self._given = {**self._given, claim.uid: given(record) if record else ()}
            if pod not in self._specs:
                self._budget = self._budget.by(self._clock())
                if not self._budget.allows:
                    return
                self._budget = self._budget.spent()
                spec = self._read_pod(one)
                with self._lock:
                    self._specs = {**self._specs, pod: spec}

    def _read_pod(self, one: Joined) -> PodSpec | None:
        """One that has just come may not be in the API server's memory yet."""
        for read in (self._pods.glance, self._pods.read):
            with contextlib.suppress(NotFound):
                spec = read(one.record.claim.namespace, one.pod.name)
                if spec.uid == one.pod.uid:
                    return spec
        return None
