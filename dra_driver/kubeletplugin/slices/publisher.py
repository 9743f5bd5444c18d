"""Keeps the ResourceSlices of a node as we want them.

A :class:`Watcher` does all of it on its thread: it decides with ``reconcile``, writes what differs,
then watches until somebody else changes a slice or we want something else. It never gives up and
never ends the process: a node whose API server is away goes on serving the claims it knows.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, Protocol

from dra_driver.base.backoff import Backoff
from dra_driver.base.errors import DriverError, Gone
from dra_driver.base.frozen import frozen
from dra_driver.k8s.api import Watch
from dra_driver.k8s.watch import Watcher, WatchIntervals
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


_WATCH: Final = WatchIntervals(watch=60, first_retry=0.2, last_retry=5.0)


@frozen
class PublishIntervals:
    """How soon things happen again, in seconds."""

    watch: WatchIntervals = _WATCH
    standby: float = 2.0  # between two questions whether this process may publish
    settle: float = 0.1  # from a change by others to our answer: the kubelet deletes one by one
    last_settle: float = 1.5  # the same in a quarrel: deleted slices are back within 2 s always
    quarrel: float = 30.0  # changes that follow faster are answered more slowly
    log_again: float = 60.0  # the same error is logged again


@frozen
class PublishStatus:
    """How publishing stands."""

    published: bool = False  # the API server has what we want
    standby: bool = False  # another process publishes
    withdrawn: bool = False  # nothing is to be published, and nothing is
    error: str | None = None  # why the last try failed
    last_success: float | None = None  # Unix time


class Publisher:
    """Owns what this driver publishes on this node. Any thread may call its methods."""

    def __init__(
        self,
        slices: PoolWriter,
        may_publish: Callable[[], bool] = lambda: True,
        observer: PublishObserver | None = None,
        intervals: PublishIntervals | None = None,
        is_withdrawn: Callable[[], bool] = lambda: False,
    ) -> None:
        """*may_publish*: whether this process may. *is_withdrawn*: whether nothing is published
        now: slices that are there are removed. Both are asked before every look, so cheap."""
        self._slices = slices
        self._may_publish = may_publish
        self._is_withdrawn = is_withdrawn
        self._observer = observer
        self._intervals = intervals or PublishIntervals()
        self._settle = Backoff(self._intervals.settle, self._intervals.last_settle)
        self._changed_at = self._logged_at = float("-inf")
        self._logged = ""
        self._lock = threading.Lock()
        self._wanted: Pool | None = None
        self._status = PublishStatus()
        self._watcher = Watcher(
            "publisher", self._look, self._see, self._failed, self._intervals.watch
        )

    def start(self) -> None:
        """Begin. Nothing is published before something is wanted."""
        self._watcher.start()

    def want(self, pool: Pool | None) -> None:
        """From now on *pool* is what shall be published; None: what that is will be known later.
        Returns at once."""
        with self._lock:
            if pool == self._wanted:
                return
            self._wanted = pool
            self._status = replace(self._status, published=False)
        self.wake()

    def wake(self) -> None:
        """Look at once whether this process may publish, and whether all is as wanted."""
        self._watcher.wake()

    def stop(self, timeout_seconds: float = 1.0) -> bool:
        """End the thread; the slices stay. Whether it ended in time."""
        return self._watcher.stop(timeout_seconds)

    def status(self) -> PublishStatus:
        """How publishing stands."""
        return self._status

    def healthy(self) -> bool:
        """Whether what is wanted is published, or another process has to see to that."""
        return self._status.published or self._status.standby or self._status.withdrawn

    def _look(self, seconds: int) -> Watch | float:
        """Write what is wanted if this process may publish, and watch for changes by others."""
        if not self._may_publish():
            self._slices.forget()
            self._set_status(published=False, standby=True, withdrawn=False, error=None)
            return self._intervals.standby
        if self._is_withdrawn():
            return self._withdraw()
        self._set_status(withdrawn=False)
        pool = self._wanted
        if pool is None:
            self._set_status(standby=False)
            return math.inf
        before = self._slices.dropped
        writes = self._slices.write(pool)
        self._succeeded(pool, writes)
        if self._observer and self._slices.dropped != before:
            self._observer.dropped(self._slices.dropped)
        return self._slices.watch(seconds)

    def _withdraw(self) -> float:
        """Once nothing is there, nobody else makes any: there is nothing to be watched."""
        writes = self._slices.remove()
        self._set_status(published=False, standby=False, withdrawn=True, error=None)
        if writes:
            log.info("slices removed", extra={"slices": writes})
        if self._observer:
            self._observer.published(0, writes)
        return math.inf

    def _see(self, event: Mapping[str, Any]) -> float | None:
        """Answer a change by others at once, but take part in no quarrel between two writers."""
        if not self._slices.is_by_others(event):
            return None
        self._slices.forget()
        now = time.monotonic()
        if now - self._changed_at > self._intervals.quarrel:
            self._settle.reset()
        self._changed_at = now
        return self._settle.next_seconds()

    def _succeeded(self, pool: Pool, writes: int) -> None:
        with self._lock:
            published = self._wanted is pool
            self._status = PublishStatus(published=published, last_success=time.time())
        if writes:
            log.info(
                "slices published",
                extra={"pool": pool.name, "devices": len(pool.devices), "writes": writes},
            )
        if self._observer:
            self._observer.published(len(pool.devices), writes)

    def _failed(self, error: DriverError) -> None:
        self._slices.forget(error)
        if isinstance(error, Gone):  # the watch fell too far behind, which happens
            return
        self._set_status(published=False, standby=False, withdrawn=False, error=str(error))
        self._log_failure(str(error))
        if self._observer:
            self._observer.failed(error)

    def _log_failure(self, text: str) -> None:
        """An outage is logged when it begins and once a minute, not with every try."""
        now = time.monotonic()
        if text != self._logged or now - self._logged_at >= self._intervals.log_again:
            log.warning("slices not published, trying again: %s", text)
            self._logged, self._logged_at = text, now

    def _set_status(self, **changes: Any) -> None:
        with self._lock:
            self._status = replace(self._status, **changes)
