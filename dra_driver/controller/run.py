"""The controller as a process: creates its parts, connects them, and works until SIGTERM.

Nodes go on with what they have while no controller runs. Of several replicas one leads and writes;
the others follow the same objects, so that the next leader can begin at once.
"""

import logging
from contextlib import ExitStack
from typing import Final

from dra_driver.base.http import SharedHttpPort
from dra_driver.base.signals import Shutdown
from dra_driver.controller.cluster import FollowedCluster, ServerVersion
from dra_driver.controller.events import ProfileEvents
from dra_driver.controller.metrics import ControllerMetrics
from dra_driver.controller.rollouts import RolloutLoop, RolloutParts
from dra_driver.controller.writes import ControllerWrites
from dra_driver.k8s.access import load_access
from dra_driver.k8s.client import ApiClient
from dra_driver.k8s.events import EventRecorder
from dra_driver.k8s.leader import Leadership, LeaseName, LeaseSeconds
from dra_driver.settings import ControllerSettings

log = logging.getLogger(__name__)

_STUCK_SECONDS: Final = 300.0  # a round ends every minute, if the API server answers or not
_COMPONENT: Final = "dra-driver-gpu-controller"


def run(settings: ControllerSettings) -> int:
    """Roll out the NodeProfiles of the cluster. 0: ended by a signal."""
    shutdown = Shutdown("cannot roll out profiles any longer")
    with ExitStack() as stack:
        _start(settings, stack)
        log.info("following", extra={"identity": settings.identity})
        shutdown.event.wait()
        log.info("stopping")
    return 1 if shutdown.failed else 0


def _start(settings: ControllerSettings, stack: ExitStack) -> None:
    """Start every part; *stack* stops them, the last one first."""
    metrics = ControllerMetrics()
    port = None
    if settings.http_address:  # first of all: the address may be wrong
        port = SharedHttpPort(settings.http_address, metrics.registry, lambda: True)
    access = load_access(settings.kubeconfig)
    api = ApiClient(access)
    stack.callback(api.close)
    events = EventRecorder(api, _COMPONENT, settings.identity[:128])
    stack.callback(events.stop)
    cluster = FollowedCluster(api, settings.revision_namespace)
    lease = LeaseName(settings.revision_namespace, settings.lease_name)
    leadership = Leadership(access, lease, settings.identity, _lease_seconds(settings))
    writes = ControllerWrites(api, settings.revision_namespace, leadership.leads, metrics)
    metrics.leads, metrics.skipped = leadership.leads, cluster.skipped()
    rollouts = RolloutLoop(
        RolloutParts(
            cluster, writes, leadership.leads, ServerVersion(api), ProfileEvents(events), metrics
        )
    )
    cluster.start(rollouts.note_change)
    stack.callback(cluster.stop)
    rollouts.start()
    leadership.start(rollouts.soon, rollouts.soon)
    stack.callback(leadership.stop)
    stack.callback(rollouts.stop)
    if port is not None:
        _serve(port, cluster, rollouts)
        stack.callback(port.stop)


def _lease_seconds(settings: ControllerSettings) -> LeaseSeconds:
    """The times of client-go's leader election, for another lease in proportion."""
    seconds = settings.lease_seconds
    return LeaseSeconds(seconds, seconds * 2 / 3, max(seconds * 2 / 15, 0.85))


def _serve(port: SharedHttpPort, cluster: FollowedCluster, rollouts: RolloutLoop) -> None:
    """Alive: the rounds go on. Ready: everything was listed once."""

    def problem() -> str | None:
        if not rollouts.alive:
            return "it has ended"
        seconds = rollouts.stuck_seconds()
        return f"no round for {seconds:.0f} s" if seconds > _STUCK_SECONDS else None

    port.start({"rollouts": problem}, {"cluster": cluster.problem})
