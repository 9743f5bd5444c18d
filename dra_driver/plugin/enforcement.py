"""What sees to it that claims have what they were given, and use no more memory than that."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, Protocol

from dra_driver.model.devices import GpuUuid
from dra_driver.model.holdings import Record
from dra_driver.model.processes import GpuProcess
from dra_driver.node.processes import Processes
from dra_driver.plugin import container_uses, gone_instances, guard, pod_limits
from dra_driver.plugin.container_uses import ContainerUses
from dra_driver.plugin.gone_instances import GoneInstances
from dra_driver.plugin.guard import Events, MemoryGuard, Tools
from dra_driver.plugin.listed_pods import Kubelet, ListedPods, Pods
from dra_driver.plugin.memory_use import MemoryUse
from dra_driver.plugin.pod_limits import Claims, Limits, PodLimits
from dra_driver.plugin.tools import Changed
from dra_driver.process.loops import Loop

PODS_SECONDS: Final = 30.0  # until a pod that joined a claim is noticed, where it was not told of


class Node(gone_instances.Node, Protocol):
    """The GPUs of this machine; ``dra_driver.node.node``."""

    @property
    def limits(self) -> Limits: ...
    def processes(self, gpu: GpuUuid) -> Sequence[GpuProcess]: ...


class Ledger(Protocol):
    """What claims hold; ``dra_driver.node.ledger``."""

    def records(self) -> tuple[Record, ...]: ...


class Containers(container_uses.Containers, Protocol):
    """The containers of this machine; ``dra_driver.node.containers``."""

    def places(self) -> tuple[str, ...]: ...


class Preparer(pod_limits.Preparer, gone_instances.Preparer, Protocol):
    """Who acts on claims; ``dra_driver.plugin.upkeep``."""


class Observer(guard.Observer, gone_instances.Observer, Protocol):
    """Who counts; ``dra_driver.plugin.metrics``."""


@dataclass(frozen=True, slots=True)
class Enforced:
    """What is looked after. *in_charge*: whether no newer process of this plugin runs."""

    node: Node
    ledger: Ledger
    claims: Claims
    preparer: Preparer
    kubelet: Kubelet
    pods: Pods
    events: Events
    metrics: Observer
    in_charge: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds from one look to the next, where nothing wakes it."""

    guard: float
    limits: float = 5.0
    instances: float = 10.0
    pods: float = PODS_SECONDS


def enforce(its: Enforced, known: Containers, pace: Pace, stack: ExitStack) -> Changed:
    """Begin to look after what is given out; *stack* ends that. What a driver limits stays so.

    The answer has the limits of pods looked after at once: to be called after a claim changed.
    """
    processes = Processes()
    use = MemoryUse(its.node.processes, processes, ContainerUses(known))
    listed = ListedPods(its.ledger.records, its.kubelet, its.pods, lambda: not known.places())
    guarding = MemoryGuard(listed.records, Tools(use, processes, its.events, its.metrics))
    gone = GoneInstances(its.node, its.ledger.records, its.preparer, its.events, its.metrics)
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

    def claim_changed(record: Record | None) -> None:
        if record is None or record.limited:
            settling.soon()

    return claim_changed


def _when(
    allowed: Callable[[], bool], look: Callable[[], float | None]
) -> Callable[[], float | None]:
    def step() -> float | None:
        return look() if allowed() else None

    return step
