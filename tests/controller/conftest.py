"""Fixtures: a fleet of nodes at a fake API server, and the rounds of a controller beside it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from dra_driver.controller.cluster import FollowedCluster, ServerVersion
from dra_driver.controller.events import ProfileEvents
from dra_driver.controller.metrics import ControllerMetrics
from dra_driver.controller.rollouts import RolloutIntervals, RolloutLoop, RolloutParts
from dra_driver.controller.writes import ControllerWrites
from dra_driver.k8s.access import load_kubeconfig
from dra_driver.k8s.api import KubernetesApi
from dra_driver.k8s.client import ApiClient, ApiTimeouts
from dra_driver.k8s.events import EventRecorder
from dra_driver.k8s.watch import WatchIntervals
from tests.controller.fleet import NAMESPACE, Fleet
from tests.fakes.api_server import ApiServer
from tests.fakes.connected import client, server

__all__ = ["client", "server"]

QUICK = RolloutIntervals(round=0.01, status=0.02, seen=1.0, first_retry=0.02, last_retry=0.1)


class Controller:
    """The rounds of one process, without its election."""

    def __init__(self, config: Path, writing: Callable[[KubernetesApi], KubernetesApi]) -> None:
        """*writing*: what the API server is for writes."""
        self.leads = True
        self.metrics = ControllerMetrics()
        self._api = ApiClient(load_kubeconfig(config), ApiTimeouts(retry=0.005))
        events = EventRecorder(self._api, "controller", "a", min_update_seconds=0.0)
        watching = WatchIntervals(first_retry=0.01, last_retry=0.05)
        self.cluster = FollowedCluster(self._api, NAMESPACE, watching)
        writes = ControllerWrites(writing(self._api), NAMESPACE, lambda: self.leads, self.metrics)
        parts = RolloutParts(
            self.cluster,
            writes,
            lambda: self.leads,
            ServerVersion(self._api),
            ProfileEvents(events),
            self.metrics,
        )
        self.rollouts = RolloutLoop(parts, QUICK)
        self._ending = ExitStack()
        self._ending.callback(self._api.close)
        self._ending.callback(events.stop)
        self._ending.callback(self.cluster.stop)
        self._ending.callback(self.rollouts.stop)

    def start(self) -> None:
        self.cluster.start(self.rollouts.note_change)
        self.rollouts.start()

    def stop(self) -> None:
        self._ending.close()


StartController = Callable[..., Controller]


@pytest.fixture
def fleet(server: ApiServer, tmp_path: Path) -> Iterator[Fleet]:
    running = Fleet(server, tmp_path)
    running.start()
    yield running
    running.stop()


@pytest.fixture
def controller(server: ApiServer, tmp_path: Path) -> Iterator[StartController]:
    """Starts one; called again, another one beside it."""
    config = server.kubeconfig(tmp_path / "controller")
    with ExitStack() as stack:

        def start(
            writing: Callable[[KubernetesApi], KubernetesApi] = lambda api: api,
        ) -> Controller:
            made = Controller(config, writing)
            stack.callback(made.stop)
            made.start()
            return made

        yield start
