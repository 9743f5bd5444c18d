"""What is looked at again and again: the GPUs of the node, and the claims in the ledger."""

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from dra_driver.errors import DriverError, NodeError
from dra_driver.kubeletplugin.slices import Pool, split
from dra_driver.model.devices import ALL_GPUS
from dra_driver.model.inventory import Inventory
from dra_driver.plan.publish import published
from dra_driver.plugin.metrics import Metrics
from dra_driver.plugin.reconcile import Reconciler

log = logging.getLogger(__name__)


class Node(Protocol):
    """What can be looked at."""

    def refresh(self) -> Inventory: ...


class Watcher:
    """Looks at the node and says what is to be published when that changed."""

    def __init__(
        self, node: Node, pool: str, want: Callable[[Pool], None], metrics: Metrics
    ) -> None:
        self._node = node
        self._pool = pool
        self._want = want
        self._metrics = metrics
        self._last: Inventory | None = None
        self.error: str | None = None  # why the last look failed

    @property
    def not_ready(self) -> str | None:
        """Why this node's GPUs cannot be offered at all now: an update should go no further."""
        found = self._last.withheld if self._last else ()
        return self.error or next((w.reason for w in found if w.what == ALL_GPUS), None)

    def look(self) -> None:
        """One look. A node that cannot be looked at keeps what it published."""
        try:
            inventory = self._node.refresh()
        except NodeError as e:
            if str(e) != self.error:
                log.warning("cannot look at the GPUs", extra={"error": str(e)})
            self.error = str(e)
            return
        self.error = None
        if inventory != self._last:
            self._tell(inventory)

    def _tell(self, inventory: Inventory) -> None:
        names = [device.name for device in inventory.devices]
        log.info("GPUs found", extra={"devices": ",".join(names), "number": len(names)})
        for withheld in inventory.withheld:
            if self._last is None or withheld not in self._last.withheld:
                facts = {"what": withheld.what, "reason": withheld.reason}
                log.warning("GPU is not offered", extra=facts)
        self._metrics.withheld_devices.set(len(inventory.withheld))
        self._want(split(self._pool, published(inventory)))
        self._last = inventory


class Work(Protocol):
    """What is done for the claims from time to time."""

    def restore(self) -> None: ...


class Rounds:
    """Two threads: one looks at the node, one holds ledger, CDI files and API server together."""

    def __init__(
        self,
        watcher: Watcher,
        reconciler: Reconciler,
        work: Work,
        in_charge: Callable[[], bool],
        metrics: Metrics,
    ) -> None:
        """*in_charge*: whether no newer process of this plugin runs; that one reconciles."""
        self._watcher = watcher
        self._reconciler = reconciler
        self._work = work
        self._in_charge = in_charge
        self._metrics = metrics
        self._error: str | None = None
        self._stopping = threading.Event()

    def start(self, look_seconds: float, reconcile_seconds: float) -> None:
        """Look and reconcile in these intervals; what a crash left over is taken back at once."""
        self._begin("looks", self._watcher.look, look_seconds)
        self._begin("reconciler", self._reconcile, reconcile_seconds)

    def stop(self) -> None:
        self._stopping.set()

    @property
    def error(self) -> str | None:
        """Why ledger and CDI files could not be brought together at the last round."""
        return self._error

    def _begin(self, name: str, step: Callable[[], None], seconds: float) -> None:
        threading.Thread(target=self._repeat, args=(step, seconds), name=name, daemon=True).start()

    def _repeat(self, step: Callable[[], None], seconds: float) -> None:
        while not self._stopping.is_set():
            try:
                step()
            except DriverError as e:
                log.warning("will try again", extra={"error": str(e), "seconds": seconds})
            except Exception:  # the next round may go better; the process must not lose its loops
                log.exception("a regular look failed")
            self._stopping.wait(seconds)

    def _reconcile(self) -> None:
        if not self._in_charge():
            return
        try:
            self._work.restore()  # the first turn recovers what a crash left
        except DriverError as e:
            self._error = str(e)
            raise
        self._error = None
        self._metrics.reconciled_claims.inc(self._reconciler.look())
