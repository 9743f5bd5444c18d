"""The limits of one GPU: set on the cgroups of pods and of their containers, looked after, removed.

A pod's cgroup is limited before any of its processes runs, and that is the enforcement. The cgroups
of its containers appear in it later. They are limited, too, so that a process sees its share as all
the memory there is, and no container gets more than its claims hold:

* dmem: every container's; without a limit of its own it would see the whole card. The pod's limit
  holds as well, for all of them together.
* misc: only where containers of a pod use different claims. Otherwise it sees the pod's limit, and
  a limit of its own frees it from the pod's.

What two containers of a pod use of one claim is counted nowhere: beside a third with another claim
they can take that claim's memory (dmem), or their own twice (misc). The memory guard sees that.
"""

import logging
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from dra_driver.base.errors import NodeError
from dra_driver.k8s.claims import ClaimUid, PodUid
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.steps import PodMemoryShare, SetMemoryLimits
from dra_driver.node.cgroups.containers import PodContainerCache
from dra_driver.node.cgroups.tree import Cgroups, container_cgroups
from dra_driver.node.cgroups.watch import INNER_CGROUP, PodCgroupWatcher
from dra_driver.node.memory.support import (
    MemoryAccounting,
    apply_limit,
    get_memory_limit,
    same_limit,
    set_memory_limit,
)
from dra_driver.node.nvml.client import Nvml

log = logging.getLogger(__name__)

# The driver forgets limits when it is loaded anew or the GPU is reset, and says nothing of that.
_RECHECK_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class _AppliedLimit:
    memory_bytes: int
    inode: int  # a cgroup of the same name may be another one
    until: float  # when it is looked at again
    problem: str = ""


class GpuMemoryLimits:
    """What is wanted of one GPU, and what was done about it. Not for several threads at once."""

    def __init__(self, nvml: Nvml, gpu: GpuUuid, clock: Callable[[], float]) -> None:
        self.shares: dict[PodUid, PodMemoryShare] = {}
        self._nvml = nvml
        self._gpu = gpu
        self._clock = clock
        self._done: dict[Path, _AppliedLimit] = {}

    @property
    def idle(self) -> bool:
        """Whether nothing is wanted and nothing has to be taken away."""
        return not self.shares and not self._done

    @property
    def due(self) -> float:
        """When something is to be looked at again, on the clock."""
        return min((done.until for done in self._done.values()), default=math.inf)

    def forget(self) -> None:
        """There is no driver any more that would know of it."""
        self._done.clear()

    def limit(self, cgroup: Path, memory_bytes: int) -> str:
        """See to it that *cgroup* has this limit. Answers with what is wrong, if something is.

        A cgroup that goes meanwhile needs no limit.
        """
        try:
            inode = os.stat(cgroup).st_ino
        except OSError:
            self._done.pop(cgroup, None)
            return ""
        before = self._done.get(cgroup)
        known = before is not None and (before.memory_bytes, before.inode) == (memory_bytes, inode)
        if before is not None and known and self._clock() < before.until:
            return before.problem
        problem = self._attempt(cgroup, memory_bytes, known and not (before and before.problem))
        if problem and not cgroup.is_dir():
            self._done.pop(cgroup, None)
            return ""
        self._say(cgroup, problem, before)
        until = self._clock() + _RECHECK_SECONDS
        self._done[cgroup] = _AppliedLimit(memory_bytes, inode, until, problem)
        return problem

    def clear_others(self, wanted: Collection[Path]) -> None:
        """Take away every limit of ours but those of *wanted*."""
        for cgroup in sorted(self._done.keys() - set(wanted), reverse=True):  # what is inside first
            self.clear(cgroup)

    def clear(self, cgroup: Path) -> None:
        """Take away the limits of *cgroup* and of what is in it, if they are there."""
        inside = [path for path in self._done if path.is_relative_to(cgroup) and path != cgroup]
        for path in (*sorted(inside, reverse=True), cgroup):  # what is inside first
            before = self._done.get(path)
            if not path.is_dir():
                self._done.pop(path, None)
            elif before is None or not before.problem or self._clock() >= before.until:
                self._take_away(path, before)

    def set_here(self, cgroup: Path) -> bool:
        """Whether a limit of ours was set on *cgroup*."""
        return cgroup in self._done

    def _attempt(self, cgroup: Path, memory_bytes: int, there: bool) -> str:
        try:
            if there:
                found = get_memory_limit(self._nvml, self._gpu, cgroup).hard_bytes
                if same_limit(found, memory_bytes):
                    return ""
                log.warning("a GPU memory limit was lost: it is set again", extra=self._at(cgroup))
            apply_limit(self._nvml, self._gpu, cgroup, memory_bytes)
        except NodeError as error:
            return str(error)
        return ""

    def _take_away(self, cgroup: Path, before: _AppliedLimit | None) -> None:
        try:
            if cgroup.parent in self._done:  # which keeps its limit, and that may be the answer
                set_memory_limit(self._nvml, self._gpu, cgroup, None)
            else:
                apply_limit(self._nvml, self._gpu, cgroup, None)
        except NodeError as error:
            if not cgroup.is_dir():
                self._done.pop(cgroup, None)
                return
            self._say(cgroup, str(error), before)
            if before is not None:
                until = self._clock() + _RECHECK_SECONDS
                self._done[cgroup] = replace(before, until=until, problem=str(error))
            return
        self._done.pop(cgroup, None)

    def _say(self, cgroup: Path, problem: str, before: _AppliedLimit | None) -> None:
        if problem and (before is None or problem != before.problem):
            log.warning("a GPU memory limit is not as wanted: %s", problem, extra=self._at(cgroup))

    def _at(self, cgroup: Path) -> dict[str, str]:
        return {"gpu": self._gpu, "cgroup": str(cgroup)}


