"""The processes of pods on GPUs, and the claims for which each may be there."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from dra_driver.base.errors import NodeError
from dra_driver.k8s.claims import PodUid
from dra_driver.k8s.pods import Container
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.processes import ContainerProcess, GpuProcess
from dra_driver.node.cgroups.containers import NoContainer
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


class ContainerFinder(Protocol):
    """Knows what containers were given; ``dra_driver.node.cgroups.tree.containers``."""

    def find(self, id_: str) -> Container | NoContainer: ...


@dataclass(frozen=True, slots=True)
class ContainerOwners:
    """What containers use, by their ids, and the pods that are known by their containers."""

    uses: Mapping[str, ContainerClaims] = field(default_factory=dict)
    pods: Mapping[PodUid, PodClaims] = field(default_factory=dict)


class ContainerClaimsCache:
    """Reads each container once; what cannot be read now, at the next look again."""

    def __init__(self, containers: ContainerFinder) -> None:
        self._containers = containers
        self._known: dict[str, Container] = {}
        self._error = ""

    def of(
        self, processes: Iterable[ContainerProcess], holders: Mapping[PodUid, PodClaims]
    ) -> ContainerOwners:
        """Of each container with *processes*; *holders*: the pods that are recorded with claims."""
        ids = {process.container: process.pod for process in processes}
        read = ((id_, self._known.get(id_) or self._find(id_)) for id_ in sorted(ids))
        found = {id_: one for id_, one in read}
        self._known = {id_: one for id_, one in found.items() if one is not None}
        return ContainerOwners(
            {id_: container_claims(one, holders.get(ids[id_])) for id_, one in found.items()},
            {
                ids[id_]: PodClaims(one.namespace, one.pod.name, ())
                for id_, one in self._known.items()
                if one.claims and ids[id_] not in holders
            },
        )

    def _find(self, id_: str) -> Container | None:
        try:
            found = self._containers.find(id_)
        except NodeError as error:
            if str(error) != self._error:
                log.warning("which container uses which claim is not known: %s", error)
            self._error = str(error)
            return None
        return found if isinstance(found, Container) else None


ListGpuProcesses = Callable[[GpuUuid], Sequence[GpuProcess]]
"""What NVML sees on a GPU; NodeError: it does not answer.
``dra_driver.node.nvml.client.processes``.
"""


class ProcessFinder(Protocol):
    """The processes of this machine; ``dra_driver.node.cgroups.tree.processes``."""

    def sees_pods(self) -> bool: ...
    def now(self) -> int: ...
    def find(self, pid: int) -> ContainerProcess | None: ...


class ContainerClaimsSource(Protocol):
    """What containers use; ``dra_driver.plugin.process_owners``."""

    def of(
        self, processes: Sequence[ContainerProcess], holders: Mapping[PodUid, PodClaims]
    ) -> ContainerOwners: ...


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """What a look found, and why there is none of some GPUs."""

    looks: tuple[GpuMemorySample, ...] = ()
    failed: Mapping[GpuUuid, str] = field(default_factory=dict)
    joined: Mapping[PodUid, PodClaims] = field(default_factory=dict)  # known by containers alone


_HIDDEN: Final = (
    "the processes of other pods cannot be seen from here: run this in the host's process "
    "namespace (hostPID: true)"
)
_Used = Sequence[tuple[ContainerProcess, int | None]]


class ProcessOwners:
    """Looks at GPUs, and at the processes that NVML finds there. For one thread."""

    def __init__(
        self,
        gpu_processes: ListGpuProcesses,
        processes: ProcessFinder,
        containers: ContainerClaimsSource,
    ) -> None:
        self._gpu_processes = gpu_processes
        self._processes = processes
        self._containers = containers
        self._sees_pods = False

    def look(
        self, shares: Mapping[GpuUuid, Sequence[MemoryShare]], holders: Mapping[PodUid, PodClaims]
    ) -> ProcessReport:
        """Who of all pods is on these GPUs; also who is there for none of *shares*.

        *holders*: the pods that are recorded. Others join a claim, and their containers tell it.
        """
        # A process stays in its namespace: who saw them once need not look again every time.
        self._sees_pods = self._sees_pods or self._processes.sees_pods()
        if not self._sees_pods:
            return ProcessReport(failed=dict.fromkeys(shares, _HIDDEN))
        used: dict[GpuUuid, _Used] = {}
        failed: dict[GpuUuid, str] = {}
        for gpu in shares:
            try:
                used[gpu] = self._used(gpu)
            except NodeError as error:
                failed[gpu] = str(error)
        everybody = [process for its in used.values() for process, _ in its]
        users = self._containers.of(everybody, holders) if everybody else ContainerOwners()
        looks = (_gpu_look(gpu, shares[gpu], its, users.uses) for gpu, its in used.items())
        return ProcessReport(tuple(looks), failed, users.pods)

    def _used(self, gpu: GpuUuid) -> _Used:
        began = self._processes.now()
        used: list[tuple[ContainerProcess, int | None]] = []
        for one in self._gpu_processes(gpu):
            process = self._processes.find(one.pid)
            # A process younger than NVML's answer only has the number of the one that was meant.
            if process is not None and process.started < began:
                used.append((process, one.memory_bytes))
        return used


def _gpu_look(
    gpu: GpuUuid,
    shares: Sequence[MemoryShare],
    used: _Used,
    containers: Mapping[str, ContainerClaims],
) -> GpuMemorySample:
    uses = (
        ProcessUsage(
            process, memory_bytes, possible_owners(shares, process, containers[process.container])
        )
        for process, memory_bytes in used
    )
    return GpuMemorySample(gpu, tuple(shares), tuple(uses))
