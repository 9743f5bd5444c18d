"""What changes about claims while they are prepared: their pods, and what serves them."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import field, replace

from dra_driver.base.deadlines import Deadline, within_request
from dra_driver.base.frozen import frozen
from dra_driver.base.threads import NamedLocks
from dra_driver.k8s.claims import Claim, ClaimUid, Pod
from dra_driver.model.gpus import Gpu
from dra_driver.model.mps import MpsNamespace
from dra_driver.model.records import ClaimRecord
from dra_driver.model.steps import RemoveMpsNamespace
from dra_driver.plan.memory.pod_limits import memory_limit_steps
from dra_driver.plugin.claims.dependencies import PrepareDependencies

log = logging.getLogger(__name__)


@frozen
class CallTimeouts:
    """How long one call may wait, in seconds, so that it ends within the kubelet's 45."""

    all: float = 20.0  # waits for the lease, for locks and for the holder together
    hand_over: float = 10.0  # of these for the holder's unprepare, after a force-deleted pod


@frozen
class ClaimLocks:
    """Who works on a claim holds its lock, and then those of its GPUs."""

    claims: NamedLocks = field(
        default_factory=lambda: NamedLocks(
            "the claim with UID {name} is still being worked on, {seconds} s later"
        )
    )
    gpus: NamedLocks = field(
        default_factory=lambda: NamedLocks(
            "a claim that is being prepared or unprepared on {name} did not finish in {seconds} s"
        )
    )


class PreparedClaims:
    """Keeps prepared claims as they should be; never beside a prepare of the same claim."""

    def __init__(
        self, dependencies: PrepareDependencies, locks: ClaimLocks, timeouts: CallTimeouts
    ) -> None:
        self._node = dependencies.node
        self._ledger = dependencies.ledger
        self._lease = dependencies.lease
        self._users = dependencies.users
        self._locks = locks
        self._timeouts = timeouts

    @contextmanager
    def alone_with(self, uid: ClaimUid) -> Iterator[Deadline]:
        """Nobody else works on the claim, in this process or another; until that deadline the call
        may wait for more. TimedOut: somebody does for too long."""
        deadline = within_request(self._timeouts.all)
        with self._locks.claims.hold([uid], deadline.remaining), self._lease(deadline.remaining):
            yield deadline

    def note_pods(self, claim: Claim) -> bool:
        """Pods joined the prepared *claim* or left it: what holds for pods holds for these now.

        The kubelet prepares a claim once, for its first pod (KEP-4381). False: nothing changed.
        """
        known = self._ledger.known(claim.ref.uid)
        if known is None or not known.completed or known.pods == claim.pods:
            return False
        with self._prepared(claim.ref.uid) as record:
            if record is not None:
                self._change_pods(record, record, claim.pods)
            return record is not None

    def give_to(self, uid: ClaimUid, namespace: str, pods: tuple[Pod, ...]) -> bool:
        """A container of these *pods* in *namespace* has what is recorded under *uid*, an
        allocation: what holds for pods holds for these from now on. False: nothing is recorded.

        NodeError: a limit that has to hold could not be set.
        """
        with self._prepared(uid) as record:
            if record is not None:
                self._change_pods(record, record.used_in(namespace), pods)
            return record is not None

    def serve_again(self, uid: ClaimUid) -> bool:
        """Have the MPS agent serve what it does not know any more of a prepared claim. False: its
        containers know another directory for that."""
        same = True
        with self.alone_with(uid):
            record = self._ledger.record(uid)
            if record is None or not record.completed:
                return same
            for namespace in record.namespaces:
                served = self._node.serve(namespace)
                if served.pipe_directory not in (record.spec or ""):
                    same = False
                    # Containers keep what they were given, and a restarted one gets it again.
                    log.error(
                        "a claim is served in another directory than its containers know: its "
                        "pods have to be created again",
                        extra={"claim": str(record.claim), "directory": served.pipe_directory},
                    )
        return same

    def end_unknown(self, namespace: MpsNamespace) -> None:
        """Have the MPS agent end *namespace*, which no record is of; not beside a prepare of its
        claim."""
        with self.alone_with(namespace.claim):
            record = self._ledger.known(namespace.claim)
            if record is None or namespace.name not in {known.name for known in record.namespaces}:
                self._node.restore(RemoveMpsNamespace(namespace.name))

    def while_prepared(self, uid: ClaimUid, act: Callable[[ClaimRecord], ClaimRecord]) -> None:
        """Have *act* done with the record of a claim while nobody else can act on it or its GPUs,
        and what it answers recorded; not at all, where it is not prepared any more."""
        with self._prepared(uid) as record:
            if record is not None and (after := act(record)) != record:
                self._ledger.write(after)

    @contextmanager
    def _prepared(self, uid: ClaimUid) -> Iterator[ClaimRecord | None]:
        """The record of a claim while nobody else can act on it or its GPUs. None: it is not
        prepared."""
        with self.alone_with(uid) as deadline:
            record = self._ledger.record(uid)
            if record is None or not record.completed:
                yield None
                return
            with self._locks.gpus.hold(record.gpus, deadline.remaining):
                yield record

    def while_free(self, gpu: Gpu, act: Callable[[], None]) -> bool:
        """Have *act* done to this GPU while no claim can come to it. False: nothing was done,
        because a claim holds it, or may by a record that cannot be read.

        Admin access is no reason to wait.
        """
        deadline = Deadline(self._timeouts.all)
        with self._lease(deadline.remaining), self._locks.gpus.hold([gpu.uuid], deadline.remaining):
            if not all(holding.admin for holding in self._ledger.held().get(gpu.uuid, ())):
                return False
            if any(damaged.may_hold(gpu.uuid, gpu.name) for damaged in self._ledger.set_aside()):
                return False
            act()
        return True

    def _change_pods(self, before: ClaimRecord, record: ClaimRecord, pods: tuple[Pod, ...]) -> None:
        """Record, act, record. The limit of a pod that left goes once none of its containers is
        known to have been given the claim (``dra_driver.plugin.memory.pod_limits``); as long as
        they are ending, it is of the claim's pods.
        """
        uid = record.claim.uid
        pods_gone = tuple(pod for pod in record.pods if pod not in pods)
        ending = self._users.still_using(uid, pods_gone) if pods_gone else ()
        after = replace(record, pods=tuple(sorted({*pods, *ending})))
        if after != before:
            both = tuple(sorted({*record.pods, *pods}))
            self._ledger.write(replace(record, pods=both))
        others = self._ledger.neighbours(uid, record.gpus)
        for step in memory_limit_steps(after, others):
            self._node.carry_out(step)
        if after != before:
            self._ledger.write(after)
