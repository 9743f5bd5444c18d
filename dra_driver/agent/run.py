"""The MPS agent as a process: picks the parts, connects them, serves until SIGTERM.

Stopping touches no daemon: clients compute on, and the next agent finds everything as it was.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Final

from dra_driver.agent.service import Service, lock_directory
from dra_driver.agent.state import Incidents, StateFiles
from dra_driver.agent.supervisor import Supervisor
from dra_driver.agent.tools import Tools
from dra_driver.kubeletplugin.disk_calls import hanging
from dra_driver.node.cgroups import cgroup_root
from dra_driver.node.mps.daemons import Daemons, check_directory
from dra_driver.node.mps.shelter import Shelter
from dra_driver.node.place import open_driver
from dra_driver.process.directories import removed
from dra_driver.process.ending import Ending
from dra_driver.process.loops import Loop
from dra_driver.settings import AgentSettings

log = logging.getLogger(__name__)

_SLOWEST_LOOK_SECONDS: Final = 60.0  # ending and starting what hangs takes a while
_STUCK_SECONDS: Final = 300.0  # after which a new process may do better
_TOGETHER_SECONDS: Final = 5.0  # most looks take some milliseconds


def run(settings: AgentSettings) -> int:
    """Keep the MPS servers of this node. 0: ended by a signal."""
    ending = Ending("cannot keep MPS servers any longer")
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
    shelter = Shelter(cgroup_root(settings.host_root))
    daemons = Daemons(driver.root, driver.run, driver.placed, shelter)
    files = StateFiles(directory / "state")
    tools = Tools(daemons, files, Incidents(files), str(directory))
    supervisor = Supervisor(tools, side_by_side)
    supervisor.recover()
    loop = Loop("mps-health", supervisor.look_after, settings.health_interval)
    supervisor.on_trouble = loop.soon
    service = Service(supervisor, directory)
    _serve_http(settings, supervisor, service, loop, stack)
    service.start()
    stack.callback(service.stop)
    loop.start()
    stack.callback(loop.stop)


def side_by_side(things: Iterable[Callable[[], None]], seconds: float = _TOGETHER_SECONDS) -> None:
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
    supervisor: Supervisor,
    service: Service,
    loop: Loop,
    stack: ExitStack,
) -> None:
    if not settings.http_address:
        return
    # Imported here: an agent that nobody asks is a third smaller without.
    from dra_driver.agent.metrics import registry
    from dra_driver.process.http import HttpServer

    server = HttpServer(
        settings.http_address, registry(supervisor.status, lambda: supervisor.unsheltered)
    )
    stack.callback(server.stop)
    patience = 3 * settings.health_interval + _SLOWEST_LOOK_SECONDS
    directories = (settings.mps_dir, settings.mps_dir / "state")
    live = {
        "disk": hanging,
        "directories": lambda: removed(directories),
        "loop": lambda: supervisor.stuck(_STUCK_SECONDS) if loop.alive else "it has ended",
    }
    ready = {
        "directories": lambda: removed(directories),
        "socket": service.problem,
        "servers": lambda: supervisor.problem(patience),
    }
    server.start(live, ready)
