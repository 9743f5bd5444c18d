"""The order of effects for one claim: record, act, record; and the same road back.

Killed at any instruction, the next start (``recover``) finds a claim either prepared or not.
"""

import itertools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from dra_driver.base.deadlines import Deadline
from dra_driver.base.errors import (
    ApiServerError,
    ClaimRecordLost,
    DeviceHeldByClaim,
    DriverError,
    MpsAgentUnreachable,
    NodeError,
    TimedOut,
)
from dra_driver.base.threads import after_call, in_parallel
from dra_driver.k8s.claims import Claim, ClaimRef, PreparedDevice
from dra_driver.kubeletplugin.device_metadata import MetadataDocument
from dra_driver.model.driver_files import DeviceFiles, DriverFiles
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.mps import MpsNamespace, MpsNamespaceName, ServedNamespace
from dra_driver.model.offer import Offer
from dra_driver.model.records import AllocationClaim, ClaimRecord
from dra_driver.model.steps import CreatePartition, ServeMpsNamespace
from dra_driver.plan.mig.claims import with_created
from dra_driver.plan.mps.namespaces import ClaimPodSpecs, PodsNeeded
from dra_driver.plan.mps.servers import served_ahead
from dra_driver.plan.prepare.cdi_spec import claim_spec
from dra_driver.plan.prepare.claim import ClaimPlan, undo_steps
from dra_driver.plan.prepare.results import (
    container_devices,
    driver_capabilities,
    metadata_documents,
    prepared_devices,
)
from dra_driver.plan.prepare.sharing import with_decoded_configs
from dra_driver.plugin.claims.dependencies import DriverIdentity, PrepareDependencies
from dra_driver.plugin.claims.driver_spec import DriverSpec
from dra_driver.plugin.claims.partitions import ClaimPartitions
from dra_driver.plugin.claims.planner import ClaimPods, GpusChanged, Planner
from dra_driver.plugin.claims.prepared_claims import CallTimeouts, ClaimLocks, PreparedClaims

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.25  # another process may end the holder's claim; nobody tells us then


