"""What the plugin counts, for Prometheus. ``run`` makes one registry for the process."""

from collections.abc import Callable, Iterable, Sequence, Sized
from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)

from dra_driver.base.errors import DriverError
from dra_driver.k8s.claims import ClaimRef
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.health import Faults, GpuEvent, Problem
from dra_driver.model.profiles import AllocationApi
from dra_driver.plan.memory.usage import ClaimMemoryUsage
from dra_driver.plan.mps.usage import ClaimMpsUsage

_CLAIM_LABELS = ("namespace", "claim", "uuid")
_LabelValues = tuple[str, str, str]


class _ClaimGauge:
    """A number for each claim and GPU. *named*: with the claims' names; without, these labels are
    empty, and there is the sum of all claims for each GPU."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry, named: bool) -> None:
        self._gauge = Gauge(f"dra_driver_{name}", text, _CLAIM_LABELS, registry=registry)
        self._named = named
        self._shown: set[_LabelValues] = set()

    def set(self, values: Iterable[tuple[ClaimRef, GpuUuid, float | None]]) -> None:
        """None: it is not known, and so nothing is shown. Claims that are not named are gone."""
        numbers: dict[_LabelValues, float] = {}
        unknown: set[_LabelValues] = set()
        for claim, gpu, number in values:
            names = (claim.namespace, claim.name) if self._named else ("", "")
            labels = (*names, str(gpu))
            if number is None:
                unknown.add(labels)
            else:
                numbers[labels] = numbers.get(labels, 0) + number
        numbers = {labels: number for labels, number in numbers.items() if labels not in unknown}
        for labels in self._shown - numbers.keys():
            self._gauge.remove(*labels)
        for labels, number in numbers.items():
            self._gauge.labels(*labels).set(number)
        self._shown = set(numbers)


class MpsMetrics:
    """Observed by ``plugin.mps.watch``; for one thread, but for drains."""

    def __init__(self, metrics: "Metrics") -> None:
        registry = metrics.registry

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"dra_driver_mps_{name}", text, registry=registry)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"dra_driver_mps_{name}", text, registry=registry)

        self._agent_up = gauge("agent_up", "1 while the MPS agent of this node answers.")
        self._percent = metrics.claim_gauge(
            "mps_claim_cores_percent",
            "The percentage of a GPU's multiprocessors that a claim has.",
        )
        self._clients = metrics.claim_gauge(
            "mps_claim_clients", "MPS clients of a claim on a GPU, if they are known."
        )
        self._unserved = metrics.claim_gauge(
            "mps_bypassing_processes", "Processes of a claim under MPS that bypass MPS on a GPU."
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

    def mps_agent(self, up: bool) -> None:
        """Whether the agent answers."""
        self._agent_up.set(1 if up else 0)

    def mps_uses(self, uses: Sequence[ClaimMpsUsage]) -> None:
        """What claims have and do under MPS; claims that are not named are gone."""
        self._percent.set((use.claim, use.gpu, use.percent) for use in uses)
        self._clients.set((use.claim, use.gpu, use.clients) for use in uses)
        self._unserved.set((use.claim, use.gpu, use.unserved) for use in uses)

    def mps_restarted(self) -> None:
        """A server was restarted."""
        self._restarts.inc()

    def mps_drained(self, clients: int) -> None:
        """Clients of a pod that is being deleted were ended."""
        self._drained.inc(clients)

    def mps_unread_pods(self, pods: int) -> None:
        """So many pods could not be read in time."""
        self._unread_pods.set(pods)


class HealthMetrics:
    """Observed by ``plugin.health.report``."""

    def __init__(self, metrics: "Metrics") -> None:
        registry = metrics.registry
        self._faults = Gauge(
            "dra_driver_gpu_fault",
            "1 while something is wrong with a GPU.",
            ("gpu", "problem"),
            registry=registry,
        )
        self._events = Counter(
            "dra_driver_gpu_events",
            "What NVIDIA's driver reported of a GPU.",
            ("gpu", "problem"),
            registry=registry,
        )
        self._xids = Counter(
            "dra_driver_gpu_xid",
            "Xids that NVIDIA's driver reported of a GPU, by their number.",
            ("gpu", "xid"),
            registry=registry,
        )
        self._shown: set[tuple[str, str]] = set()

    def faults(self, faults: Faults) -> None:
        """All that is wrong now."""
        labels = {(str(fault.gpu), fault.problem.value) for fault in faults}
        for gone in self._shown - labels:
            self._faults.remove(*gone)
        for each in labels:
            self._faults.labels(*each).set(1)
        self._shown = labels

    def event(self, event: GpuEvent) -> None:
        """The driver reported *event*."""
        self._events.labels(event.gpu, event.problem.value).inc(event.count)
        if event.problem is Problem.XID:
            self._xids.labels(event.gpu, event.value).inc(event.count)


_BUCKETS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32)


def _number(is_on: Callable[[AllocationApi], bool], api: AllocationApi) -> float:
    return 1 if is_on(api) else 0


class Metrics:
    """Observed by the service (requests), the publisher (slices) and the loops of ``run``.

    *claim_names*: whether series tell the names of claims and of their namespaces.
    """

    def __init__(self, claim_names: bool = True) -> None:
        self.registry = CollectorRegistry()
        self._claim_names = claim_names
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._requests = Histogram(
            "dra_driver_request_duration_seconds",
            "Time to prepare or unprepare one claim, or for one call of the device-plugin API.",
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
        self._api = Gauge(
            "dra_driver_allocation_api",
            "1 for the API by which this node gives its GPUs out now: DRA or DevicePlugin.",
            ("api",),
            registry=self.registry,
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
        self._memory_used = self.claim_gauge(
            "claim_memory_used_bytes", "Memory of a GPU that a claim uses."
        )
        self._memory_share = self.claim_gauge(
            "claim_memory_share_bytes", "Memory of a GPU that a claim may use."
        )
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

    def watch_api(self, is_on: Callable[[AllocationApi], bool]) -> None:
        """Ask at each scrape."""
        for api in (AllocationApi.DRA, AllocationApi.DEVICE_PLUGIN):
            self._api.labels(api.value).set_function(partial(_number, is_on, api))

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
        self._memory_used.set((use.claim, use.gpu, use.used_bytes) for use in uses)
        self._memory_share.set((use.claim, use.gpu, use.limit_bytes) for use in uses)
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

    def claim_gauge(self, name: str, text: str) -> _ClaimGauge:
        """A number for each claim and GPU, named as this process may."""
        return _ClaimGauge(name, text, self.registry, self._claim_names)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"dra_driver_{name}", text, registry=self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"dra_driver_{name}", text, registry=self.registry)
