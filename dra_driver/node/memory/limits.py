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
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dra_driver.base.errors import NodeError
from dra_driver.base.threads import NamedLocks
from dra_driver.k8s.claims import PodUid
from dra_driver.k8s.pods import Container
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.steps import PodMemoryShare, SetMemoryLimits
from dra_driver.node.cgroups.containers import FindContainer, PodContainerCache
from dra_driver.node.cgroups.tree import Cgroups, container_cgroups
from dra_driver.node.cgroups.watch import NewPodWatcher, PodCgroupWatcher
from dra_driver.node.memory.pod_limits import GpuMemoryLimits, PodMemoryLimits
from dra_driver.node.memory.support import MemoryAccounting, MemoryLimitProbe, MemoryLimitSupport
from dra_driver.node.nvml.client import Nvml

log = logging.getLogger(__name__)

ReadPodShares = Callable[[Sequence[Container]], Iterable[PodMemoryShare]]
"""What all pods hold by the claims of this node, with those whose containers are known to have been
given some."""
_RECHECK_SECONDS: Final = 60.0  # where nothing seems to change
_BUSY: Final = "the memory limits of GPU {name} are still being changed after {seconds} s"


@dataclass(frozen=True, slots=True)
class _SettledState:
    """What all was made right by, at the last time."""

    shares: tuple[PodMemoryShare, ...]
    joinable: bool
    offered: MemoryLimitSupport
    news: int
    until: float  # on the clock


