"""Reads the GPUs of the node again and again, and says what is to be published of them."""

import logging
import time
from collections.abc import Callable

from dra_driver.base.errors import ApiServerError, NodeError, SettingsError
from dra_driver.kubeletplugin.slices.reconcile import Pool, split_into_slices
from dra_driver.model.gpus import ALL_GPUS, UnavailableGpu
from dra_driver.model.offer import Offer, PendingChange, gpu_name_of
from dra_driver.model.records import ClaimRecord
from dra_driver.plan.offer.slice_documents import published_counters, published_devices
from dra_driver.plugin.metrics import Metrics
from dra_driver.plugin.publish.offers import OfferBuilder

log = logging.getLogger(__name__)

_SOON_SECONDS = 1.0
_REPORT_SECONDS = 1800.0  # the API server forgets an event after an hour


class DeviceScanner:
    """Reads the GPUs, and has the devices published when they changed."""

    def __init__(
        self,
        offers: OfferBuilder,
        pool: str,
        publish: Callable[[Pool | None], None],
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """*publish*: takes what slices are to have; None: there are to be none."""
        self._clock = clock
        self._reported: dict[UnavailableGpu, float] = {}
        self._offers = offers
        self._pool = pool
        self._publish = publish
        self._metrics = metrics
        self._last: Offer | None = None
        self._was_published = False
        self.is_published: Callable[[], bool] = lambda: True  # in slices, what is offered now
        self.error: str | None = None  # why the last scan failed
        self.scanned_at = float("-inf")  # when the last scan began that succeeded
        self.scan_soon: Callable[[], None] = lambda: None
        self.scanned: Callable[[], None] = lambda: None  # called after every scan
        self.offer_changed: Callable[[], None] = lambda: None  # called when it is published
        # Called with each GPU that is not offered, when that begins and from time to time, but for
        # those that the profile leaves out.
        self.report: Callable[[UnavailableGpu], None] = lambda unavailable: None

    @property
    def not_ready(self) -> str | None:
        """Why this node's GPUs cannot be offered at all now: an update should go no further."""
        unavailable = self._last.unavailable if self._last else ()
        return self.error or next((w.reason for w in unavailable if w.what == ALL_GPUS), None)

    def scan(self) -> float | None:
        """A node that cannot be read keeps what it published.

        Returns the seconds until the next scan where that should be soon: an API server that is
        away comes back.
        """
        try:
            return self._scan()
        finally:
            self.scanned()

    def _scan(self) -> float | None:
        began = time.monotonic()
        is_published = self.is_published()  # first: what is offered next is not older
        try:
            offer = self._offers.refresh()
        except SettingsError as e:  # no pod should come here until somebody mends the profile
            offer = Offer(unavailable=(UnavailableGpu(ALL_GPUS, str(e)),))
        except (NodeError, ApiServerError) as e:
            if str(e) != self.error:
                log.warning("cannot tell what to offer", extra={"error": str(e)})
            self.error = str(e)
            return _SOON_SECONDS if isinstance(e, ApiServerError) else None
        self.error = None
        if offer != self._last:
            self._log_changes(offer)
        if (offer, is_published) != (self._last, self._was_published):
            self._publish(_pool(self._pool, offer) if is_published else None)
            self._last, self._was_published = offer, is_published
            self.offer_changed()
        self._report_unavailable(offer)
        self.scanned_at = began
        return None

    @property
    def offer(self) -> Offer | None:
        """What was offered last; the same object as long as nothing of it changes."""
        return self._last

    @property
    def pending(self) -> bool:
        """Whether a GPU changes its shape as soon as no claim holds it any more."""
        return bool(self._last and self._last.pending)

    @property
    def pending_gpus(self) -> tuple[str, ...]:
        """Those that change as soon as no claim holds them any more."""
        pending = self._last.pending if self._last else ()
        return tuple(dict.fromkeys(gpu_name_of(each.device) for each in pending if not each.reason))

    def claim_changed(self, record: ClaimRecord | None = None) -> None:
        """A claim was unprepared, maybe: a GPU that waited for that changes its shape now."""
        if self.pending:
            self.scan_soon()

    def _report_unavailable(self, offer: Offer) -> None:
        now = self._clock()
        due = {u: at for u, at in self._reported.items() if now - at < _REPORT_SECONDS}
        wrong = [unavailable for unavailable in offer.unavailable if not unavailable.by_profile]
        for unavailable in wrong:
            if unavailable not in due:
                self.report(unavailable)
        self._reported = {unavailable: due.get(unavailable, now) for unavailable in wrong}

    def _log_changes(self, offer: Offer) -> None:
        names = [device.name for device in offer.devices]
        log.info("devices to offer", extra={"devices": ",".join(names), "number": len(names)})
        for unavailable in offer.unavailable:
            if self._last is None or unavailable not in self._last.unavailable:
                fields = {"what": unavailable.what, "reason": unavailable.reason}
                log.warning("GPU is not offered", extra=fields)
        for pending in offer.pending:
            if self._last is None or pending not in self._last.pending:
                log.warning("GPU is not offered as its profile says", extra=_log_fields(pending))
        for warning in offer.warnings:
            if self._last is None or warning not in self._last.warnings:
                log.warning("part of the profile has no effect", extra={"warning": warning})
        self._metrics.unavailable_devices.set(len(offer.unavailable))
        self._metrics.pending_devices.set(len(offer.pending))


def _pool(name: str, offer: Offer) -> Pool:
    return split_into_slices(name, published_devices(offer), published_counters(offer))


def _log_fields(pending: PendingChange) -> dict[str, str]:
    if pending.reason:
        return {"device": pending.device, "offered": pending.change, "reason": pending.reason}
    reason = "a claim holds it; it changes once none does"
    return {"device": pending.device, "wanted": pending.change, "reason": reason}
