"""The processes of pods: which container each is in, whether it lives, and signals to exactly one.

The number of a process is used again when the process ended. So a process is known by its number,
its start time and its container, and a signal goes through a handle of the kernel's (a pidfd): the
handle is taken, then the process behind it is looked at again, then it is signalled.
"""

import errno
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from dra_driver.base.errors import NodeError
from dra_driver.base.files import disk_call
from dra_driver.k8s.claims import ClaimRef, ClaimUid, Pod, PodUid
from dra_driver.k8s.pods import Container
from dra_driver.model.processes import CgroupProcesses, ContainerProcess
from dra_driver.model.records import is_allocation
from dra_driver.node.cgroups.containers import ContainerBundles, NoContainer
from dra_driver.node.cgroups.procfs import read_proc_file
from dra_driver.node.cgroups.tree import (
    Cgroups,
    cgroup_root,
    container_cgroups,
    container_of_process,
    subdirectories,
)

_AFTER_NAME: Final = ") "  # the name of a program can hold anything, also this
# proc(5) counts from 1, and two fields are before the name's end.
_STATE: Final = 3 - 3
_THREADS: Final = 20 - 3
_START_TIME: Final = 22 - 3
_ENDED: Final = ("Z", "X")
_POD_INIT: Final = "pause"  # of a pod whose containers see each other's processes


class ContainerProcesses:
    """The processes that this process sees. *proc*: where it sees them, /proc."""

    def __init__(self, proc: Path = Path("/proc"), own_pid: Callable[[], int] = os.getpid) -> None:
        self._proc = str(proc)
        self._own_pid = own_pid
        self._ticks_per_second = os.sysconf("SC_CLK_TCK")

    def now(self) -> int:
        """Clock ticks since boot: what starts from here on has no smaller start time."""
        return int(time.clock_gettime(time.CLOCK_BOOTTIME) * self._ticks_per_second)

    def find(self, pid: int) -> ContainerProcess | None:
        """The process with that number, if it is in a container of a pod and not this process.

        NodeError: it cannot be read now.
        """
        if pid <= 1 or pid == self._own_pid():
            return None
        stat, cgroup = self._read(pid, "stat"), self._read(pid, "cgroup")
        container = container_of_process(cgroup) if stat and cgroup else None
        if container is None:
            return None
        started = int(stat.rpartition(_AFTER_NAME)[2].split()[_START_TIME])
        return ContainerProcess(pid, started, container.pod, container.container)

    def lives(self, pid: int) -> bool:
        """Whether that process has not ended. A zombie has, unless some thread of it goes on.

        NodeError: it cannot be read now.
        """
        if not (stat := self._read(pid, "stat")):
            return False
        fields = stat.rpartition(_AFTER_NAME)[2].split()
        return fields[_STATE] not in _ENDED or int(fields[_THREADS]) > 1

    def signal(self, process: ContainerProcess, number: signal.Signals) -> bool:
        """Send a signal to *process*. False: it is gone, or no more in its container.

        NodeError: it could not be signalled. A kernel that gives no handle is no reason to signal
        by number.
        """
        try:
            handle = os.pidfd_open(process.pid)
        except OSError as error:
            return _has_ended(error, process)
        try:
            if self.find(process.pid) != process:
                return False
            signal.pidfd_send_signal(handle, number)
        except OSError as error:
            return _has_ended(error, process)
        finally:
            os.close(handle)
        return True

    def sees_pods(self) -> bool:
        """Whether processes of other pods can be seen from here at all."""
        return self._own_pid() != 1 and self._read(1, "comm").strip() != _POD_INIT

    def _read(self, pid: int, file: str) -> str:
        """Empty: the process is gone. NodeError: it may be there, and cannot be looked at now."""
        try:
            return read_proc_file(self._proc, pid, file).decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            return ""
        except OSError as error:
            raise NodeError(
                f"process {pid} cannot be looked at now ({file}): {error.strerror}; it is tried "
                "again"
            ) from error


def _has_ended(error: OSError, process: ContainerProcess) -> bool:
    """False for a process that ended; every other error is raised."""
    if error.errno == errno.ESRCH:
        return False
    mends = {
        errno.EPERM: "run this as root of the host, with the right to signal (CAP_KILL)",
        errno.ENOSYS: "handles of processes need Linux 5.3",
    }
    mend = mends.get(error.errno or 0)
    raise NodeError(
        f"process {process.pid} cannot be signalled: {error.strerror}"
        + (f"; {mend}" if mend else "")
    ) from error


_MAX_PROCESSES: Final = 4096  # processes of one container, and cgroups below its own
# The cgroup was removed meanwhile; or it is one of threads, whose processes are listed above it.
_NOTHING_LISTED: Final = (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP)


