"""The processes of pods on GPUs, and the claims for which each may be there."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Final

from dra_driver.base.errors import NodeError
from dra_driver.base.frozen import frozen
from dra_driver.k8s.claims import PodUid
from dra_driver.k8s.pods import Container
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.processes import ContainerProcess, GpuProcess
from dra_driver.node.cgroups.containers import FindContainer
from dra_driver.node.cgroups.processes import ContainerProcesses
from dra_driver.plan.memory.usage import (
    ContainerClaims,
    GpuMemorySample,
    MemoryShare,
    PodClaims,
    ProcessUsage,
    container_claims,
    possible_owners,
)

log = logging.getLogger(__name__)

ListGpuProcesses = Callable[[GpuUuid], Sequence[GpuProcess]]
"""The processes that NVML sees on a GPU; NodeError: it does not answer.
``dra_driver.node.gpu_node.GpuNode.processes``.
"""


@frozen
class ProcessReport:
    """A sample of each GPU, and why there is none of others."""

    samples: tuple[GpuMemorySample, ...] = ()
    errors: Mapping[GpuUuid, str] = field(default_factory=dict)
    joined: Mapping[PodUid, PodClaims] = field(default_factory=dict)  # known by containers alone


_HIDDEN: Final = (
    "the processes of other pods cannot be seen from here: run this in the host's process "
    "namespace (hostPID: true)"
)
_ProcessMemory = Sequence[tuple[ContainerProcess, int | None]]
"""Processes, and the bytes that each uses; None: not known."""


class ProcessOwners:
    """Reads which processes NVML finds on GPUs, and which claims their containers were given. For
    one thread."""

    def __init__(
        self,
        gpu_processes: ListGpuProcesses,
        processes: ContainerProcesses,
        find_container: FindContainer,
    ) -> None:
        self._gpu_processes = gpu_processes
        self._processes = processes
        self._find_container = find_container
        self._sees_pods = False
        self._last_error = ""

    def scan(
        self, shares: Mapping[GpuUuid, Sequence[MemoryShare]], holders: Mapping[PodUid, PodClaims]
    ) -> ProcessReport:
        """The processes of pods on these GPUs, also those that are there for none of *shares*.

        *holders*: the pods that are recorded. Containers tell which other pods joined a claim.
        """
        # A process stays in its namespace: what it once saw, it sees from then on.
        self._sees_pods = self._sees_pods or self._processes.sees_pods()
        if not self._sees_pods:
            return ProcessReport(errors=dict.fromkeys(shares, _HIDDEN))
        by_gpu: dict[GpuUuid, _ProcessMemory] = {}
        errors: dict[GpuUuid, str] = {}
        for gpu in shares:
            try:
                by_gpu[gpu] = self._processes_on(gpu)
            except NodeError as error:
                errors[gpu] = str(error)
        pods = {process.container: process.pod for used in by_gpu.values() for process, _ in used}
        containers = {id_: self._container(id_) for id_ in sorted(pods)}
        claims = {
            id_: container_claims(container, holders.get(pods[id_]))
            for id_, container in containers.items()
        }
        joined = {
            pods[id_]: PodClaims(container.namespace, container.pod.name, ())
            for id_, container in containers.items()
            if container and container.claims and pods[id_] not in holders
        }
        samples = (_sample(gpu, shares[gpu], used, claims) for gpu, used in by_gpu.items())
        return ProcessReport(tuple(samples), errors, joined)

    def _processes_on(self, gpu: GpuUuid) -> _ProcessMemory:
        began = self._processes.now()
        used: list[tuple[ContainerProcess, int | None]] = []
        for gpu_process in self._gpu_processes(gpu):
            process = self._processes.find(gpu_process.pid)
            # A process younger than NVML's answer only has the number of the one that was meant.
            if process is not None and process.started < began:
                used.append((process, gpu_process.memory_bytes))
        return used

    def _container(self, id_: str) -> Container | None:
        try:
            container = self._find_container(id_)
        except NodeError as error:
            if str(error) != self._last_error:
                log.warning("which container uses which claim is not known: %s", error)
            self._last_error = str(error)
            return None
        return container if isinstance(container, Container) else None


def _sample(
    gpu: GpuUuid,
    shares: Sequence[MemoryShare],
    used: _ProcessMemory,
    containers: Mapping[str, ContainerClaims],
) -> GpuMemorySample:
    usages = (
        ProcessUsage(
            process, memory_bytes, possible_owners(shares, process, containers[process.container])
        )
        for process, memory_bytes in used
    )
    return GpuMemorySample(gpu, tuple(shares), tuple(usages))
