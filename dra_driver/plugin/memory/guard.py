"""The memory guard: samples shared GPUs, and warns or ends who uses more than a claim was given.

It comes after the fact: between two samples a neighbour may find no memory. Where the driver itself
limits memory, the guard remains for what those limits do not see.
"""

import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, assert_never

from dra_driver.base.errors import NodeError
from dra_driver.base.frozen import frozen
from dra_driver.base.threads import UNTIL_WOKEN
from dra_driver.k8s.claims import PodUid
from dra_driver.k8s.events import Event, EventRecorder, PodRef
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
    PodClaims,
    ProcessUsage,
    claim_usages,
    instance_names,
    memory_shares,
    pod_claims,
)
from dra_driver.plugin.metrics import Metrics
from dra_driver.plugin.process_owners import ProcessOwners, ProcessReport

log = logging.getLogger(__name__)


_GIB: Final = 1024**3
_SIGNALLED: Final = {
    signal.SIGTERM: "was asked to end (SIGTERM)",
    signal.SIGKILL: "was killed (SIGKILL)",
}


@frozen
class MemoryGuardDependencies:
    """What the guard works with."""

    owners: ProcessOwners
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
        self._report = ProcessReport()
        self._was_guarding = False

    def check(self) -> float | None:
        """One scan and what follows from it. Where no claim is guarded, nothing is scanned until a
        claim changed."""
        if (records := self._records()) is not self._guarded.records:
            self._guarded = _GuardedShares(records)
        guarded, dependencies = self._guarded, self._dependencies
        if not guarded.shares and not self._was_guarding:
            return UNTIL_WOKEN
        report = self._scan() if guarded.shares else ProcessReport()
        self._pods = {**guarded.pods, **report.joined}
        self._state, actions = guard_actions(report.samples, self._state, dependencies.clock())
        for action in actions:
            self._do(action)
        if report != self._report:
            usages = [usage for sample in report.samples for usage in claim_usages(sample)]
            dependencies.metrics.memory_used(usages, len(report.errors))
        self._report, self._was_guarding = report, bool(guarded.shares)
        return None

    def _scan(self) -> ProcessReport:
        """What each process of claims uses. A GPU that does not tell that is among the errors."""
        report = self._dependencies.owners.scan(self._guarded.shares, self._guarded.pods)
        errors = {**report.errors}
        for sample in report.samples:
            if any(usage.memory_bytes is None for usage in sample.usages):
                errors[sample.gpu] = "NVML does not tell how much memory each process uses"
        for gpu, error in errors.items():
            if self._report.errors.get(gpu) != error:
                log.warning("memory shares are not guarded", extra={"gpu": gpu, "error": error})
        samples = (
            replace(sample, usages=tuple(usage for usage in sample.usages if usage.claims))
            for sample in report.samples
        )
        return replace(report, samples=tuple(samples), errors=errors)

    def _do(self, action: GuardAction) -> None:
        match action:
            case LimitExceeded():
                self._dependencies.metrics.memory_excursion()
            case WarnOverLimit(group):
                self._warn(group)
            case TerminateProcess(group, usage):
                if self._signal(group, usage, signal.SIGTERM):
                    self._dependencies.metrics.memory_kill()
                    self._report_end(group, usage, signal.SIGTERM)
            case KillProcess(group, usage):
                if self._signal(group, usage, signal.SIGKILL):
                    self._report_end(group, usage, signal.SIGKILL)
            case _:
                assert_never(action)

    def _warn(self, group: ClaimGroup) -> None:
        log.warning("a claim uses more GPU memory than its share", extra=_log_fields(group))
        consequence = (
            f"; if it stays so for {group.guard.grace_seconds:g} s, its largest process is ended"
            if group.guard.policy is GuardPolicy.KILL
            else ""
        )
        message = f"{self._above(group)}{consequence}"
        for pod in sorted({usage.process.pod for usage in group.usages}):
            self._send_event(pod, "GPUMemoryAboveShare", _about(group), message)

    def _report_end(self, group: ClaimGroup, usage: ProcessUsage, number: signal.Signals) -> None:
        message = (
            f"process {usage.process.pid} of the host, "
            f"which used {_gib(usage.memory_bytes)} of it, {_SIGNALLED[number]}: "
            f"{self._above(group)}"
        )
        # Each signal is an event of its own: the same one again so soon would only be counted.
        about = f"{_about(group)} {number.name}"
        self._send_event(usage.process.pod, "GPUMemoryProcessEnded", about, message)

    def _send_event(self, uid: PodUid, reason: str, about: str, message: str) -> None:
        pod = self._pods[uid]
        ref = PodRef(pod.namespace, pod.name, uid)
        self._dependencies.events.emit(Event(ref, reason, about, message))

    def _above(self, group: ClaimGroup) -> str:
        gpu, share = self._guarded.names.get(group.gpu, group.gpu), _gib(group.limit_bytes)
        used = f"{_gib(group.used_bytes)} of {gpu}"
        if len(group.claims) > 1:
            return f"claims {_names(group)} together use {used}, but have a share of {share}"
        return f"claim {_names(group)} uses {used}, but has a share of {share}"

    def _signal(self, group: ClaimGroup, usage: ProcessUsage, number: signal.Signals) -> bool:
        process = usage.process
        fields = _log_fields(group) | {
            "pid": process.pid,
            "container": process.container,
            "signal": number.name,
        }
        try:
            sent = self._dependencies.processes.signal(process, number)
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
