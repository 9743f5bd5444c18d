"""The metrics of the controller."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, PlatformCollector, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dra_driver.controller.writes import Kind, WriteCounter
from dra_driver.model.node_profiles import ProfileStatus


class ControllerMetrics(WriteCounter, Collector):
    """One registry for the process; what is gauged is read when Prometheus asks."""

    def __init__(self) -> None:
        self.leads: Callable[[], bool] = lambda: False
        self.statuses: Mapping[str, ProfileStatus] = {}  # by profile, as the leader decided them
        self.skipped: Mapping[str, Callable[[], int]] = {}  # by resource
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._writes = Counter(
            "dra_driver_controller_writes",
            "Objects that the controller wrote.",
            ("resource",),
            registry=self.registry,
        )
        self._errors = Counter(
            "dra_driver_controller_write_errors",
            "Writes of the controller that failed; conflicts do not count.",
            ("resource",),
            registry=self.registry,
        )
        for kind in Kind:
            self._writes.labels(kind.value)
            self._errors.labels(kind.value)
        self.registry.register(self)

    def written(self, kind: Kind) -> None:
        self._writes.labels(kind.value).inc()

    def failed(self, kind: Kind) -> None:
        self._errors.labels(kind.value).inc()

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "dra_driver_controller_leader",
            "1 while this replica leads.",
            value=int(self.leads()),
        )
        nodes = GaugeMetricFamily(
            "dra_driver_profile_nodes",
            "Nodes that a NodeProfile holds for, by how far they are: all, updated, updating, "
            "failed. The leader tells it.",
            labels=("profile", "state"),
        )
        pending = GaugeMetricFamily(
            "dra_driver_profile_pending_gpus",
            "GPUs in use that follow a NodeProfile when no claim holds them. The leader tells it.",
            labels=("profile",),
        )
        for profile, status in sorted(self.statuses.items()):
            numbers = {
                "all": status.nodes,
                "updated": status.updated,
                "updating": len(status.updating),
                "failed": status.failed,
            }
            for state, number in numbers.items():
                nodes.add_metric((profile, state), number)
            pending.add_metric((profile,), status.pending)
        yield nodes
        yield pending
        skipped = GaugeMetricFamily(
            "dra_driver_controller_skipped_objects",
            "Objects that cannot be read, and are as if they were not there.",
            labels=("resource",),
        )
        for resource, count in self.skipped.items():
            skipped.add_metric((resource,), count())
        yield skipped
