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
from typing import Final

from dra_driver.base.errors import NotFound
from dra_driver.base.threads import BackgroundTask, BackgroundTasks
from dra_driver.k8s.claims import ClaimUid, PodUid
from dra_driver.k8s.events import Event, EventRecorder, PodRef
from dra_driver.k8s.pods import PodSpec
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.records import ClaimRecord
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
    MpsSnapshot,
    bypass_message,
    bypass_subject,
    bypassing_processes,
    claim_namespaces,
    confirmed_bypasses,
    mps_memory_shares,
    pod_not_served_message,
)
from dra_driver.plugin.parts import PluginParts
from dra_driver.plugin.process_owners import ProcessOwners, ProcessReport

log = logging.getLogger(__name__)


class MpsBypassDetector:
    """Remembers since when each process bypasses MPS: it may only be about to connect."""

    def __init__(
        self,
        owners: ProcessOwners,
        events: EventRecorder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._owners = owners
        self._events = events
        self._clock = clock
        self._since: Mapping[BypassingProcess, float] = {}
        self._reported: frozenset[BypassingProcess] = frozenset()
        self._failed: Mapping[GpuUuid, str] = {}

    def look(self, snapshot: MpsSnapshot) -> frozenset[BypassingProcess]:
        """Those that had the time to connect and did not. New ones are told to their pods."""
        shares = mps_memory_shares(snapshot)
        pods = pod_claims(snapshot.records)
        report = self._owners.scan(shares, pods) if shares else ProcessReport()
        pods = {**pods, **report.joined}
        self._warn(report.errors)
        now = self._clock()
        bypasses = bypassing_processes(report.samples, snapshot)
        # Of a GPU that does not answer this time, what was seen the last time stands.
        remembered = {bypass for bypass in self._since if bypass.gpu in report.errors}
        self._since = {bypass: self._since.get(bypass, now) for bypass in bypasses | remembered}
        confirmed = confirmed_bypasses(self._since, now)
        names = {
            gpu: name
            for namespace in snapshot.namespaces
            for gpu, name in namespace.display_names.items()
        }
        for bypass in sorted(confirmed - self._reported, key=lambda item: (item.process, item.gpu)):
            self._send_event(bypass, pods, names.get(bypass.gpu, bypass.gpu))
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
        log.warning("a process of a claim under MPS bypasses it", extra=facts)
        pod = PodRef(holder.namespace, holder.name, bypass.process.pod)
        self._events.emit(
            Event(pod, "MPSNotUsed", bypass_subject(bypass), bypass_message(bypass, gpu))
        )

    def _warn(self, failed: Mapping[GpuUuid, str]) -> None:
        for gpu, why in failed.items():
            if self._failed.get(gpu) != why:
                facts = {"gpu": gpu, "error": why}
                log.warning("it cannot be seen who bypasses MPS", extra=facts)
        self._failed = failed


READS_A_SECOND, READS_AT_ONCE = 0.5, 4.0  # of pods; every node of a cluster does this
_AGAIN_SECONDS: Final = 30.0  # after one could not be read


class UnservedPods:
    """Reads each pod once, on another thread; ``saw`` tells of later changes. One thread at a time
    may ``look``."""

    def __init__(
        self, parts: PluginParts, tasks: BackgroundTasks, clock: Callable[[], float]
    ) -> None:
        self._parts = parts
        self._tasks = tasks
        self._clock = clock
        self._budget = ReadBudget(READS_A_SECOND, READS_AT_ONCE, READS_AT_ONCE, clock())
        self._specs: Mapping[PodUid, PodSpec | None] = {}  # None: it is gone
        self._devices: Mapping[ClaimUid, Sequence[RequestedDevice]] = {}
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
        if unread := [user for user in joined if not self._knows(user)]:
            name = "pods that joined claims under MPS"
            read = partial(self._read, unread)
            self._tasks.go(name, [BackgroundTask(name, read, _AGAIN_SECONDS)])
        # Once: a pod that is read meanwhile has its turn at the next look.
        known = [user for user in joined if self._knows(user)]
        reported, kept_out = set(), set()
        for user in known:
            if spec := self._specs[user.pod.uid]:
                uid = user.record.claim.uid
                problems = unusable_devices(user, spec, self._devices[uid], records)
                if problems:
                    reported.add(self._send_event(user, problems))
                if tenant_violations(user, spec):
                    kept_out.add((uid, spec.uid))
        self._reported, self._kept_out = frozenset(reported), frozenset(kept_out)
        self._settled = records if len(known) == len(joined) else None

    def saw(self, spec: PodSpec) -> None:
        """A pod was read for another reason: ephemeral containers come while it runs."""
        with self._lock:
            known = self._specs.get(spec.uid)
            if known is not None and known.containers != spec.containers:
                self._specs = {**self._specs, spec.uid: spec}
                self._changed = True

    def keeps_out(self, claim: ClaimUid, pod: PodUid) -> bool:
        """Whether the profile does not let the pod use the claim, as far as its spec was read."""
        return (claim, pod) in self._kept_out

    def _knows(self, user: JoinedPod) -> bool:
        return user.pod.uid in self._specs and user.record.claim.uid in self._devices

    def _forget_all_but(self, joined: Sequence[JoinedPod]) -> None:
        pods = {user.pod.uid for user in joined}
        claims = {user.record.claim.uid for user in joined}
        with self._lock:
            self._specs = {uid: self._specs[uid] for uid in pods & self._specs.keys()}
            self._devices = {uid: self._devices[uid] for uid in claims & self._devices.keys()}

    def _send_event(self, user: JoinedPod, problems: Sequence[str]) -> tuple[PodUid, str]:
        """Once for each pod and claim, as long as it is the same."""
        claim, pod = user.record.claim, user.pod
        message = pod_not_served_message(claim_namespaces([user.record]), problems)
        if (pod.uid, message) not in self._reported:
            facts = {"claim": str(claim), "pod": pod.name, "problems": list(problems)}
            log.warning("a pod that joined a claim is not served by its MPS server", extra=facts)
            ref = PodRef(claim.namespace, pod.name, pod.uid)
            self._parts.events.emit(Event(ref, "MPSNotServed", str(claim), message))
        return pod.uid, message

    def _read(self, unread: Sequence[JoinedPod]) -> None:
        """As many pods as may be read; the others at the next look."""
        for user in unread:
            claim, pod = user.record.claim, user.pod.uid
            if claim.uid not in self._devices:
                record = self._parts.ledger.record(claim.uid)
                devices = requested_devices(record) if record else ()
                with self._lock:
                    self._devices = {**self._devices, claim.uid: devices}
            if pod not in self._specs:
                budget = self._budget.after_read(self._clock())
                if budget is None:
                    return
                self._budget = budget
                spec = self._read_pod(user)
                with self._lock:
                    self._specs = {**self._specs, pod: spec}

    def _read_pod(self, user: JoinedPod) -> PodSpec | None:
        """One that has just come may not be in the API server's memory yet."""
        for read in (self._parts.pods.read_cached, self._parts.pods.read):
            with contextlib.suppress(NotFound):
                spec = read(user.record.claim.namespace, user.pod.name)
                if spec.uid == user.pod.uid:
                    return spec
        return None
