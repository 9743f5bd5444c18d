"""What the node offers now: its GPUs, its profile, the API server and the ledger together."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dra_driver.base.errors import ApiServerError
from dra_driver.model.gpus import Inventory
from dra_driver.model.offer import ApiFeatures, Offer
from dra_driver.model.profiles import Profile
from dra_driver.model.records import HoldingsByDevice
from dra_driver.plan.mig.partitions import CreatedPartitions
from dra_driver.plan.offer.devices import build_offer

log = logging.getLogger(__name__)

PROBE_SECONDS = 600.0  # an API server can be upgraded, or its gates set, while we run
_SOON_SECONDS = 1.0  # until it is asked again that has never answered; after that twice as long …
_MOST_SECONDS = 60.0  # … and so on, up to this
_FIRST_SECONDS = 5.0  # that the first answer is waited for

_Parts = tuple[Inventory, Profile, ApiFeatures, HoldingsByDevice, CreatedPartitions]


class InventoryNode(Protocol):
    """What can be looked at."""

    def inventory(self) -> Inventory: ...
    def refresh(self) -> Inventory: ...


class OfferLedger(Protocol):
    """What claims hold; ``dra_driver.node.state.ledger``."""

    def held(self) -> HoldingsByDevice: ...
    def mark(self) -> int: ...
    def cut_since(self, mark: int) -> CreatedPartitions: ...


@dataclass(frozen=True, slots=True)
class _InventoryScan:
    """What a look at the GPUs found."""

    inventory: Inventory | None = None  # None: nobody has looked yet
    ours: CreatedPartitions = frozenset()  # the partitions of it that were cut for claims
    began: int = 0  # a mark of the ledger


class Offers:
    """Puts together what is offered; the same again as long as nothing of it changed.

    *profile* may raise SettingsError, and it and *features* ClusterError: there is nothing to offer
    yet. *mps*: the node has an MPS agent.
    """

    def __init__(
        self,
        node: InventoryNode,
        profile: Callable[[], Profile],
        features: Callable[[], ApiFeatures],
        ledger: OfferLedger,
        *,
        mps: bool = True,
    ) -> None:
        self._node = node
        self._profile = profile
        self._keeps = features
        self._ledger = ledger
        self._mps = mps
        self._last: tuple[_Parts, Offer] | None = None
        self._looking = threading.Lock()  # one look after the other
        self._lock = threading.Lock()
        self._look = _InventoryScan()

    def now(self) -> Offer:
        """What is offered of what the last look found; the first call looks."""
        with self._lock:
            inventory = self._node.inventory()
            if inventory is not self._look.inventory:
                # Somebody else has looked, after the look that is known had begun.
                self._note(inventory, self._look.began)
            ours = self._look.ours
        return self._of(inventory, ours)

    def refresh(self) -> Offer:
        """Look at the GPUs again."""
        with self._looking:
            began = self._ledger.mark()
            inventory = self._node.refresh()
            with self._lock:
                ours = self._note(inventory, began)
        return self._of(inventory, ours)

    def _note(self, inventory: Inventory, began: int) -> CreatedPartitions:
        """Which partitions of what was found were cut for claims. One that came or went while we
        looked may be among them, too, and is nobody else's."""
        ours = self._ledger.cut_since(began)
        if ours == self._look.ours:
            ours = self._look.ours  # the same, for who compares
        self._look = _InventoryScan(inventory, ours, began)
        return ours

    def _of(self, inventory: Inventory, ours: CreatedPartitions) -> Offer:
        held = self._ledger.held()
        parts = (inventory, self._profile(), self._keeps(), held, ours)
        last = self._last
        if last is not None and all(a is b for a, b in zip(last[0], parts, strict=True)):
            return last[1]
        offer = build_offer(inventory, parts[1], parts[2], held, mps=self._mps, ours=ours)
        self._last = (parts, offer)
        return offer


class ApiFeatureProbe:
    """What the API server keeps of a slice. A loop asks for it, at once and from time to time: who
    prepares a claim never does."""

    def __init__(self, ask: Callable[[], ApiFeatures]) -> None:
        self._ask = ask
        self._known: ApiFeatures | None = None
        self._error: ApiServerError | None = None
        self._soon = _SOON_SECONDS
        self._asked = threading.Event()

    def look(self) -> float | None:
        """Ask; one thread's. Answers with seconds where the next time should be soon: there never
        was an answer. Every node asks, and whoever refuses may go on for long."""
        try:
            self._known = self._ask()
        except ApiServerError as e:
            self._error = e
            if self._known is not None:
                log.info("the API server does not say what it keeps", extra={"error": str(e)})
        finally:
            self._asked.set()
        if self._known is not None:
            return None
        seconds, self._soon = self._soon, min(2 * self._soon, _MOST_SECONDS)
        return seconds

    def __call__(self) -> ApiFeatures:
        """What is known; the first answer is waited for. ClusterError: there is none yet."""
        if self._known is None:
            self._asked.wait(_FIRST_SECONDS)
        if self._known is None:
            why = self._error or f"nothing came within {_FIRST_SECONDS:g} s"
            raise ApiServerError(f"what the API server keeps of a slice is not known: {why}")
        return self._known
