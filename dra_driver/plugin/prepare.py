"""The order of effects for one claim: record, act, record; and the same road back.

Killed at any instruction, the next start (``recover``) finds a claim either prepared or not.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

from cdi import Spec
from dra_driver.errors import DeviceHeld, DriverError, NodeError, UnknownDevice
from dra_driver.kubeletplugin.claims import Claim, ClaimRef, PreparedDevice
from dra_driver.kubeletplugin.exclusive import NamedLocks
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
    """How long prepare may wait, in seconds; all together well below the kubelet's 45."""

    hand_over: float = 10.0  # for the holder's unprepare, after a force-deleted pod
    lock: float = 15.0


@dataclass(frozen=True, slots=True)
class Tools:
    """What a Preparer works with."""

    node: Node
    claims: Claims
    ledger: Ledger
    specs: SpecFiles
    turn: Callable[[], AbstractContextManager[None]]  # this process may prepare (rolling update)


@dataclass(frozen=True, slots=True)
class Names:
    """As whom it prepares."""

    driver: str
    pool: str  # the pool that this node publishes
    hook: str | None = None  # the host's path of nvidia-cdi-hook


class Preparer:
    """Makes claims usable on this node, and unusable again. Calls for one UID come one by one."""

    def __init__(self, names: Names, tools: Tools, waits: Waits | None = None) -> None:
        self._names = names
        self._node = tools.node
        self._claims = tools.claims
        self._ledger = tools.ledger
        self._specs = tools.specs
        self._turn = tools.turn
        self._waits = waits or Waits()
        self._locks = NamedLocks(
            "a claim that is being prepared or unprepared on {name} did not finish in {seconds} s"
        )

    def prepare(self, ref: ClaimRef) -> Sequence[PreparedDevice]:
        """Make the claim's devices usable on this node. Asking again changes nothing."""
        with self._turn():
            if (done := self._completed(ref)) is not None:
                return done
        claim = self._claims.read(ref)
        deadline = time.monotonic() + self._waits.hand_over
        while True:
            try:
                with self._turn(), self._lock(a.device for a in claim.allocations):
                    return self._prepare(claim)
            except DeviceHeld:
                # The turn and the locks are free meanwhile: the holder's unprepare needs them.
                if time.monotonic() >= deadline:
                    raise
                self._ledger.wait_for_change(_POLL_SECONDS)

    def unprepare(self, ref: ClaimRef) -> None:
        """Take back what *ref* was given. That there is nothing to take back is success."""
        with self._turn():
            found = self._ledger.known(ref.uid)
            with self._lock(holding.device for holding in (found.holdings if found else ())):
                if (record := self._ledger.known(ref.uid)) is not None:
                    self._take_back(record)
                else:
                    self._specs.remove(ref.uid)
                    self._ledger.forget(ref.uid)

    def recover(self) -> None:
        """Bring files and ledger together: at start, and after another process had the turn.

        Claims whose preparation was cut short are taken back; a completed claim gets its CDI file
        again where that is gone (a cleared /var/run); files of no claim are removed. To be called
        while this process has the turn.
        """
        self._ledger.reload()
        self._specs.sweep()
        for record in self._ledger.records():
            if record.completed:
                self._restore(record)
            else:
                log.warning(
                    "taking back a claim whose preparation was cut short", extra=_facts(record)
                )
                self._take_back(record)
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

    def _prepare(self, claim: Claim) -> Sequence[PreparedDevice]:
        if (done := self._completed(claim.ref)) is not None:  # while we waited for the locks
            return done
        if (begun := self._ledger.known(claim.ref.uid)) is not None:
            self._take_back(begun)
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
            self._undo_after_failure(record)
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

    def _undo_after_failure(self, record: Record) -> None:
        """The first error is the one to report; what cannot be undone now stays *started*."""
        try:
            self._take_back(record)
        except DriverError as e:
            log.warning("cannot take back a failed claim yet", extra=_facts(record, e))

    def _take_back(self, record: Record) -> None:
        for step in reversed(record.steps):
            self._node.undo(step)
        self._specs.remove(record.claim.uid)
        self._ledger.forget(record.claim.uid)

    def _restore(self, record: Record) -> None:
        try:
            self._completed(record.claim)
        except (
            NodeError
        ) as e:  # the directory may be unwritable now; asking for the claim tries again
            log.warning("cannot restore the CDI file of a claim yet", extra=_facts(record, e))

    def _lock(self, devices: Iterable[str]) -> AbstractContextManager[None]:
        return self._locks.hold(devices, self._waits.lock)


def _refuse_unsettled(claim: Claim, set_aside: Iterable[SetAside]) -> None:
    """A damaged record may be of any device that it names, or of any at all if it names none."""
    wanted = {allocation.device for allocation in claim.allocations if not allocation.admin}
    for aside in set_aside:
        if aside.uid != claim.ref.uid and (not aside.mentions or wanted & aside.mentions):
            raise NodeError(
                f"claim {claim.ref} has to wait: its device may be held by the claim with UID "
                f"{aside.uid}, whose record {aside.path} cannot be read ({aside.reason}); "
                "it is settled as soon as the API server can be asked about that claim"
            )


def _facts(record: Record, error: DriverError | None = None) -> dict[str, str]:
    facts = {"claim": str(record.claim), "uid": str(record.claim.uid)}
    return facts | {"error": str(error)} if error else facts
