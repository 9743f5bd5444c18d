"""One MPS server: starts it, puts spaces into it, finds out what is wrong with it, mends that.

What is wanted is written before it is done (``agent.state``), and nothing is done that was not
written: an agent that is killed anywhere leaves a state that ``tend`` brings to its end. A space
that was written and never served is taken out; a server in which nothing is served is ended; one
that is condemned is started again with everything that was served in it.
"""

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

from dra_driver.agent.health import LOOK_SECONDS, Health
from dra_driver.agent.mending import Mending
from dra_driver.agent.state import Kept, ServerState, new_token
from dra_driver.agent.tools import Tools
from dra_driver.errors import DriverError, NodeError, TimedOut
from dra_driver.model.devices import GpuUuid
from dra_driver.model.mps import (
    Incident,
    MpsServer,
    Served,
    ServerName,
    Space,
    SpaceName,
)
from dra_driver.node.mps.daemon import Look
from dra_driver.plan import mps_servers

log = logging.getLogger(__name__)


class Server:
    """Whoever calls holds the lock of this server; ``status`` and ``served`` need none."""

    def __init__(self, state: ServerState, tools: Tools) -> None:
        self._state = state
        self._tools = tools
        self._daemons = tools.daemons
        self._health = Health(tools.clock)
        self._mending = Mending()
        self.gone = False  # ended, and nothing is written of it any more

    @property
    def name(self) -> ServerName:
        return self._state.daemon.name

    @property
    def gpus(self) -> tuple[GpuUuid, ...]:
        return self._state.daemon.gpus

    @property
    def is_well(self) -> bool:
        return not self._state.condemned and not self._health.trouble

    @property
    def token(self) -> str:
        return self._state.daemon.token

    def find(self, name: SpaceName) -> Kept | None:
        return self._state.find(name)

    def status(self) -> MpsServer:
        state, trouble = self._state, self._health.trouble
        reason = "; ".join(dict.fromkeys(one for one in (state.condemned, trouble) if one))
        return MpsServer(
            self.name,
            state.daemon.gpus,
            state.daemon.protocol,
            ready=bool(state.served) and not reason,
            reason=reason or ("" if state.served else "it is being started or ended"),
            spaces=state.served,
            clients=self._health.clients,
            restarts=state.restarts,
        )

    def seconds_to_wait(self) -> float | None:
        """Until it wants to be tended before its time; None: it does not."""
        if self.is_well:
            return None
        return max(1.0, self._health.again_at - self._tools.clock.passed())

    # What is asked of it

    def start(self, space: Space) -> Served:
        """The first space of a server that was not there. If it fails, everything is undone."""
        self._write(self._state.keep(Kept(space)))
        try:
            self._started((space,))
        except Exception:
            self._undo(self._end)
            raise
        return self._served(space.name)

    def serve(self, space: Space) -> Served:
        """A space in a server that runs. If it fails, everything is undone."""
        if (known := self._state.find(space.name)) and known.served:
            return known.served
        self._make_room(space)
        self._write(self._state.keep(Kept(space)))
        try:
            self._add(space)
        except Exception:
            self._undo(self._clear)
            raise
        return self._served(space.name)

    def release(self, name: SpaceName) -> None:
        if (known := self._state.find(name)) is None:
            return
        self._write(self._state.keep(Kept(known.space)))
        if not self._state.served:
            self._end()
        elif self._is_up():
            self._clear()
        else:
            self._write(self._state.drop({name}))  # it is started again without

    def terminate(self, pids: Collection[int]) -> None:
        """End clients. A server in which one cannot be ended is condemned, and they end with it."""
        if not self._is_up():
            return
        try:
            self._daemons.terminate(self._state.daemon, pids)
        except TimedOut as e:
            self._condemn(f"a client could not be ended: {e}")

    # What it needs

    def tend(self) -> None:
        """Mend what is wrong, now and then looking for it."""
        if not self._health.is_due:
            return
        look = self.look() if self._state.served and self._is_up() else None
        if self._health.failed and not self._state.condemned:
            self._condemn(self._health.trouble)
        self.put_right()
        if look is not None and look.ready and self._state.daemon.protocol > 2:
            self._mend_spaces(look)

    def put_right(self) -> None:
        """As ``tend``, for somebody who waits for it: at once, and without a look."""
        try:
            if not self._state.served:
                self._end()
            elif not self._is_up():
                self._restart()
            else:
                self._clear()
        except NodeError as e:
            self._health.pause(str(e))
            raise

    def look(self, older_than: float = LOOK_SECONDS) -> Look | None:
        """See how it is; None: the last look is not that old, or it does not say."""
        if self._state.condemned or not self._health.needs_look(older_than):
            return None
        try:
            look = self._daemons.look(self._state.daemon)
        except TimedOut as e:
            self._health.saw_nothing(f"it does not answer: {e}")
            return None
        except NodeError as e:
            self._health.saw_nothing(f"it answers with an error: {e}")
            return None
        self._health.saw(look)
        return look

    def _is_up(self) -> bool:
        if not self._state.condemned and not self._daemons.is_running(self._state.daemon):
            self._condemn("its daemon was gone")
        return not self._state.condemned

    def _condemn(self, reason: str) -> None:
        """From here on it is going to be started again, whoever does it."""
        spaces = tuple(one.space.name for one in self._state.served)
        self._record(reason, spaces, len(self._health.clients))
        self._write(replace(self._state, condemned=reason))
        log.warning("an MPS server is started again", extra={"server": self.name, "why": reason})

    def _record(self, reason: str, spaces: tuple[SpaceName, ...], lost: int) -> None:
        now = self._tools.clock.since_epoch()
        self._tools.incidents.record(Incident(0, self.name, now, reason, spaces, lost))

    def _restart(self, more: Space | None = None) -> None:
        """End what is left of it and start it with what was served, in the same directory:
        containers have it mounted."""
        old = self._state.daemon
        self._daemons.end(old)
        spaces = tuple(one.space for one in self._state.served)
        most = mps_servers.most((*spaces, more) if more else spaces)
        daemon = replace(
            old,
            token=new_token(),
            most=most,
            # Containers have what their protocol needs; a driver that is older by now has no other.
            protocol=min(old.protocol, self._daemons.protocol()),
        )
        left = {one.space.name for one in self._state.spaces if one.served is None}
        self._write(replace(self._state.drop(left), daemon=daemon))
        self._started(spaces)

    def _started(self, spaces: tuple[Space, ...]) -> None:
        state = self._state
        directories = self._daemons.start(state.daemon, spaces)
        kept = tuple(Kept(one, self._with(one, directories[one.name])) for one in spaces)
        again = state.restarts + (1 if state.condemned else 0)
        self._write(replace(state, spaces=kept, condemned="", restarts=again))
        self._health.fresh()

    def _add(self, space: Space) -> None:
        with self._counted():
            directory = self._daemons.add(self._state.daemon, space)
        self._write(self._state.keep(Kept(space, self._with(space, directory))))

    def _clear(self) -> None:
        """Take out what is written and not served."""
        left = tuple(one.space.name for one in self._state.spaces if one.served is None)
        with self._counted():
            for name in left:
                self._daemons.remove(self._state.daemon, name)
        if left:
            self._write(self._state.drop(left))

    def _end(self) -> None:
        self._daemons.stop(self._state.daemon)
        self._tools.files.remove(self.name)
        self.gone = True

    def _make_room(self, space: Space) -> None:
        """Protocol 2: the environment cannot give a client more than the server's defaults."""
        most, needed = self._state.daemon.most, mps_servers.needed(space)
        if self._state.daemon.protocol > 2 or not mps_servers.exceeds(needed, most):
            return
        self.look(0)
        if self._health.clients or self._health.trouble:
            busy = ", ".join(str(one.pid) for one in self._health.clients) or self._health.trouble
            raise NodeError(
                f"the MPS server over {', '.join(space.gpus)} gives a client at most "
                f"{mps_servers.said(most)}, and claim {space.claim} wants "
                f"{mps_servers.said(needed)}: it can give more once its clients have "
                f"ended ({busy})"
            )
        self._condemn("it has to give more than it was started with")
        self._restart(space)

    def _mend_spaces(self, look: Look) -> None:
        """A tenant that is root can change what its server grants."""
        wanted = tuple(one.space for one in self._state.served)
        strays = mps_servers.strays(wanted, look.spaces)
        for name in strays.unwanted:
            self._daemons.remove(self._state.daemon, name)
        for space, reason in self._mending.due(strays):
            log.error("an MPS space is made again", extra={"space": space.name, "why": reason})
            lost = sum(one.space == space.name for one in self._health.clients)
            self._record(reason, (space.name,), lost)
            self._daemons.remove(self._state.daemon, space.name)
            self._add(space)

    def _served(self, name: SpaceName) -> Served:
        return next(one for one in self._state.served if one.space.name == name)

    def _with(self, space: Space, directory: str) -> Served:
        daemon = self._state.daemon
        shm = daemon.shm if daemon.protocol == 2 else ""
        return Served(space, daemon.protocol, directory, shm)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """A daemon that does not answer is looked at again soon."""
        try:
            yield
        except TimedOut as e:
            self._health.saw_nothing(str(e))
            raise

    def _undo(self, how: Callable[[], None]) -> None:
        try:
            how()
        except DriverError as e:
            self._health.pause(str(e))
            log.warning("it will be undone later", extra={"server": self.name, "error": str(e)})

    def _write(self, state: ServerState) -> None:
        self._tools.files.write(state)
        self._state = state
