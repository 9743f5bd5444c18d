"""What is in one server: the spaces of claims, and with protocol 3 a spare one.

The spare is a namespace that the next space gets, so that a claim waits for as little as can be. It
is written of from before it is made. So giving it out takes one write, after its limits are set and
before the answer: whoever is killed in between leaves a spare of unknown limits. A namespace that
has to be made first is written twice, before that and when it can be used.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from dra_driver.agent.health import Health
from dra_driver.agent.mending import End, Mending, limit_again, within
from dra_driver.agent.state import Book, Kept, ServerState, Spare, new_namespace
from dra_driver.agent.tools import Daemons
from dra_driver.errors import NodeError, TimedOut
from dra_driver.model.mps import Served, Space, SpaceName
from dra_driver.node.mps.daemon import Daemon, Look

log = logging.getLogger(__name__)

Record = Callable[[str, tuple[SpaceName, ...], int], None]
"""Writes down that something happened: why, to which spaces, how many clients were lost."""


class Spaces:
    """Of a server that runs, where nothing else is said. NodeError: something could not be done;
    what is written then is for ``clear``."""

    def __init__(self, book: Book, daemons: Daemons, health: Health) -> None:
        self._book = book
        self._daemons = daemons
        self._health = health
        self._mending = Mending()
        self._ready: Space | None = None  # the spare, if its limits were set here
        self._last: Space | None = None  # that was served
        self._failed = False  # the last try to make a spare

    @property
    def _state(self) -> ServerState:
        return self._book.state

    @property
    def _daemon(self) -> Daemon:
        return self._state.daemon

    def put(self, space: Space) -> None:
        """Have it served."""
        if not self._give_spare(space):
            if self._daemon.protocol > 2:  # with protocol 2 nothing is made
                self._book.write(self._state.keep(Kept(space)))
            self._add(Kept(space))
        self._last, self._failed = space, False

    def clear(self) -> None:
        """Take out what is written and nobody can use."""
        left = self._state.left
        with self._health.counting():
            for name in left:
                self._daemons.remove(self._daemon, name)
        if left:
            self._book.note(self._state.cleared())

    def to_start(self, first: Space | None = None) -> tuple[Space, ...]:
        """What its daemon is started with, as that knows it: what is written, and a spare."""
        self._last = first or self._last
        spaces = tuple(one.inside for one in self._state.spaces)
        self._ready = None
        if self._daemon.protocol > 2:
            self._ready = self._like_the_last(self._state.spare)
            spaces += (self._ready,)
        return spaces

    def started(self, directories: Mapping[SpaceName, str]) -> ServerState:
        """What is served now; to be written."""
        ready = self._ready
        self._failed = False
        spaces = [self._served(one, directories[one.inside.name]) for one in self._state.spaces]
        return replace(
            self._state,
            spaces=tuple(spaces),
            spare=Spare(ready.name, directories[ready.name]) if ready else None,
        )

    @property
    def lacks_spare(self) -> bool:
        state = self._state
        if state.daemon.protocol == 2 or not state.served or self._failed:
            return False
        last = self._last
        return state.spare is None or (last is not None and not _can_become(self._ready, last))

    def make_spare(self) -> None:
        """With the limits that the last space got. Once, until the next is served."""
        self._failed = True
        if self._state.spare:
            self._spoil(self._state.spare)
            self.clear()
        space = self._like_the_last(None)
        self._book.write(replace(self._state, spare=Spare(space.name)))
        with self._health.counting():
            directory = self._daemons.add(self._daemon, space)
        self._book.write(replace(self._state, spare=Spare(space.name, directory)))
        self._ready, self._failed = space, False

    def mend(self, look: Look, record: Record, end: End) -> None:
        """A tenant that is root can change what its server grants."""
        damage = self._mending.damage(self._state, self._ready, look)
        for name in damage.strangers:
            self._daemons.remove(self._daemon, name)
        if damage.spoilt_spare and self._state.spare:
            self._spoil(self._state.spare)
            self.clear()
        for kept, reason in damage.spaces:
            space, inside = kept.space.name, kept.inside
            log.error("somebody changed an MPS space", extra={"space": space, "why": reason})
            clients = within(look.clients, inside.name)
            record(reason, (space,), len(clients))
            if inside.name in damage.missing:
                self._add(kept)
            else:
                limit_again(self._daemons, self._daemon, inside, clients, end)

    def _add(self, kept: Kept) -> None:
        with self._health.counting():
            directory = self._daemons.add(self._daemon, kept.inside)
        self._book.write(self._state.keep(self._served(kept, directory)))

    def _give_spare(self, space: Space) -> bool:
        """Serve *space* with what is ready, at the price of one run of the program at most."""
        spare, ready = self._state.spare, self._ready
        if spare is None or not spare.directory or not self._daemons.is_there(spare.directory):
            return False
        if not _can_become(ready, space):
            return False
        self._ready = None
        kept = self._served(Kept(space, namespace=spare.namespace), spare.directory)
        if ready is None or not _alike(ready, space):
            try:
                with self._health.counting():
                    self._daemons.limit(self._daemon, kept.inside)
            except NodeError as e:
                self._spoil(spare)
                if isinstance(e, TimedOut):
                    raise
                log.warning("a spare MPS space is of no use", extra={"error": str(e)})
                self.clear()
                return False
        self._book.write(replace(self._state.keep(kept), spare=None))
        return True

    def _spoil(self, spare: Spare) -> None:
        """From here on nobody gets it."""
        self._ready = None
        self._book.note(replace(self._state, spare=replace(spare, directory="")))

    def _like_the_last(self, spare: Spare | None) -> Space:
        last = self._last or self._state.served[-1].space
        return replace(last, name=spare.namespace if spare else new_namespace())

    def _served(self, kept: Kept, directory: str) -> Kept:
        daemon = self._daemon
        shm = daemon.shm if daemon.protocol == 2 else ""
        return replace(kept, served=Served(kept.space, daemon.protocol, directory, shm))


def _can_become(ready: Space | None, space: Space) -> bool:
    """A limit of memory can be changed, and not be taken away."""
    if space.allowance.memory_bytes is not None:
        return True
    return ready is not None and ready.allowance.memory_bytes is None


def _alike(one: Space, other: Space) -> bool:
    return (one.allowance, one.priority) == (other.allowance, other.priority)
