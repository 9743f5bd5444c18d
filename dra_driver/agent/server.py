"""The life of one MPS server: started, given namespaces, checked, repaired, stopped.

Every change is recorded before it is made (``agent.state``), so that ``tend`` completes whatever an
agent that was killed left unfinished. A namespace that was recorded and never served is removed; a
server without served namespaces is stopped; one that is condemned is started again with everything
that it served.
"""

import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Final

from dra_driver.agent.dependencies import AgentDependencies
from dra_driver.agent.health import STATUS_SECONDS, ServerHealth
from dra_driver.agent.namespaces import ServerNamespaces
from dra_driver.agent.state import NamespaceState, ServerState, ServerStateFile, new_daemon_token
from dra_driver.base.errors import DriverError, MpsClientStuck, MpsStateUnknown, NodeError, TimedOut
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.mps import (
    MpsNamespace,
    MpsNamespaceName,
    MpsServer,
    MpsServerName,
    MpsServerRestart,
    ServedNamespace,
)
from dra_driver.node.mps.daemon import DaemonStatus
from dra_driver.plan.mps import servers

log = logging.getLogger(__name__)

_TRIM_SECONDS: Final = 60.0  # between two looks at its logs


class ManagedServer:
    """Whoever calls holds the lock of this server; ``status`` and ``served`` need none."""

    def __init__(self, state: ServerState, tools: AgentDependencies) -> None:
        self._book = ServerStateFile(state, tools.files)
        self._tools = tools
        self._daemons = tools.daemons
        self._health = ServerHealth(tools.clock)
        self._namespaces = ServerNamespaces(self._book, tools.daemons, self._health)
        self._trimmed_at = float("-inf")
        self.gone = False  # ended, and nothing is written of it any more

    @property
    def _state(self) -> ServerState:
        return self._book.state

    @property
    def name(self) -> MpsServerName:
        return self._state.daemon.name

    @property
    def gpus(self) -> tuple[GpuUuid, ...]:
        return self._state.daemon.gpus

    @property
    def protocol(self) -> int:
        return self._state.daemon.protocol

    @property
    def is_well(self) -> bool:
        return not self._state.condemned and not self._health.trouble

    @property
    def lacks_spare(self) -> bool:
        return self.is_well and self._namespaces.lacks_spare

    @property
    def token(self) -> str:
        return self._state.daemon.token

    @property
    def is_sheltered(self) -> bool:
        """False: its daemon ends with this container."""
        return self._daemons.is_sheltered(self._state.daemon)

    def adopt(self) -> None:
        """Another agent started it."""
        self._daemons.shelter(self._state.daemon)

    def find(self, name: MpsNamespaceName) -> NamespaceState | None:
        return self._state.find(name)

    def serves(self, name: MpsNamespaceName) -> bool:
        return any(served.namespace.name == name for served in self._state.served)

    def status(self) -> MpsServer:
        state, trouble = self._state, self._health.trouble
        reason = "; ".join(dict.fromkeys(filter(None, (state.condemned, trouble))))
        return MpsServer(
            self.name,
            state.daemon.gpus,
            state.daemon.protocol,
            ready=bool(state.served) and not reason,
            reason=reason or ("" if state.served else "it is being started or ended"),
            namespaces=state.served,
            clients=self._health.clients,
            restarts=state.restarts,
            tenant=state.tenant,
        )

    def seconds_to_wait(self) -> float | None:
        """Until it wants to be tended before its time; None: it does not."""
        if self.is_well:
            return None
        return max(1.0, self._health.again_at - self._tools.clock.passed())

    # What is asked of it

    def start(self, namespace: MpsNamespace) -> ServedNamespace:
        """The first namespace of a server that was not there. If it fails, everything is undone."""
        self._book.write(self._state.keep(NamespaceState(namespace)))
        try:
            self._start(namespace)
        except Exception:
            self._undo(self._end)
            raise
        return self._served(namespace.name)

    def serve(self, namespace: MpsNamespace) -> ServedNamespace:
        """A namespace in a server that runs. If it fails, everything is undone."""
        if (known := self._state.find(namespace.name)) and known.served:
            return known.served
        self._make_room(namespace)
        try:
            self._namespaces.put(namespace)
        except Exception:
            self._undo(self._namespaces.clear)
            raise
        return self._served(namespace.name)

    def release(self, name: MpsNamespaceName) -> None:
        if (known := self._state.find(name)) is None:
            return
        self._book.note(self._state.keep(replace(known, served=None)))
        if not self._state.served:
            self._end()
        elif self._is_up():
            self._namespaces.clear()
        else:
            self._book.note(self._state.cleared())  # it is started again without

    def terminate(self, pids: Collection[int]) -> bool:
        """End clients. False: one cannot be ended. Then the server is condemned, and they end with
        it."""
        if not self._is_up():
            return False
        try:
            with self._health.counting():
                self._daemons.terminate(self._state.daemon, pids)
        except MpsClientStuck as e:
            self.look(0)  # how many are lost
            log.warning("clients do not end", extra={"server": self.name, "error": str(e)})
            self._condemn("a client could not be ended")  # whose, is no business of the others
            return False
        return True

    # What it needs

    def make_spare(self) -> None:
        """Have something ready for the next namespace, if nothing is."""
        if not self.lacks_spare or not self._is_up():
            return
        try:
            self._namespaces.make_spare()
        except Exception:
            self._undo(self._namespaces.clear)
            raise

    def tend(self) -> None:
        """Mend what is wrong, now and then looking for it."""
        self._book.catch_up()
        self._trim()
        if not self._health.is_due:
            return
        try:
            self._tend()
        except MpsStateUnknown as e:
            self._health.could_not_ask(str(e))
            raise

    def _tend(self) -> None:
        look = self.look() if self._state.served and self._is_up() else None
        if self._health.failed and not self._state.condemned:
            self._condemn(self._health.trouble)
        self.put_right()
        if look is not None and look.ready and self._state.daemon.protocol > 2:
            self._namespaces.mend(look, self._record, self.terminate)
            self.make_spare()

    def put_right(self) -> None:
        """As ``tend``, for somebody who waits for it: at once, and without a look."""
        try:
            if not self._state.served:
                self._end()
            elif not self._is_up():
                self._restart()
            else:
                self._namespaces.clear()
        except NodeError as e:
            self._health.pause(str(e))
            raise

    def look(self, older_than: float = STATUS_SECONDS) -> DaemonStatus | None:
        """See how it is; None: the last look is not that old, or it does not say."""
        if self._state.condemned or not self._health.needs_look(older_than):
            return None
        asked_at = self._tools.clock.passed()
        try:
            look = self._daemons.look(self._state.daemon)
        except TimedOut as e:
            self._health.saw_nothing(f"it does not answer: {e}", asked_at)
            return None
        except MpsStateUnknown as e:
            self._health.could_not_ask(str(e))
            return None
        except NodeError as e:
            self._health.saw_wrong(f"it answers with an error: {e}")
            return None
        self._health.saw(replace(look, clients=self._state.named(look.clients)))
        return look

    def _is_up(self) -> bool:
        if not self._state.condemned and not self._daemons.is_running(self._state.daemon):
            self._condemn("its daemon was gone")
        return not self._state.condemned

    def _condemn(self, reason: str) -> None:
        """From here on it is going to be started again, whoever does it."""
        namespaces = tuple(served.namespace.name for served in self._state.served)
        self._record(reason, namespaces, len(self._health.clients))
        self._book.note(replace(self._state, condemned=reason))
        log.warning("an MPS server is started again", extra={"server": self.name, "why": reason})

    def _record(self, reason: str, namespaces: tuple[MpsNamespaceName, ...], lost: int) -> None:
        now = self._tools.clock.since_epoch()
        self._tools.incidents.record(MpsServerRestart(0, self.name, now, reason, namespaces, lost))

    def _restart(self, more: MpsNamespace | None = None) -> None:
        """End what is left of it and start it with what was served, in the same directory:
        containers have it mounted.

        Only protocol 3 serves several tenants: where there is no more of that, they have to come to
        servers of their own.
        """
        old = self._state.daemon
        # Containers have what their protocol needs; a driver that is older by now has no other.
        protocol = min(old.protocol, self._daemons.protocol())  # without a driver nothing is ended
        self._daemons.end(old)
        if protocol < old.protocol:
            self._book.write(self._state.without_tenants())
            if not self._state.served:
                return self._end()
        namespaces = tuple(served.namespace for served in self._state.served)
        most = servers.default_limits((*namespaces, more) if more else namespaces)
        daemon = replace(
            old,
            token=new_daemon_token(),
            most=most,
            protocol=protocol,
        )
        self._book.write(replace(self._state.cleared(), daemon=daemon))
        self._start()

    def _start(self, first: MpsNamespace | None = None) -> None:
        wanted = self._namespaces.to_start(first)
        directories = self._daemons.start(self._state.daemon, wanted)
        state = self._namespaces.started(directories)
        again = state.restarts + (1 if state.condemned else 0)
        self._book.write(replace(state, condemned="", restarts=again))
        self._health.fresh()

    def _trim(self) -> None:
        now = self._tools.clock.passed()
        if now - self._trimmed_at >= _TRIM_SECONDS:
            self._trimmed_at = now
            self._daemons.trim(self._state.daemon)

    def _end(self) -> None:
        self._daemons.stop(self._state.daemon)
        self._book.close()
        self.gone = True

    def _make_room(self, namespace: MpsNamespace) -> None:
        """Protocol 2: the environment cannot give a client more than the server's defaults."""
        most, needed = self._state.daemon.most, servers.least_limits(namespace)
        if self._state.daemon.protocol > 2 or not servers.exceeds_limits(needed, most):
            return
        self.look(0)
        if self._health.clients or self._health.trouble:
            number = len(self._health.clients)
            busy = f"{number} now" if number else self._health.trouble
            raise NodeError(
                f"the MPS server over {', '.join(namespace.gpus)} gives a client at most "
                f"{servers.describe_limits(most)}, and claim {namespace.claim} wants "
                f"{servers.describe_limits(needed)}: it can give more once its clients have "
                f"ended ({busy})"
            )
        self._condemn("it has to give more than it was started with")
        self._restart(namespace)

    def _served(self, name: MpsNamespaceName) -> ServedNamespace:
        return next(served for served in self._state.served if served.namespace.name == name)

    def _undo(self, how: Callable[[], None]) -> None:
        try:
            how()
        except DriverError as e:
            self._health.pause(str(e))
            log.warning("it will be undone later", extra={"server": self.name, "error": str(e)})
