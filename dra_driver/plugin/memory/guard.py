"""The memory guard: samples shared GPUs, and warns or ends who uses more than a claim was given.

It comes after the fact: between two samples a neighbour may find no memory. Where the driver itself
limits memory, the guard remains for what those limits do not see.
"""

import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, assert_never

from dra_driver.base.errors import NodeError
from dra_driver.k8s.claims import PodUid
from dra_driver.k8s.events import Event, PodRef
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.processes import ContainerProcess
from dra_driver.model.profiles import GuardPolicy
from dra_driver.model.records import ClaimRecord
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
    ClaimMemoryUsage,
    GpuMemorySample,
    MemoryShare,
    PodClaims,
    ProcessUsage,
    claim_usages,
    instance_names,
    memory_shares,
    pod_claims,
)
from dra_driver.plugin.process_owners import (
    ContainerClaimsSource,
    ListGpuProcesses,
    ProcessFinder,
    ProcessOwners,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What a look found. GPUs that do not tell who uses how much are *blind*."""

    looks: tuple[GpuMemorySample, ...] = ()
    blind: frozenset[GpuUuid] = frozenset()
    joined: Mapping[PodUid, PodClaims] = field(default_factory=dict)  # pods, as ``Looked`` says


class MemoryScanner:
    """Looks at what each process uses, and says where that cannot be seen."""

    def __init__(
        self,
        gpu_processes: ListGpuProcesses,
        processes: ProcessFinder,
        containers: ContainerClaimsSource,
    ) -> None:
        self._users = ProcessOwners(gpu_processes, processes, containers)
        self._blind: dict[GpuUuid, str] = {}

    def look(
        self, shares: Mapping[GpuUuid, Sequence[MemoryShare]], holders: Mapping[PodUid, PodClaims]
    ) -> MemoryReport:
        """Who uses how much of these GPUs. One that does not answer is missing."""
        looked = self._users.look(shares, holders)
        blind = dict(looked.failed)
        for look in looked.looks:
            if any(use.memory_bytes is None for use in look.uses):
                blind[look.gpu] = "NVML does not tell how much memory each process uses"
        self._tell(blind)
        return MemoryReport(
            tuple(map(_uses_of_claims, looked.looks)), frozenset(blind), looked.joined
        )

    def _tell(self, blind: dict[GpuUuid, str]) -> None:
        for gpu, why in blind.items():
            if self._blind.get(gpu) != why:
                log.warning("memory shares are not guarded", extra={"gpu": gpu, "error": why})
        self._blind = blind


def _uses_of_claims(look: GpuMemorySample) -> GpuMemorySample:
    return replace(look, uses=tuple(use for use in look.uses if use.claims))


_GIB: Final = 1024**3
_NOTHING: Final = MemoryReport()
_DONE: Final = {
    signal.SIGTERM: "was asked to end (SIGTERM)",
    signal.SIGKILL: "was killed (SIGKILL)",
}


class MemoryReportSource(Protocol):
    """Who uses how much; ``dra_driver.plugin.memory.guard``."""

    def look(
        self, shares: Mapping[GpuUuid, Sequence[MemoryShare]], holders: Mapping[PodUid, PodClaims]
    ) -> MemoryReport: ...


class ProcessSignaller(Protocol):
    """Signals a process and no other; False: it is gone.
    ``dra_driver.node.cgroups.tree.processes``.
    """

    def signal(self, process: ContainerProcess, number: signal.Signals) -> bool: ...


class MemoryGuardEvents(Protocol):
    """Tells of pods without waiting; ``dra_driver.k8s.events``."""

    def tell(self, event: Event) -> None: ...


class MemoryGuardMetrics(Protocol):
    """Who counts; ``dra_driver.plugin.metrics``."""

    def memory_used(self, uses: Sequence[ClaimMemoryUsage], blind: int) -> None: ...
    def memory_excursion(self) -> None: ...
    def memory_kill(self) -> None: ...


@dataclass(frozen=True, slots=True)
class MemoryGuardDependencies:
    """What the guard works with."""

    use: MemoryReportSource
    signals: ProcessSignaller
    events: MemoryGuardEvents
    observer: MemoryGuardMetrics
    clock: Callable[[], float] = time.monotonic


class _GuardedShares:
    """What follows from the records, worked out once for all looks until they change."""

    def __init__(self, records: Sequence[ClaimRecord]) -> None:
        self.records = records
        self.shares = memory_shares(records)
        self.pods = pod_claims(records)
        self.names = instance_names(records)


class MemoryEnforcer:
    """Guards what the claims of *records* were given. One thread at a time may ``look``."""

    def __init__(
        self, records: Callable[[], Sequence[ClaimRecord]], tools: MemoryGuardDependencies
    ) -> None:
        """*records* gives the same object again where nothing changed."""
        self._records = records
        self._tools = tools
        self._shared = _GuardedShares(())
        self._pods: Mapping[PodUid, PodClaims] = {}  # who uses what is guarded, at the last look
        self._excursions: GuardState = {}
        self._told = _NOTHING
        self._watched = False

    def look(self) -> None:
        """One look and what follows from it. Where no claim is guarded, it looks at nothing."""
        if (records := self._records()) is not self._shared.records:
            self._shared = _GuardedShares(records)
        shared = self._shared
        if not shared.shares and not self._watched:
            return
        seen = self._tools.use.look(shared.shares, shared.pods) if shared.shares else _NOTHING
        self._pods = {**shared.pods, **seen.joined}
        self._excursions, actions = guard_actions(seen.looks, self._excursions, self._tools.clock())
        for action in actions:
            self._do(action, shared)
        if seen != self._told:
            uses = [use for look in seen.looks for use in claim_usages(look)]
            self._tools.observer.memory_used(uses, len(seen.blind))
        self._told, self._watched = seen, bool(shared.shares)

    def _do(self, action: GuardAction, shared: _GuardedShares) -> None:
        match action:
            case LimitExceeded():
                self._tools.observer.memory_excursion()
            case WarnOverLimit(group):
                self._warn(group, shared)
            case TerminateProcess(group, use):
                if self._signal(group, use, signal.SIGTERM):
                    self._tools.observer.memory_kill()
                    self._tell_of_end(group, use, signal.SIGTERM, shared)
            case KillProcess(group, use):
                if self._signal(group, use, signal.SIGKILL):
                    self._tell_of_end(group, use, signal.SIGKILL, shared)
            case _:
                assert_never(action)

    def _warn(self, group: ClaimGroup, shared: _GuardedShares) -> None:
        log.warning("a claim uses more GPU memory than its share", extra=_facts(group))
        then = (
            f"; if it stays so for {group.guard.grace_seconds:g} s, its largest process is ended"
            if group.guard.policy is GuardPolicy.KILL
            else ""
        )
        for pod in sorted({use.process.pod for use in group.uses}):
            about, message = _about(group), f"{_above(group, shared)}{then}"
            ref = _ref(pod, self._pods)
            self._tools.events.tell(Event(ref, "GPUMemoryAboveShare", about, message))

    def _tell_of_end(
        self,
        group: ClaimGroup,
        use: ProcessUsage,
        number: signal.Signals,
        shared: _GuardedShares,
    ) -> None:
        message = (
            f"process {use.process.pid} of the host, which used {_gib(use.memory_bytes)} of it, "
            f"{_DONE[number]}: {_above(group, shared)}"
        )
        # Each signal is an event of its own: the same one told again so soon would only count.
        about = f"{_about(group)} {number.name}"
        pod = _ref(use.process.pod, self._pods)
        self._tools.events.tell(Event(pod, "GPUMemoryProcessEnded", about, message))

    def _signal(self, group: ClaimGroup, use: ProcessUsage, number: signal.Signals) -> bool:
        facts = _facts(group) | {
            "pid": use.process.pid,
            "container": use.process.container,
            "signal": number.name,
        }
        try:
            sent = self._tools.signals.signal(use.process, number)
        except NodeError as error:
            facts["error"] = str(error)
            log.warning("a process of a claim above its share cannot be ended", extra=facts)
            return False
        if not sent:
            log.info("a process of a claim above its share is gone already", extra=facts)
        elif number is signal.SIGKILL:
            log.warning("killed a process of a claim above its share", extra=facts)
        else:
            log.warning("asked a process of a claim above its share to end", extra=facts)
        return sent


def _ref(pod: PodUid, pods: Mapping[PodUid, PodClaims]) -> PodRef:
    return PodRef(pods[pod].namespace, pods[pod].name, pod)


def _above(group: ClaimGroup, shared: _GuardedShares) -> str:
    claims = "claim" if len(group.claims) == 1 else "claims (told apart by nothing)"
    return (
        f"{claims} {_names(group)} uses {_gib(group.used_bytes)} of "
        f"{shared.names.get(group.gpu, group.gpu)}, "
        f"but has a share of {_gib(group.limit_bytes)}"
    )


def _about(group: ClaimGroup) -> str:
    return f"{group.gpu} {_names(group)}"


def _names(group: ClaimGroup) -> str:
    return ", ".join(map(str, group.claims))


def _gib(size: int | None) -> str:
    return f"{(size or 0) / _GIB:.2f} GiB"


def _facts(group: ClaimGroup) -> dict[str, object]:
    return {
        "claim": _names(group),
        "gpu": group.gpu,
        "used_bytes": group.used_bytes,
        "share_bytes": group.limit_bytes,
    }
