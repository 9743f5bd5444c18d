"""The memory guard: samples shared GPUs, and warns or ends who uses more than a claim was given.

It comes after the fact: between two samples a neighbour may find no memory. Where the driver itself
limits memory, the guard remains for what those limits do not see.
"""

import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, assert_never

from dra_driver.base.errors import NodeError
from dra_driver.k8s.claims import PodUid
from dra_driver.k8s.events import Event, EventRecorder, PodRef
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.profiles import GuardPolicy
from dra_driver.model.records import ClaimRecord
from dra_driver.node.cgroups.processes import ContainerProcesses
from dra_driver.plan.memory.guard import (
    ClaimGroup,
    GuardAction,
    GuardState,
    KillProcess,
    LimitExceeded,
    TerminateProcess,
    WarnOverLimit,
    guard_actions,
)
from dra_driver.plan.memory.usage import (
    GpuMemorySample,
    MemoryShare,
    PodClaims,
    ProcessUsage,
    claim_usages,
    instance_names,
    memory_shares,
    pod_claims,
)
from dra_driver.plugin.metrics import Metrics
from dra_driver.plugin.process_owners import ProcessOwners

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """A sample of each GPU that answered. *unreadable*: GPUs whose use per process is unknown."""

    samples: tuple[GpuMemorySample, ...] = ()
    unreadable: frozenset[GpuUuid] = frozenset()
    joined: Mapping[PodUid, PodClaims] = field(default_factory=dict)  # as in ``ProcessReport``


class MemoryScanner:
    """Samples what each process of claims uses, and logs where that cannot be read."""

    def __init__(self, owners: ProcessOwners) -> None:
        self._owners = owners
        self._unreadable: dict[GpuUuid, str] = {}

    def scan(
        self, shares: Mapping[GpuUuid, Sequence[MemoryShare]], holders: Mapping[PodUid, PodClaims]
    ) -> MemoryReport:
        """Who uses how much of these GPUs. One that does not answer is missing."""
        report = self._owners.scan(shares, holders)
        unreadable = dict(report.errors)
        for sample in report.samples:
            if any(usage.memory_bytes is None for usage in sample.usages):
                unreadable[sample.gpu] = "NVML does not tell how much memory each process uses"
        for gpu, error in unreadable.items():
            if self._unreadable.get(gpu) != error:
                log.warning("memory shares are not guarded", extra={"gpu": gpu, "error": error})
        self._unreadable = unreadable
        samples = tuple(map(_of_claims, report.samples))
        return MemoryReport(samples, frozenset(unreadable), report.joined)


def _of_claims(sample: GpuMemorySample) -> GpuMemorySample:
    return replace(sample, usages=tuple(usage for usage in sample.usages if usage.claims))


_GIB: Final = 1024**3
_EMPTY: Final = MemoryReport()
_SIGNALLED: Final = {
    signal.SIGTERM: "was asked to end (SIGTERM)",
    signal.SIGKILL: "was killed (SIGKILL)",
}


@dataclass(frozen=True, slots=True)
class MemoryGuardDependencies:
    """What the guard works with."""

    scanner: MemoryScanner
    processes: ContainerProcesses
    events: EventRecorder
    metrics: Metrics
    clock: Callable[[], float] = time.monotonic


class _GuardedShares:
    """What follows from the records, worked out once for all looks until they change."""

    def __init__(self, records: Sequence[ClaimRecord]) -> None:
        self.records = records
        self.shares = memory_shares(records)
        self.pods = pod_claims(records)
        self.names = instance_names(records)


