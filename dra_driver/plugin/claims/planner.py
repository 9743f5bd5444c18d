"""Plans a claim by what is offered, what other claims hold and what the GPUs say now.

Where what a claim gets depends on its pods, they are read here; and a record that cannot be read is
in the way of each claim that may be given the same device.
"""

import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from dra_driver.base.errors import (
    ApiServerError,
    ClaimError,
    DriverError,
    NodeError,
    NotFound,
    SettingsError,
    UnknownDevice,
)
from dra_driver.base.threads import in_parallel
from dra_driver.k8s.claims import Claim, ClaimRef, Pod
from dra_driver.k8s.pods import PodReader, PodSpec
from dra_driver.model.gpus import DeviceName, GpuUuid
from dra_driver.model.offer import Offer, gpu_name_of
from dra_driver.model.records import AllocationClaim, ClaimRecord, is_allocation
from dra_driver.node.state.ledger import Ledger
from dra_driver.node.state.ledger_files import DamagedRecord
from dra_driver.plan.mig.claims import partitions_left_behind
from dra_driver.plan.mps.containers import separate_server_problems
from dra_driver.plan.mps.namespaces import ClaimPodSpecs, PodsNeeded
from dra_driver.plan.prepare.claim import ClaimPlan, plan_claim
from dra_driver.plan.prepare.gpu_settings import settings_to_read, with_previous_values
from dra_driver.plugin.claims.dependencies import PrepareDependencies
from dra_driver.plugin.claims.partitions import ClaimPartitions


def refuse_unreadable(claim: Claim, offer: Offer, set_aside: Iterable[DamagedRecord]) -> None:
    """NodeError: the claim of a damaged record may hold a GPU of *claim*."""
    names = {DeviceName(each.device) for each in claim.allocations if not each.admin}
    devices = {name: offer.by_name.get(name) for name in names}
    gpus = {
        (device.gpu.uuid if device else None, gpu_name_of(name)) for name, device in devices.items()
    }
    for aside in set_aside:
        if isinstance(claim, AllocationClaim) and is_allocation(aside.uid):
            continue  # it would be in nobody's way if it could be read
        if aside.uid != claim.ref.uid and any(aside.may_hold(*gpu) for gpu in gpus):
            waits = f"claim {claim.ref} has to wait: its device may be held by"
            until = "it is settled as soon as the API server can be asked about that claim"
            if aside.release:
                until = f"install release {aside.release} again, or drain the node and reboot it"
            raise NodeError(
                f"{waits} the claim with UID {aside.uid}, whose record {aside.path} cannot be read "
                f"({aside.reason}); {until}",
                f"{waits} a claim whose record cannot be read; {until}",
            )


_MPS_IN_NAMESPACE: Final = "it or a claim of its namespace is shared by MPS"


class ClaimPods:
    """Reads pods, and looks at claims of one pod together."""

    def __init__(self, pods: PodReader, ledger: Ledger) -> None:
        self._pods = pods
        self._ledger = ledger

    def read_early(self, claim: Claim) -> ClaimPodSpecs | None:
        """Before *claim* is planned: :meth:`refuse_two_servers` will ask for them, and then it
        would be planned twice. None: it may not. Errors as :meth:`read` says."""
        computes = any(not allocation.admin for allocation in claim.allocations)
        if not computes or self._ledger.known(claim.ref.uid) is not None:
            return None
        if not _computing_beside(claim.ref, self._ledger.served()):
            return None
        return self.read(claim, _MPS_IN_NAMESPACE)

    def read(self, claim: Claim, why: str) -> ClaimPodSpecs:
        """The pods that *claim* is reserved for; those that are gone need nothing. NodeError: they
        cannot be read, and *why* they have to be known.

        To be called while nobody waits for a GPU: an API server may take its time. One that does
        not answer for a pod is not asked for those that are still to come.
        """
        failed = threading.Event()
        specs = in_parallel(partial(self._read, claim, why, failed), claim.pods)
        return tuple(spec for spec in specs if spec is not None)

    def refuse_two_servers(self, mine: ClaimRecord, pods: ClaimPodSpecs | None) -> None:
        """ClaimError: a container of *pods* would have GPUs on two MPS servers, or on one and on
        none. PodsNeeded: it depends on them.

        To be called once *mine* is recorded: of two claims that are prepared at the same time, one
        at least sees the other. The pods that the others were prepared for say nothing: any pod of
        the namespace can have come to them since.
        """
        if not (others := self._beside(mine)):
            return
        if pods is None:
            raise PodsNeeded(_MPS_IN_NAMESPACE)
        if problems := separate_server_problems(mine, others, pods):
            raise ClaimError(f"claim {mine.claim}: " + "; ".join(problems))

    def _beside(self, mine: ClaimRecord) -> Sequence[ClaimRecord]:
        """The claims that no container can have together with *mine*, whoever uses them."""
        if not mine.computes or mine.allocation is not None:
            return ()
        # A claim without MPS is in nobody's way but of those with it: most nodes have none.
        candidates = self._ledger.records() if mine.namespaces else self._ledger.served()
        return _computing_beside(mine.claim, candidates)

    def _read(self, claim: Claim, why: str, failed: threading.Event, pod: Pod) -> PodSpec | None:
        if failed.is_set():
            return None
        try:
            spec = self._pods.read(claim.ref.namespace, pod.name)
        except NotFound:
            return None
        except ApiServerError as e:
            failed.set()
            raise NodeError(
                f"claim {claim.ref}: which container of pod {pod.name} uses what cannot be read, "
                f"and has to be known ({why}): {e}"
            ) from e
        return spec if spec.uid == pod.uid else None


