"""One look at who uses how much of the memory of GPUs that guarded claims share."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dra_driver.kubeletplugin.claims import PodUid
from dra_driver.model.devices import GpuUuid
from dra_driver.plan.memory_look import GpuLook
from dra_driver.plan.memory_shares import Holder, Share
from dra_driver.plugin.gpu_users import Containers, GpuProcesses, GpuUsers, Processes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a look found. GPUs that do not tell who uses how much are *blind*."""

    looks: tuple[GpuLook, ...] = ()
    blind: frozenset[GpuUuid] = frozenset()
    joined: Mapping[PodUid, Holder] = field(default_factory=dict)  # pods, as ``Looked`` says


class MemoryUse:
    """Looks at what each process uses, and says where that cannot be seen."""

    def __init__(
        self, gpu_processes: GpuProcesses, processes: Processes, containers: Containers
    ) -> None:
        self._users = GpuUsers(gpu_processes, processes, containers)
        self._blind: dict[GpuUuid, str] = {}

    def look(
        self, shares: Mapping[GpuUuid, Sequence[Share]], holders: Mapping[PodUid, Holder]
    ) -> Seen:
        """Who uses how much of these GPUs. One that does not answer is missing."""
        looked = self._users.look(shares, holders)
        blind = dict(looked.failed)
        for look in looked.looks:
            if any(use.memory_bytes is None for use in look.uses):
                blind[look.gpu] = "NVML does not tell how much memory each process uses"
        self._tell(blind)
        return Seen(tuple(map(_of_claims, looked.looks)), frozenset(blind), looked.joined)

    def _tell(self, blind: dict[GpuUuid, str]) -> None:
        for gpu, why in blind.items():
            if self._blind.get(gpu) != why:
                log.warning("memory shares are not guarded", extra={"gpu": gpu, "error": why})
        self._blind = blind


def _of_claims(look: GpuLook) -> GpuLook:
    return replace(look, uses=tuple(use for use in look.uses if use.claims))
