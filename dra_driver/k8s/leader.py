"""Which of several processes leads: one Lease, by the rules of the official client.

``kubernetes.leaderelection`` decides who may have the Lease. It is asked again and again from here,
since its own loop cannot be stopped, ends with the first error of the network, and does not say for
how long its answer is good. Requests go through our client, with its timeouts and its token.
"""

import datetime
import json
import logging
import math
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from kubernetes.client import V1Lease, V1LeaseSpec
from kubernetes.client.exceptions import ApiException
from kubernetes.leaderelection.electionconfig import Config
from kubernetes.leaderelection.leaderelection import LeaderElection
from kubernetes.leaderelection.leaderelectionrecord import LeaderElectionRecord
from kubernetes.leaderelection.resourcelock.leaselock import LeaseLock

from dra_driver.base.errors import Conflict, DriverError, NotFound, SettingsError
from dra_driver.base.frozen import frozen
from dra_driver.k8s.access import ApiServerAccess
from dra_driver.k8s.api import Document
from dra_driver.k8s.client import ApiClient, ApiTimeouts

log = logging.getLogger(__name__)


@frozen
class LeaseSeconds:
    """SettingsError: they do not fit together."""

    lease: int = 15  # nobody else takes a Lease that was renewed within this time
    renew: float = 10.0  # who did not renew it for so long does not lead any more
    retry: float = 2.0  # between attempts to renew or to get it

    def __post_init__(self) -> None:
        # The library ends the process otherwise, and takes whole seconds for the Lease alone.
        if not 0 < max(1.0, self.retry) * 1.2 < self.renew < self.lease:
            raise SettingsError(
                f"a Lease of {self.lease} s, to be renewed within {self.renew:g} s, tried every "
                f"{self.retry:g} s: the second has to be less than the first, and more than 1.2 "
                "times the third and 1.2"
            )


@frozen
class LeaseName:
    """Which Lease the candidates want."""

    namespace: str
    name: str

    @property
    def path(self) -> str:
        """Of the collection that it is in."""
        return f"/apis/coordination.k8s.io/v1/namespaces/{self.namespace}/leases"