class MemoryEnforcer:
    """Guards what the claims of *records* were given. One thread at a time may ``check``."""

    def __init__(
        self, records: Callable[[], Sequence[ClaimRecord]], dependencies: MemoryGuardDependencies
    ) -> None:
        """*records* gives the same object again where nothing changed."""
        self._records = records
        self._dependencies = dependencies
        self._guarded = _GuardedShares(())
        self._pods: Mapping[PodUid, PodClaims] = {}  # the users of guarded claims, at the last scan
        self._state: GuardState = {}
        self._reported = _EMPTY
        self._was_guarding = False

    def check(self) -> None:
        """One scan and what follows from it. Where no claim is guarded, nothing is scanned."""
        if (records := self._records()) is not self._guarded.records:
            self._guarded = _GuardedShares(records)
        guarded, dependencies = self._guarded, self._dependencies
        if not guarded.shares and not self._was_guarding:
            return
        report = (
            dependencies.scanner.scan(guarded.shares, guarded.pods) if guarded.shares else _EMPTY
        )
        self._pods = {**guarded.pods, **report.joined}
        self._state, actions = guard_actions(report.samples, self._state, dependencies.clock())
        for action in actions:
            self._do(action, guarded)
        if report != self._reported:
            usages = [usage for sample in report.samples for usage in claim_usages(sample)]
            dependencies.metrics.memory_used(usages, len(report.unreadable))
        self._reported, self._was_guarding = report, bool(guarded.shares)

    def _do(self, action: GuardAction, guarded: _GuardedShares) -> None:
        match action:
            case LimitExceeded():
                self._dependencies.metrics.memory_excursion()
            case WarnOverLimit(group):
                self._warn(group, guarded)
            case TerminateProcess(group, usage):
                if self._signal(group, usage, signal.SIGTERM):
                    self._dependencies.metrics.memory_kill()
                    self._report_end(group, usage, signal.SIGTERM, guarded)
            case KillProcess(group, usage):
                if self._signal(group, usage, signal.SIGKILL):
                    self._report_end(group, usage, signal.SIGKILL, guarded)
            case _:
                assert_never(action)

    def _warn(self, group: ClaimGroup, guarded: _GuardedShares) -> None:
        log.warning("a claim uses more GPU memory than its share", extra=_log_fields(group))
        consequence = (
            f"; if it stays so for {group.guard.grace_seconds:g} s, its largest process is ended"
            if group.guard.policy is GuardPolicy.KILL
            else ""
        )
        for pod in sorted({usage.process.pod for usage in group.usages}):
            about, message = _about(group), f"{_above(group, guarded)}{consequence}"
            ref = _ref(pod, self._pods)
            self._dependencies.events.emit(Event(ref, "GPUMemoryAboveShare", about, message))

    def _report_end(
        self,
        group: ClaimGroup,
        usage: ProcessUsage,
        number: signal.Signals,
        guarded: _GuardedShares,
    ) -> None:
        message = (
            f"process {usage.process.pid} of the host, "
            f"which used {_gib(usage.memory_bytes)} of it, {_SIGNALLED[number]}: "
            f"{_above(group, guarded)}"
        )
        # Each signal is an event of its own: the same one again so soon would only be counted.
        about = f"{_about(group)} {number.name}"
        pod = _ref(usage.process.pod, self._pods)
        self._dependencies.events.emit(Event(pod, "GPUMemoryProcessEnded", about, message))

    def _signal(self, group: ClaimGroup, usage: ProcessUsage, number: signal.Signals) -> bool:
        fields = _log_fields(group) | {
            "pid": usage.process.pid,
            "container": usage.process.container,
            "signal": number.name,
        }
        try:
            sent = self._dependencies.processes.signal(usage.process, number)
        except NodeError as error:
            fields["error"] = str(error)
            log.warning("a process of a claim above its share cannot be ended", extra=fields)
            return False
        if not sent:
            log.info("a process of a claim above its share is gone already", extra=fields)
        elif number is signal.SIGKILL:
            log.warning("killed a process of a claim above its share", extra=fields)
        else:
            log.warning("asked a process of a claim above its share to end", extra=fields)
        return sent


def _ref(pod: PodUid, pods: Mapping[PodUid, PodClaims]) -> PodRef:
    return PodRef(pods[pod].namespace, pods[pod].name, pod)


def _above(group: ClaimGroup, guarded: _GuardedShares) -> str:
    claims = "claim" if len(group.claims) == 1 else "claims (told apart by nothing)"
    return (
        f"{claims} {_names(group)} uses {_gib(group.used_bytes)} of "
        f"{guarded.names.get(group.gpu, group.gpu)}, "
        f"but has a share of {_gib(group.limit_bytes)}"
    )


def _about(group: ClaimGroup) -> str:
    return f"{group.gpu} {_names(group)}"


def _names(group: ClaimGroup) -> str:
    return ", ".join(map(str, group.claims))


def _gib(size: int | None) -> str:
    return f"{(size or 0) / _GIB:.2f} GiB"


def _log_fields(group: ClaimGroup) -> dict[str, object]:
    return {
        "claim": _names(group),
        "gpu": group.gpu,
        "used_bytes": group.used_bytes,
        "share_bytes": group.limit_bytes,
    }
