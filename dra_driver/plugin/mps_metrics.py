"""What is counted of MPS, where a node has it."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from dra_driver.plan.mps_watch import MpsUse

_LABELS = ("namespace", "claim", "uuid")
_Labels = tuple[str, str, str]


class MpsMetrics:
    """Observed by ``plugin.mps_watch``; for one thread, but for what is told of
    drains."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
            return Gauge(f"dra_driver_mps_{name}", text, labels, registry=registry)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"dra_driver_mps_{name}", text, registry=registry)

        self._agent_up = gauge("agent_up", "1 while the MPS agent of the node answers.")
        self._percent = gauge(
            "claim_cores_percent", "Percent of the multiprocessors that a claim has.", _LABELS
        )
        self._clients = gauge("claim_clients", "Clients of MPS that a claim has.", _LABELS)
        self._unserved = gauge(
            "unserved_processes", "Processes of a claim under MPS that go past it.", _LABELS
        )
        self._restarts = counter("server_restarts", "Restarts of MPS servers that were noticed.")
        self._drained = counter(
            "drained_clients", "Clients ended by their server before their pod's end."
        )
        self._late = gauge(
            "late_pods", "Pods with clients that could not be looked at within their grace period."
        )
        self._labels: dict[Gauge, set[_Labels]] = {}

    def mps_agent(self, up: bool) -> None:
        """Whether the agent answers."""
        self._agent_up.set(1 if up else 0)

    def mps_uses(self, uses: Sequence[MpsUse]) -> None:
        """What claims have and do under MPS; claims that are not named are gone."""
        by_labels = {(one.claim.namespace, one.claim.name, str(one.gpu)): one for one in uses}
        self._set(self._percent, {key: one.percent for key, one in by_labels.items()})
        self._set(self._clients, {key: one.clients for key, one in by_labels.items()})
        self._set(self._unserved, {key: one.unserved for key, one in by_labels.items()})

    def mps_restarted(self) -> None:
        """A server was restarted."""
        self._restarts.inc()

    def mps_drained(self, clients: int) -> None:
        """Clients of a pod that is being deleted were ended."""
        self._drained.inc(clients)

    def mps_late_looks(self, pods: int) -> None:
        """So many could not be looked at in time."""
        self._late.set(pods)

    def _set(self, gauge: Gauge, values: dict[_Labels, int | None]) -> None:
        known = {key: value for key, value in values.items() if value is not None}
        for labels in self._labels.get(gauge, set()) - known.keys():
            gauge.remove(*labels)
        for labels, value in known.items():
            gauge.labels(*labels).set(value)
        self._labels[gauge] = set(known)
