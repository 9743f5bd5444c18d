"""What the node offers now: its GPUs, its profile, the API server and the ledger together."""

import itertools
import logging
import threading
from collections.abc import Callable

from dra_driver.base.backoff import Backoff
from dra_driver.base.errors import ApiServerError
from dra_driver.base.frozen import frozen
from dra_driver.model.gpus import Inventory
from dra_driver.model.health import Faults
from dra_driver.model.offer import ApiFeatures, Offer
from dra_driver.model.profiles import Profile
from dra_driver.model.records import HoldingsByGpu
from dra_driver.node.gpu_node import GpuNode
from dra_driver.node.state.ledger import Ledger
from dra_driver.plan.mig.partitions import CreatedPartitions
from dra_driver.plan.offer.devices import HeldShapes, build_offer, held_shapes

log = logging.getLogger(__name__)

PROBE_SECONDS = 600.0  # an API server can be upgraded, or its gates set, while we run
_FIRST_WAIT_SECONDS, _LAST_WAIT_SECONDS = 1.0, 60.0  # between questions before any answer
_ANSWER_SECONDS = 5.0  # that the first answer is waited for

_MOST_OFFERS = 16  # that are kept: claims come and go, and leave what is offered as it was

_Node = tuple[Inventory, Profile, ApiFeatures, Faults]
_Offers = dict[tuple[HeldShapes, CreatedPartitions], Offer]


@frozen
class _InventoryScan:
    """What reading the GPUs found."""

    inventory: Inventory | None = None  # None: nothing was read yet
    ours: CreatedPartitions = frozenset()  # the partitions of it that were created for claims
    began: int = 0  # a mark of the ledger


class OfferBuilder:
    """Puts together what is offered; the same again as long as nothing of it changed.

    *profile* may raise SettingsError, both it and *features* ApiServerError: there is nothing to
    offer yet. *mps*: the node has an MPS agent. *health*: what is wrong with the GPUs of an
    inventory; the same object as long as nothing of it changed.
    """

    def __init__(  # noqa: PLR0913 - all that an offer is made of
        self,
        node: GpuNode,
        profile: Callable[[], Profile],
        features: Callable[[], ApiFeatures],
        ledger: Ledger,
        *,
        mps: bool = True,
        health: Callable[[Inventory], Faults] = lambda _inventory: (),
    ) -> None:
        self._node = node
        self._profile = profile
        self._features = features
        self._ledger = ledger
        self._mps = mps
        self._health = health
        self._built: tuple[_Node, _Offers] | None = None
        # The holdings that were last looked at, and their shapes.
        self._shapes: tuple[HoldingsByGpu, HeldShapes] = ({}, ())
        self._scanning = threading.Lock()  # one read after the other
        self._lock = threading.Lock()
        self._scan = _InventoryScan()
        # By the newest look at the GPUs that led to one; for who cannot wait. None: there was none.
        self.last_offer: Offer | None = None
        self._looks = itertools.count(1)
        self._last_look = 0  # that of the last offer

    def now(self) -> Offer:
        """The offer of the last inventory; the first call reads the GPUs."""
        with self._lock:
            inventory = self._node.inventory()
            if inventory is not self._scan.inventory:
                # Another reader has refreshed it, after the scan that is known had begun.
                self._remember_scan(inventory, self._scan.began)
            ours, look = self._scan.ours, next(self._looks)
        return self._remember_offer(look, self._build(inventory, ours))

    def refresh(self) -> Offer:
        """The offer after reading the GPUs again."""
        with self._scanning:
            began = self._ledger.mark()
            inventory = self._node.refresh()
            with self._lock:
                ours, look = self._remember_scan(inventory, began), next(self._looks)
        return self._remember_offer(look, self._build(inventory, ours))

    def _remember_scan(self, inventory: Inventory, began: int) -> CreatedPartitions:
        """The partitions of *inventory* that belong to claims. One that was created or removed
        during the scan is among them, too: nobody else created it."""
        ours = self._ledger.partitions_since(began)
        if ours == self._scan.ours:
            ours = self._scan.ours  # the same object, which is compared quickly
        self._scan = _InventoryScan(inventory, ours, began)
        return ours

    def _build(self, inventory: Inventory, ours: CreatedPartitions) -> Offer:
        node = (inventory, self._profile(), self._features(), self._health(inventory))
        built = self._built
        if built is None or not all(a is b for a, b in zip(built[0], node, strict=True)):
            self._built = built = (node, {})
        offers, holdings = built[1], self._ledger.held()
        held = (self._shapes_of(holdings), ours)
        if (offer := offers.get(held)) is None:
            if len(offers) >= _MOST_OFFERS:
                offers.clear()
            offers[held] = offer = build_offer(
                *node[:3], holdings, mps=self._mps, ours=ours, faults=node[3]
            )
        return offer

    def _shapes_of(self, holdings: HoldingsByGpu) -> HeldShapes:
        """A claim asks several times for the same ones."""
        known, shapes = self._shapes
        if known is not holdings:
            shapes = held_shapes(holdings)
            self._shapes = (holdings, shapes)
        return shapes

    def _remember_offer(self, look: int, offer: Offer) -> Offer:
        """*look*: of another thread a newer one may have come to its offer first."""
        with self._lock:
            if look > self._last_look:
                self._last_look, self.last_offer = look, offer
        return offer


class ApiFeatureProbe:
    """What the API server keeps of a slice. A loop asks, at once and from time to time; preparing a
    claim never does."""

    def __init__(self, ask: Callable[[], ApiFeatures]) -> None:
        self._ask = ask
        self._features: ApiFeatures | None = None
        self._error: ApiServerError | None = None
        self._backoff = Backoff(_FIRST_WAIT_SECONDS, _LAST_WAIT_SECONDS)
        self._asked = threading.Event()

    def probe(self) -> float | None:
        """Ask the API server; for one thread. Returns the seconds until the next time where there
        never was an answer. Every node asks, so the waits grow."""
        try:
            self._features = self._ask()
        except ApiServerError as e:
            self._error = e
            if self._features is not None:
                log.info("the API server does not say what it keeps", extra={"error": str(e)})
        finally:
            self._asked.set()
        return None if self._features is not None else self._backoff.next_seconds()

    def __call__(self) -> ApiFeatures:
        """What is known; waits for the first answer. ApiServerError: there is none yet."""
        if self._features is None:
            self._asked.wait(_ANSWER_SECONDS)
        if self._features is None:
            why = self._error or f"nothing came within {_ANSWER_SECONDS:g} s"
            raise ApiServerError(f"what the API server keeps of a slice is not known: {why}")
        return self._features
