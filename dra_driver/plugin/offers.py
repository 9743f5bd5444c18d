"""What the node offers now: its GPUs, its profile, the API server and the ledger together."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from dra_driver.errors import ClusterError
from dra_driver.model.holdings import Held
from dra_driver.model.inventory import Inventory
from dra_driver.model.offer import Keeps, Offer
from dra_driver.model.profiles import Profile
from dra_driver.plan.mig.offered import Ours, made
from dra_driver.plan.offer import offer

log = logging.getLogger(__name__)

_ASK_AGAIN_SECONDS = 600.0  # an API server can be upgraded, or its gates set, while we run


_Parts = tuple[Inventory, Profile, Keeps, Held, Ours]


class Node(Protocol):
    """What can be looked at."""

    def inventory(self) -> Inventory: ...
    def refresh(self) -> Inventory: ...


class Offers:
    """Puts together what is offered; the same again as long as nothing of it changed.

    *profile* may raise SettingsError, and it and *keeps* ClusterError: there is nothing to offer
    yet. *mps*: the node has an MPS agent.
    """

    def __init__(
        self,
        node: Node,
        profile: Callable[[], Profile],
        keeps: Callable[[], Keeps],
        held: Callable[[], Held],
        *,
        mps: bool = True,
    ) -> None:
        self._node = node
        self._profile = profile
        self._keeps = keeps
        self._held = held
        self._mps = mps
        self._last: tuple[_Parts, Offer] | None = None
        self._looked: tuple[Inventory | None, Ours] = (None, frozenset())

    def now(self) -> Offer:
        """What is offered of what the last look found; the first call looks."""
        return self._of(self._node.inventory, again=False)

    def refresh(self) -> Offer:
        """Look at the GPUs again."""
        return self._of(self._node.refresh, again=True)

    def _of(self, look: Callable[[], Inventory], again: bool) -> Offer:
        inventory, ours = self._seen(look, again)
        held = self._held()
        parts = (inventory, self._profile(), self._keeps(), held, ours)
        last = self._last
        if last is not None and all(a is b for a, b in zip(last[0], parts, strict=True)):
            return last[1]
        found = offer(inventory, parts[1], parts[2], held, mps=self._mps, ours=ours)
        self._last = (parts, found)
        return found

    def _seen(self, look: Callable[[], Inventory], again: bool) -> tuple[Inventory, Ours]:
        """What a look finds, and which partitions of it were cut for claims.

        A claim comes, or goes, while we look: its partition may be among what was found, and is
        nobody else's. Of a look that somebody else began only its end is known, so what counted at
        the one before counts too.
        """
        before = self._held()
        inventory = look()
        known, ours = self._looked
        if inventory is known and not again:
            return inventory, ours
        found = made(before) | made(self._held())
        if not again:
            found |= ours
        if found != ours:
            ours = found
        self._looked = (inventory, ours)
        return inventory, ours


class Keeping:
    """What the API server keeps of a slice; asked for once, and again from time to time."""

    def __init__(self, ask: Callable[[], Keeps], again_seconds: float = _ASK_AGAIN_SECONDS) -> None:
        self._ask = ask
        self._again_seconds = again_seconds
        self._lock = threading.Lock()
        self._known: Keeps | None = None
        self._until = 0.0

    def __call__(self) -> Keeps:
        """What is known. ClusterError: the API server could not be asked even once."""
        with self._lock:
            known = self._known
            if known is not None and time.monotonic() < self._until:
                return known
            try:
                known = self._ask()
            except ClusterError as e:
                if known is None:
                    raise
                log.info("the API server is not asked what it keeps", extra={"error": str(e)})
            self._known, self._until = known, time.monotonic() + self._again_seconds
            return known
