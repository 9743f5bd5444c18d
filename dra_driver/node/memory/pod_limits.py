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
from dataclasses import replace
from pathlib import Path
from typing import Final

from dra_driver.base.errors import NodeError
from dra_driver.base.frozen import frozen
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


@frozen
class _AppliedLimit:
    memory_bytes: int
    inode: int  # a cgroup of the same name may be another one
    next_check: float  # when it is looked at again
    problem: str = ""


class CgroupLimits:
    """The limits of cgroups on one GPU that were set. For one thread at a time."""

    def __init__(self, nvml: Nvml, gpu: GpuUuid, clock: Callable[[], float]) -> None:
        self._nvml = nvml
        self._gpu = gpu
        self._clock = clock
        self._applied: dict[Path, _AppliedLimit] = {}

    def __len__(self) -> int:
        return len(self._applied)

    @property
    def next_check(self) -> float:
        """When a limit is to be read again, on the clock."""
        return min((applied.next_check for applied in self._applied.values()), default=math.inf)

    def forget(self) -> None:
        """The driver that kept the limits is gone."""
        self._applied.clear()

    def limit(self, cgroup: Path, memory_bytes: int) -> str:
        """See to it that *cgroup* has this limit. Answers with the problem, or an empty string.

        A cgroup that goes meanwhile needs no limit.
        """
        try:
            inode = os.stat(cgroup).st_ino
        except OSError:
            self._applied.pop(cgroup, None)
            return ""
        before = self._applied.get(cgroup)
        same = (memory_bytes, inode)
        unchanged = before is not None and (before.memory_bytes, before.inode) == same
        if before is not None and unchanged and self._clock() < before.next_check:
            return before.problem
        problem = self._attempt(cgroup, memory_bytes, unchanged and not (before and before.problem))
        if problem and not cgroup.is_dir():
            self._applied.pop(cgroup, None)
            return ""
        self._warn(cgroup, problem, before)
        until = self._clock() + _RECHECK_SECONDS
        self._applied[cgroup] = _AppliedLimit(memory_bytes, inode, until, problem)
        return problem

    def clear_others(self, cgroups: Collection[Path]) -> None:
        """Remove every limit of ours but those of *cgroups*."""
        others = self._applied.keys() - set(cgroups)
        for cgroup in sorted(others, reverse=True):  # what is inside first
            self.clear(cgroup)

    def clear(self, cgroup: Path) -> None:
        """Remove the limits of *cgroup* and of what is in it, if there are any."""
        inside = [path for path in self._applied if path.is_relative_to(cgroup) and path != cgroup]
        for path in (*sorted(inside, reverse=True), cgroup):  # what is inside first
            before = self._applied.get(path)
            if not path.is_dir():
                self._applied.pop(path, None)
            elif before is None or not before.problem or self._clock() >= before.next_check:
                self._remove(path, before)

    def has_limit(self, cgroup: Path) -> bool:
        """Whether a limit of ours was set on *cgroup*."""
        return cgroup in self._applied

    def _attempt(self, cgroup: Path, memory_bytes: int, applied: bool) -> str:
        try:
            if applied:
                current_bytes = get_memory_limit(self._nvml, self._gpu, cgroup).hard_bytes
                if same_limit(current_bytes, memory_bytes):
                    return ""
                log.warning(
                    "a GPU memory limit was lost: it is set again", extra=self._log_fields(cgroup)
                )
            apply_limit(self._nvml, self._gpu, cgroup, memory_bytes)
        except NodeError as error:
            return str(error)
        return ""

    def _remove(self, cgroup: Path, before: _AppliedLimit | None) -> None:
        try:
            if cgroup.parent in self._applied:  # which keeps its limit, and that may be the answer
                set_memory_limit(self._nvml, self._gpu, cgroup, None)
            else:
                apply_limit(self._nvml, self._gpu, cgroup, None)
        except NodeError as error:
            if not cgroup.is_dir():
                self._applied.pop(cgroup, None)
                return
            self._warn(cgroup, str(error), before)
            if before is not None:
                until = self._clock() + _RECHECK_SECONDS
                self._applied[cgroup] = replace(before, next_check=until, problem=str(error))
            return
        self._applied.pop(cgroup, None)

    def _warn(self, cgroup: Path, problem: str, before: _AppliedLimit | None) -> None:
        if problem and (before is None or problem != before.problem):
            log.warning(
                "a GPU memory limit is not as wanted: %s", problem, extra=self._log_fields(cgroup)
            )

    def _log_fields(self, cgroup: Path) -> dict[str, str]:
        return {"gpu": self._gpu, "cgroup": str(cgroup)}


