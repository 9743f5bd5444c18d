"""What the status of prepared claims says of their devices: ``status.devices`` (KEP-4817).

Written on a thread of its own about a second after the kubelet has its answer, so that nothing
waits for it and a claim that is gone again by then costs nothing. What cannot be written never
keeps a claim from being prepared.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final, Protocol

from api import names
from dra_driver.base.backoff import Backoff
from dra_driver.base.errors import Conflict, DriverError, NotFound, Refused, Unreachable
from dra_driver.base.frozen import frozen
from dra_driver.base.threads import UNTIL_WOKEN, Loop
from dra_driver.k8s.api import FROM_WATCH_CACHE, Document, Query
from dra_driver.k8s.claims import ClaimRef, ClaimUid
from dra_driver.kubeletplugin.serve.health import DeviceHealth, HealthStatus
from dra_driver.model.offer import AdminAccess
from dra_driver.model.profiles import SharingStrategy
from dra_driver.model.records import ClaimRecord, Holding
from dra_driver.plan.health.messages import timestamp
from dra_driver.plan.offer.slice_documents import bytes_quantity
from dra_driver.plan.prepare.amounts import requested_amount
from dra_driver.plugin.device_health import NodeDevices
from dra_driver.plugin.parts import PluginParts

log = logging.getLogger(__name__)

_AFTER_SECONDS: Final = 1.0  # from a change until it is written
_REMOVE_AFTER_SECONDS: Final = 5.0  # mostly the claim is deleted by then, or not allocated any more
_START_SECONDS: Final = 10.0  # at most, after the start: nodes may be updated all at once
_TOGETHER_SECONDS: Final = 0.5  # between two steps, for claims that come one by one
_BETWEEN_SECONDS: Final = 0.05  # between two writes: 110 pods that start at once need the processor
_FIRST_WAIT_SECONDS, _LAST_WAIT_SECONDS = 5.0, 600.0  # until a failed write is tried again
_RIGHT: Final = "resourceclaims/driver"  # of whom it lacks is told with a 422 (Kubernetes 1.36)
_LONGEST_MESSAGE: Final = 32768  # of a condition
_LONGEST_MANAGER: Final = 128  # of fields, for the API server


@frozen
class DeviceStatus:
    """What is said of one device of a claim. *since*: when it became ready or ceased to be, in
    the words of Kubernetes; empty: now."""

    device: str
    share: str = ""
    ready: bool = True
    reason: str = "Prepared"
    message: str = ""
    data: tuple[tuple[str, Any], ...] = ()
    since: str = ""


Statuses = tuple[DeviceStatus, ...]


def device_statuses(
    record: ClaimRecord, health: Iterator[DeviceHealth], mps_failure: str = ""
) -> Statuses:
    """Of each device of a prepared claim. *mps_failure*: why its MPS server does not serve it."""
    return tuple(
        _device_status(record, holding, device, mps_failure)
        for holding, device in zip(record.holdings, health, strict=True)
    )


def _device_status(
    record: ClaimRecord, holding: Holding, health: DeviceHealth, mps_failure: str
) -> DeviceStatus:
    reason, message = "Prepared", ""
    if health.status is HealthStatus.UNHEALTHY:
        reason, message = "Unhealthy", health.message
    elif health.status is HealthStatus.UNKNOWN:
        reason, message = "Released", health.message
    elif mps_failure and _is_under_mps(record, holding):
        reason, message = "MPSNotServed", mps_failure
    return DeviceStatus(
        holding.device,
        holding.share or "",
        ready=reason == "Prepared",
        reason=reason,
        message=message[:_LONGEST_MESSAGE],
        data=tuple(sorted(_data(record, holding))),
    )


def _data(record: ClaimRecord, holding: Holding) -> Iterator[tuple[str, Any]]:
    """What the claim was given, in the words of attributes and capacities."""
    if holding.partition is None or holding.instance is not None:
        yield names.UUID, str(holding.memory_of)
    if holding.partition is not None:
        yield names.PARENT_UUID, str(holding.gpu)
    if isinstance(holding.shape, AdminAccess) or holding.admin:
        yield "adminAccess", True
        return
    amount = requested_amount(holding.consumed, holding.shape)
    if amount.whole:
        return
    if amount.memory_bytes:
        yield names.MEMORY, bytes_quantity(amount.memory_bytes)
    if amount.cores:
        yield names.CORES, amount.cores
    under_mps = _is_under_mps(record, holding)
    yield names.STRATEGY, str(SharingStrategy.MPS if under_mps else SharingStrategy.TIME_SLICING)


def _is_under_mps(record: ClaimRecord, holding: Holding) -> bool:
    return any(holding.uuid in namespace.gpus for namespace in record.namespaces)


class StatusApi(Protocol):
    """What is used of the API server."""

    def claim(self, namespace: str, name: str, query: Query) -> Document: ...

    def apply_claim_status(
        self, namespace: str, name: str, uid: str, status: Document, manager: str
    ) -> None: ...


class PreparedRecords(Protocol):
    def records(self) -> tuple[ClaimRecord, ...]: ...

    def known(self, uid: ClaimUid) -> ClaimRecord | None: ...


@frozen
class StatusSources:
    """Of what the statuses are made."""

    driver: str
    pool: str
    ledger: PreparedRecords
    of_claim: Callable[[ClaimRecord], Iterator[DeviceHealth]]
    mps_failures: Callable[[], Mapping[ClaimUid, str]]
    may_write: Callable[[], bool]  # this process, to an API server that knows claims


class DeviceStatusWriter:
    """Writes what changed. ``step`` is of one thread; the other methods never wait."""

    def __init__(
        self,
        api: StatusApi,
        sources: StatusSources,
        clock: Callable[[], float] = time.monotonic,
        between_seconds: float = _BETWEEN_SECONDS,
    ) -> None:
        self._api = api
        self._sources = sources
        self._clock = clock
        self._between_seconds = between_seconds
        self._lock = threading.Lock()
        self._due: dict[ClaimUid, float] = {}  # when each is looked at, by the clock
        self._all_due: float | None = clock() + random.uniform(_AFTER_SECONDS, _START_SECONDS)
        self._wakes_at = float("-inf")  # when the thread looks for what is due, by the clock
        self._written: dict[ClaimUid, tuple[ClaimRef, Statuses]] = {}  # of the thread alone
        self._unread: set[ClaimUid] = set()  # somebody else may have changed what these say
        self._failing: set[ClaimUid] = set()  # these could not be written the last time
        self._backoff = Backoff(_FIRST_WAIT_SECONDS, _LAST_WAIT_SECONDS, randomized=True)
        self._again_at = float("-inf")  # when those are tried again
        self._logged_error: type[DriverError] | None = None
        self.loop: Final = Loop("device-status", self.step, _LAST_WAIT_SECONDS)

    def claim_changed(self, record: ClaimRecord | None) -> None:
        """It was prepared or given back. None: any may have been."""
        if record is None:
            self._look_at_all(_AFTER_SECONDS)
            return
        if record.allocation is not None:
            return  # the API server knows nothing of it
        uid = record.claim.uid
        due = self._clock() + _AFTER_SECONDS
        if self._sources.ledger.known(uid) is None:
            due = self._clock() + _REMOVE_AFTER_SECONDS
            self._unread.add(uid)  # the API server forgets it when the claim is allocated anew
        with self._lock:
            self._due[uid] = min(due, self._due.get(uid, due))
            is_sooner = due < self._wakes_at
            self._wakes_at = min(self._wakes_at, due)
        if is_sooner:  # else the thread wakes by itself
            self.loop.soon()

    def health_changed(self) -> None:
        """That of any device or MPS server."""
        self._look_at_all(0.0)

    def _look_at_all(self, seconds: float) -> None:
        due = self._clock() + seconds
        with self._lock:
            if self._all_due is None or due < self._all_due:
                self._all_due = due
        self.loop.soon()

    def step(self) -> float:
        """Write what is due. Returns the seconds until more is."""
        with self._lock:
            self._wakes_at = float("inf")  # what comes from here on may not be seen any more
        seconds = self._write_due()
        with self._lock:
            self._wakes_at = self._clock() + seconds
        return seconds

    def _write_due(self) -> float:
        if not self._sources.may_write():
            return _LAST_WAIT_SECONDS
        now = self._clock()
        with self._lock:
            look_at_all = self._all_due is not None and now >= self._all_due
            if look_at_all:
                self._all_due = None
        if look_at_all:
            self._find_changes(now)
        with self._lock:
            due = [uid for uid, moment in self._due.items() if moment <= now]
        for uid in due:
            with self._lock:
                del self._due[uid]
            self._failing.discard(uid)
            try:
                self._look_at(uid)
            except Unreachable as e:
                return self._failed(uid, e)
            except DriverError as e:  # others may be written all the same
                self._failed(uid, e)
            else:
                self._backoff.reset()
                self._again_at = float("-inf")
        with self._lock:
            moments = [*self._due.values(), *(() if self._all_due is None else (self._all_due,))]
        return max(_TOGETHER_SECONDS, min(moments) - self._clock()) if moments else UNTIL_WOKEN

    def _failed(self, uid: ClaimUid, error: DriverError) -> float:
        """The seconds until it is tried again. However many claims fail meanwhile, or how often
        this thread is woken, the wait gets longer only when it was waited for."""
        now = self._clock()
        if now >= self._again_at:
            self._again_at = now + self._backoff.next_seconds()
        seconds = self._again_at - now
        self._failing.add(uid)
        if type(error) is not self._logged_error:  # messages name the claim
            facts = {"error": str(error), "seconds": round(seconds, 1)}
            log.warning("the status of a claim cannot be written", extra=facts)
        self._logged_error = type(error)
        with self._lock:
            self._due.setdefault(uid, self._again_at)
        return seconds

    def _find_changes(self, now: float) -> None:
        """Have a look at every claim whose status may say something else than is written."""
        records = self._sources.ledger.records()
        prepared = {record.claim.uid for record in records if record.allocation is None}
        self._unread |= prepared - self._written.keys()
        with self._lock:
            for uid in prepared | self._written.keys():
                if uid in self._failing:  # what is due later was to say something else
                    self._due[uid] = now
                self._due.setdefault(uid, now)

    def _look_at(self, uid: ClaimUid) -> None:
        record = self._sources.ledger.known(uid)
        if record is None or not record.completed:
            self._unread.discard(uid)
            if uid in self._written:
                self._apply(self._written[uid][0], ())
                del self._written[uid]
            return
        failure = self._sources.mps_failures().get(uid, "")
        wanted = device_statuses(record, self._sources.of_claim(record), failure)
        try:
            statuses = self._known(record.claim)
            if tuple(replace(each, since="") for each in statuses) != wanted:
                statuses = _dated(wanted, statuses)
                self._apply(record.claim, statuses)
        except (NotFound, Conflict, Refused) as e:  # deleted, another one, or allocated anew
            if _RIGHT in str(e):
                raise
            log.debug("a claim is not as it was prepared", extra={"error": str(e)})
            self._unread.discard(uid)
            return
        self._unread.discard(uid)
        self._written[uid] = (record.claim, statuses)

    def _known(self, claim: ClaimRef) -> Statuses:
        """What the claim says by now."""
        if claim.uid in self._unread:
            document = self._api.claim(claim.namespace, claim.name, FROM_WATCH_CACHE)
            return tuple(_decode(document, self._sources.driver))
        return self._written.get(claim.uid, (claim, ()))[1]

    def _apply(self, claim: ClaimRef, statuses: Statuses) -> None:
        driver, pool = self._sources.driver, self._sources.pool
        devices = [_encode(each, driver, pool) for each in statuses]
        status = {"devices": devices} if devices else {}
        # Of this node alone: the claim may be prepared on another one by now, which says its own.
        manager = f"{driver}/{pool}"[:_LONGEST_MANAGER]
        try:
            self._api.apply_claim_status(claim.namespace, claim.name, claim.uid, status, manager)
        except (NotFound, Conflict, Refused):
            if devices:
                raise
        time.sleep(self._between_seconds)


def _dated(statuses: Statuses, before: Statuses) -> Statuses:
    """With the moment at which each became ready, or ceased to be."""
    known = {(each.device, each.share, each.ready): each.since for each in before}
    now = timestamp(time.time())
    return tuple(
        replace(each, since=known.get((each.device, each.share, each.ready)) or now)
        for each in statuses
    )


def _encode(status: DeviceStatus, driver: str, pool: str) -> Document:
    condition = {
        "type": "Ready",
        "status": str(status.ready),
        "reason": status.reason,
        "message": status.message,
        "lastTransitionTime": status.since,
    }
    return {
        "driver": driver,
        "pool": pool,
        "device": status.device,
        **({"shareID": status.share} if status.share else {}),
        "conditions": [condition],
        "data": dict(status.data),
    }


def _decode(claim: Document, driver: str) -> Iterator[DeviceStatus]:
    """What *claim* says of the devices of *driver*."""
    for device in (claim.get("status") or {}).get("devices") or ():
        conditions = {each["type"]: each for each in device.get("conditions") or ()}
        ready = conditions.get("Ready", {})
        if device.get("driver") == driver:
            yield DeviceStatus(
                device["device"],
                device.get("shareID") or "",
                ready.get("status") == "True",
                ready.get("reason", ""),
                ready.get("message", ""),
                tuple(sorted((device.get("data") or {}).items())),
                ready.get("lastTransitionTime", ""),
            )


def start(parts: PluginParts, stack: ExitStack) -> None:
    """Unless the settings say that it is not wanted."""
    settings = parts.settings
    if not settings.device_status:
        return
    devices: NodeDevices = parts.devices
    sources = StatusSources(
        settings.driver_name,
        settings.node_name,
        parts.ledger,
        devices.of_claim,
        lambda: parts.mps_failures,
        lambda: parts.is_newest() and not parts.resources.missing,
    )
    writer = DeviceStatusWriter(parts.resources, sources)
    parts.claim_listeners.append(writer.claim_changed)
    parts.health_listeners.append(writer.health_changed)
    parts.after_publishing.append(writer.loop.start)
    stack.callback(writer.loop.stop)
