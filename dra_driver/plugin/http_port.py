"""The HTTP port of the plugin, which two processes want during an update on the host's network.

The older process keeps the port until it ends; its successor takes it then. Meanwhile the older one
answers the liveness and readiness probes of both pods. So nobody relies on these before the pod's
own process has said that it is ready: the startup probe asks for that, without the port
(``dra-driver startup-probe``). An older process that is not ready itself, with a wrong driver root
say, answers as ready from then on: otherwise its successor's pod never would be, and the update
that mends it would not go on.
"""

import logging
import os
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from dra_driver.base.errors import NodeError
from dra_driver.base.http import HealthCheck, HealthChecks, SharedHttpPort
from dra_driver.kubeletplugin.serve.rolling_update import plugin_processes
from dra_driver.settings import PluginSettings

log = logging.getLogger(__name__)


class HttpPort:
    """Serves HTTP as soon as the port can be had."""

    def __init__(self, settings: PluginSettings, registry: CollectorRegistry) -> None:
        """SettingsError: the address cannot be served. AddressInUse: somebody else than a plugin
        process of ours has it."""
        self._instances = settings.plugin_dir / "instances"
        self._owner = settings.pod_uid or str(os.getpid())
        self._port = SharedHttpPort(
            settings.http_address, registry, lambda: bool(plugin_processes(self._instances))
        )
        self._problems: dict[str, str] = {}

    def start(
        self, live: HealthChecks, ready: HealthChecks, on_started: Callable[[], None]
    ) -> None:
        """*on_started* is called when the startup probe may succeed: if nobody has the port, the
        pod's other probes are answered by us from now on; else when we are ready."""
        self._ready, self._on_started = ready, on_started
        for_both = {name: self._for_both_pods(check) for name, check in ready.items()}
        self._port.start(live, for_both, on_started, self._note_problems)

    def stop(self) -> None:
        self._port.stop()

    def _for_both_pods(self, check: HealthCheck) -> HealthCheck:
        def problem_for_both() -> str | None:
            problem = check()
            return None if problem and self._has_successor() else problem

        return problem_for_both

    def _has_successor(self) -> bool:
        """Whether a newer process has started: while we have the port, only one that is ready."""
        try:
            processes = plugin_processes(self._instances)
        except NodeError:
            return False
        return bool(processes) and processes[-1].started and processes[-1].owner != self._owner

    def _note_problems(self) -> None:
        answers = {name: check() for name, check in self._ready.items()}
        problems = {name: problem for name, problem in answers.items() if problem}
        if not problems:
            self._on_started()
        elif problems != self._problems:
            log.warning("not ready yet", extra={"problems": problems})
        self._problems = problems
