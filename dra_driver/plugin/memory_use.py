"""One look at who uses how much of the memory of GPUs that guarded claims share."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from dra_driver.errors import NodeError
from dra_driver.kubeletplugin.claims import PodUid
from dra_driver.model.devices import GpuUuid
from dra_driver.model.processes import GpuProcess, Process
from dra_driver.plan.memory_look import GpuLook, Use
from dra_driver.plan.memory_shares import Holder, Share, Uses, owners

log = logging.getLogger(__name__)

GpuProcesses = Callable[[GpuUuid], Sequence[GpuProcess]]
"""What NVML sees on a GPU; NodeError: it does not answer. ``dra_driver.node.gpu_processes``."""


class Processes(Protocol):
    """The processes of this machine; ``dra_driver.node.processes``."""

    def sees_pods(self) -> bool: ...
    def now(self) -> int: ...
    def find(self, pid: int) -> Process | None: ...


class Containers(Protocol):
    """What containers use; ``dra_driver.plugin.container_uses``."""

    def of(
        self, processes: Sequence[Process], holders: Mapping[PodUid, Holder]
    ) -> Mapping[str, Uses]: ...


@dataclass(frozen=True, slots=True)
class Seen:
    """What a look found. GPUs that do not tell who uses how much are *blind*."""

    looks: tuple[GpuLook, ...] = ()
    blind: frozenset[GpuUuid] = frozenset()


_HIDDEN: Final = (
    "the processes of other pods cannot be seen from here: run this in the host's process "
    "namespace (hostPID: true)"
)
_Used = Sequence[tuple[Process, int | None]]


class MemoryUse:
    """Looks at GPUs, and at the processes that NVML finds there."""

    def __init__(
        self, gpu_processes: GpuProcesses, processes: Processes, containers: Containers
    ) -> None:
        self._gpu_processes = gpu_processes
        self._processes = processes
        self._containers = containers
        self._blind: dict[GpuUuid, str] = {}
        self._sees_pods = False

    def look(
        self, shares: Mapping[GpuUuid, Sequence[Share]], holders: Mapping[PodUid, Holder]
    ) -> Seen:
        """Who uses how much of these GPUs. One that does not answer is missing."""
        # A process stays in its namespace: who saw them once need not look again every time.
        self._sees_pods = self._sees_pods or self._processes.sees_pods()
        if not self._sees_pods:
            self._tell(dict.fromkeys(shares, _HIDDEN))
            return Seen(blind=frozenset(shares))
        used: dict[GpuUuid, _Used] = {}
        blind: dict[GpuUuid, str] = {}
        for gpu in shares:
            try:
                used[gpu] = self._used(gpu, holders)
            except NodeError as error:
                blind[gpu] = str(error)
            else:
                if any(memory_bytes is None for _, memory_bytes in used[gpu]):
                    blind[gpu] = "NVML does not tell how much memory each process uses"
        self._tell(blind)
        everybody = [process for its in used.values() for process, _ in its]
        containers = self._containers.of(everybody, holders) if everybody else {}
        looks = (_gpu_look(gpu, shares[gpu], its, containers) for gpu, its in used.items())
        return Seen(tuple(looks), frozenset(blind))

    def _used(self, gpu: GpuUuid, holders: Mapping[PodUid, Holder]) -> _Used:
        began = self._processes.now()
        used: list[tuple[Process, int | None]] = []
        for one in self._gpu_processes(gpu):
            process = self._processes.find(one.pid)
            # A process younger than NVML's answer only has the number of the one that was meant.
            if process is not None and process.started < began and process.pod in holders:
                used.append((process, one.memory_bytes))
        return used

    def _tell(self, blind: dict[GpuUuid, str]) -> None:
        for gpu, why in blind.items():
            if self._blind.get(gpu) != why:
                log.warning("memory shares are not guarded", extra={"gpu": gpu, "error": why})
        self._blind = blind


def _gpu_look(
    gpu: GpuUuid, shares: Sequence[Share], used: _Used, containers: Mapping[str, Uses]
) -> GpuLook:
    uses = (
        Use(process, memory_bytes, owners(shares, process, containers[process.container]))
        for process, memory_bytes in used
    )
    return GpuLook(gpu, tuple(shares), tuple(use for use in uses if use.claims))