@frozen
class PodCgroups:
    """The cgroups of pods, the containers in them, and who reports new ones."""

    cgroups: Cgroups
    containers: PodContainerCache
    watcher: PodCgroupWatcher


class GpuMemoryLimits:
    """The limits of pods on one GPU. For one thread at a time."""

    def __init__(self, pods: PodCgroups, applied: CgroupLimits) -> None:
        self.shares: Mapping[PodUid, PodMemoryShare] = {}  # replaced: other threads read it
        self.applied = applied
        self._pods = pods

    @property
    def idle(self) -> bool:
        """Whether there is no limit to set and none to remove."""
        return not self.shares and not self.applied

    def change(self, step: SetMemoryLimits, backend: MemoryAccounting) -> Collection[str | None]:
        """The problem of each pod that is limited now, or an empty string; None: no cgroup."""
        problems: list[str | None] = []
        for pod, memory_bytes in ((limit.pod, limit.memory_bytes) for limit in step.pods):
            if memory_bytes is not None:
                share = self._share(step.gpu, pod, memory_bytes)
                self.shares = {**self.shares, pod: share}
                problems.append(self.limit(pod, backend))
                continue
            self.shares = {uid: share for uid, share in self.shares.items() if uid != pod}
            directory = self._pods.cgroups.pod(pod)
            if directory is not None:
                self.applied.clear(directory)
        return problems

    def _share(self, gpu: GpuUuid, pod: PodUid, memory_bytes: int) -> PodMemoryShare:
        """What a step limits. The next ``settle`` says for which of the pod's claims."""
        share = self.shares.get(pod)
        if share is not None and share.memory_bytes == memory_bytes:
            return share
        return PodMemoryShare(pod, gpu, ((ClaimUid(""), memory_bytes),))

    def settle(self, backend: MemoryAccounting, directories: Mapping[PodUid, Path]) -> None:
        """Limit the pods that have shares, and no others. *directories*: the cgroups of pods."""
        limited: set[Path] = set()
        for pod, share in self.shares.items():
            directory = directories.get(pod) or self._pods.cgroups.pod(pod)
            if directory is not None:
                limited |= self._limit_pod(share, directory, backend)[1]
        self.applied.clear_others(limited)

    def limit(self, pod: PodUid, backend: MemoryAccounting) -> str | None:
        """Limit the cgroups of *pod* that exist now. Answers with the problem, or an empty string;
        None: it has no share or no cgroup."""
        share, directory = self.shares.get(pod), self._pods.cgroups.pod(pod)
        return self._limit_pod(share, directory, backend)[0] if share and directory else None

    def _limit_pod(
        self, share: PodMemoryShare, directory: Path, backend: MemoryAccounting
    ) -> tuple[str, set[Path]]:
        """The problem with the pod's own limit, and every cgroup that has one now."""
        self._pods.watcher.watch(directory, share.pod)  # first: no container is missed
        problem = self.applied.limit(directory, share.memory_bytes or 0)
        limited = {directory}
        for container, leaf in container_cgroups(directory):
            memory_bytes = self._container_bytes(share, container, backend)
            limited.update(self._limit_container(share.pod, leaf, memory_bytes, backend))
        return problem, limited

    def _limit_container(
        self, pod: PodUid, leaf: Path, memory_bytes: int | None, backend: MemoryAccounting
    ) -> Iterator[Path]:
        if memory_bytes is None:
            # On misc a limit once set is not taken away below a pod: without it, no limit at all
            # might hold, not the pod's.
            if backend is MemoryAccounting.MISC and self.applied.has_limit(leaf):
                yield leaf
            return
        self.applied.limit(leaf, memory_bytes)
        yield leaf
        if backend is MemoryAccounting.DMEM and leaf.name.startswith("crio-"):
            self._pods.watcher.watch(leaf, pod)
            if (leaf / INNER_CGROUP).is_dir():
                self.applied.limit(leaf / INNER_CGROUP, memory_bytes)
                yield leaf / INNER_CGROUP

    def _container_bytes(
        self, share: PodMemoryShare, container: str, backend: MemoryAccounting
    ) -> int | None:
        """A container's own limit; None: the pod's is enough. It uses all of the pod's claims,
        unless some are known."""
        pod_claims = frozenset(claim for claim, _ in share.claims)
        claims = pod_claims
        if len(pod_claims) > 1:
            claims = (self._pods.containers.claims_of(container) & pod_claims) or pod_claims
        if backend is MemoryAccounting.MISC and claims == pod_claims:
            return None
        return share.of(claims)
