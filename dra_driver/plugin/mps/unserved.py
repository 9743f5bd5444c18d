"""Finds pods and processes that MPS does not serve, and sends their pods an event.

``UnservedPods``: the kubelet asks nothing for a pod that joins a prepared claim, so such a pod
cannot be refused. Its containers run, without their MPS server or on another one than they think.
It also says whom the profile keeps out of MPS, to have its clients ended.

``MpsBypassDetector``: a process that bypasses MPS runs without an error and without limits.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, Protocol

from dra_driver.base.errors import NotFound
from dra_driver.base.threads import BackgroundTask, BackgroundTasks
from dra_driver.k8s.claims import ClaimUid, PodUid
from dra_driver.k8s.events import Event, Events, PodRef
from dra_driver.k8s.pods import PodSpec
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.mps import MpsStatus
from dra_driver.model.records import ClaimRecord
from dra_driver.node.state.ledger_files import DamagedRecord
from dra_driver.plan.memory.usage import PodClaims, pod_claims
from dra_driver.plan.mps.containers import (
    JoinedPod,
    RequestedDevice,
    pods_to_check,
    requested_devices,
    tenant_violations,
    unusable_devices,
)
from dra_driver.plan.mps.drain import ReadBudget
from dra_driver.plan.mps.usage import (
    BypassingProcess,
    ClaimNamespace,
    bypass_message,
    bypass_subject,
    bypassing_processes,
    claim_namespaces,
    confirmed_bypasses,
    mps_memory_shares,
    pod_not_served_message,
)
from dra_driver.plugin.mps.drain import PodSource
from dra_driver.plugin.process_owners import ProcessOwners, ProcessReport

log = logging.getLogger(__name__)


class MpsBypassDetector:
    """Remembers who was seen since when: a process may only be about to connect."""

    def __init__(
        self,
        users: ProcessOwners,
        events: Events,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._users = users
        self._events = events
        self._clock = clock
        self._since: Mapping[BypassingProcess, float] = {}
        self._reported: frozenset[BypassingProcess] = frozenset()
        self._failed: Mapping[GpuUuid, str] = {}

    def look(
        self,
        records: Sequence[ClaimRecord],
        namespaces: Sequence[ClaimNamespace],
        status: MpsStatus,
    ) -> frozenset[BypassingProcess]:
        """Those that had the time to connect and did not. One that is new is told of."""
        shares = mps_memory_shares(records, namespaces)
        pods = pod_claims(records)
        report = self._users.scan(shares, pods) if shares else ProcessReport()
        pods = {**pods, **report.joined}
        self._warn(report.errors)
        now = self._clock()
        bypasses = bypassing_processes(report.samples, namespaces, status)
        # Of a GPU that does not answer this time, what was seen the last time stands.
        remembered = {bypass for bypass in self._since if bypass.gpu in report.errors}
        self._since = {bypass: self._since.get(bypass, now) for bypass in bypasses | remembered}
        confirmed = confirmed_bypasses(self._since, now)
        display_names = {
            gpu: name for namespace in namespaces for gpu, name in namespace.display_names.items()
        }
        for bypass in sorted(confirmed - self._reported, key=lambda item: (item.process, item.gpu)):
            self._send_event(bypass, pods, display_names.get(bypass.gpu, bypass.gpu))
        self._reported = confirmed
        return confirmed

    def _send_event(
        self, bypass: BypassingProcess, pods: Mapping[PodUid, PodClaims], gpu: str
    ) -> None:
        holder = pods.get(bypass.process.pod)
        if holder is None:  # its claims are gone since; so will it be
            return
        claims = ", ".join(map(str, bypass.claims))
        facts = {"pid": bypass.process.pid, "gpu": bypass.gpu, "claim": claims}
        log.warning("a process of a claim under MPS goes past it", extra=facts)
        pod = PodRef(holder.namespace, holder.name, bypass.process.pod)
        self._events.emit(
            Event(pod, "MPSNotUsed", bypass_subject(bypass), bypass_message(bypass, gpu))
        )

    def _warn(self, failed: Mapping[GpuUuid, str]) -> None:
        for gpu, why in failed.items():
            if self._failed.get(gpu) != why:
                facts = {"gpu": gpu, "error": why}
                log.warning("it cannot be seen who goes past MPS", extra=facts)
        self._failed = failed


READS_A_SECOND, READS_AT_ONCE = 0.5, 4.0  # of pods; every node of a cluster does this
_AGAIN_SECONDS: Final = 30.0  # after one could not be read


class MpsLedger(Protocol):
    """What claims hold; ``dra_driver.node.state.ledger``."""

    def record(self, uid: ClaimUid) -> ClaimRecord | None: ...
    def records(self) -> tuple[ClaimRecord, ...]: ...
    def set_aside(self) -> tuple[DamagedRecord, ...]: ...


class UnservedPods:
    """Reads each pod once, beside whoever looks, and is told of changes that others saw; one thread
    at a time may ``look``."""

    def __init__(
        self,
        ledger: MpsLedger,
        pods: PodSource,
        events: Events,
        tasks: BackgroundTasks,
        clock: Callable[[], float],
    ) -> None:
        self._ledger = ledger
        self._pods = pods
        self._events = events
        self._tasks = tasks
        self._clock = clock
        self._budget = ReadBudget(READS_A_SECOND, READS_AT_ONCE, READS_AT_ONCE, clock())
        self._specs: Mapping[PodUid, PodSpec | None] = {}  # None: it is gone
        self._given: Mapping[ClaimUid, Sequence[RequestedDevice]] = {}
        self._changed = False  # what is known of a pod, since the last look
        self._lock = threading.Lock()  # of these three: the threads of tasks write them
        self._reported: frozenset[tuple[PodUid, str]] = frozenset()
        self._settled: Sequence[ClaimRecord] | None = None  # the records of which all is told
        self._kept_out: frozenset[tuple[ClaimUid, PodUid]] = frozenset()

    def look(self, records: Sequence[ClaimRecord]) -> None:
        """Costs nothing as long as nothing changes: *records* are the same object then."""
        with self._lock:
            changed, self._changed = self._changed, False
        if records is self._settled and not changed:
            return
        joined = pods_to_check(records)
        self._forget_all_but(joined)
        if new := [one for one in joined if not self._knows(one)]:
            name = "pods that joined claims under MPS"
            self._tasks.go(name, [BackgroundTask(name, partial(self._read, new), _AGAIN_SECONDS)])
        told, out = set(), set()
        known = [one for one in joined if self._knows(one)]
        for record in known:
            if spec := self._specs[record.pod.uid]:
                uid = record.record.claim.uid
                told |= self._send_event(
                    record, unusable_devices(record, spec, self._given[uid], records)
                )
                out |= {(uid, spec.uid)} if tenant_violations(record, spec) else set()
        self._reported, self._kept_out = frozenset(told), frozenset(out)
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

    def _knows(self, one: JoinedPod) -> bool:
        return one.pod.uid in self._specs and one.record.claim.uid in self._given

    def _forget_all_but(self, joined: Sequence[JoinedPod]) -> None:
        pods = {one.pod.uid for one in joined}
        claims = {one.record.claim.uid for one in joined}
        with self._lock:
            self._specs = {uid: spec for uid, spec in self._specs.items() if uid in pods}
            self._given = {uid: its for uid, its in self._given.items() if uid in claims}

    def _send_event(self, one: JoinedPod, problems: Sequence[str]) -> set[tuple[PodUid, str]]:
        """Once for each pod and claim, as long as it is the same."""
        if not problems:
            return set()
        claim = one.record.claim
        message = pod_not_served_message(claim_namespaces([one.record]), problems)
        if (one.pod.uid, message) not in self._reported:
            facts = {"claim": str(claim), "pod": one.pod.name, "problems": list(problems)}
            log.warning("a pod that joined a claim is not served by its MPS server", extra=facts)
            pod = PodRef(claim.namespace, one.pod.name, one.pod.uid)
            self._events.emit(Event(pod, "MPSNotServed", str(claim), message))
        return {(one.pod.uid, message)}

    def _read(self, new: Sequence[JoinedPod]) -> None:
        """As many pods as may be read; the others at the next look."""
        for one in new:
            claim, pod = one.record.claim, one.pod.uid
            if claim.uid not in self._given:
                record = self._ledger.record(claim.uid)
                with self._lock:
                    self._given = {
                        **self._given,
                        claim.uid: requested_devices(record) if record else (),
                    }
            if pod not in self._specs:
                self._budget = self._budget.by(self._clock())
                if not self._budget.allows:
                    return
                self._budget = self._budget.spent()
                spec = self._read_pod(one)
                with self._lock:
                    self._specs = {**self._specs, pod: spec}

    def _read_pod(self, one: JoinedPod) -> PodSpec | None:
        """One that has just come may not be in the API server's memory yet."""
        for read in (self._pods.read_cached, self._pods.read):
            with contextlib.suppress(NotFound):
                spec = read(one.record.claim.namespace, one.pod.name)
                if spec.uid == one.pod.uid:
                    return spec
        return None
