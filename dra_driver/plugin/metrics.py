"""What the plugin counts, for Prometheus. One registry per process, made by ``run``."""

from collections.abc import Callable, Sized

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)

from dra_driver.errors import DriverError

_SECONDS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32)


class Metrics:
    """Observed by the service (requests), the publisher (slices) and the loops of ``run``."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._requests = Histogram(
            "dra_driver_request_duration_seconds",
            "Time to serve one claim, by operation and outcome.",
            ("operation", "outcome"),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._prepared_claims = self._gauge("prepared_claims", "Claims in the ledger.")
        self._unreadable_records = self._gauge("unreadable_records", "Ledger records set aside.")
        self.published_devices = self._gauge("published_devices", "Devices in our slices.")
        self.withheld_devices = self._gauge("withheld_devices", "GPUs here but not offered.")
        self.dropped_fields = self._gauge(
            "dropped_slice_fields", "Fields of slices that the API server does not keep."
        )
        self._writes = self._counter("slice_writes", "Writes of slices that succeeded.")
        self._failures = self._counter("publish_failures", "Tries to publish that failed.")
        self.reconciled_claims = self._counter(
            "reconciled_claims", "Claims put right without the kubelet."
        )

    def observe(self, operation: str, outcome: str, seconds: float) -> None:
        """One claim was served."""
        self._requests.labels(operation, outcome).observe(seconds)

    def count(self, records: Callable[[], Sized], set_aside: Callable[[], Sized]) -> None:
        """Ask the ledger whenever somebody asks us."""
        self._prepared_claims.set_function(lambda: len(records()))
        self._unreadable_records.set_function(lambda: len(set_aside()))

    def published(self, devices: int, writes: int) -> None:
        """The API server has what we want."""
        self.published_devices.set(devices)
        self._writes.inc(writes)

    def failed(self, error: DriverError) -> None:
        """A try to publish failed."""
        self._failures.inc()

    def dropped(self, fields: tuple[str, ...]) -> None:
        """The API server does not keep these fields."""
        self.dropped_fields.set(len(fields))

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"dra_driver_{name}", text, registry=self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"dra_driver_{name}", text, registry=self.registry)
