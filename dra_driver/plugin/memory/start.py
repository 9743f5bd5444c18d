"""What sees to it that claims have what they were given, and use no more memory than that."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, Protocol

from dra_driver.base.threads import Loop
from dra_driver.kubeletplugin.serve.pod_resources import PodResourcesClient
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.processes import GpuProcess
from dra_driver.model.records import ClaimRecord
from dra_driver.node.cgroups.processes import ContainerProcesses
from dra_driver.plugin import process_owners
from dra_driver.plugin.claims.dependencies import ClaimChanged
from dra_driver.plugin.memory import guard, pod_limits
from dra_driver.plugin.memory.guard import (
    MemoryEnforcer,
    MemoryGuardDependencies,
    MemoryGuardEvents,
    MemoryScanner,
)
from dra_driver.plugin.memory.pod_limits import (
    CachedClaimSource,
    KubeletPodLister,
    KubeletPods,
    PodLimitBackend,
    PodLimits,
    PodSource,
)
from dra_driver.plugin.mig import lost_instances
from dra_driver.plugin.mig.lost_instances import LostInstances
from dra_driver.plugin.parts import PluginParts
from dra_driver.plugin.process_owners import ContainerClaimsCache

PODS_SECONDS: Final = 30.0  # until a pod that joined a claim is noticed, where it was not told of


def start(parts: PluginParts, stack: ExitStack) -> None:
    dependencies = MemoryDependencies(
        parts.node,
        parts.ledger,
        parts.claims,
        parts.prepared_claims,
        PodResourcesClient(parts.settings.kubelet_dir),
        parts.pods,
        parts.events,
        parts.metrics,
        parts.is_newest,
    )
    parts.metrics.judge_limits(lambda: parts.node.limits.status().backend is not None)
    intervals = MemoryIntervals(parts.settings.guard_interval)
    parts.claim_listeners.append(enforce(dependencies, parts.containers, intervals, stack))


class MemoryNode(lost_instances.LostInstanceNode, Protocol):
    """The GPUs of this machine; ``dra_driver.node.gpu_node``."""

    @property
    def limits(self) -> PodLimitBackend: ...
    def processes(self, gpu: GpuUuid) -> Sequence[GpuProcess]: ...


class MemoryLedger(Protocol):
    """What claims hold; ``dra_driver.node.state.ledger``."""

    def records(self) -> tuple[ClaimRecord, ...]: ...


class MemoryContainers(process_owners.ContainerFinder, Protocol):
    """The containers of this machine; ``dra_driver.node.cgroups.tree.containers``."""

    def places(self) -> tuple[str, ...]: ...


class MemoryPreparedClaims(pod_limits.PodUpdater, lost_instances.PreparedClaimUpdater, Protocol):
    """Who acts on claims; ``dra_driver.plugin.claims.prepared_claims``."""


class EnforcementMetrics(guard.MemoryGuardMetrics, lost_instances.LostInstanceMetrics, Protocol):
    """Who counts; ``dra_driver.plugin.metrics``."""


@dataclass(frozen=True, slots=True)
class MemoryDependencies:
    """What is looked after. *in_charge*: whether no newer process of this plugin runs."""

    node: MemoryNode
    ledger: MemoryLedger
    claims: CachedClaimSource
    preparer: MemoryPreparedClaims
    kubelet: KubeletPodLister
    pods: PodSource
    events: MemoryGuardEvents
    metrics: EnforcementMetrics
    in_charge: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class MemoryIntervals:
    """Seconds from one look to the next, where nothing wakes it."""

    guard: float
    limits: float = 5.0
    instances: float = 10.0
    pods: float = PODS_SECONDS


def enforce(
    its: MemoryDependencies, known: MemoryContainers, pace: MemoryIntervals, stack: ExitStack
) -> ClaimChanged:
    """Begin to look after what is given out; *stack* ends that. What a driver limits stays so.

    The answer has the limits of pods looked after at once: to be called after a claim changed.
    """
    processes = ContainerProcesses()
    use = MemoryScanner(its.node.processes, processes, ContainerClaimsCache(known))
    listed = KubeletPods(its.ledger.records, its.kubelet, its.pods, lambda: not known.places())
    guarding = MemoryEnforcer(
        listed.records, MemoryGuardDependencies(use, processes, its.events, its.metrics)
    )
    gone = LostInstances(its.node, its.ledger.records, its.preparer, its.events, its.metrics)
    limits = PodLimits(listed.records, its.claims, its.preparer, its.node.limits)

    def look_for_pods() -> float | None:
        listed.look()
        return limits.look_for_pods()

    settling = Loop("pod-limits", _when(its.in_charge, limits.settle), pace.limits)
    looking = Loop("pods", _when(its.in_charge, look_for_pods), pace.pods)
    limits.wake(looking.soon, settling.soon)
    for loop in (
        Loop("memory-guard", _when(its.in_charge, guarding.look), pace.guard),
        Loop("mig-instances", _when(its.in_charge, gone.look), pace.instances),
        looking,
        settling,
    ):
        loop.start()
        stack.callback(loop.stop)

    def claim_changed(record: ClaimRecord | None) -> None:
        if record is None or record.limited:
            settling.soon()

    return claim_changed


def _when(
    allowed: Callable[[], bool], look: Callable[[], float | None]
) -> Callable[[], float | None]:
    def step() -> float | None:
        return look() if allowed() else None

    return step
