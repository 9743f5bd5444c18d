"""The agent's metrics: read from the supervisor whenever Prometheus asks.

``run`` imports this module only where the agent has an HTTP address: without Prometheus's library
the process is a third smaller.
"""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dra_driver.model.mps import MpsStatus


def metrics_registry(
    status: Callable[[], MpsStatus], in_container: Callable[[], int] = lambda: 0
) -> CollectorRegistry:
    """*in_container*: how many servers end with the container of this process."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    registry.register(_StatusCollector(status, in_container))
    return registry


class _StatusCollector(Collector):
    def __init__(self, status: Callable[[], MpsStatus], in_container: Callable[[], int]) -> None:
        self._status = status
        self._in_container = in_container

    def collect(self) -> Iterable[Metric]:
        status = self._status()
        servers = GaugeMetricFamily(
            "dra_driver_mps_servers",
            "MPS servers of this node, by whether they are ready.",
            labels=("ready",),
        )
        for ready in (True, False):
            number = sum(server.ready is ready for server in status.servers)
            servers.add_metric([str(ready).lower()], number)
        yield servers
        yield GaugeMetricFamily(
            "dra_driver_mps_clients",
            "Clients of all MPS servers of this node.",
            value=sum(len(server.clients) for server in status.servers),
        )
        yield CounterMetricFamily(
            "dra_driver_mps_restarts",
            "How often an MPS server, or the MPS namespace of a claim, was started again.",
            value=status.incidents[-1].number if status.incidents else 0,
        )
        yield GaugeMetricFamily(
            "dra_driver_mps_unmanaged_daemons",
            "MPS daemons on this node that somebody else started.",
            value=len(status.unmanaged),
        )
        yield GaugeMetricFamily(
            "dra_driver_mps_servers_in_agent_container",
            "MPS servers that end with the container of the agent, because they cannot leave it.",
            value=self._in_container(),
        )
