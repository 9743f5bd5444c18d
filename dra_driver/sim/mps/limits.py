"""How much of a GPU a client can have: what its server holds, lowered by its environment."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from dra_driver.base.frozen import frozen
from dra_driver.sim.mps.command_line import CommandRefused
from dra_driver.sim.mps.host_snapshot import HostGpu

_SHIFTS: Final = {"K": 10, "M": 20, "G": 30}
_PERCENT: Final = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_MEMORY: Final = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
_PRIORITY: Final = "CUDA_MPS_CLIENT_PRIORITY"


@dataclass(slots=True)
class ServerLimits:
    """What a server holds for those who come."""

    memory_bytes: int | None = None  # of each GPU
    percent: float | None = None  # of the multiprocessors
    priority: int | None = None
    by_gpu: dict[str, int] = field(default_factory=dict)  # protocol 2: memory by UUID

    def of(self, gpu: str) -> int | None:
        """How much memory of *gpu*."""
        return self.by_gpu.get(gpu, self.memory_bytes)

    def copy(self) -> "ServerLimits":
        return ServerLimits(self.memory_bytes, self.percent, self.priority, dict(self.by_gpu))


@frozen
class ClientLimits:
    """What holds for one client."""

    percent: float
    memory: Mapping[str, int | None]  # by UUID of the GPUs that it sees; None: no limit
    priority: int


def grant_limits(
    limits: ServerLimits, gpus: Sequence[HostGpu], environ: Mapping[str, str], protocol: int
) -> ClientLimits:
    """What a client that sees *gpus*, in this order, gets with its environment."""
    percent = limits.percent or 100.0
    own = environ.get(_PERCENT, "")
    if re.fullmatch(r"\d+(\.\d+)?", own) and 0 < float(own) <= 100:
        percent = min(percent, float(own))
    own_priority = environ.get(_PRIORITY, "")
    priority = int(own_priority) if own_priority in ("0", "1") else limits.priority or 0
    return ClientLimits(
        percent, _memory(limits, gpus, environ.get(_MEMORY, ""), protocol), priority
    )


def _memory(
    limits: ServerLimits, gpus: Sequence[HostGpu], own_limits: str, protocol: int
) -> Mapping[str, int | None]:
    limit_of = {gpu.uuid: limits.of(gpu.uuid) for gpu in gpus}
    for entry in filter(None, own_limits.split(",")):
        name, _, text = entry.strip().partition("=")
        gpu = _seen(name, gpus)
        if gpu is None:
            if protocol == 3:  # measured: one wrong entry, and nothing is limited any more
                return dict.fromkeys(limit_of)
            continue
        own = _size(text, "MG")
        if own is not None:
            limit_of[gpu] = min(own, limit_of[gpu] or own)
    return limit_of


def _seen(name: str, gpus: Sequence[HostGpu]) -> str | None:
    if name.isdecimal():
        return gpus[int(name)].uuid if int(name) < len(gpus) else None
    return next((gpu.uuid for gpu in gpus if gpu.uuid == name), None)


def parse_memory(text: str, units: str = "KMG") -> int:
    """``4G``, ``512M``."""
    size = _size(text, units)
    if not size:
        raise CommandRefused(f"Invalid memory limit '{text}'")
    return size


def _size(text: str, units: str) -> int | None:
    match = re.fullmatch(r"(\d+)([A-Z])", text)
    return int(match[1]) << _SHIFTS[match[2]] if match and match[2] in units else None


def parse_percent(text: str) -> float:
    """1 to 100."""
    if not re.fullmatch(r"\d{1,3}(\.\d+)?", text) or not 1 <= float(text) <= 100:
        raise CommandRefused(f"Invalid active thread percentage '{text}': 1 to 100")
    return float(text)


def parse_priority(text: str) -> int:
    """0 (normal) or 1 (below normal)."""
    if text not in ("0", "1"):
        raise CommandRefused(f"Invalid client priority '{text}': 0 or 1")
    return int(text)


def format_memory(size: int | None) -> str:
    """As it is printed: in the largest unit that leaves a whole number."""
    if size is None:
        return "unlimited"
    unit = next((unit for unit in "GMK" if size % (1 << _SHIFTS[unit]) == 0), "")
    return f"{size >> _SHIFTS[unit]}{unit}" if unit else str(size)
