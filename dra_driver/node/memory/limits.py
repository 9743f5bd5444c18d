"""GPU memory limits of this node: the GPU's driver refuses pods more memory than their claims hold.

A pod's cgroup is limited before any of its processes runs (`dra_driver.node.memory.pod_limits`).
The kernel reports containers as they appear. Seen with 40 pods on a machine of two cores: limits
were set 25 to 163 ms before a container's first instruction, half of them more than 67 ms, and once
49 ms after it with the cores overloaded.

Where the driver offers no limits, nothing is done, and the memory guard remains.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from dra_driver.base.errors import NodeError
from dra_driver.base.frozen import frozen
from dra_driver.base.threads import NamedLocks
from dra_driver.k8s.claims import PodUid
from dra_driver.k8s.pods import Container
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.steps import PodMemoryShare, SetMemoryLimits
from dra_driver.node.cgroups.containers import FindContainer, PodContainerCache
from dra_driver.node.cgroups.tree import Cgroups, container_cgroups
from dra_driver.node.cgroups.watch import NewPodWatcher, PodCgroupWatcher
from dra_driver.node.memory.pod_limits import CgroupLimits, GpuMemoryLimits, PodCgroups
from dra_driver.node.memory.support import MemoryAccounting, MemoryLimitProbe, MemoryLimitSupport
from dra_driver.node.nvml.client import Nvml

log = logging.getLogger(__name__)

ReadPodShares = Callable[[Sequence[Container]], Iterable[PodMemoryShare]]
"""What all pods hold by the claims of this node, also the pods whose containers are known to have
been given some."""
_RECHECK_SECONDS: Final = 60.0  # where nothing seems to change
_BUSY: Final = "the memory limits of GPU {name} are still being changed after {seconds} s"


@frozen
class _SettledState:
    """What the limits were set by, when all of them were as they should be."""

    shares: tuple[PodMemoryShare, ...]
    joinable: bool
    support: MemoryLimitSupport
    changes: int
    until: float  # on the clock


class NodeMemoryLimits:
    """Sets the limits of pods on all GPUs, looks after them, and removes them."""

    def __init__(
        self,
        nvml: Nvml,
        cgroups: Cgroups,
        find: FindContainer,
        clock: Callable[[], float] = time.monotonic,
        lock_seconds: float = 15.0,
    ) -> None:
        """*lock_seconds*: how long a change waits until another one on the same GPU is done."""
        self._nvml = nvml
        self._cgroups = cgroups
        self._lock_seconds = lock_seconds
        self._clock = clock
        self._probe = MemoryLimitProbe(nvml, cgroups, clock)
        self._containers = PodContainerCache(find)
        self._watcher = PodCgroupWatcher(cgroups, self._on_cgroup)
        self._pods = PodCgroups(cgroups, self._containers, self._watcher)
        self._new_pods = NewPodWatcher(cgroups)
        self._gpu_locks = NamedLocks(_BUSY)
        self._lock = threading.Lock()  # of what follows
        self._gpus: dict[GpuUuid, GpuMemoryLimits] = {}
        self._changes = 0  # how often something happened that ``settle`` has to act on
        self._settled: _SettledState | None = None
        self._read: ReadPodShares = lambda containers: ()
        self.on_owners_unknown: Callable[[], None] = lambda: None  # to settle soon would help

    def status(self) -> MemoryLimitSupport:
        """What the driver offers, read once a minute at most where it is ready."""
        return self._probe.support()

    def carry_out(self, step: SetMemoryLimits) -> None:
        """Limit the pods of *step* that are on this node.

        NodeError: the step is strict, and the driver offers no limits, a limit could not be set, or
        none of the pods has a cgroup. Where it is not strict, that is a line in the log.
        """
        support = self._probe.support()
        if support.backend is not None:
            problem = self._carry_out(step, support.backend)
        else:
            limited = any(pod_limit.memory_bytes is not None for pod_limit in step.pods)
            problem = support.reason if limited else ""
        if problem and step.strict:
            raise NodeError(
                f"GPU {step.gpu}: its driver does not limit the pod's memory: {problem}. The "
                "node's profile requires the limit (memoryLimit: Strict). Without memoryLimit in "
                "the profile the memory guard watches the pod instead. A pod that has the GPU "
                "without a claim has to be created again after the profile was changed"
            )

    def settle(self, read: ReadPodShares, joinable: bool = False) -> bool:
        """Make the limits those of *read*: what all pods hold by the claims of this node.

        For pods that joined a claim later or left it, for limits that were lost, and for containers
        that appeared unseen. While nothing changes it only compares. *read* is asked again for each
        GPU, so that no claim prepared meanwhile is undone. *joinable*: there are claims that limit
        any pod that joins them; its containers tell that it did. One thread at a time.

        False: nothing is limited, and nothing has to be.
        """
        self._read = read
        containers = self._containers.known
        shares = tuple(read(containers))
        if not (joinable or self._limited_gpus() or _limited(shares)):
            self._watcher.forget()
            self._settled = None
            return False
        if self._is_settled(shares, joinable):
            return True
        changes, support, succeeded = self._changes, self._probe.support(), True
        directories: Mapping[PodUid, Path] = {}
        if support.backend is not None:
            directories, succeeded = self._find_pods()
            if self._containers.known is not containers:
                shares = tuple(read(self._containers.known))
        gpus = {share.gpu for share in _limited(shares)} | set(self._limited_gpus())
        succeeded &= all(
            [self._settle_gpu(gpu, read, support, directories) for gpu in sorted(gpus)]
        )
        settled = _SettledState(shares, joinable, support, changes, self._next_check())
        self._settled = settled if succeeded else None
        return True

    def _find_pods(self) -> tuple[Mapping[PodUid, Path], bool]:
        """The cgroups of all pods, and whether the claims of all containers could be read."""
        directories: Mapping[PodUid, Path] = {}

        def containers_by_pod() -> Mapping[PodUid, Sequence[str]]:
            nonlocal directories
            directories = self._watcher.find()
            return {pod: _ids(directory) for pod, directory in directories.items()}

        succeeded = self._containers.learn(containers_by_pod)
        return directories, succeeded

    def report_new_pods(self, on_new_pod: Callable[[], None] | None) -> bool:
        """Call *on_new_pod* when a pod comes to this node, from now on; None: no longer.

        False: pods, or some of them, cannot be reported now.
        """
        return self._new_pods.report(on_new_pod)

    def stop(self) -> None:
        """Set nothing any more. The driver keeps what was set."""
        self._watcher.stop()
        self._new_pods.stop()

    def _is_settled(self, shares: tuple[PodMemoryShare, ...], joinable: bool) -> bool:
        last = self._settled
        return (
            last is not None
            and (last.shares, last.joinable) == (shares, joinable)
            and last.changes == self._changes
            and self._clock() < last.until
            and self._watcher.complete
            and self._probe.support() == last.support
        )

    def _next_check(self) -> float:
        with self._lock:
            checks = [limits.applied.next_check for limits in self._gpus.values()]
        return min([self._clock() + _RECHECK_SECONDS, *checks])

    def _count_change(self) -> None:
        with self._lock:
            self._changes += 1

    def _carry_out(self, step: SetMemoryLimits, backend: MemoryAccounting) -> str:
        """The problem that is left afterwards, or an empty string."""
        try:
            with self._lock_gpu(step.gpu) as limits:
                problems = limits.change(step, backend)
        except NodeError as error:  # busy, or the cgroups cannot be looked at now
            log.warning("GPU memory limits not set: %s", error, extra={"gpu": step.gpu})
            return str(error)
        finally:
            self._count_change()
        if problems and not any(problem is not None for problem in problems):
            pods = ", ".join(
                pod_limit.pod for pod_limit in step.pods if pod_limit.memory_bytes is not None
            )
            problem = f"no cgroup of pod {pods} is below {self._cgroups.root}"
            log.warning("no pod to limit the GPU memory of: %s", problem, extra={"gpu": step.gpu})
            return problem
        return next((problem for problem in problems if problem), "")

    def _settle_gpu(
        self,
        gpu: GpuUuid,
        read: ReadPodShares,
        support: MemoryLimitSupport,
        directories: Mapping[PodUid, Path],
    ) -> bool:
        """Whether it was possible."""
        try:
            with self._lock_gpu(gpu) as limits:
                # It is not known whether a pod whose containers are hidden still has its claims.
                hidden = self._containers.hidden
                limits.shares = {
                    **{pod: share for pod, share in limits.shares.items() if pod in hidden},
                    **_on_gpu(gpu, read(self._containers.known)),
                }
                if support.backend is not None:
                    limits.settle(support.backend, directories)
                elif not support.fault:
                    limits.applied.forget()
        except NodeError as error:
            log.warning("GPU memory limits not looked after: %s", error, extra={"gpu": gpu})
            return False
        return True

    def _on_cgroup(self, pod: PodUid, container: str | None) -> None:
        """The cgroup of *pod*, or one in it, is new."""
        try:
            directory = self._cgroups.pod(pod)
            ids = [container] if container else _ids(directory) if directory else []
            readable = self._containers.learn_new(pod, ids)
        except NodeError as error:
            log.warning("GPU memory limits not set: %s", error, extra={"pod": pod})
            readable = False
        gpus = {share.gpu for share in self._shares_of(pod)}
        gpus |= {gpu for gpu in self._limited_gpus() if pod in self._pods_of(gpu)}
        for gpu in sorted(gpus):
            try:
                self._limit_new(gpu, pod)
            except NodeError as error:
                log.warning("GPU memory limits not set: %s", error, extra={"gpu": gpu, "pod": pod})
        if gpus or not readable:
            self._count_change()
        if not readable:
            self.on_owners_unknown()

    def _shares_of(self, pod: PodUid) -> Iterable[PodMemoryShare]:
        shares = self._read(self._containers.known)
        return [share for share in _limited(shares) if share.pod == pod]

    def _limit_new(self, gpu: GpuUuid, pod: PodUid) -> None:
        with self._lock_gpu(gpu) as limits:
            limits.shares = {**limits.shares, **_on_gpu(gpu, self._shares_of(pod))}
            if (backend := self._probe.known()) is not None:
                limits.limit(pod, backend)

    def _pods_of(self, gpu: GpuUuid) -> Collection[PodUid]:
        with self._lock:
            return tuple(self._gpus[gpu].shares) if gpu in self._gpus else ()

    def _limited_gpus(self) -> tuple[GpuUuid, ...]:
        with self._lock:
            return tuple(sorted(self._gpus))

    @contextmanager
    def _lock_gpu(self, gpu: GpuUuid) -> Iterator[GpuMemoryLimits]:
        """The limits of *gpu*, for this thread alone. TimedOut: another kept them for too long."""
        with self._gpu_locks.hold([gpu], self._lock_seconds):
            new = GpuMemoryLimits(self._pods, CgroupLimits(self._nvml, gpu, self._clock))
            with self._lock:
                limits = self._gpus.setdefault(gpu, new)
            try:
                yield limits
            finally:
                with self._lock:
                    if limits.idle:
                        del self._gpus[gpu]


def _limited(shares: Iterable[PodMemoryShare]) -> Sequence[PodMemoryShare]:
    return [share for share in shares if share.memory_bytes is not None]


def _on_gpu(gpu: GpuUuid, shares: Iterable[PodMemoryShare]) -> Mapping[PodUid, PodMemoryShare]:
    return {share.pod: share for share in _limited(shares) if share.gpu == gpu}


def _ids(pod: Path) -> Sequence[str]:
    return [container for container, _ in container_cgroups(pod)]