def open_pod_processes(host_root: Path, containers: ContainerBundles) -> "PodProcesses":
    """Those of the host whose root this process sees at *host_root*."""
    return PodProcesses(Cgroups(cgroup_root(host_root)), containers, ContainerProcesses())


def pods_given(claim: ClaimRef, containers: Iterable[Container]) -> frozenset[Pod]:
    """The pods with a container that was given *claim*.

    Containers of other namespaces do not count, whatever they mount, unless only the UID of the
    claim is known. An allocation has no namespace of its own: its last user may be of another one.
    """
    anywhere = not claim.namespace or is_allocation(claim.uid)
    return frozenset(
        container.pod
        for container in containers
        if claim.uid in container.claims and (anywhere or container.namespace == claim.namespace)
    )


class PodProcesses:
    """Reads anew with every call. What cannot be read is a NodeError, and never an empty answer."""

    def __init__(
        self, cgroups: Cgroups, containers: ContainerBundles, processes: ContainerProcesses
    ) -> None:
        self._cgroups = cgroups
        self._containers = containers
        self._processes = processes

    def containers(self) -> tuple[Container, ...]:
        """Those of this machine, by their bundles."""
        with disk_call("look for containers"):
            return self._containers.all()

    def of(
        self, pods: Iterable[Pod], containers: Sequence[Container] | None = None
    ) -> tuple[CgroupProcesses, ...]:
        """The cgroups of *pods* with processes. Where there is no cgroup, no process lives.

        *containers*: those of this machine, where they were just looked for.
        """
        if not (sorted_pods := sorted(set(pods))):
            return ()
        if containers is None:
            containers = self.containers()
        with disk_call(f"look for processes in {self._cgroups.root}"):
            directories = self._cgroups.pods([pod.uid for pod in sorted_pods])
            in_pod_cgroups = [
                processes
                for pod in sorted_pods
                if pod.uid in directories
                for processes in self._in_pod_cgroup(pod, directories[pod.uid])
            ]
            outside = self._outside_pod_cgroups(sorted_pods, directories, containers)
            return (*in_pod_cgroups, *outside)

    def lives(self, pid: int) -> bool:
        """Whether that process has not ended; one that is not seen from here (0) has not."""
        return pid == 0 or self._processes.lives(pid)

    def _in_pod_cgroup(self, pod: Pod, directory: Path) -> Iterator[CgroupProcesses]:
        containers = tuple(container_cgroups(directory))
        for container, cgroup in containers:
            if pids := _processes_in(cgroup):
                yield CgroupProcesses(pod, self._claims(container), pids)
        if pids := _processes_in(directory, {cgroup for _, cgroup in containers}):
            yield CgroupProcesses(pod, frozenset(), pids)

    def _outside_pod_cgroups(
        self,
        pods: Iterable[Pod],
        directories: Mapping[PodUid, Path],
        containers: Iterable[Container],
    ) -> Iterator[CgroupProcesses]:
        """The first processes of containers with claims whose cgroups are not in their pods', as
        with a runtime on cgroupfs under a kubelet on systemd."""
        by_uid = {pod.uid: pod for pod in pods}
        for container in containers:
            pod, directory = by_uid.get(container.pod.uid), directories.get(container.pod.uid)
            if (
                pod is None
                or not container.claims
                or (directory and container.id in dict(container_cgroups(directory)))
            ):
                continue
            pid = self._containers.first_process(container.id)
            process = self._processes.find(pid) if pid is not None else None
            if process is not None and process.container == container.id:
                yield CgroupProcesses(pod, container.claims, (process.pid,))

    def _claims(self, container_id: str) -> frozenset[ClaimUid] | None:
        container = self._containers.find(container_id)
        if isinstance(container, Container):
            return container.claims
        return frozenset() if container is NoContainer.SANDBOX else None


def _processes_in(cgroup: Path, excluded: Collection[Path] = ()) -> tuple[int, ...]:
    """The numbers of all processes in *cgroup* and below it."""
    pids: list[int] = []
    pending, seen_directories = [cgroup], 0
    while pending:
        directory = pending.pop()
        pids += _listed(directory)
        pending += (path for path in subdirectories(directory) if path not in excluded)
        seen_directories += 1
        if max(seen_directories, len(pids)) > _MAX_PROCESSES:
            raise NodeError(
                f"the processes in {cgroup} cannot be listed: "
                f"more than {_MAX_PROCESSES} processes or cgroups"
            )
    return tuple(sorted(pids))


def _listed(cgroup: Path) -> list[int]:
    try:
        with open(cgroup / "cgroup.procs") as file:
            return [int(line) for line in file]
    except OSError as error:
        if error.errno in _NOTHING_LISTED:
            return []
        raise NodeError(
            f"the processes in {cgroup} cannot be listed now: {error.strerror}; it is tried again"
        ) from error