class Preparer:
    """Makes claims usable on this node, and unusable again; one call at a time for each claim."""

    def __init__(
        self,
        names: DriverIdentity,
        dependencies: PrepareDependencies,
        timeouts: CallTimeouts | None = None,
    ) -> None:
        self._names = names
        self._node = dependencies.node
        self._claims = dependencies.claims
        self._ledger = dependencies.ledger
        self._files = dependencies.files
        self._lease = dependencies.lease
        self._changed = dependencies.changed
        self._users = dependencies.users
        self._pods = ClaimPods(dependencies.pods, dependencies.ledger)
        self._partitions = ClaimPartitions(dependencies.node)
        self._planner = Planner(dependencies, names.pool, self._partitions)
        self._timeouts = timeouts or CallTimeouts()
        self._locks = ClaimLocks()
        self.prepared_claims: Final = PreparedClaims(dependencies, self._locks, self._timeouts)
        self.driver_spec: Final = DriverSpec(
            names, dependencies.node.driver_files, dependencies.files.driver_spec
        )

    def prepare(self, ref: ClaimRef) -> Sequence[PreparedDevice]:
        """Make the claim's devices usable on this node. Asking again changes nothing."""
        deadline = Deadline(self._timeouts.all)
        hand_over = Deadline(self._timeouts.hand_over, within=deadline)
        with self._locks.claims.hold([ref.uid], deadline.remaining):
            try:
                claim = self._claims.read(ref)
            except ApiServerError:
                with self._lease(deadline.remaining):
                    if (done := self._recorded_answer(ref)) is not None:
                        return done
                raise
            # Whoever can create a claim says how long it takes to read: nobody waits for that.
            return self._prepare_and_tell(with_decoded_configs(claim), deadline, hand_over)

    def allocate(self, claim: AllocationClaim, timeouts: CallTimeouts) -> Sequence[PreparedDevice]:
        """The same for what the kubelet gave to a container, of which it alone knows."""
        deadline = Deadline(timeouts.all)
        hand_over = Deadline(timeouts.hand_over, within=deadline)
        with self._locks.claims.hold([claim.ref.uid], deadline.remaining):
            return self._prepare_and_tell(claim, deadline, hand_over)

    def recorded(self, ref: ClaimRef, seconds: float) -> Sequence[PreparedDevice] | None:
        """The same answer again, without a look at anything else, within *seconds*. None: there is
        none."""
        deadline = Deadline(seconds)
        with (
            self._locks.claims.hold([ref.uid], deadline.remaining),
            self._lease(deadline.remaining),
        ):
            return self._recorded_answer(ref)

    def unprepare(self, ref: ClaimRef) -> None:
        """Take back what *ref* was given. That there is nothing to take back is success."""
        self.take_back_if(ref, lambda: True)

    def take_back_if(self, ref: ClaimRef, gone: Callable[[], bool]) -> bool:
        """Take back what *ref* was given if it is *gone* at the moment when nobody else can act."""
        with self.prepared_claims.alone_with(ref.uid) as deadline:
            record = self._record_or_partitions(ref)
            with self._locks.gpus.hold(_gpus(record), deadline.remaining):
                if not gone():
                    return False
                self._take_back(record or ClaimRecord(ref, ()))
        after_call(partial(self._changed, record))
        return True

    def recover(self) -> None:
        """Bring files and ledger together: at start, and after another process held the lease.

        Claims whose preparation was cut short are taken back; a completed claim gets its files
        again where they are gone (a cleared /var/run), and so does the driver; files of no claim
        are removed. What fails waits for the next time: a *started* record goes on holding its
        devices. To be called while this process holds the lease. NodeError: the ledger itself
        cannot be read.
        """
        self._ledger.reload()
        try:
            self.driver_spec.keep_after_others()
        except NodeError as e:
            facts = {"error": str(e)}
            log.warning("cannot write the CDI spec of the driver's files yet", extra=facts)
        for record in self._ledger.records():
            if record.completed:
                self._quietly(record, partial(self._recorded_answer, record.claim))
            elif not _is_of_other_boot(record):
                fields = _log_fields(record)
                log.warning("taking back a claim whose preparation was cut short", extra=fields)
                self._quietly(record, partial(self._take_back, record))
        try:
            self._remove_orphans()
        except NodeError as e:
            log.warning("cannot clear up CDI files yet", extra={"error": str(e)})

    def restore_files(self) -> None:
        """Give completed claims their files again, where somebody removed them."""
        with self._lease(self._timeouts.all):
            lacking = [record for record in self._ledger.records() if self._lacks_files(record)]
        for record in lacking:
            self._quietly(record, partial(self._restore_files_of, record.claim))

    def _restore_files_of(self, ref: ClaimRef) -> None:
        """Not beside its unprepare: that removes files before it forgets the claim."""
        with self.prepared_claims.alone_with(ref.uid):
            record = self._ledger.known(ref.uid)
            if record is not None and self._lacks_files(record):
                self._recorded_answer(ref)

    def _record_or_partitions(self, ref: ClaimRef) -> ClaimRecord | None:
        """The record of a claim; of one that cannot be read, the partitions. NodeError: another
        release wrote it, and this one does not understand it."""
        self._ledger.refuse_other_release(ref.uid)
        return self._ledger.known(ref.uid) or self._ledger.partitions_record(ref.uid)

    def _lacks_files(self, record: ClaimRecord) -> bool:
        return record.completed and not self._files.exist(record)

    def _remove_orphans(self) -> None:
        self._files.sweep()
        known = {record.claim.uid for record in self._ledger.records()}
        known |= {aside.uid for aside in self._ledger.set_aside()}
        for uid in sorted(self._files.claims()):
            if uid not in known:
                log.warning("removing files of no claim", extra={"uid": uid})
                self._files.remove(uid)

    def _recorded_answer(self, ref: ClaimRef) -> Sequence[PreparedDevice] | None:
        """The recorded answer, with the files that it promises: what is lost is written again.

        An error is no reason to take anything back: pods may be using it.
        """
        try:
            record = self._ledger.record(ref.uid)
        except ClaimRecordLost as e:
            log.warning("recording a claim again", extra={"claim": str(ref), "error": str(e)})
            record = self._recorded_again(ref)
        if record is None or record.prepared is None:
            return None
        self._files.restore(record)
        self.driver_spec.restore()
        return record.prepared

    def _recorded_again(self, ref: ClaimRef) -> ClaimRecord | None:
        if (known := self._ledger.known(ref.uid)) is None:
            return None
        record = self._files.with_texts(known)
        self._ledger.write(record)
        return record

    def _prepare_and_tell(
        self, claim: Claim, deadline: Deadline, hand_over: Deadline
    ) -> Sequence[PreparedDevice]:
        try:
            return self._prepare_when_free(claim, deadline, hand_over)
        finally:  # a claim that could not be taken back after an error is begun
            after_call(partial(self._changed, self._ledger.known(claim.ref.uid)))

    def _prepare_when_free(
        self, claim: Claim, deadline: Deadline, hand_over: Deadline
    ) -> Sequence[PreparedDevice]:
        """Until *hand_over* the holder of a device is waited for."""
        gpus = self._planner.gpus(claim)
        pods = self._pods.read_early(claim)
        while True:
            try:
                with self._lease(deadline.remaining):
                    known = self._record_or_partitions(claim.ref)
                    with self._locks.gpus.hold(gpus | _gpus(known), deadline.remaining):
                        return self._prepare(claim, gpus, pods)
            except PodsNeeded as e:
                pods = self._pods.read(claim, why=str(e))  # the lease and the locks are free
            except GpusChanged as e:
                if deadline.expired:
                    raise NodeError(
                        f"claim {claim.ref}: its devices belong to other GPUs at each attempt: "
                        "GPUs are being renumbered on this node"
                    ) from e
                gpus = self._planner.gpus(claim)
            except DeviceHeldByClaim:
                # The lease and the locks are free meanwhile: the holder's unprepare needs them.
                if hand_over.expired:
                    raise
                self._ledger.wait_for_change(_POLL_SECONDS)

    def _prepare(
        self, claim: Claim, gpus: Collection[GpuUuid], pods: ClaimPodSpecs | None
    ) -> Sequence[PreparedDevice]:
        known = self._ledger.known(claim.ref.uid)
        if known is not None and _is_of(known, claim) and self._partitions.are_there(known):
            done = self._recorded_answer(claim.ref)
            if done is not None:
                return done
        # while the claim holds its GPU, that is offered as it was
        offer = self._planner.offer(claim)
        before = self._made_way(known) if known is not None else None
        plan = self._planned(claim, offer, gpus, pods)
        # What may be refused: before anything is done.
        documents = self._documents(plan)
        driver = self.driver_spec.keep()
        nodes = self._device_files(plan, driver)
        self._ledger.begin(plan.record)
        begun: set[CreatePartition] = set()
        try:
            self._pods.refuse_two_servers(plan.record, pods)  # others may have come meanwhile
            self._carry_out(plan.record, begun)
            if instances := self._partitions.of(plan):
                plan = plan.settled(instances)
                self._ledger.write(plan.record)  # after a crash they are known from others
                documents = self._documents(plan)
            if capabilities := _capabilities(plan):  # they are there with their partitions
                nodes = self._device_files(plan, driver, capabilities)
            return self._complete(plan, nodes, documents, self._serve(plan))
        except (DriverError, PodsNeeded):
            # The first error is reported.
            self._quietly(plan.record, partial(self._give_up, plan.record, begun, before))
            raise

    def _made_way(self, known: ClaimRecord) -> ClaimRecord | None:
        """Take back what is *known*: it was begun and not completed, or allocated anew since. What
        is of another boot has its place until it is replaced: then it is the answer."""
        if _is_of_other_boot(known):
            return known
        self._take_back(known)
        return None

    def _planned(
        self, claim: Claim, offer: Offer, gpus: Collection[GpuUuid], pods: ClaimPodSpecs | None
    ) -> ClaimPlan:
        plan = self._planner.plan(claim, offer, gpus, pods)
        self._pods.refuse_two_servers(plan.record, pods)
        return plan

    def _documents(self, plan: ClaimPlan) -> Sequence[MetadataDocument]:
        return metadata_documents(plan, self._names.driver, self._files.metadata_directory)

    def _carry_out(self, record: ClaimRecord, begun: set[CreatePartition]) -> None:
        """Steps of one kind side by side; all but MPS, which needs the instances."""
        steps = (step for step in record.steps if not isinstance(step, ServeMpsNamespace))
        carry_out = partial(self._partitions.carry_out, begun=begun)
        for _, alike in itertools.groupby(steps, key=type):
            in_parallel(carry_out, tuple(alike))

    def _serve(self, plan: ClaimPlan) -> Mapping[MpsNamespaceName, ServedNamespace]:
        """What the clients of MPS can use."""
        serve = partial(self._serve_in_time, plan)
        return {
            served.namespace.name: served for served in in_parallel(serve, plan.record.namespaces)
        }

    def _serve_in_time(self, plan: ClaimPlan, namespace: MpsNamespace) -> ServedNamespace:
        """All pods of the node wait for an allocation, and a server may have to start first: it is
        seen to that it serves before the container starts (``plugin.device_plugin``)."""
        try:
            return self._node.serve(namespace)
        except (TimedOut, MpsAgentUnreachable):
            major = min(grant.device.gpu.driver_version.major for grant in plan.grants)
            ahead = served_ahead(namespace, self._names.mps_dir, major)
            if ahead is None or not isinstance(plan.claim, AllocationClaim):
                raise
            return ahead

    def _device_files(
        self, plan: ClaimPlan, driver: DriverFiles, capabilities: tuple[str, ...] = ()
    ) -> DeviceFiles:
        """Missing ones are made. They stay: they do no harm, and others may use them."""
        minors = {grant.device.gpu.minor for grant in plan.grants}
        return self._node.device_files(tuple(sorted(minors)), capabilities, driver)

    def _complete(
        self,
        plan: ClaimPlan,
        nodes: DeviceFiles,
        documents: Sequence[MetadataDocument],
        served: Mapping[MpsNamespaceName, ServedNamespace],
    ) -> Sequence[PreparedDevice]:
        """Write the files of a claim for which all is done, and its record."""
        devices = container_devices(plan, documents, served)
        spec = claim_spec(plan.claim.ref, devices, nodes, self._names.driver)
        text = self._files.write(plan.claim.ref.uid, spec, documents)
        prepared = prepared_devices(plan, self._names.driver)
        record = replace(plan.record, prepared=prepared, spec=text, documents=tuple(documents))
        self._ledger.write(record)
        return prepared

    def _give_up(
        self, record: ClaimRecord, begun: Collection[CreatePartition], before: ClaimRecord | None
    ) -> None:
        """*before*: what is recorded in its place."""
        remaining = with_created(record, begun)
        if remaining != record:  # written first: the next start does not ask what was not begun
            self._quietly(remaining, partial(self._ledger.write, remaining))  # the disk may be full
        self._take_back(remaining)
        if before is not None:
            self._ledger.write(before)

    def _take_back(self, record: ClaimRecord) -> None:
        """Not while a process uses the claim (InUse): a limit holds as long as that runs."""
        self._users.refuse_while_used(record)
        steps = undo_steps(record, self._ledger.neighbours(record.claim.uid, record.gpus))
        if steps and record.completed:
            self._ledger.end(record)
        for step in steps:
            self._node.restore(step)
        uid = record.claim.uid
        self._files.remove(uid, self._ledger.known(uid))
        self._ledger.forget(uid)

    def _quietly(self, record: ClaimRecord, act: Callable[[], object]) -> None:
        """What does not work now is tried again at the next occasion."""
        try:
            act()
        except DriverError as e:
            log.warning("cannot bring a claim into order yet", extra=_log_fields(record, e))


def _capabilities(plan: ClaimPlan) -> tuple[str, ...]:
    return tuple(sorted({name for grant in plan.grants for name in driver_capabilities(grant)}))


def _gpus(record: ClaimRecord | None) -> frozenset[GpuUuid]:
    return record.gpus if record else frozenset()


def _is_of(record: ClaimRecord, claim: Claim) -> bool:
    """Whether *record* is of what *claim* is allocated now; a claim can be allocated anew."""
    recorded = {(h.device, h.share, h.admin) for h in record.holdings}
    return recorded == {(a.device, a.share, a.admin) for a in claim.allocations}


def _is_of_other_boot(record: ClaimRecord) -> bool:
    """Whether *record* is of what a container had before a reboot: nothing was done for it yet."""
    return record.allocation is not None and not record.completed and not record.steps


def _log_fields(record: ClaimRecord, error: DriverError | None = None) -> dict[str, str]:
    fields = {"claim": str(record.claim), "uid": str(record.claim.uid)}
    return fields | {"error": str(error)} if error else fields