class Leadership:
    """Tries to lead, on a thread of its own that no error ends. Any thread may ask ``leads``.

    A process that was stopped, or could not reach the API server, leads no more once the time that
    its last renewal was good for is over. Nobody else can lead before that: others wait longer, and
    count from later.
    """

    def __init__(
        self,
        access: ApiServerAccess,
        lease: LeaseName,
        identity: str,
        seconds: LeaseSeconds | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """*identity*: unique among the candidates, of every process another one. SettingsError:
        *access* cannot be used."""
        self._seconds = seconds or LeaseSeconds()
        renew = self._seconds.renew
        # One attempt at most, get and update together, takes less than a renewal is good for.
        timeouts = ApiTimeouts(connect=renew / 5, read=renew / 5, write=renew / 4)
        self._api = ApiClient(access, timeouts, "dra-driver-leader-election")
        self._leases = _Leases(self._api, lease, renew * 0.4)
        self._lock = _lease_lock(self._leases, lease, identity)
        self._election = _election(self._lock, self._seconds)
        self._identity = identity
        self._clock = clock
        self._observed_at = -math.inf  # when the Lease was seen to change
        self._until = -math.inf  # we lead until then; written by our thread, or to end it
        self._is_leading = False  # begun and not ended; of our thread alone
        self._begin: Callable[[], None] = lambda: None
        self._end: Callable[[], None] = lambda: None
        self._logged = ""
        self._guard = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leader-election", daemon=True)

    def start(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        """Become a candidate. *begin* and *end* are called in our thread, in turns, when this
        process leads and when it does not any more; *end* up to some seconds late, unlike
        ``leads``."""
        self._begin, self._end = begin, end
        self._thread.start()

    def leads(self) -> bool:
        """Whether this process leads at this moment."""
        return self._clock() < self._until

    def stop(self, timeout_seconds: float = 1.0) -> bool:
        """Lead no more, and let others have the Lease at once. Whether that was done in time;
        otherwise they wait until its time is over. Write nothing any more before."""
        with self._guard:
            self._stopping.set()
            self._until = -math.inf
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)
        self._api.close()
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._round()
            except Exception:  # a fault of ours or of the library: the next time may go well
                log.exception("an attempt to lead failed unexpectedly")
            self._stopping.wait(self._seconds.retry * random.uniform(0.9, 1.1))
        self._finish()
        _call(self._release)

    def _round(self) -> None:
        """Try once to lead or to go on leading."""
        if not self.leads():  # others may have led since, and changed what was decided here
            self._finish()
        asked_at = self._clock()
        is_ours = self._try()
        if is_ours:
            with self._guard:
                if self._stopping.is_set():
                    return
                self._until = asked_at + self._seconds.renew
            if not self._is_leading:
                self._is_leading = True
                log.info("this process leads", extra={"identity": self._identity})
                _call(self._begin)
        elif self._holder() not in ("", self._identity):
            self._finish()

    def _try(self) -> bool:
        """Whether the Lease is ours now."""
        election, before = self._election, self._election.observed_record
        # The library counts by the wall clock, which jumps when it is set.
        age = min(self._clock() - self._observed_at, 1e9)
        election.observed_time_milliseconds = int((time.time() - age) * 1000)
        self._leases.error = None
        is_ours = bool(election.try_acquire_or_renew())
        if election.observed_record is not before:
            self._observed_at = self._clock()
        self._log(self._leases.error)
        return is_ours

    def _holder(self) -> str:
        """Who has the Lease, as far as is known; empty: nobody."""
        record = self._election.observed_record
        return str(record.holder_identity or "") if record else ""

    def _finish(self) -> None:
        self._until = -math.inf
        if self._is_leading:
            self._is_leading = False
            log.info("this process leads no more", extra={"holder": self._holder()})
            _call(self._end)

    def _release(self) -> None:
        """Give the Lease back, if it is ours, as client-go does: nobody holds it, for a second."""
        if self._holder() != self._identity:
            return
        is_there, record = self._lock.get(self._lock.name, self._lock.namespace)
        if is_there and record.holder_identity == self._identity:
            now = str(datetime.datetime.now())
            nobody = LeaderElectionRecord("", "1", now, now)  # type: ignore[no-untyped-call]
            self._lock.update(self._lock.name, self._lock.namespace, nobody)

    def _log(self, error: DriverError | None) -> None:
        """An outage is logged when it begins, not with every attempt."""
        if error is not None and str(error) != self._logged:
            log.warning("cannot ask for leadership, trying again: %s", error)
        self._logged = str(error or "")


class _Leases:
    """What the library asks of ``CoordinationV1Api``, by our client, about one Lease."""

    def __init__(self, api: ApiClient, lease: LeaseName, read_seconds: float) -> None:
        self._api = api
        self._lease = lease
        self._read_seconds = read_seconds
        self._document: Document = {}
        self.error: DriverError | None = None  # why the last request failed

    def read_namespaced_lease(self, name: str, namespace: str) -> V1Lease:
        path = f"{self._lease.path}/{self._lease.name}"
        document = self._answer(lambda: self._api.get(path, deadline_seconds=self._read_seconds))
        return V1Lease(spec=_spec(document.get("spec") or {}))

    def create_namespaced_lease(self, namespace: str, body: V1Lease) -> V1Lease:
        document = {"metadata": {"name": self._lease.name}, "spec": _document(body.spec)}
        self._answer(lambda: self._api.create(self._lease.path, document))
        return body

    def replace_namespaced_lease(self, name: str, namespace: str, body: V1Lease) -> V1Lease:
        """Only where it is as it was read: its resource version says so."""
        spec = {**(self._document.get("spec") or {}), **_document(body.spec)}
        document = {**self._document, "spec": spec}
        path = f"{self._lease.path}/{self._lease.name}"
        self._answer(lambda: self._api.update(path, document))
        return body

    def _answer(self, request: Callable[[], Document]) -> Document:
        """ApiException: it failed. The library expects no other error."""
        try:
            self._document = request()
        except DriverError as e:
            if not isinstance(e, Conflict | NotFound):  # another was first; it is not there yet
                self.error = e
            failed = ApiException(status=404 if isinstance(e, NotFound) else 0, reason=str(e))
            failed.body = json.dumps({"code": failed.status})
            raise failed from e
        return self._document


def _call(step: Callable[[], None]) -> None:
    try:
        step()
    except Exception:  # a fault of ours: the rest does not depend on it
        log.exception("a step of the leader election failed unexpectedly")


def _lease_lock(leases: _Leases, lease: LeaseName, identity: str) -> Any:
    lock: Any = LeaseLock(lease.name, lease.namespace, identity)  # type: ignore[no-untyped-call]
    lock.api_instance = leases
    return lock


def _election(lock: Any, seconds: LeaseSeconds) -> Any:
    """Its callbacks are for a loop that is not used here."""
    logging.getLogger("leaderelection").addFilter(_at_debug)
    config = Config(  # type: ignore[no-untyped-call]
        lock,
        lease_duration=seconds.lease,
        renew_deadline=seconds.renew,
        retry_period=max(1.0, seconds.retry),  # only checked
        onstarted_leading=lambda: None,
        onstopped_leading=lambda: None,
    )
    return LeaderElection(config)  # type: ignore[no-untyped-call]


def _at_debug(record: logging.LogRecord) -> bool:
    """The library tells every attempt as news."""
    record.levelno, record.levelname = logging.DEBUG, logging.getLevelName(logging.DEBUG)
    return log.isEnabledFor(logging.DEBUG)


def _spec(spec: Document) -> V1LeaseSpec:
    def moment(field: str) -> datetime.datetime | None:
        return datetime.datetime.fromisoformat(spec[field]) if spec.get(field) else None

    return V1LeaseSpec(
        holder_identity=spec.get("holderIdentity"),
        lease_duration_seconds=spec.get("leaseDurationSeconds"),
        acquire_time=moment("acquireTime"),
        renew_time=moment("renewTime"),
    )


def _document(spec: Any) -> Document:
    return {
        "holderIdentity": spec.holder_identity,
        "leaseDurationSeconds": spec.lease_duration_seconds,
        "acquireTime": spec.acquire_time.isoformat(timespec="microseconds"),
        "renewTime": spec.renew_time.isoformat(timespec="microseconds"),
    }
