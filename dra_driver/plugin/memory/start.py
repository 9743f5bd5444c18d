"""Starts the loops that keep claims within the GPU memory that they were given."""

from contextlib import ExitStack
from typing import Final

from dra_driver.base.threads import Loop
from dra_driver.kubeletplugin.serve.pod_resources import PodResourcesClient
from dra_driver.model.records import ClaimRecord
from dra_driver.node.cgroups.processes import ContainerProcesses
from dra_driver.plugin.memory.guard import MemoryEnforcer, MemoryGuardDependencies
from dra_driver.plugin.memory.pod_limits import KubeletPods, PodLimits
from dra_driver.plugin.parts import PluginParts
from dra_driver.plugin.process_owners import ProcessOwners

LIMITS_SECONDS: Final = 5.0
PODS_SECONDS: Final = 30.0  # until a pod that joined a claim is noticed, where it is not reported


def start(
    parts: PluginParts,
    stack: ExitStack,
    limits_seconds: float = LIMITS_SECONDS,
    pods_seconds: float = PODS_SECONDS,
) -> None:
    """*stack* ends the loops. What a driver limits stays limited.

    Seconds are between two runs of a loop, where nothing wakes it.
    """
    containers, limits = parts.node.containers, parts.node.limits
    parts.metrics.watch_memory_limits(lambda: limits.status().backend is not None)
    kubelet_pods = KubeletPods(
        parts.ledger.records,
        PodResourcesClient(parts.settings.kubelet_dir),
        parts.pods,
        bundles_hidden=lambda: not containers.runtime_directories(),
    )
    pod_limits = PodLimits(kubelet_pods.records, parts.claims, parts.prepared_claims, limits)
    processes = ContainerProcesses()
    owners = ProcessOwners(parts.node.processes, processes, containers.find)
    guard = MemoryEnforcer(
        kubelet_pods.records,
        MemoryGuardDependencies(owners, processes, parts.events, parts.metrics),
    )

    def update_pods() -> float | None:
        kubelet_pods.update()
        if parts.resources.missing:  # an API server without claims says nothing of their pods
            return None
        return pod_limits.update_pods()

    settling = Loop("pod-limits", parts.while_newest(pod_limits.settle), limits_seconds)
    updating = Loop("pods", parts.while_newest(update_pods), pods_seconds)
    guarding = Loop("memory-guard", parts.while_newest(guard.check), parts.settings.guard_interval)
    pod_limits.wake(updating.soon, settling.soon)
    for loop in (guarding, updating, settling):
        loop.start()
        stack.callback(loop.stop)

    def claim_changed(record: ClaimRecord | None) -> None:
        if record is None or record.limited:
            guarding.soon()
        if record is None or record.limited or record.namespaces:
            settling.soon()

    parts.claim_listeners.append(claim_changed)
