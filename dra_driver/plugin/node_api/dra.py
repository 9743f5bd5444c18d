"""DRA as the kubelet sees it: the plugin is registered while claims have, or can get, GPUs here."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from dra_driver.base.deadlines import Deadline
from dra_driver.base.errors import DriverError, NodeError
from dra_driver.k8s.claims import ClaimRef, ClaimUid, PreparedDevice
from dra_driver.kubeletplugin.serve.health import HealthService
from dra_driver.kubeletplugin.serve.plugin import KubeletPlugin
from dra_driver.kubeletplugin.serve.services import ClaimHandler, DraService
from dra_driver.kubeletplugin.serve.sockets import remove_dead_sockets, socket_paths
from dra_driver.model.profiles import AllocationApi
from dra_driver.model.records import ClaimRecord
from dra_driver.plan.node_api import ApiState
from dra_driver.plugin.node_api.current import NodeApi
from dra_driver.plugin.parts import PluginParts

_DRA = AllocationApi.DRA
_REGISTRATION_SECONDS: Final = 5.0  # for which slices wait
_LOOK_SECONDS: Final = 0.05


class OfferedClaims:
    """Does as *handler* does, but prepares nothing more while no GPUs are given out by DRA. What is
    prepared is answered: the kubelet asks again when it was restarted."""

    def __init__(
        self,
        handler: ClaimHandler,
        node_api: NodeApi,
        known: Callable[[ClaimUid], ClaimRecord | None],
    ) -> None:
        """*known*: what is recorded of a claim; None: it holds nothing here."""
        self._handler = handler
        self._node_api = node_api
        self._known = known

    def prepare(self, ref: ClaimRef) -> Sequence[PreparedDevice]:
        if (why := self._node_api.refusal(_DRA)) is not None:
            record = self._known(ref.uid)
            if record is None or not record.completed:
                raise NodeError(f"claim {ref} is not prepared: {why}")
        return self._handler.prepare(ref)

    def unprepare(self, ref: ClaimRef) -> None:
        self._handler.unprepare(ref)


class DraServing:
    """Serves DRA to the kubelet as long as the choice of the API says so. For many threads.

    A kubelet that does not know plugins of DRA finds none, and one that does asks us for nothing
    that the other API gives out.
    """

    def __init__(self, parts: PluginParts, on_fatal: Callable[[DriverError], None]) -> None:
        """*on_fatal* is called when serving is over for a reason that a new process may mend."""
        settings = parts.settings
        self._parts = parts
        self._on_fatal = on_fatal
        self._sockets = socket_paths(
            settings.driver_name, settings.plugin_dir, settings.registry, settings.pod_uid or None
        )
        self._lock = threading.Lock()
        self._plugin: KubeletPlugin | None = None
        self._health: HealthService | None = None
        self._stopped = False
        self._was_away = False  # from the kubelet: the node gave GPUs out by the other API
        self._patience = Deadline(0)

    def start(self) -> None:
        """Serve from now on while that is to be. DriverError: what is in the way."""
        self._parts.health_listeners.append(self._health_changed)
        self._parts.node_api.listeners.insert(0, self._follow)
        self.update()

    def update(self) -> None:
        """Serve, or be gone for the kubelet, as the choice of the API says. DriverError: what is in
        the way."""
        with self._lock:
            is_off = self._parts.node_api.state(_DRA) is ApiState.OFF
            if is_off or self._stopped:
                self._was_away |= self._parts.node_api.serving is not None
                self._end()
            elif self._plugin is None:
                self._begin()

    def is_awaited(self) -> bool:
        """Whether slices would bring pods too early: the node has just gone to DRA, and the
        kubelet, which looks for plugins once a second, would refuse them until it tries again."""
        plugin = self._plugin
        is_here = plugin is not None and (plugin.registered or self._patience.expired)
        return self._was_away and not is_here

    def stop(self) -> None:
        """Be gone for the kubelet, for good."""
        with self._lock:
            self._stopped = True
            self._end()

    def socket_problem(self) -> str | None:
        """Why the kubelet cannot reach us; None: it can, or need not."""
        plugin = self._plugin
        if plugin is None:
            return None
        try:
            plugin.check()
        except NodeError as e:
            return str(e) if plugin is self._plugin else None
        return None

    def registration_problem(self) -> str | None:
        """Why the kubelet does not ask us; None: it does, or need not."""
        plugin = self._plugin
        return None if plugin is None or plugin.registered else "the kubelet has not accepted us"

    def _follow(self) -> None:
        """The first of those who are told: those who publish slices come later."""
        self._patience = Deadline(_REGISTRATION_SECONDS)
        try:
            self.update()
        except DriverError as e:
            self._on_fatal(e)
        while self.registration_problem() and not self._patience.expired:
            time.sleep(_LOOK_SECONDS)

    def _begin(self) -> None:
        parts, sockets = self._parts, self._sockets
        claims = OfferedClaims(parts.claim_handler, parts.node_api, parts.ledger.known)
        plugin = KubeletPlugin(
            sockets,
            DraService(claims, parts.metrics),
            self._on_fatal,
            on_round=lambda: remove_dead_sockets(sockets),
        )
        health = HealthService(parts.devices.health)
        plugin.serve_health(health)
        plugin.start()
        self._plugin, self._health = plugin, health

    def _end(self) -> None:
        plugin, self._plugin, self._health = self._plugin, None, None
        if plugin is not None:
            plugin.stop()

    def _health_changed(self) -> None:
        if (health := self._health) is not None:
            health.changed()