def _computing_beside(claim: ClaimRef, records: Iterable[ClaimRecord]) -> Sequence[ClaimRecord]:
    """Those of other claims of its namespace that hold more than admin access. An allocation is no
    claim that a container could name besides."""
    return [
        record
        for record in records
        if record.claim.namespace == claim.namespace
        and record.claim.uid != claim.uid
        and record.computes
        and record.allocation is None
    ]


class GpusChanged(Exception):
    """The devices of a claim are of other GPUs now than when these were locked."""


class Planner:
    """Plans claims for the node whose pool is *pool*."""

    def __init__(
        self, dependencies: PrepareDependencies, pool: str, partitions: ClaimPartitions
    ) -> None:
        self._node = dependencies.node
        self._offers = dependencies.offers
        self._ledger = dependencies.ledger
        self._pool = pool
        self._partitions = partitions

    def gpus(self, claim: Claim) -> frozenset[GpuUuid]:
        """The GPUs of *claim*, as far as they are offered. From here on nothing goes by the names
        of devices: a GPU can be called otherwise than it was."""
        try:
            offered = self._offers.now().by_name
        except DriverError:  # what was prepared before is answered all the same
            return frozenset()
        devices = (offered.get(DeviceName(a.device)) for a in claim.allocations)
        return frozenset(device.gpu.uuid for device in devices if device is not None)

    def offer(self, claim: Claim) -> Offer:
        """What is offered now. NodeError: the node's profile cannot be used."""
        try:
            return self._offers.now()
        except SettingsError as e:
            raise NodeError(
                f"claim {claim.ref} has to wait for a profile of this node that can be used: {e}"
            ) from e

    def plan(
        self, claim: Claim, offer: Offer, gpus: Collection[GpuUuid], pods: ClaimPodSpecs | None
    ) -> ClaimPlan:
        """While nobody else acts on *gpus*. Errors as ``plan_claim`` says, NodeError where somebody
        else has changed a GPU, and GpusChanged where the claim turns out to be for others."""
        # Before anything is said of what is in the way: it may be of such a record.
        refuse_unreadable(claim, offer, self._ledger.set_aside())
        neighbours = self._ledger.neighbours(claim.ref.uid, gpus)
        partitions_record = self._ledger.partitions_record(claim.ref.uid)
        others = (*neighbours, *partitions_left_behind(partitions_record))
        try:
            plan = plan_claim(claim, offer, others, self._pool, pods)
        except UnknownDevice:
            # It may have appeared since the last look: the scheduler saw another process's slice.
            plan = plan_claim(claim, self._offers.refresh(), others, self._pool, pods)
        if not plan.record.gpus <= set(gpus):
            raise GpusChanged
        if self._partitions.are_taken(plan, others):
            # By somebody else, since the last look: what is there now may do, or says who it is.
            plan = plan_claim(claim, self._offers.refresh(), others, self._pool, pods)
            if not plan.record.gpus <= set(gpus):
                raise GpusChanged
            self._partitions.refuse_taken(plan, others)
        self._partitions.remove_recorded(partitions_record, (*neighbours, plan.record))
        if not (settings := settings_to_read(plan.steps, others)):
            return plan
        current = dict(
            zip(settings, in_parallel(self._node.current_setting, settings), strict=True)
        )
        return replace(plan, steps=with_previous_values(plan.steps, current))
