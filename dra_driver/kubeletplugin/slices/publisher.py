"""Keeps the ResourceSlices of a node as we want them.

One thread does all of it: it looks, decides with ``slices``, writes what differs, then waits in a
watch until somebody else changes one or we want something else. It never gives up and never ends
the process: a node whose API server is away goes on serving the claims it knows.
"""

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from dra_driver.base.backoff import Backoff
from dra_driver.base.errors import ApiServerError, DriverError, Gone
from dra_driver.k8s.resource_api import Watch
from dra_driver.kubeletplugin.slices.pool_writer import PoolWriter
from dra_driver.kubeletplugin.slices.reconcile import Pool

log = logging.getLogger(__name__)


class PublishObserver(Protocol):
    """What is told of publishing, for metrics; called in the publisher's thread."""

    def published(self, devices: int, writes: int) -> None:
        """The API server has what we want, so many devices; getting there took so many writes."""

    def failed(self, error: DriverError) -> None:
        """A try failed; the next follows by itself."""

    def dropped(self, fields: tuple[str, ...]) -> None:
        """The API server does not keep these fields of our slices; none: it keeps them all now."""


@dataclass(frozen=True, slots=True)
class PublishIntervals:
    """How soon things happen again, in seconds."""

    watch: int = 60  # a watch lasts this long
    standby: float = 2.0  # between two questions whether it is our turn
    first_retry: float = 0.2
    last_retry: float = 5.0
    settle: float = 0.1  # from a foreign change to our answer: the kubelet deletes one by one
    last_settle: float = 1.5  # the same in a quarrel: deleted slices are back within 2 s always
    quarrel: float = 30.0  # foreign changes that follow each other faster are answered more slowly
    log_again: float = 60.0  # the same error is logged again


@dataclass(frozen=True, slots=True)
class PublishStatus:
    """How publishing stands."""

    published: bool = False  # the API server has what we want
    standby: bool = False  # it is another process's turn
    error: str | None = None  # why the last try failed
    last_success: float | None = None  # Unix time


class Publisher:
    """Owns what this driver publishes on this node. Any thread may call its methods."""

    def __init__(
        self,
        slices: PoolWriter,
        may_publish: Callable[[], bool] = lambda: True,
        observer: PublishObserver | None = None,
        pace: PublishIntervals | None = None,
    ) -> None:
        """*may_publish*: whether it is our turn, asked before every look and write, so cheap."""
        self._slices = slices
        self._may_publish = may_publish
        self._observer = observer
        self._pace = pace or PublishIntervals()
        self._retry = Backoff(self._pace.first_retry, self._pace.last_retry, randomized=True)
        self._settle = Backoff(self._pace.settle, self._pace.last_settle)
        self._behind = Backoff(self._pace.first_retry, self._pace.last_retry)
        self._settled_at = self._logged_at = float("-inf")
        self._logged = ""
        self._lock = threading.Lock()
        self._wanted: Pool | None = None
        self._status = PublishStatus()
        self._watch: Watch | None = None
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)

    def start(self) -> None:
        """Begin. Nothing is published before something is wanted."""
        self._thread.start()

    def want(self, pool: Pool) -> None:
        """From now on *pool* is what shall be published. Returns at once."""
        with self._lock:
            if pool == self._wanted:
                return
            self._wanted = pool
            self._status = replace(self._status, published=False)
        self.wake()

    def wake(self) -> None:
        """Look at once whether it is our turn and whether all is as wanted."""
        with self._lock:
            self._wake.set()
            if self._watch:
                self._watch.close()

    def stop(self, timeout_seconds: float = 1.0) -> bool:
        """End the thread; the slices stay. Whether it ended in time."""
        self._stopping.set()
        self.wake()
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def status(self) -> PublishStatus:
        """How publishing stands."""
        return self._status

    def healthy(self) -> bool:
        """Whether what is wanted is published, or another process has to see to that."""
        return self._status.published or self._status.standby

    def _run(self) -> None:
        while True:
            self._wake.clear()  # before anything is asked: what changes from here on wakes again
            if self._stopping.is_set():
                return
            try:
                self._turn()
            except Gone:
                self._slices.forget()  # the watch fell too far behind, which happens
                self._wake.wait(self._behind.next_seconds())
            except DriverError as e:
                self._failed(e)
            except Exception as e:  # a fault of ours: the next look may go well
                log.exception("publishing failed unexpectedly")
                self._failed(ApiServerError(f"unexpected, please report: {e!r}"))

    def _turn(self) -> None:
        """Wait for our turn and a wish, fulfil it, and wait for a reason to do so again."""
        if not self._may_publish():
            self._slices.forget()
            self._set_status(published=False, standby=True, error=None)
            self._wake.wait(self._pace.standby)
            return
        wanted = self._wanted
        if wanted is None:
            self._set_status(standby=False)
            self._wake.wait()
            return
        before = self._slices.dropped
        writes = self._slices.write(wanted)
        self._succeeded(wanted, writes)
        if self._observer and self._slices.dropped != before:
            self._observer.dropped(self._slices.dropped)
        self._wait_for_change()

    def _wait_for_change(self) -> None:
        """Sit in a watch until it ends, we are woken, or somebody else changed our slices."""
        opened_at = time.monotonic()
        watch = self._slices.watch(round(self._pace.watch * random.uniform(0.9, 1.1)))
        with self._lock:
            self._watch = watch
            if self._wake.is_set():
                watch.close()
        try:
            foreign = any(self._slices.is_foreign(event) for event in watch)
        finally:
            with self._lock:
                self._watch = None
            watch.close()
        if foreign:
            self._slices.forget()
            self._let_settle()
        elif time.monotonic() - opened_at < self._pace.first_retry:
            self._wake.wait(self._pace.first_retry)  # an API server that ends watches at once
        else:
            self._behind.reset()

    def _let_settle(self) -> None:
        """Answer a foreign change at once, but take part in no quarrel between two writers."""
        now = time.monotonic()
        if now - self._settled_at > self._pace.quarrel:
            self._settle.reset()
        self._settled_at = now
        self._wake.wait(self._settle.next_seconds())

    def _succeeded(self, wanted: Pool, writes: int) -> None:
        self._retry.reset()
        with self._lock:
            published = self._wanted is wanted
            self._status = PublishStatus(published=published, last_success=time.time())
        if writes:
            log.info(
                "slices published",
                extra={"pool": wanted.name, "devices": len(wanted.devices), "writes": writes},
            )
        if self._observer:
            self._observer.published(len(wanted.devices), writes)

    def _failed(self, error: DriverError) -> None:
        self._slices.forget(error)
        self._set_status(published=False, standby=False, error=str(error))
        self._log_failure(str(error))
        if self._observer:
            self._observer.failed(error)
        self._wake.wait(self._retry.next_seconds())

    def _log_failure(self, text: str) -> None:
        """An outage is logged when it begins and once a minute, not with every try."""
        now = time.monotonic()
        if text != self._logged or now - self._logged_at >= self._pace.log_again:
            log.warning("slices not published, trying again: %s", text)
            self._logged, self._logged_at = text, now

    def _set_status(self, **changes: Any) -> None:
        with self._lock:
            self._status = replace(self._status, **changes)
