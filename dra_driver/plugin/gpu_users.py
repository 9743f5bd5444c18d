"""Which processes of claims' pods are on GPUs, and for which claims each may be there."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from dra_driver.errors import NodeError
from dra_driver.kubeletplugin.claims import PodUid
from dra_driver.model.devices import GpuUuid
from dra_driver.model.processes import GpuProcess, Process
from dra_driver.plan.memory_look import GpuLook, Use
from dra_driver.plan.memory_shares import Holder, Share, Uses, owners
from dra_driver.plugin.container_uses import Users

GpuProcesses = Callable[[GpuUuid], Sequence[GpuProcess]]
"""What NVML sees on a GPU; NodeError: it does not answer. ``dra_driver.node.gpu_processes``."""


class Processes(Protocol):
    """The processes of this machine; ``dra_driver.node.processes``."""

    def sees_pods(self) -> bool: ...
    def now(self) -> int: ...
    def find(self, pid: int) -> Process | None: ...


class Containers(Protocol):
    """What containers use; ``dra_driver.plugin.container_uses``."""

    def of(self, processes: Sequence[Process], holders: Mapping[PodUid, Holder]) -> Users: ...


@dataclass(frozen=True, slots=True)
class Looked:
    """What a look found, and why there is none of some GPUs."""

    looks: tuple[GpuLook, ...] = ()
    failed: Mapping[GpuUuid, str] = field(default_factory=dict)
    joined: Mapping[PodUid, Holder] = field(default_factory=dict)  # known by containers alone


_HIDDEN: Final = (
    "the processes of other pods cannot be seen from here: run this in the host's process "
    "namespace (hostPID: true)"
)
_Used = Sequence[tuple[Process, int | None]]


class GpuUsers:
    """Looks at GPUs, and at the processes that NVML finds there. For one thread."""

    def __init__(
        self, gpu_processes: GpuProcesses, processes: Processes, containers: Containers
    ) -> None:
        self._gpu_processes = gpu_processes
        self._processes = processes
        self._containers = containers
        self._sees_pods = False

    def look(
        self, shares: Mapping[GpuUuid, Sequence[Share]], holders: Mapping[PodUid, Holder]
    ) -> Looked:
        """Who of all pods is on these GPUs; also who is there for none of *shares*.

        *holders*: the pods that are recorded. Others join a claim, and their containers tell it.
        """
        # A process stays in its namespace: who saw them once need not look again every time.
        self._sees_pods = self._sees_pods or self._processes.sees_pods()
        if not self._sees_pods:
            return Looked(failed=dict.fromkeys(shares, _HIDDEN))
        used: dict[GpuUuid, _Used] = {}
        failed: dict[GpuUuid, str] = {}
        for gpu in shares:
            try:
                used[gpu] = self._used(gpu)
            except NodeError as error:
                failed[gpu] = str(error)
        everybody = [process for its in used.values() for process, _ in its]
        users = self._containers.of(everybody, holders) if everybody else Users()
        looks = (_gpu_look(gpu, shares[gpu], its, users.uses) for gpu, its in used.items())
        return Looked(tuple(looks), failed, users.pods)

    def _used(self, gpu: GpuUuid) -> _Used:
        began = self._processes.now()
        used: list[tuple[Process, int | None]] = []
        for one in self._gpu_processes(gpu):
            process = self._processes.find(one.pid)
            # A process younger than NVML's answer only has the number of the one that was meant.
            if process is not None and process.started < began:
                used.append((process, one.memory_bytes))
        return used


def _gpu_look(
    gpu: GpuUuid, shares: Sequence[Share], used: _Used, containers: Mapping[str, Uses]
) -> GpuLook:
    uses = (
        Use(process, memory_bytes, owners(shares, process, containers[process.container]))
        for process, memory_bytes in used
    )
    return GpuLook(gpu, tuple(shares), tuple(uses))
