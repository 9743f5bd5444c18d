"""The order of effects for one claim: record, act, record; and the same road back.

Killed at any instruction, the next start (``recover``) finds a claim either prepared or not.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from cdi import Spec
from dra_driver.errors import ClusterError, DeviceHeld, DriverError, NodeError, UnknownDevice
from dra_driver.kubeletplugin.claims import Claim, ClaimRef, PreparedDevice
from dra_driver.kubeletplugin.named_locks import NamedLocks
from dra_driver.model.driver_files import DeviceFiles, DriverFiles
from dra_driver.model.holdings import Record
from dra_driver.model.inventory import Inventory
from dra_driver.model.steps import Step
from dra_driver.node.ledger import Ledger, SetAside
from dra_driver.node.spec_files import SpecFiles
from dra_driver.plan.edits import Granted, Host, claim_spec, device_id
from dra_driver.plan.prepare import Plan, plan_claim

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.25  # another process may end the holder's claim; nobody tells us then


class Node(Protocol):
    """What preparing needs of this machine."""

    def inventory(self) -> Inventory: ...
    def refresh(self) -> Inventory: ...
    def carry_out(self, step: Step) -> None: ...
    def undo(self, step: Step) -> None: ...
    def driver_files(self) -> DriverFiles: ...
    def device_files(self, minors: tuple[int, ...]) -> DeviceFiles: ...


class Claims(Protocol):
    """Where claims are read from."""

    def read(self, ref: ClaimRef) -> Claim: ...


@dataclass(frozen=True, slots=True)
class Waits:
    """How long one call may wait, in seconds, so that it ends within the kubelet's 45."""

    all: float = 20.0  # for the turn, for locks and for the holder together
    hand_over: float = 10.0  # of these for the holder's unprepare, after a force-deleted pod


@dataclass(frozen=True, slots=True)
class Tools:
    """What a Preparer works with."""

    node: Node
    claims: Claims
    ledger: Ledger
    specs: SpecFiles
    turn: Callable[[float], AbstractContextManager[None]]  # within seconds (rolling update)


@dataclass(frozen=True, slots=True)
class Names:
    """As whom it prepares."""

    driver: str
    pool: str  # the pool that this node publishes
    hook: str | None = None  # the host's path of nvidia-cdi-hook


