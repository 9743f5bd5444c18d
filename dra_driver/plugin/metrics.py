"""What the plugin counts, for Prometheus. ``run`` makes one registry for the process."""

from collections.abc import Callable, Sequence, Sized

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)

from dra_driver.base.errors import DriverError
from dra_driver.plan.memory.usage import ClaimMemoryUsage
from dra_driver.plan.mps.usage import ClaimMpsUsage

_CLAIM_LABELS = ("namespace", "claim", "uuid")
_LabelValues = tuple[str, str, str]


class MpsMetrics:
    """Observed by ``plugin.mps.watch``; for one thread, but for drains."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
            return Gauge(f"dra_driver_mps_{name}", text, labels, registry=registry)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"dra_driver_mps_{name}", text, registry=registry)

        self._agent_up = gauge("agent_up", "1 while the MPS agent of this node answers.")
        self._percent = gauge(
            "claim_cores_percent",
            "The percentage of a GPU's multiprocessors that a claim has.",
            _CLAIM_LABELS,
        )
        self._clients = gauge(
            "claim_clients", "MPS clients of a claim on a GPU, if they are known.", _CLAIM_LABELS
        )
        self._unserved = gauge(
            "bypassing_processes",
            "Processes of a claim under MPS that bypass MPS on a GPU.",
            _CLAIM_LABELS,
        )
        self._restarts = counter(
            "server_restarts", "Restarts of MPS servers that the plugin noticed."
        )
        self._drained = counter(
            "drained_clients", "Clients that their MPS server ended before the end of their pod."
        )
        self._unread_pods = gauge(
            "late_pods", "Pods with clients that the plugin cannot read within their grace period."
        )
        self._labels: dict[Gauge, set[_LabelValues]] = {}

    def mps_agent(self, up: bool) -> None:
        """Whether the agent answers."""
        self._agent_up.set(1 if up else 0)

    def mps_uses(self, uses: Sequence[ClaimMpsUsage]) -> None:
        """What claims have and do under MPS; claims that are not named are gone."""
        by_labels = {(use.claim.namespace, use.claim.name, str(use.gpu)): use for use in uses}
        self._set(self._percent, {key: use.percent for key, use in by_labels.items()})
        self._set(self._clients, {key: use.clients for key, use in by_labels.items()})
        self._set(self._unserved, {key: use.unserved for key, use in by_labels.items()})

    def mps_restarted(self) -> None:
        """A server was restarted."""
        self._restarts.inc()

    def mps_drained(self, clients: int) -> None:
        """Clients of a pod that is being deleted were ended."""
        self._drained.inc(clients)

    def mps_unread_pods(self, pods: int) -> None:
        """So many pods could not be read in time."""
        self._unread_pods.set(pods)

    def _set(self, gauge: Gauge, values: dict[_LabelValues, int | None]) -> None:
        known_values = {key: value for key, value in values.items() if value is not None}
        for labels in self._labels.get(gauge, set()) - known_values.keys():
            gauge.remove(*labels)
        for labels, value in known_values.items():
            gauge.labels(*labels).set(value)
        self._labels[gauge] = set(known_values)


_BUCKETS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32)


class Metrics:
    """Observed by the service (requests), the publisher (slices) and the loops of ``run``."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._requests = Histogram(
            "dra_driver_request_duration_seconds",
            "Time to prepare or unprepare one claim.",
            ("operation", "outcome"),
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self._prepared_claims = self._gauge(
            "prepared_claims", "Claims that are prepared, or being prepared, on this node."
        )
        self._unreadable_records = self._gauge(
            "unreadable_records", "Damaged claim records that were set aside."
        )
        self.published_devices = self._gauge(
            "published_devices", "Devices in the ResourceSlices of this node."
        )
        self.unavailable_devices = self._gauge(
            "unavailable_devices", "GPUs of this node that are not offered."
        )
        self.pending_devices = self._gauge(
            "pending_devices", "GPUs that are not yet offered as their profile says."
        )
        self.mig_problems = self._gauge(
            "mig_problems", "GPUs whose partitions or MIG mode are not as their profile wants."
        )
        self._lost_instances = self._gauge("mig_lost_instances", "Claims that lost a MIG instance.")
        self._profile_problems = self._gauge(
            "profile_problems", "1 while the profile that the node should have cannot be used."
        )
        self._limits_offered = self._gauge(
            "memory_limits_offered", "1 if NVIDIA's driver limits memory by cgroup on this node."
        )
        self.dropped_fields = self._gauge(
            "dropped_slice_fields", "Fields of ResourceSlices that the API server does not keep."
        )
        self._writes = self._counter("slice_writes", "Successful writes of ResourceSlices.")
        self._failures = self._counter(
            "publish_failures", "Failed attempts to publish ResourceSlices."
        )
        self.reconciled_claims = self._counter(
            "reconciled_claims",
            "Claims that were taken back or restored without a call of the kubelet.",
        )
        claim_and_gpu = ("namespace", "claim", "uuid")
        self._memory_used = self._gauge(
            "claim_memory_used_bytes", "Memory of a GPU that a claim uses.", claim_and_gpu
        )
        self._memory_share = self._gauge(
            "claim_memory_share_bytes", "Memory of a GPU that a claim may use.", claim_and_gpu
        )
        self._memory_users: set[tuple[str, str, str]] = set()
        self._memory_blind = self._gauge(
            "memory_guard_unreadable_gpus", "GPUs whose memory use per process cannot be read."
        )
        self._memory_excursions = self._counter(
            "memory_excursions", "How often a claim began to use more memory than its share."
        )
        self._memory_kills = self._counter(
            "memory_guard_kills", "Processes that the memory guard asked to end (SIGTERM)."
        )

    def observe(self, operation: str, outcome: str, seconds: float) -> None:
        """One claim was served."""
        self._requests.labels(operation, outcome).observe(seconds)

    def count(self, records: Callable[[], Sized], set_aside: Callable[[], Sized]) -> None:
        """Ask the ledger at each scrape."""
        self._prepared_claims.set_function(lambda: len(records()))
        self._unreadable_records.set_function(lambda: len(set_aside()))

    def watch_profile(self, problem: Callable[[], str | None]) -> None:
        """Ask at each scrape."""
        self._profile_problems.set_function(lambda: 1 if problem() else 0)

    def watch_memory_limits(self, offered: Callable[[], bool]) -> None:
        """Ask at each scrape."""
        self._limits_offered.set_function(lambda: 1 if offered() else 0)

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

    def memory_used(self, uses: Sequence[ClaimMemoryUsage], blind: int) -> None:
        """What guarded claims use of GPUs; claims that are not named are gone."""
        by_labels = {(use.claim.namespace, use.claim.name, str(use.gpu)): use for use in uses}
        for labels in self._memory_users - by_labels.keys():
            self._memory_used.remove(*labels)
            self._memory_share.remove(*labels)
        for labels, use in by_labels.items():
            self._memory_used.labels(*labels).set(use.used_bytes)
            self._memory_share.labels(*labels).set(use.limit_bytes)
        self._memory_users = set(by_labels)
        self._memory_blind.set(blind)

    def memory_excursion(self) -> None:
        """Claims went above their share."""
        self._memory_excursions.inc()

    def memory_kill(self) -> None:
        """The memory guard asked a process to end."""
        self._memory_kills.inc()

    def mig_instances_lost(self, number: int) -> None:
        """So many claims have lost an instance now."""
        self._lost_instances.set(number)

    def _gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(f"dra_driver_{name}", text, labels, registry=self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"dra_driver_{name}", text, registry=self.registry)