class NodeMemoryLimits:
    """Sets what is wanted, looks after it, and takes it away."""

    def __init__(
        self,
        nvml: Nvml,
        cgroups: Cgroups,
        find: FindContainer,
        clock: Callable[[], float] = time.monotonic,
        turn_seconds: float = 15.0,
    ) -> None:
        """*turn_seconds*: how long a change waits until another one on the same GPU is done."""
        self._nvml = nvml
        self._cgroups = cgroups
        self._turn_seconds = turn_seconds
        self._clock = clock
        self._backend = MemoryLimitProbe(nvml, cgroups, clock)
        self._containers = PodContainerCache(find)
        self._directories = PodCgroupWatcher(cgroups, self._appeared)
        self._pods = PodMemoryLimits(cgroups, self._containers, self._directories)
        self._new_pods = NewPodWatcher(cgroups)
        self._turns = NamedLocks(_BUSY)
        self._lock = threading.Lock()  # of what follows
        self._gpus: dict[GpuUuid, GpuMemoryLimits] = {}
        self._news = 0  # how often something happened that ``settle`` has to look at
        self._settled: _SettledState | None = None
        self._read: ReadPodShares = lambda containers: ()
        self.on_unsettled: Callable[[], None] = lambda: None  # it would be good to settle now

    def status(self) -> MemoryLimitSupport:
        """What the driver offers, looked at once a minute at most where it is ready."""
        return self._backend.offered()

    def carry_out(self, step: SetMemoryLimits) -> None:
        """Limit the pods of *step*, as far as they are here.

        NodeError: the step is strict, and the driver offers no limits, a limit could not be set, or
        none of the pods has a cgroup. Without strict all that is a line in the log.
        """
        offered = self._backend.offered()
        if offered.backend is not None:
            problem = self._carry_out(step, offered.backend)
        else:
            limited = any(one.memory_bytes is not None for one in step.pods)
            problem = offered.reason if limited else ""
        if problem and step.strict:
            raise NodeError(
                f"GPU {step.gpu}: its driver does not limit the claim's memory, which the node's "
                f"profile insists on: {problem}; or make the profile not strict: then the memory "
                "guard is enough"
            )

    def settle(self, read: ReadPodShares, joinable: bool = False) -> None:
        """Make the limits those of *read*, what all pods hold by the claims of this node.

        For pods that came to a claim later or left it, for limits that were lost, for containers
        that nobody told of, and for what those use. While nothing changes it compares, and no more.
        *read* is asked again for each GPU, so that no claim prepared meanwhile is undone.
        *joinable*: there are claims that limit whoever joins them, which a pod may do that nobody
        named: as its containers appear, they tell. One thread at a time.
        """
        self._read = read
        containers = self._containers.known
        shares = tuple(read(containers))
        if self._is_settled(shares, joinable):
            return
        if not (joinable or self._known() or _limited(shares)):
            self._directories.forget()
            return
        news, offered, well = self._news, self._backend.offered(), True
        places: Mapping[PodUid, Path] = {}
        if offered.backend is not None:
            places, well = self._look()
            if self._containers.known is not containers:
                shares = tuple(read(self._containers.known))
        gpus = {share.gpu for share in _limited(shares)} | set(self._known())
        well &= all([self._settle_gpu(gpu, read, offered, places) for gpu in sorted(gpus)])
        done = _SettledState(shares, joinable, offered, news, self._due())
        self._settled = done if well else None

    def _look(self) -> tuple[Mapping[PodUid, Path], bool]:
        """Where all pods are, and whether all could be read that their containers were given."""
        places: Mapping[PodUid, Path] = {}

        def there() -> Mapping[PodUid, Sequence[str]]:
            nonlocal places
            places = self._directories.find()
            return {pod: _ids(directory) for pod, directory in places.items()}

        well = self._containers.learn(there)
        return places, well

    def report_new_pods(self, on_new_pod: Callable[[], None] | None) -> bool:
        """Call *on_new_pod* when a pod comes to this node, from now on; None: no longer.

        False: that is not possible now, or not for all pods.
        """
        return self._new_pods.report(on_new_pod)

    def stop(self) -> None:
        """Set nothing any more. The driver keeps what was set."""
        self._directories.stop()
        self._new_pods.stop()

    def _is_settled(self, shares: tuple[PodMemoryShare, ...], joinable: bool) -> bool:
        last = self._settled
        return (
            last is not None
            and (last.shares, last.joinable) == (shares, joinable)
            and last.news == self._news
            and self._clock() < last.until
            and self._directories.complete
            and self._backend.offered() == last.offered
        )

    def _due(self) -> float:
        """When to look again even if nothing changes."""
        with self._lock:
            dues = [limits.due for limits in self._gpus.values()]
        return min([self._clock() + _RECHECK_SECONDS, *dues])

    def _note(self) -> None:
        with self._lock:
            self._news += 1

    def _carry_out(self, step: SetMemoryLimits, backend: MemoryAccounting) -> str:
        """What is wrong afterwards, if something is."""
        try:
            with self._turn(step.gpu) as limits:
                found = self._pods.change(limits, step, backend)
        except NodeError as error:  # busy, or the cgroups cannot be looked at now
            log.warning("GPU memory limits not set: %s", error, extra={"gpu": step.gpu})
            return str(error)
        finally:
            self._note()
        if found and not any(problem is not None for problem in found):
            pods = ", ".join(one.pod for one in step.pods if one.memory_bytes is not None)
            problem = f"no cgroup of pod {pods} is below {self._cgroups.root}"
            log.warning("no pod to limit the GPU memory of: %s", problem, extra={"gpu": step.gpu})
            return problem
        return next((problem for problem in found if problem), "")

    def _settle_gpu(
        self,
        gpu: GpuUuid,
        read: ReadPodShares,
        offered: MemoryLimitSupport,
        places: Mapping[PodUid, Path],
    ) -> bool:
        """Whether it was possible."""
        try:
            with self._turn(gpu) as limits:
                # Nobody can tell whether a pod whose containers are hidden still has its claims.
                hidden = self._containers.hidden
                kept = {pod: share for pod, share in limits.shares.items() if pod in hidden}
                wanted = _limited(read(self._containers.known))
                limits.shares = kept | {one.pod: one for one in wanted if one.gpu == gpu}
                if offered.backend is not None:
                    self._pods.settle(limits, offered.backend, places)
                elif not offered.fault:
                    limits.forget()
        except NodeError as error:
            log.warning("GPU memory limits not looked after: %s", error, extra={"gpu": gpu})
            return False
        return True

    def _appeared(self, pod: PodUid, container: str | None) -> None:
        """The directory of *pod*, or something in it, is new."""
        try:
            directory = self._cgroups.pod(pod)
            ids = [container] if container else _ids(directory) if directory else []
            well = self._containers.learn_new(pod, ids)
        except NodeError as error:
            log.warning("GPU memory limits not set: %s", error, extra={"pod": pod})
            well = False
        gpus = {share.gpu for share in self._shares_of(pod)}
        gpus |= {gpu for gpu in self._known() if pod in self._pods_of(gpu)}
        for gpu in sorted(gpus):
            try:
                self._limit_new(gpu, pod)
            except NodeError as error:
                log.warning("GPU memory limits not set: %s", error, extra={"gpu": gpu, "pod": pod})
        if gpus or not well:
            self._note()
        if not well:
            self.on_unsettled()

    def _shares_of(self, pod: PodUid) -> Iterable[PodMemoryShare]:
        shares = self._read(self._containers.known)
        return [share for share in _limited(shares) if share.pod == pod]

    def _limit_new(self, gpu: GpuUuid, pod: PodUid) -> None:
        with self._turn(gpu) as limits:
            mine = {share.pod: share for share in self._shares_of(pod) if share.gpu == gpu}
            limits.shares = {**limits.shares, **mine}
            if (backend := self._backend.known()) is not None:
                self._pods.limit(limits, pod, backend)

    def _pods_of(self, gpu: GpuUuid) -> Collection[PodUid]:
        with self._lock:
            return tuple(self._gpus[gpu].shares) if gpu in self._gpus else ()

    def _known(self) -> tuple[GpuUuid, ...]:
        with self._lock:
            return tuple(sorted(self._gpus))

    @contextmanager
    def _turn(self, gpu: GpuUuid) -> Iterator[GpuMemoryLimits]:
        """The limits of *gpu*, for this thread alone. TimedOut: another had them for too long."""
        with self._turns.hold([gpu], self._turn_seconds):
            with self._lock:
                limits = self._gpus.setdefault(gpu, GpuMemoryLimits(self._nvml, gpu, self._clock))
            try:
                yield limits
            finally:
                with self._lock:
                    if limits.idle:
                        del self._gpus[gpu]


def _limited(shares: Iterable[PodMemoryShare]) -> Sequence[PodMemoryShare]:
    return [share for share in shares if share.memory_bytes is not None]


def _ids(pod: Path) -> Sequence[str]:
    return [container for container, _ in container_cgroups(pod)]
