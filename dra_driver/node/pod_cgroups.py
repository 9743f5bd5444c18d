"""Limits the cgroups of pods: a pod's own, and those of its containers.

A pod's directory is limited before any of its processes runs, and that is the enforcement. The
directories of its containers appear in it later. They are limited, too, so that a process sees its
share as all that there is, and none gets more than the claims of its container hold:

* dmem: every container's; without a limit of its own it would see the whole card. The pod's limit
  holds as well, for all of them together.
* misc: only where containers of a pod use different claims. There it sees the pod's limit anyway,
  and a limit of its own frees it from the pod's.

What two containers of a pod use of one claim is counted nowhere: beside a third with another claim
they can take what is that one's (dmem), or the claim twice (misc). That is the memory guard's to
see.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from dra_driver.kubeletplugin.claims import ClaimUid, PodUid
from dra_driver.model.devices import GpuUuid
from dra_driver.model.shares import PodShare
from dra_driver.model.steps import LimitMemory
from dra_driver.node.cgroups import Cgroups, containers_in
from dra_driver.node.gpu_limits import GpuLimits
from dra_driver.node.limit_backend import Backend
from dra_driver.node.pod_containers import PodContainers
from dra_driver.node.pod_directories import INNER, PodDirectories


class PodCgroups:
    """Changes what one GPU's driver keeps, while nobody else does."""

    def __init__(
        self, cgroups: Cgroups, containers: PodContainers, directories: PodDirectories
    ) -> None:
        self._cgroups = cgroups
        self._containers = containers
        self._directories = directories

    def change(
        self, limits: GpuLimits, step: LimitMemory, backend: Backend
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

    def settle(self, limits: GpuLimits, backend: Backend, places: Mapping[PodUid, Path]) -> None:
        """Limit the pods that *limits* wants limited, and no others. *places*: where they are."""
        wanted: set[Path] = set()
        for share in limits.shares.values():
            directory = places.get(share.pod) or self._cgroups.pod(share.pod)
            if directory is not None:
                wanted.update(self._limit_pod(limits, share, directory, backend)[1])
        limits.clear_others(wanted)

    def limit(self, limits: GpuLimits, pod: PodUid, backend: Backend) -> None:
        """Limit what there is of *pod* now, if it is one that *limits* wants limited."""
        share, directory = limits.shares.get(pod), self._cgroups.pod(pod)
        if share and directory:
            self._limit_pod(limits, share, directory, backend)

    def _limit_if_here(self, limits: GpuLimits, share: PodShare, backend: Backend) -> str | None:
        limits.shares = {**limits.shares, share.pod: share}
        directory = self._cgroups.pod(share.pod)
        if directory is None:
            return None
        return self._limit_pod(limits, share, directory, backend)[0]

    def _clear(self, limits: GpuLimits, pod: PodUid) -> None:
        limits.shares = {one: share for one, share in limits.shares.items() if one != pod}
        directory = self._cgroups.pod(pod)
        if directory is not None:
            limits.clear(directory)

    def _limit_pod(
        self, limits: GpuLimits, share: PodShare, directory: Path, backend: Backend
    ) -> tuple[str, set[Path]]:
        """What is wrong with the pod's own limit, and every cgroup that has one now."""
        self._directories.watch(directory, share.pod)  # first: no container is missed
        problem = limits.limit(directory, share.memory_bytes or 0)
        limited = {directory}
        for container, leaf in containers_in(directory):
            limited.update(self._limit_container(limits, share, (container, leaf), backend))
        return problem, limited

    def _limit_container(
        self, limits: GpuLimits, share: PodShare, at: tuple[str, Path], backend: Backend
    ) -> Iterator[Path]:
        container, leaf = at
        memory_bytes = self._container_bytes(share, container, backend)
        if memory_bytes is None:
            # On misc a limit once set is not taken away below a pod: without it, no limit at all
            # might hold, not the pod's.
            if backend is Backend.MISC and limits.set_here(leaf):
                yield leaf
            return
        limits.limit(leaf, memory_bytes)
        yield leaf
        if backend is Backend.DMEM and leaf.name.startswith("crio-"):
            self._directories.watch(leaf, share.pod)
            if (leaf / INNER).is_dir():
                limits.limit(leaf / INNER, memory_bytes)
                yield leaf / INNER

    def _container_bytes(self, share: PodShare, container: str, backend: Backend) -> int | None:
        """The limit of a container's own; None: the pod's is enough."""
        used, every = self._used_as_far_as_known(share, container), _claims(share)
        if backend is Backend.MISC and used == every:
            return None
        return share.of(used)

    def _used_as_far_as_known(self, share: PodShare, container: str) -> frozenset[ClaimUid]:
        """The claims of *share* that a container uses: all of them, unless some are known."""
        every = _claims(share)
        if len(every) == 1:
            return every
        return (self._containers.given(container) & every) or every


def _claims(share: PodShare) -> frozenset[ClaimUid]:
    return frozenset(claim for claim, _ in share.claims)


def _share(limits: GpuLimits, gpu: GpuUuid, pod: PodUid, memory_bytes: int) -> PodShare:
    """What a step says of a pod. Which of its claims it is for, the next ``settle`` says."""
    known = limits.shares.get(pod)
    if known is not None and known.memory_bytes == memory_bytes:
        return known
    return PodShare(pod, gpu, ((ClaimUid(""), memory_bytes),))
