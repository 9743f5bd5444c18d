"""Lists this node's devices for the kubelet: by one process at a time, and as long as it is to.

When any list of a resource ends, the kubelet closes the newest connection for it, whoever has that.
So the older process of an update ends its lists before the newer one registers: both want one
lease, and the older one lets go of it when the newer one waits.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from contextlib import ExitStack
from typing import Final, Protocol

from dra_driver.base.errors import TimedOut
from dra_driver.base.threads import UNTIL_WOKEN
from dra_driver.k8s.node_labels import NodeStatus
from dra_driver.kubeletplugin.device_plugin.resources import Resource, ResourceName
from dra_driver.kubeletplugin.serve.rolling_update import PluginLease
from dra_driver.model.offer import Offer
from dra_driver.model.profiles import AllocationApi
from dra_driver.model.records import DeviceAllocation
from dra_driver.node.state.ledger import Ledger
from dra_driver.plan.device_plugin.resources import ResourceNames, ResourceOffer, resources
from dra_driver.plan.device_plugin.users import left_behind, nothing_more, with_leftovers
from dra_driver.plan.node_api import ApiState
from dra_driver.plugin.device_plugin.reconciler import AllocationReconciler
from dra_driver.plugin.node_api.current import NodeApi
from dra_driver.plugin.publish.offers import OfferBuilder

log = logging.getLogger(__name__)

Held = frozenset[DeviceAllocation]

_LOOK_SECONDS: Final = 1.0  # between two looks for a newer process
_HELD_SECONDS: Final = 30  # that it is waited for what containers have, at each of which …
_LOOKS_SECONDS: Final = 5  # … the reconciler is to look
_TURN_SECONDS: Final = 5.0
_AGAIN_SECONDS: Final = 0.1


class ListServer(Protocol):
    """``DevicePluginServer`` is one."""

    def offer(self, resources: Sequence[Resource]) -> None: ...

    def withdraw(self) -> None: ...

    def freeze(self, frozen: bool) -> None: ...

    def end(self, leftovers: Collection[ResourceName]) -> None: ...

    @property
    def has_ended(self) -> bool: ...


class DeviceListing:
    """One thread at a time may call its methods."""

    def __init__(  # noqa: PLR0913 - what is listed, and who says whether
        self,
        server: ListServer,
        lease: PluginLease,
        offers: OfferBuilder,
        ledger: Ledger,
        api: NodeApi,
        names: ResourceNames,
        is_newest: Callable[[], bool],
        reconciler: AllocationReconciler,
        node_status: Callable[[], NodeStatus | None],
        not_taken: Callable[[Iterable[ResourceName]], Set[ResourceName]],
        turn_seconds: float = _TURN_SECONDS,
    ) -> None:
        """*lease*: of those who list. *reconciler*: knows what containers have: no device of those
        may leave its list. *node_status*: as last read. *not_taken*: which of these
        resources another device plugin, which is there, has certainly not taken. *turn_seconds*:
        for which an older process is waited for at a time."""
        self._server = server
        self._lease = lease
        self._offers = offers
        self._ledger = ledger
        self._api = api
        self._names = names
        self._is_newest = is_newest
        self._reconciler = reconciler
        self._node_status = node_status
        self._not_taken = not_taken
        self._turn_seconds = turn_seconds
        self._allocatable: dict[str, str] = {}  # by resource, as the Node said last of each
        self._turn = ExitStack()  # holds the lease
        self._has_turn = False  # nobody but this process lists
        self._offered: dict[ResourceName, Resource] | None = None  # None: nothing was offered yet
        self._beside_other = False  # another device plugin is on the node, and may have what we had
        self._refused: set[ResourceName] = set()  # the kubelet asks us, and not the other one
        self._ended = False  # the kubelet was told of the end, also of what was listed before us
        self.look_soon: Callable[[], None] = lambda: None  # has the reconciler look
        self._waits = 0  # seconds for that
        self._held_from = 0  # the question whose answer is needed for what containers have
        self._problems: tuple[str, ...] = ()
        self._found: tuple[Offer, tuple[Held, Held], ResourceOffer] | None = None

    def step(self) -> float | None:
        """List what there is now, or nothing any more; the seconds until the next look."""
        state = self._api.state(AllocationApi.DEVICE_PLUGIN)
        if state is ApiState.OFF:
            return self._end()
        self._ended = False
        if not self._reconciler.ready:
            return None
        if self._has_turn and not self._is_newest() and self._lease.changed_hands():
            self.stop()
        if not self._has_turn and not (self._is_newest() and self._take_turn()):
            return _AGAIN_SECONDS if self._is_newest() else _LOOK_SECONDS
        was_beside_other, self._beside_other = self._beside_other, self._is_beside_other()
        if was_beside_other and not self._beside_other:
            self.stop()  # the kubelet dials nobody again by itself, and the other one is gone
            return _AGAIN_SECONDS
        return self._list(state)

    def _list(self, state: ApiState) -> float:
        if self._beside_other:  # it gives out what it likes
            self._held_from, self._waits = self._reconciler.questions + 1, 0
        elif self._reconciler.answered < self._held_from:
            if self._is_waiting_for_held():
                return _LOOK_SECONDS
            state = ApiState.DRAINING  # what is recorded is held, and nothing is known of the rest
        else:
            self._refused.clear()
        listed = {resource.name: resource for resource in self._listed(state)}
        is_frozen = self._beside_other and bool(self._offered)
        if is_frozen and self._offered:  # what the kubelet asks us for is not the other one's
            ours = self._refused | self._not_taken(self._offered)
            listed = self._offered | {name: listed[name] for name in ours & listed.keys()}
            self._refused -= listed.keys()  # once: the other one may get it later
        self._server.freeze(is_frozen)
        self._server.offer(tuple(listed.values()))
        self._offered = listed
        return _LOOK_SECONDS

    def _is_waiting_for_held(self) -> bool:
        """Whether it is still waited for what containers have; a look is asked for meanwhile."""
        if self._waits % _LOOKS_SECONDS == 0:
            self.look_soon()
        self._waits += 1
        return self._waits < _HELD_SECONDS

    def _is_beside_other(self) -> bool:
        """One that is gone does not come back for what pods have by it: ours is to be registered,
        or containers of our pods could not start again."""
        choice = self._api.choice
        return bool(choice.other_plugin) and not choice.other_plugin_is_gone

    @property
    def listed(self) -> bool:
        """Whether the server knows what to list."""
        return self._offered is not None

    def refused(self, resource: ResourceName) -> None:
        """A container was refused what is listed of *resource*. For any thread."""
        self._refused.add(resource)

    def _listed(self, state: ApiState) -> tuple[Resource, ...]:
        recorded = frozenset(r.allocation for r in self._ledger.records() if r.allocation)
        held = self._reconciler.held | recorded
        offer = self._resources(held, held - recorded)
        if offer.problems != self._problems:
            self._problems = offer.problems
            for problem in offer.problems:
                log.warning("part of what there is is not listed: %s", problem)
        if status := self._node_status():
            self._allocatable |= status.allocatable
        listed = with_leftovers(offer.resources, self._allocatable, self._names)
        if self._beside_other:  # to register a resource takes it away, to end a list cuts it off
            ours = self._offered or {allocation.resource for allocation in recorded}
            listed = tuple(resource for resource in listed if resource.name in ours)
        return listed if state is ApiState.ON else nothing_more(listed, held)

    def _resources(self, held: Held, others: Held) -> ResourceOffer:
        """Found once for an offer and what is held of it: with many devices that takes long."""
        offer = self._offers.now()
        if self._found is None or self._found[0] is not offer or self._found[1] != (held, others):
            found = resources(offer, self._names, held, others)
            self._found = offer, (held, others), found
        return self._found[2]

    def stop(self) -> None:
        """End the lists; a newer process may begin with its own."""
        if self._has_turn:
            self._server.withdraw()
            self.leave()

    def leave(self) -> None:
        """The server has ended: another process may list."""
        self._has_turn = self._beside_other = False
        self._offered = None
        self._turn.close()

    def _end(self) -> float | None:
        """End the lists so that the kubelet starts pods that have the same resources by DRA."""
        leftovers: frozenset[ResourceName] = frozenset()
        if not (self._has_turn or self._ended):
            if self._api.serving is None or self._api.choice.other_plugin:
                return UNTIL_WOKEN
            remembered = left_behind(self._node_status(), self._names)
            if remembered is None:
                return None
            leftovers = remembered
            if leftovers and not (self._is_newest() and self._take_turn()):
                return _LOOK_SECONDS
        if self._has_turn and not self._ended:
            self._server.end(leftovers)
        self._ended = True
        if self._has_turn and not self._server.has_ended:
            return _AGAIN_SECONDS
        self.stop()
        return UNTIL_WOKEN

    def _take_turn(self) -> bool:
        """False: an older process still lists."""
        try:
            self._turn.enter_context(self._lease.held(self._turn_seconds))
        except TimedOut as e:
            log.info("another process still lists the devices", extra={"error": str(e)})
            return False
        self._has_turn = True
        return True