class Preparer:
    """Makes claims usable on this node, and unusable again; one call at a time for each claim."""

    def __init__(self, names: Names, tools: Tools, waits: Waits | None = None) -> None:
        self._names = names
        self._node = tools.node
        self._claims = tools.claims
        self._ledger = tools.ledger
        self._specs = tools.specs
        self._turn = tools.turn
        self._waits = waits or Waits()
        self._claim_locks = NamedLocks(
            "the claim with UID {name} is still being worked on, {seconds} s later"
        )
        self._device_locks = NamedLocks(
            "a claim that is being prepared or unprepared on {name} did not finish in {seconds} s"
        )

    def prepare(self, ref: ClaimRef) -> Sequence[PreparedDevice]:
        """Make the claim's devices usable on this node. Asking again changes nothing."""
        wait = _Wait(self._waits)
        with self._claim_locks.hold([ref.uid], wait.left()):
            try:
                claim = self._claims.read(ref)
            except ClusterError:
                with self._turn(wait.left()):
                    if (done := self._completed(ref)) is not None:
                        return done
                raise
            return self._prepare_when_free(claim, wait)

    def unprepare(self, ref: ClaimRef) -> None:
        """Take back what *ref* was given. That there is nothing to take back is success."""
        self.take_back_if(ref, lambda: True)

    def take_back_if(self, ref: ClaimRef, gone: Callable[[], bool]) -> bool:
        """Take back what *ref* was given if it is *gone* at the moment when nobody else can act."""
        wait = _Wait(self._waits)
        with self._claim_locks.hold([ref.uid], wait.left()), self._turn(wait.left()):
            record = self._ledger.known(ref.uid)
            with self._device_locks.hold(_devices(record), wait.left()):
                if not gone():
                    return False
                if record is not None:
                    self._take_back(record)
                else:
                    self._specs.remove(ref.uid)
                    self._ledger.forget(ref.uid)
                return True

    def recover(self) -> None:
        """Bring files and ledger together: at start, and after another process had the turn.

        Claims whose preparation was cut short are taken back; a completed claim gets its CDI file
        again where that is gone (a cleared /var/run); files of no claim are removed. What fails
        waits for the next time: a *started* record goes on holding its devices. To be called while
        this process has the turn. NodeError: the ledger itself cannot be read.
        """
        self._ledger.reload()
        for record in self._ledger.records():
            if record.completed:
                self._quietly(record, partial(self._completed, record.claim))
            else:
                facts = _facts(record)
                log.warning("taking back a claim whose preparation was cut short", extra=facts)
                self._quietly(record, partial(self._take_back, record))
        try:
            self._remove_orphans()
        except NodeError as e:
            log.warning("cannot clear up CDI files yet", extra={"error": str(e)})

    def restore(self) -> None:
        """Give completed claims their CDI files again, where somebody removed them."""
        with self._turn(self._waits.all):
            for record in self._ledger.records():
                if record.completed and not self._specs.exists(record.claim.uid):
                    self._quietly(record, partial(self._completed, record.claim))

    def _remove_orphans(self) -> None:
        self._specs.sweep()
        known = {record.claim.uid for record in self._ledger.records()}
        known |= {aside.uid for aside in self._ledger.set_aside()}
        for uid in self._specs.claims():
            if uid not in known:
                log.warning("removing the CDI file of no claim", extra={"uid": uid})
                self._specs.remove(uid)

    def _completed(self, ref: ClaimRef) -> Sequence[PreparedDevice] | None:
        """The recorded answer, with the CDI file that it promises."""
        try:
            record = self._ledger.record(ref.uid)
        except NodeError as e:
            log.warning("preparing a claim again", extra={"claim": str(ref), "error": str(e)})
            return None
        if record is None or record.prepared is None:
            return None
        self._specs.restore(ref.uid, record.spec or "")
        return record.prepared

    def _prepare_when_free(self, claim: Claim, wait: "_Wait") -> Sequence[PreparedDevice]:
        wanted = {allocation.device for allocation in claim.allocations}
        while True:
            try:
                with self._turn(wait.left()):
                    known = self._ledger.known(claim.ref.uid)
                    with self._device_locks.hold(wanted | _devices(known), wait.left()):
                        return self._prepare(claim)
            except DeviceHeld:
                # The turn and the locks are free meanwhile: the holder's unprepare needs them.
                if not wait.hands_over():
                    raise
                self._ledger.wait_for_change(_POLL_SECONDS)

    def _prepare(self, claim: Claim) -> Sequence[PreparedDevice]:
        known = self._ledger.known(claim.ref.uid)
        if known is not None:
            if _is_of(known, claim) and (done := self._completed(claim.ref)) is not None:
                return done
            self._take_back(known)  # begun and not completed, or allocated anew since
        plan = self._plan(claim)
        record = Record(claim.ref, plan.holdings, plan.steps)
        self._ledger.write(record)
        try:
            for step in plan.steps:
                self._node.carry_out(step)
            text = self._specs.write(claim.ref.uid, self._render(plan))
            prepared = self._answer(plan)
            self._ledger.write(replace(record, prepared=prepared, spec=text))
        except DriverError:
            self._quietly(record, partial(self._take_back, record))  # the first error is reported
            raise
        return prepared

    def _plan(self, claim: Claim) -> Plan:
        _refuse_unsettled(claim, self._ledger.set_aside())
        try:
            return plan_claim(claim, self._node.inventory(), self._ledger.held(), self._names.pool)
        except UnknownDevice:
            # It may have appeared since the last look: the scheduler saw another process's slice.
            return plan_claim(claim, self._node.refresh(), self._ledger.held(), self._names.pool)

    def _render(self, plan: Plan) -> Spec:
        minors = tuple(sorted({grant.device.minor for grant in plan.grants}))
        host = Host(self._node.driver_files(), self._node.device_files(minors), self._names.hook)
        granted = [
            Granted(grant.device, grant.allocation.share, grant.allocation.consumed)
            for grant in plan.grants
        ]
        return claim_spec(plan.claim.ref, granted, host, self._names.driver)

    def _answer(self, plan: Plan) -> tuple[PreparedDevice, ...]:
        uid, driver = plan.claim.ref.uid, self._names.driver
        return tuple(
            PreparedDevice(
                requests=(grant.allocation.base_request,),
                pool=grant.allocation.pool,
                device=grant.allocation.device,
                cdi_ids=(device_id(uid, grant.device.name, grant.allocation.share, driver),),
                share=grant.allocation.share,
            )
            for grant in plan.grants
        )

    def _take_back(self, record: Record) -> None:
        for step in reversed(record.steps):
            self._node.undo(step)
        self._specs.remove(record.claim.uid)
        self._ledger.forget(record.claim.uid)

    def _quietly(self, record: Record, act: Callable[[], object]) -> None:
        """What does not work now is tried again at the next occasion."""
        try:
            act()
        except DriverError as e:
            log.warning("cannot bring a claim into order yet", extra=_facts(record, e))


class _Wait:
    """How long one call may still wait, for whatever it is."""

    def __init__(self, waits: Waits) -> None:
        now = time.monotonic()
        self._until = now + waits.all
        self._hand_over_until = now + min(waits.hand_over, waits.all)

    def left(self) -> float:
        return max(0.0, self._until - time.monotonic())

    def hands_over(self) -> bool:
        """Whether the holder of a device may still be waited for."""
        return time.monotonic() < self._hand_over_until


def _devices(record: Record | None) -> set[str]:
    return {str(holding.device) for holding in record.holdings} if record else set()


def _is_of(record: Record, claim: Claim) -> bool:
    """Whether *record* is of what *claim* is allocated now; a claim can be allocated anew."""
    recorded = {(h.device, h.share, h.admin) for h in record.holdings}
    return recorded == {(a.device, a.share, a.admin) for a in claim.allocations}


def _refuse_unsettled(claim: Claim, set_aside: Iterable[SetAside]) -> None:
    """A damaged record may be of any device that it names, or of any at all if it names none."""
    wanted = {allocation.device for allocation in claim.allocations if not allocation.admin}
    for aside in set_aside:
        if aside.uid != claim.ref.uid and any(map(aside.may_hold, wanted)):
            raise NodeError(
                f"claim {claim.ref} has to wait: its device may be held by the claim with UID "
                f"{aside.uid}, whose record {aside.path} cannot be read ({aside.reason}); "
                "it is settled as soon as the API server can be asked about that claim"
            )


def _facts(record: Record, error: DriverError | None = None) -> dict[str, str]:
    facts = {"claim": str(record.claim), "uid": str(record.claim.uid)}
    return facts | {"error": str(error)} if error else facts
