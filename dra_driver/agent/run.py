"""The MPS agent as a process: creates its parts, connects them, and serves until SIGTERM.

Stopping it touches no daemon: clients go on, and the next agent takes all servers over.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Final

from dra_driver.agent.dependencies import AgentDependencies
from dra_driver.agent.service import AgentService, lock_directory
from dra_driver.agent.state import ServerStateFiles
from dra_driver.agent.supervisor import MpsSupervisor
from dra_driver.base.deadlines import Deadline
from dra_driver.base.files import hanging_disk_calls, removed_directory
from dra_driver.base.signals import Shutdown
from dra_driver.base.threads import Loop
from dra_driver.node.cgroups.tree import cgroup_root
from dra_driver.node.driver.config import DriverPrograms
from dra_driver.node.mps.daemon import check_directory
from dra_driver.node.mps.daemon_cgroup import DaemonCgroup
from dra_driver.node.mps.daemons import MpsDaemons
from dra_driver.settings import AgentSettings

log = logging.getLogger(__name__)

_LONGEST_ROUND_SECONDS: Final = 60.0  # ending and starting servers that hang takes a while
_STUCK_SECONDS: Final = 300.0  # after which a new process may do better
_CONCURRENT_SECONDS: Final = 5.0  # most checks take some milliseconds


def run(settings: AgentSettings, open_driver: Callable[[], DriverPrograms]) -> int:
    """Keep the MPS servers of this node. 0: ended by a signal."""
    ending = Shutdown("cannot keep MPS servers any longer")
    with ExitStack() as stack:
        _start(settings, open_driver, stack)
        log.info("serving MPS", extra={"directory": str(settings.mps_dir)})
        ending.event.wait()
        log.info("stopping")
    return 1 if ending.failed else 0


def _start(
    settings: AgentSettings, open_driver: Callable[[], DriverPrograms], stack: ExitStack
) -> None:
    """Start every part; *stack* stops them, the last one first."""
    directory = settings.mps_dir
    check_directory(str(directory))
    stack.callback(os.close, lock_directory(directory))
    driver = open_driver()
    cgroup = DaemonCgroup(cgroup_root(settings.host_root))
    daemons = MpsDaemons(driver, cgroup, shared_memory_bytes=settings.shared_memory_bytes)
    files = ServerStateFiles(directory / "state")
    dependencies = AgentDependencies(daemons, files, str(directory))
    supervisor = MpsSupervisor(dependencies, run_concurrently)
    supervisor.recover()
    loop = Loop("mps-health", supervisor.maintain, settings.health_interval)
    supervisor.on_problem = loop.soon
    service = AgentService(supervisor, directory)
    _serve_http(settings, supervisor, service, loop, stack)
    service.start()
    stack.callback(service.stop)
    loop.start()
    stack.callback(loop.stop)


def run_concurrently(
    calls: Iterable[Callable[[], None]], seconds: float = _CONCURRENT_SECONDS
) -> None:
    """Make several calls, and wait for all, for so long: one that hangs goes on, and holds up
    nothing else."""
    deadline = Deadline(seconds)
    threads = [threading.Thread(target=call, name="mps-server", daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline.remaining)


def _serve_http(
    settings: AgentSettings,
    supervisor: MpsSupervisor,
    service: AgentService,
    loop: Loop,
    stack: ExitStack,
) -> None:
    if not settings.http_address:
        return
    # Imported here: an agent without an address is a third smaller without them.
    from dra_driver.agent.metrics import metrics_registry
    from dra_driver.base.http import HttpServer

    server = HttpServer(
        settings.http_address,
        metrics_registry(supervisor.status, lambda: supervisor.servers_in_container),
    )
    stack.callback(server.stop)
    longest = 3 * settings.health_interval + _LONGEST_ROUND_SECONDS
    directories = (settings.mps_dir, settings.mps_dir / "state")
    live = {
        "disk": hanging_disk_calls,
        "directories": lambda: removed_directory(directories),
        "loop": lambda: supervisor.stuck(_STUCK_SECONDS) if loop.alive else "it has ended",
    }
    ready = {
        "directories": lambda: removed_directory(directories),
        "socket": service.problem,
        "servers": lambda: supervisor.problem(longest),
    }
    server.start(live, ready)
