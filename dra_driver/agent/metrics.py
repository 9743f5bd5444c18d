"""What the agent counts, for Prometheus: asked of the supervisor whenever somebody asks."""

from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dra_driver.model.mps import MpsStatus

_PREFIX: Final = "dra_driver_mps"


class _OfStatus(Collector):
    def __init__(self, status: Callable[[], MpsStatus], unsheltered: Callable[[], int]) -> None:
        self._status = status
        self._unsheltered = unsheltered

    def describe(self) -> Iterable[Metric]:
        return _metrics(MpsStatus(), 0)

    def collect(self) -> Iterable[Metric]:
        return _metrics(self._status(), self._unsheltered())


def registry(
    status: Callable[[], MpsStatus], unsheltered: Callable[[], int] = lambda: 0
) -> CollectorRegistry:
    """*unsheltered*: how many servers end with the container of this process."""
    made = CollectorRegistry()
    ProcessCollector(registry=made)
    PlatformCollector(registry=made)
    made.register(_OfStatus(status, unsheltered))
    return made


def _metrics(status: MpsStatus, unsheltered: int) -> Iterable[Metric]:
    servers = GaugeMetricFamily(
        f"{_PREFIX}_servers", "MPS servers of this node, by whether they serve.", labels=("ready",)
    )
    for ready in (True, False):
        number = sum(one.ready is ready for one in status.servers)
        servers.add_metric([str(ready).lower()], number)
    yield servers
    yield GaugeMetricFamily(
        f"{_PREFIX}_clients",
        "Processes that MPS servers serve.",
        value=sum(len(one.clients) for one in status.servers),
    )
    yield CounterMetricFamily(
        f"{_PREFIX}_restarts",
        "Times that an MPS server, or a claim's part of one, was made again.",
        value=status.incidents[-1].number if status.incidents else 0,
    )
    yield GaugeMetricFamily(
        f"{_PREFIX}_foreign_daemons",
        "MPS daemons that somebody else started on this node.",
        value=len(status.foreign),
    )
    yield GaugeMetricFamily(
        f"{_PREFIX}_unsheltered_servers",
        "MPS servers that end with the agent's container, because they cannot be moved out of it.",
        value=unsheltered,
    )
