"""What a tenant that is root changed in its server, and how often at most that is put right."""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from dra_driver.agent.state import Kept, ServerState
from dra_driver.agent.tools import Daemons
from dra_driver.errors import NodeError, TimedOut
from dra_driver.model.mps import MpsClient, Space, SpaceName
from dra_driver.node.mps.daemon import Daemon, Look
from dra_driver.plan.mps_servers import said, strays

_MOST: Final = 3  # times that one agent mends a space: it may misread what the daemon says
_ANY_SPARE: Final = SpaceName("")
_TRIES: Final = 3  # to change limits before the next client is there


@dataclass(frozen=True, slots=True)
class Damage:
    """Found in one server."""

    strangers: tuple[SpaceName, ...] = ()  # namespaces that nobody wrote of
    spoilt_spare: bool = False
    spaces: tuple[tuple[Kept, str], ...] = ()  # and why
    missing: frozenset[SpaceName] = frozenset()  # those of them that are gone altogether


class Mending:
    """Of one server."""

    def __init__(self) -> None:
        self._times: Counter[SpaceName] = Counter()

    def damage(self, state: ServerState, spare: Space | None, look: Look) -> Damage:
        """*spare*: with the limits that it has to have; None: they are not known."""
        kept = {one.inside.name: one for one in state.spaces if one.served is not None}
        found = strays([one.inside for one in kept.values()], look.spaces)
        named = state.spare.namespace if state.spare else None
        spoilt = named is not None and named not in look.spaces
        if spare is not None and not spoilt:
            loose = strays([spare], {spare.name: look.spaces[spare.name]}).loose
            spoilt = bool(loose) and self._again(_ANY_SPARE)
        why = {space.name: "it was removed" for space in found.missing}
        for space, there in found.loose:
            wanted = said(space.allowance)
            why[space.name] = f"its limits were changed: {said(there)} instead of {wanted}"
        return Damage(
            tuple(name for name in found.unwanted if name != named),
            spoilt,
            tuple((kept[name], reason) for name, reason in why.items() if self._again(name)),
            frozenset(space.name for space in found.missing),
        )

    def _again(self, name: SpaceName) -> bool:
        self._times[name] += 1
        return self._times[name] <= _MOST


def within(clients: Collection[MpsClient], namespace: SpaceName) -> list[int]:
    """The clients of a namespace, as the daemon calls it."""
    return [one.pid for one in clients if one.space == namespace]


End = Callable[[Collection[int]], bool]
"""Ends clients. False: they end with the server, which is started again."""


def limit_again(
    daemons: Daemons, daemon: Daemon, space: Space, pids: Collection[int], end: End
) -> None:
    """Its clients are ended first: with some in there it is refused. Its directory stays what it
    is, since containers have it mounted."""
    for tries_left in reversed(range(_TRIES)):
        if not end(pids):
            return
        try:
            return daemons.limit(daemon, space)
        except NodeError as e:
            if isinstance(e, TimedOut) or not tries_left:
                raise
        pids = within(daemons.look(daemon).clients, space.name)