class PodMemoryLimits:
    """Changes what one GPU's driver keeps, while nobody else does."""

    def __init__(
        self, cgroups: Cgroups, containers: PodContainerCache, directories: PodCgroupWatcher
    ) -> None:
        self._cgroups = cgroups
        self._containers = containers
        self._directories = directories

    def change(
        self, limits: GpuMemoryLimits, step: SetMemoryLimits, backend: MemoryAccounting
    ) -> Collection[str | None]:
        """What is wrong with each pod that is limited now; None: it has no directory."""
        found: list[str | None] = []
        for one in step.pods:
            if one.memory_bytes is None:
                self._clear(limits, one.pod)
            else:
                share = _share(limits, step.gpu, one.pod, one.memory_bytes)
                found.append(self._limit_if_here(limits, share, backend))
        return found

    def settle(
        self, limits: GpuMemoryLimits, backend: MemoryAccounting, places: Mapping[PodUid, Path]
    ) -> None:
        """Limit the pods that *limits* wants limited, and no others. *places*: where they are."""
        wanted: set[Path] = set()
        for share in limits.shares.values():
            directory = places.get(share.pod) or self._cgroups.pod(share.pod)
            if directory is not None:
                wanted.update(self._limit_pod(limits, share, directory, backend)[1])
        limits.clear_others(wanted)

    def limit(self, limits: GpuMemoryLimits, pod: PodUid, backend: MemoryAccounting) -> None:
        """Limit what there is of *pod* now, if it is one that *limits* wants limited."""
        share, directory = limits.shares.get(pod), self._cgroups.pod(pod)
        if share and directory:
            self._limit_pod(limits, share, directory, backend)

    def _limit_if_here(
        self, limits: GpuMemoryLimits, share: PodMemoryShare, backend: MemoryAccounting
    ) -> str | None:
        limits.shares = {**limits.shares, share.pod: share}
        directory = self._cgroups.pod(share.pod)
        if directory is None:
            return None
        return self._limit_pod(limits, share, directory, backend)[0]

    def _clear(self, limits: GpuMemoryLimits, pod: PodUid) -> None:
        limits.shares = {one: share for one, share in limits.shares.items() if one != pod}
        directory = self._cgroups.pod(pod)
        if directory is not None:
            limits.clear(directory)

    def _limit_pod(
        self,
        limits: GpuMemoryLimits,
        share: PodMemoryShare,
        directory: Path,
        backend: MemoryAccounting,
    ) -> tuple[str, set[Path]]:
        """What is wrong with the pod's own limit, and every cgroup that has one now."""
        self._directories.watch(directory, share.pod)  # first: no container is missed
        problem = limits.limit(directory, share.memory_bytes or 0)
        limited = {directory}
        for container, leaf in container_cgroups(directory):
            limited.update(self._limit_container(limits, share, (container, leaf), backend))
        return problem, limited

    def _limit_container(
        self,
        limits: GpuMemoryLimits,
        share: PodMemoryShare,
        at: tuple[str, Path],
        backend: MemoryAccounting,
    ) -> Iterator[Path]:
        container, leaf = at
        memory_bytes = self._container_bytes(share, container, backend)
        if memory_bytes is None:
            # On misc a limit once set is not taken away below a pod: without it, no limit at all
            # might hold, not the pod's.
            if backend is MemoryAccounting.MISC and limits.set_here(leaf):
                yield leaf
            return
        limits.limit(leaf, memory_bytes)
        yield leaf
        if backend is MemoryAccounting.DMEM and leaf.name.startswith("crio-"):
            self._directories.watch(leaf, share.pod)
            if (leaf / INNER_CGROUP).is_dir():
                limits.limit(leaf / INNER_CGROUP, memory_bytes)
                yield leaf / INNER_CGROUP

    def _container_bytes(
        self, share: PodMemoryShare, container: str, backend: MemoryAccounting
    ) -> int | None:
        """The limit of a container's own; None: the pod's is enough."""
        used, every = self._used_as_far_as_known(share, container), _claims(share)
        if backend is MemoryAccounting.MISC and used == every:
            return None
        return share.of(used)

    def _used_as_far_as_known(self, share: PodMemoryShare, container: str) -> frozenset[ClaimUid]:
        """The claims of *share* that a container uses: all of them, unless some are known."""
        every = _claims(share)
        if len(every) == 1:
            return every
        return (self._containers.given(container) & every) or every


def _claims(share: PodMemoryShare) -> frozenset[ClaimUid]:
    return frozenset(claim for claim, _ in share.claims)


def _share(limits: GpuMemoryLimits, gpu: GpuUuid, pod: PodUid, memory_bytes: int) -> PodMemoryShare:
    """What a step says of a pod. Which of its claims it is for, the next ``settle`` says."""
    known = limits.shares.get(pod)
    if known is not None and known.memory_bytes == memory_bytes:
        return known
    return PodMemoryShare(pod, gpu, ((ClaimUid(""), memory_bytes),))
