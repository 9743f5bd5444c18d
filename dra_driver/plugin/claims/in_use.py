"""Keeps claims that processes still use, and gives them back once those ended.

The kubelet asks for an unprepare while containers are still ending: within a minute for every pod
that was force-deleted. Such a claim is refused, an event of its pods says so (or the Node, where a
pod is gone and its process is not), and whoever uses it is looked at again and again: the kubelet
asks again, but only after 10 s or more. Without the kubelet only a deleted claim is given back: of
one that exists the kubelet would go on to believe that it is prepared.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from dra_driver.base.errors import ClaimInUse, DriverError, MigInstanceNotFound
from dra_driver.k8s.claims import ClaimRef, ClaimUid, Pod
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.processes import CgroupProcesses
from dra_driver.model.records import ClaimRecord
from dra_driver.node.cgroups.processes import PodProcesses, pods_given
from dra_driver.plan.prepare.claim_users import cgroups_given_claim, outside_gpu_processes
from dra_driver.plugin.process_owners import ListGpuProcesses

ClaimsOnGpus = Callable[[ClaimUid, Collection[GpuUuid]], Sequence[ClaimRecord]]
"""The records of the other claims that hold any part of these GPUs; ``Ledger.neighbours``."""


class InUseCheck:
    """Looks each time it is asked; where nobody is left in a claim's pods, that costs little."""

    def __init__(
        self, processes: PodProcesses, gpu_processes: ListGpuProcesses, neighbours: ClaimsOnGpus
    ) -> None:
        self._processes = processes
        self._gpu_processes = gpu_processes
        self._neighbours = neighbours

    def refuse_while_used(self, record: ClaimRecord) -> None:
        """ClaimInUse: a process of a pod of the claim uses it. NodeError: that is not known."""
        claim = record.claim
        containers = self._processes.containers()
        pods = pods_given(claim, containers) | frozenset(record.pods)
        cgroups = self._processes.of(pods, containers)
        for pod, pid in self._living(cgroups_given_claim(claim.uid, cgroups)):
            raise ClaimInUse(
                f"{_process_of(record, pod, pid)} still runs; the claim waits for its end"
            )
        for gpu, pod, pid in self._computing(record, cgroups):
            raise ClaimInUse(
                f"{_process_of(record, pod, pid)} still computes on {gpu}; "
                "the claim waits for its end"
            )

    def has_processes(self, pod: Pod) -> bool:
        """Whether any process of *pod* lives. NodeError: that is not known."""
        cgroups = self._processes.of([pod])
        return any(self._processes.lives(pid) for cgroup in cgroups for pid in cgroup.pids)

    def pods_using(self, record: ClaimRecord) -> tuple[Pod, ...]:
        """The pods, recorded or not, in which a process lives in a container that was given what is
        recorded. NodeError: that is not known."""
        containers = self._processes.containers()
        pods = pods_given(record.claim, containers) | frozenset(record.pods)
        cgroups = cgroups_given_claim(record.claim.uid, self._processes.of(pods, containers))
        return tuple(sorted({pod for pod, _ in self._living(cgroups)}))

    def still_using(self, claim: ClaimUid, pods: Iterable[Pod]) -> tuple[Pod, ...]:
        """Those of *pods* in which a process lives in a container that was given *claim*."""
        cgroups = cgroups_given_claim(claim, self._processes.of(pods))
        return tuple(sorted({pod for pod, _ in self._living(cgroups)}))

    def _living(self, cgroups: Iterable[CgroupProcesses]) -> Iterator[tuple[Pod, int]]:
        """The first process of each that lives."""
        for cgroup in cgroups:
            pid = next((pid for pid in cgroup.pids if self._processes.lives(pid)), None)
            if pid is not None:
                yield cgroup.pod, pid

    def _computing(
        self, record: ClaimRecord, cgroups: Sequence[CgroupProcesses]
    ) -> Iterator[tuple[GpuUuid, Pod, int]]:
        """The GPUs are asked after the cgroups: so none of their processes can be one that came
        later and has the same number."""
        if not cgroups:
            return
        others = self._neighbours(record.claim.uid, record.gpus)
        for gpu, processes in outside_gpu_processes(record, others, cgroups).items():
            for pid in self._on(gpu):
                if pid in processes and self._processes.lives(pid):
                    yield gpu, processes[pid], pid

    def _on(self, gpu: GpuUuid) -> Iterator[int]:
        try:
            yield from (process.pid for process in self._gpu_processes(gpu))
        except MigInstanceNotFound:
            return  # the MIG instance is gone, and with it whoever computed there


def _process_of(record: ClaimRecord, pod: Pod, pid: int) -> str:
    which = f"process {pid}" if pid else "a process that is not seen from here"
    return f"pod {record.claim.namespace}/{pod.name}: {which}"


log = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.25
_AT_ONCE: Final = 16  # claims that one look is about; the others have their turn at the next
_ASK_SECONDS: Final = 2.0  # between two questions to the API server about one claim
_MOST_ASKED: Final = 30  # by then the kubelet has asked again; else it is the reconciler's


@dataclass(slots=True)
class _DeferredClaim:
    ref: ClaimRef
    asked: int = 0
    ask_at: float = 0.0


class DeferredUnprepare:
    """``refused`` is for many threads, ``look`` for one."""

    def __init__(
        self,
        take_back_if: Callable[[ClaimRef, Callable[[], bool]], bool],
        refuse_while_used: Callable[[ClaimRecord], None],
        is_deleted: Callable[[ClaimRef], bool],
        known: Callable[[ClaimUid], ClaimRecord | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """*known*: what is recorded of a claim; None: it holds nothing here."""
        self._take_back_if = take_back_if
        self._refuse_while_used = refuse_while_used
        self._is_deleted = is_deleted
        self._known = known
        self._clock = clock
        self._waiting: dict[ClaimUid, _DeferredClaim] = {}  # who was looked at last comes last
        self._lock = threading.Lock()
        self.look_soon: Callable[[], None] = lambda: None

    def refused(self, ref: ClaimRef) -> None:
        """A process still used *ref* when it was to be given back."""
        with self._lock:
            self._waiting.setdefault(ref.uid, _DeferredClaim(ref)).asked = 0
        self.look_soon()

    def look(self) -> float | None:
        """One look. Answers with the seconds until the next where claims wait."""
        with self._lock:
            chosen = list(self._waiting.values())[:_AT_ONCE]
        for waiting in chosen:
            done = self._check(waiting)
            with self._lock:
                del self._waiting[waiting.ref.uid]
                if not done:
                    self._waiting[waiting.ref.uid] = waiting
        return _LOOK_SECONDS if self._waiting else None

    def _check(self, waiting: _DeferredClaim) -> bool:
        """Whether there is nothing more to do about it."""
        ref, now = waiting.ref, self._clock()
        if (record := self._known(ref.uid)) is None:
            return True
        try:
            self._refuse_while_used(record)
            if now < waiting.ask_at:
                return False
            waiting.asked, waiting.ask_at = waiting.asked + 1, now + _ASK_SECONDS
            if not self._is_deleted(ref):
                return waiting.asked >= _MOST_ASKED
            # A deleted claim does not come back.
            self._take_back_if(ref, lambda: True)
        except DriverError:
            return False  # it is used, that is not known, or something cannot be undone yet
        log.info("gave back a claim that is deleted", extra={"claim": str(ref), "uid": ref.uid})
        return True
