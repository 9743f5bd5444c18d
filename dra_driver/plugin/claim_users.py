"""Refuses that a claim is taken back while processes of its pods still use it.

The kubelet asks for that while containers are still ending: within a minute for every pod that was
force-deleted.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Protocol

from dra_driver.errors import InUse, Vanished
from dra_driver.kubeletplugin.claims import ClaimRef, ClaimUid, Pod
from dra_driver.model.devices import GpuUuid
from dra_driver.model.holdings import Record
from dra_driver.model.processes import CgroupProcesses
from dra_driver.plan.claim_users import in_given_containers, must_not_compute
from dra_driver.plugin.gpu_users import GpuProcesses


class PodProcesses(Protocol):
    """Who is in the cgroups of pods; ``dra_driver.node.pod_processes``. NodeError: not known."""

    def pods_given(self, claim: ClaimRef) -> frozenset[Pod]: ...
    def of(self, pods: Iterable[Pod]) -> Sequence[CgroupProcesses]: ...
    def lives(self, pid: int) -> bool: ...


Neighbours = Callable[[ClaimUid, Collection[str]], Sequence[Record]]
"""The records of the other claims that hold any part of these GPUs; ``Ledger.neighbours``."""


class ClaimUsers:
    """Looks each time it is asked; where nobody is left in a claim's pods, that costs little."""

    def __init__(
        self, processes: PodProcesses, gpu_processes: GpuProcesses, neighbours: Neighbours
    ) -> None:
        self._processes = processes
        self._gpu_processes = gpu_processes
        self._neighbours = neighbours

    def refuse_while_used(self, record: Record) -> None:
        """InUse: a process of a pod of the claim uses it. NodeError: that cannot be told now."""
        claim = record.claim
        pods = self._processes.pods_given(claim) | frozenset(record.pods)
        cgroups = self._processes.of(sorted(pods))
        for pod, pid in self._living(in_given_containers(claim.uid, cgroups)):
            raise InUse(f"{_told(record, pod, pid)} still runs; the claim waits for its end")
        for gpu, pod, pid in self._computing(record, cgroups):
            raise InUse(
                f"{_told(record, pod, pid)} still computes on {gpu}; the claim waits for its end"
            )

    def still_using(self, claim: ClaimUid, pods: Iterable[Pod]) -> tuple[Pod, ...]:
        """Those of *pods* in which a process lives in a container that was given *claim*."""
        cgroups = in_given_containers(claim, self._processes.of(pods))
        return tuple(sorted({pod for pod, _ in self._living(cgroups)}))

    def _living(self, cgroups: Iterable[CgroupProcesses]) -> Iterator[tuple[Pod, int]]:
        """The first process of each that lives."""
        for cgroup in cgroups:
            pid = next((pid for pid in cgroup.pids if self._processes.lives(pid)), None)
            if pid is not None:
                yield cgroup.pod, pid

    def _computing(
        self, record: Record, cgroups: Sequence[CgroupProcesses]
    ) -> Iterator[tuple[GpuUuid, Pod, int]]:
        """The GPUs are asked after the cgroups: so none of their processes can be one that came
        later and has the same number."""
        if not cgroups:
            return
        others = self._neighbours(record.claim.uid, record.gpus)
        for gpu, processes in must_not_compute(record, others, cgroups).items():
            for pid in self._on(gpu):
                if pid in processes and self._processes.lives(pid):
                    yield gpu, processes[pid], pid

    def _on(self, gpu: GpuUuid) -> Iterator[int]:
        try:
            yield from (process.pid for process in self._gpu_processes(gpu))
        except Vanished:
            return  # the MIG instance is gone, and with it whoever computed there


def _told(record: Record, pod: Pod, pid: int) -> str:
    which = f"process {pid}" if pid else "a process that is not seen from here"
    return f"pod {record.claim.namespace}/{pod.name}: {which}"
