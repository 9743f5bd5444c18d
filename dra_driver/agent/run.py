"""The MPS agent as a process: picks the parts, connects them, serves until SIGTERM.

Stopping touches no daemon: clients compute on, and the next agent finds everything as it was.

What the agent counts, for Prometheus: asked of the supervisor whenever somebody asks.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Final

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dra_driver.agent.dependencies import AgentDependencies
from dra_driver.agent.service import AgentService, lock_directory
from dra_driver.agent.state import IncidentLog, ServerStateFiles
from dra_driver.agent.supervisor import MpsSupervisor
from dra_driver.base.files import hanging_disk_calls, removed_directory
from dra_driver.base.signals import Shutdown
from dra_driver.base.threads import Loop
from dra_driver.model.mps import MpsStatus
from dra_driver.node.cgroups.tree import cgroup_root
from dra_driver.node.driver.config import open_driver
from dra_driver.node.mps.daemon import check_directory
from dra_driver.node.mps.daemon_cgroup import DaemonCgroup
from dra_driver.node.mps.daemons import MpsDaemons
from dra_driver.settings import AgentSettings

_PREFIX: Final = "dra_driver_mps"


class _StatusCollector(Collector):
    def __init__(self, status: Callable[[], MpsStatus], unsheltered: Callable[[], int]) -> None:
        self._status = status
        self._unsheltered = unsheltered

    def describe(self) -> Iterable[Metric]:
        return _metrics(MpsStatus(), 0)

    def collect(self) -> Iterable[Metric]:
        return _metrics(self._status(), self._unsheltered())


def metrics_registry(
    status: Callable[[], MpsStatus], unsheltered: Callable[[], int] = lambda: 0
) -> CollectorRegistry:
    """*unsheltered*: how many servers end with the container of this process."""
    made = CollectorRegistry()
    ProcessCollector(registry=made)
    PlatformCollector(registry=made)
    made.register(_StatusCollector(status, unsheltered))
    return made


def _metrics(status: MpsStatus, unsheltered: int) -> Iterable[Metric]:
    servers = GaugeMetricFamily(
        f"{_PREFIX}_servers",
        "MPS servers of this node, by whether they are ready.",
        labels=("ready",),
    )
    for ready in (True, False):
        number = sum(one.ready is ready for one in status.servers)
        servers.add_metric([str(ready).lower()], number)
    yield servers
    yield GaugeMetricFamily(
        f"{_PREFIX}_clients",
        "Clients of all MPS servers of this node.",
        value=sum(len(one.clients) for one in status.servers),
    )
    yield CounterMetricFamily(
        f"{_PREFIX}_restarts",
        "How often an MPS server, or the part of a claim in one, was started again.",
        value=status.incidents[-1].number if status.incidents else 0,
    )
    yield GaugeMetricFamily(
        f"{_PREFIX}_unmanaged_daemons",
        "MPS daemons on this node that somebody else started.",
        value=len(status.foreign),
    )
    yield GaugeMetricFamily(
        f"{_PREFIX}_servers_in_agent_container",
        "MPS servers that end with the container of the agent, because they cannot leave it.",
        value=unsheltered,
    )


log = logging.getLogger(__name__)

_SLOWEST_STATUS_SECONDS: Final = 60.0  # ending and starting what hangs takes a while
_STUCK_SECONDS: Final = 300.0  # after which a new process may do better
_CONCURRENT_SECONDS: Final = 5.0  # most looks take some milliseconds


def run(settings: AgentSettings) -> int:
    """Keep the MPS servers of this node. 0: ended by a signal."""
    ending = Shutdown("cannot keep MPS servers any longer")
    with ExitStack() as stack:
        _start(settings, stack)
        log.info("serving MPS", extra={"directory": str(settings.mps_dir)})
        ending.event.wait()
        log.info("stopping")
    return 1 if ending.failed else 0


def _start(settings: AgentSettings, stack: ExitStack) -> None:
    """Start every part; *stack* stops them, the last one first."""
    directory = settings.mps_dir
    check_directory(str(directory))
    stack.callback(os.close, lock_directory(directory))
    driver = stack.enter_context(open_driver(settings.place, directory / "sim"))
    shelter = DaemonCgroup(cgroup_root(settings.host_root))
    daemons = MpsDaemons(driver.root, driver.run, driver.placed, shelter)
    files = ServerStateFiles(directory / "state")
    tools = AgentDependencies(daemons, files, IncidentLog(files), str(directory))
    supervisor = MpsSupervisor(tools, run_concurrently)
    supervisor.recover()
    loop = Loop("mps-health", supervisor.look_after, settings.health_interval)
    supervisor.on_trouble = loop.soon
    service = AgentService(supervisor, directory)
    _serve_http(settings, supervisor, service, loop, stack)
    service.start()
    stack.callback(service.stop)
    loop.start()
    stack.callback(loop.stop)


def run_concurrently(
    things: Iterable[Callable[[], None]], seconds: float = _CONCURRENT_SECONDS
) -> None:
    """Do several things, and wait for all, for so long: what hangs goes on, and holds up nothing
    else."""
    until = time.monotonic() + seconds
    threads = [threading.Thread(target=thing, name="mps-server", daemon=True) for thing in things]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


def _serve_http(
    settings: AgentSettings,
    supervisor: MpsSupervisor,
    service: AgentService,
    loop: Loop,
    stack: ExitStack,
) -> None:
    if not settings.http_address:
        return
    # Imported here: an agent that nobody asks is a third smaller without.
    from dra_driver.base.http import HttpServer

    server = HttpServer(
        settings.http_address, metrics_registry(supervisor.status, lambda: supervisor.unsheltered)
    )
    stack.callback(server.stop)
    patience = 3 * settings.health_interval + _SLOWEST_STATUS_SECONDS
    directories = (settings.mps_dir, settings.mps_dir / "state")
    live = {
        "disk": hanging_disk_calls,
        "directories": lambda: removed_directory(directories),
        "loop": lambda: supervisor.stuck(_STUCK_SECONDS) if loop.alive else "it has ended",
    }
    ready = {
        "directories": lambda: removed_directory(directories),
        "socket": service.problem,
        "servers": lambda: supervisor.problem(patience),
    }
    server.start(live, ready)
