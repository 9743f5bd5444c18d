"""The processes in the cgroups of pods, and which claims the containers they are in were given."""

import errno
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from dra_driver.errors import NodeError
from dra_driver.kubeletplugin.claims import ClaimRef, ClaimUid, Pod, PodUid
from dra_driver.kubeletplugin.disk_calls import disk_call
from dra_driver.model.processes import CgroupProcesses
from dra_driver.node.cgroups import Cgroups, cgroup_root, containers_in, directories_in
from dra_driver.node.containers import Absent, Container, Containers
from dra_driver.node.processes import Processes

_MOST: Final = 4096  # processes of one container, and cgroups below its own
# The cgroup was removed meanwhile; or it is one of threads, whose processes are listed above it.
_NOTHING_LISTED: Final = (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP)


def open_pod_processes(host_root: Path, runtime_dir: str) -> "PodProcesses":
    """Those of this machine. *runtime_dir*: of its container runtime, if not at a usual place."""
    containers = Containers(host_root, runtime_dir)
    return PodProcesses(Cgroups(cgroup_root(host_root)), containers, Processes())


class PodProcesses:
    """Looks each time it is asked. What cannot be looked at is a NodeError, and never nobody."""

    def __init__(self, cgroups: Cgroups, containers: Containers, processes: Processes) -> None:
        self._cgroups = cgroups
        self._containers = containers
        self._processes = processes

    def pods_given(self, claim: ClaimRef) -> frozenset[Pod]:
        """The pods with a container that was given *claim*, by what the runtime keeps of it.

        Those of its namespace: whatever a container of another one mounts is not believed. Of a
        claim of which only the UID is known, all.
        """
        with disk_call(f"look for containers that were given claim {claim.uid}"):
            containers = self._containers.given(claim.uid)
        namespaces = {claim.namespace} if claim.namespace else {one.namespace for one in containers}
        return frozenset(one.pod for one in containers if one.namespace in namespaces)

    def of(self, pods: Iterable[Pod]) -> tuple[CgroupProcesses, ...]:
        """The cgroups of *pods* with processes. Where there is no cgroup any more, nobody lives."""
        in_order = sorted(set(pods))
        with disk_call(f"look for processes in {self._cgroups.root}"):
            places = self._cgroups.pods([pod.uid for pod in in_order])
            found = (self._in_pod(pod, places[pod.uid]) for pod in in_order if pod.uid in places)
            inside = tuple(one for its in found for one in its)
            return (*inside, *self._elsewhere(in_order, places))

    def lives(self, pid: int) -> bool:
        """Whether that process has not ended; one that is not seen from here (0) has not."""
        return pid == 0 or self._processes.lives(pid)

    def _in_pod(self, pod: Pod, place: Path) -> Iterator[CgroupProcesses]:
        containers = tuple(containers_in(place))
        for container, cgroup in containers:
            if pids := _processes_in(cgroup):
                yield CgroupProcesses(pod, self._claims(container), pids)
        if pids := _processes_in(place, {cgroup for _, cgroup in containers}):
            yield CgroupProcesses(pod, frozenset(), pids)

    def _elsewhere(
        self, pods: Iterable[Pod], places: Mapping[PodUid, Path]
    ) -> Iterator[CgroupProcesses]:
        """Of containers with claims whose cgroups are not in their pods', as with a runtime on
        cgroupfs under a kubelet on systemd: their first processes, if they live."""
        wanted = {pod.uid: pod for pod in pods}
        for one in self._containers.all():
            pod, place = wanted.get(one.pod.uid), places.get(one.pod.uid)
            if pod is None or not one.claims or (place and one.id in dict(containers_in(place))):
                continue
            pid = self._containers.first_process(one.id)
            process = self._processes.find(pid) if pid is not None else None
            if process is not None and process.container == one.id:
                yield CgroupProcesses(pod, one.claims, (process.pid,))

    def _claims(self, container: str) -> frozenset[ClaimUid] | None:
        found = self._containers.find(container)
        if isinstance(found, Container):
            return found.claims
        return frozenset() if found is Absent.SANDBOX else None


def _processes_in(cgroup: Path, leaving_out: Collection[Path] = ()) -> tuple[int, ...]:
    """The numbers of all processes in *cgroup* and below it."""
    found: list[int] = []
    waiting, looked_at = [cgroup], 0
    while waiting:
        one = waiting.pop()
        found += _listed(one)
        waiting += (path for path in directories_in(one) if path not in leaving_out)
        looked_at += 1
        if max(looked_at, len(found)) > _MOST:
            raise NodeError(
                f"who runs in {cgroup} cannot be told: more than {_MOST} processes or cgroups"
            )
    return tuple(sorted(found))


def _listed(cgroup: Path) -> list[int]:
    try:
        with open(cgroup / "cgroup.procs") as file:
            return [int(line) for line in file]
    except OSError as error:
        if error.errno in _NOTHING_LISTED:
            return []
        raise NodeError(
            f"who runs in {cgroup} cannot be told now: {error.strerror}; it is tried again"
        ) from error
