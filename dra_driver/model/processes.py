"""The processes of pods' containers, and those that use a GPU."""

from dra_driver.base.frozen import frozen, ordered
from dra_driver.k8s.claims import ClaimUid, Pod, PodUid


@ordered
class ContainerProcess:
    """A process, distinguished from every other one that had or will have its number."""

    pid: int
    started: int  # clock ticks since boot
    pod: PodUid
    container: str  # its id


@frozen
class GpuProcess:
    """A number that NVML has for a process, and how much of one GPU's memory it uses."""

    pid: int
    memory_bytes: int | None  # None: NVML does not tell


@frozen
class CgroupProcesses:
    """What is in the cgroup of one of a pod's containers, or in the pod's outside of all of them.

    Some of the processes may have ended meanwhile. Number 0: it is not seen from here which one.
    """

    pod: Pod
    claims: frozenset[ClaimUid] | None  # that the container was given; None: that is not known
    pids: tuple[int, ...]
