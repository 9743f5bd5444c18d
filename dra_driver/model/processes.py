"""The processes of pods' containers that use a GPU."""

from dataclasses import dataclass

from dra_driver.kubeletplugin.claims import PodUid


@dataclass(frozen=True, slots=True, order=True)
class Process:
    """A process, told apart from every other one that had or will have its number."""

    pid: int
    started: int  # clock ticks since boot
    pod: PodUid
    container: str  # its id


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A number that NVML has for a process, and how much of one GPU's memory it uses."""

    pid: int
    memory_bytes: int | None  # None: NVML does not tell
