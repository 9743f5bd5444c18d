"""The life of one MPS server: started, given namespaces, checked, repaired, stopped.

Every change is recorded before it is made (``agent.state``), so that ``maintain`` completes
whatever an agent that was killed left unfinished. A namespace that was recorded and never served is
removed; a server without served namespaces is stopped; one with a ``restart_reason`` is started
again with everything that it served.
"""

import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Final

from dra_driver.agent.dependencies import AgentDependencies
from dra_driver.agent.namespaces import ServerNamespaces
from dra_driver.agent.server_health import STATUS_SECONDS, ServerHealth
from dra_driver.agent.state import NamespaceState, ServerState, ServerStateFile, new_daemon_token
from dra_driver.base.errors import DriverError, MpsClientStuck, MpsStateUnknown, NodeError, TimedOut
from dra_driver.model.mps import (
    MpsNamespace,
    MpsNamespaceName,
    MpsServer,
    MpsServerName,
    MpsServerRestart,
    ServedNamespace,
)
from dra_driver.node.mps.daemon import ControlDaemon, DaemonStatus
from dra_driver.plan.mps import servers

log = logging.getLogger(__name__)

_TRIM_SECONDS: Final = 60.0  # between two looks at its logs
_RELEASED: Final = "its GPUs were released for a while"


class ManagedServer:
    """Callers hold the lock of this server; ``status`` and ``serves`` need none."""

    def __init__(self, state: ServerState, dependencies: AgentDependencies) -> None:
        self._file = ServerStateFile(state, dependencies.files)
        self._files = dependencies.files
        self._daemons = dependencies.daemons
        self._clock = dependencies.clock
        self._released = dependencies.released
        self._health = ServerHealth(dependencies.clock)
        self._namespaces = ServerNamespaces(self._file, dependencies.daemons, self._health)
        self._trimmed_at = float("-inf")
        self.gone = False  # stopped, and its record is removed

    @property
    def state(self) -> ServerState:
        return self._file.state

    @property
    def daemon(self) -> ControlDaemon:
        return self.state.daemon

    @property
    def name(self) -> MpsServerName:
        return self.daemon.name

    @property
    def is_well(self) -> bool:
        return not self.state.restart_reason and not self._health.problem

    @property
    def lacks_spare(self) -> bool:
        return self.is_well and self._namespaces.lacks_spare

    def serves(self, name: MpsNamespaceName) -> bool:
        return any(served.namespace.name == name for served in self.state.served)

    def status(self) -> MpsServer:
        state, trouble = self.state, self._health.problem
        reason = "; ".join(dict.fromkeys(filter(None, (state.restart_reason, trouble))))
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
        """Until its next ``maintain``, if that is sooner than usual; None: it is not."""
        if self.is_well or self._is_released:
            return None
        return max(1.0, self._health.retry_at - self._clock.passed())

    def start(self, namespace: MpsNamespace) -> ServedNamespace:
        """Start the server, with its first namespace. A failure is undone."""
        self._refuse_released()
        self._file.write(self.state.with_namespace(NamespaceState(namespace)))
        try:
            self._start()
        except Exception:
            self._undo(self._stop)
            raise
        return self._answer(namespace.name)

    def serve(self, namespace: MpsNamespace) -> ServedNamespace:
        """Serve one more namespace. A failure is undone."""
        if (entry := self.state.find(namespace.name)) and entry.served:
            return entry.served
        self._make_room(namespace)
        try:
            self._namespaces.put(namespace)
        except Exception:
            self._undo(self._namespaces.remove_unusable)
            raise
        return self._answer(namespace.name)

    def release(self, name: MpsNamespaceName) -> None:
        if (entry := self.state.find(name)) is None:
            return
        self._file.write_or_retry(self.state.with_namespace(replace(entry, served=None)))
        if not self.state.served:
            self._stop()
        elif self._is_up():
            self._namespaces.remove_unusable()
        else:
            self._file.write_or_retry(self.state.without_unusable())  # it restarts without it

    def terminate(self, pids: Collection[int]) -> bool:
        """End clients. False: one cannot be ended, so the server is restarted, and they end with
        it."""
        if not self._is_up():
            return False
        try:
            with self._health.counting_timeouts():
                self._daemons.terminate(self.daemon, pids)
        except MpsClientStuck as e:
            self.check(0)  # how many are lost
            log.warning("clients do not end", extra={"server": self.name, "error": str(e)})
            # Tenants of the server read this: it does not say whose client.
            self._require_restart("a client could not be ended")
            return False
        return True

    def make_spare(self) -> None:
        """Create a spare namespace for the next claim, unless there is one."""
        if not self.lacks_spare or not self._is_up():
            return
        try:
            self._namespaces.make_spare()
        except Exception:
            self._undo(self._namespaces.remove_unusable)
            raise

    def maintain(self) -> None:
        """Check it now and then, and repair what is wrong."""
        self._file.retry_write()
        self._trim()
        if not self._health.is_due:
            return
        try:
            self._maintain()
        except MpsStateUnknown as e:
            self._health.could_not_ask(str(e))
            raise

    def let_go(self) -> None:
        """If its GPUs are released, end its daemon, unless it has clients; one that failed, as
        always. ``maintain`` starts it again, with all that it served, when they are not any
        more."""
        if not self._is_released or not self.state.served:
            return
        if not self.state.restart_reason:
            self.check(0)
            if not self._health.failed and (self._health.clients or self._health.problem):
                return
            self._require_restart(self._health.problem or _RELEASED)
        if self._daemons.is_running(self.daemon):
            self._daemons.kill(self.daemon)

    @property
    def _is_released(self) -> bool:
        return self._released.any_of(self.daemon.gpus, self._clock.since_epoch())

    def _refuse_released(self) -> None:
        """NodeError: its GPUs are released."""
        self._released.refuse(self.daemon.gpus, self._clock.since_epoch())

    def _maintain(self) -> None:
        if self._is_released and self.state.served:
            return self.let_go()
        status = self.check() if self.state.served and self._is_up() else None
        if self._health.failed and not self.state.restart_reason:
            self._require_restart(self._health.problem)
        self.finish_interrupted()
        if status is not None and status.ready and self.daemon.protocol > 2:
            self._namespaces.repair(status, self._record, self.terminate)
            self.make_spare()

    def finish_interrupted(self) -> None:
        """Do what the state says and was not done yet: stop, restart, or remove namespaces.
        NodeError: it cannot be done, or has to wait."""
        if self.state.served and self.state.restart_reason:
            self._refuse_released()
        try:
            if not self.state.served:
                self._stop()
            elif not self._is_up():
                self._restart()
            else:
                self._namespaces.remove_unusable()
        except NodeError as e:
            self._health.back_off(str(e))
            raise

    def check(self, older_than: float = STATUS_SECONDS) -> DaemonStatus | None:
        """Its status; None: the last one is not that old, or it does not answer."""
        if self.state.restart_reason or not self._health.needs_check(older_than):
            return None
        asked_at = self._clock.passed()
        try:
            status = self._daemons.check(self.daemon)
        except TimedOut as e:
            self._health.did_not_answer(f"it does not answer: {e}", asked_at)
            return None
        except MpsStateUnknown as e:
            self._health.could_not_ask(str(e))
            return None
        except NodeError as e:
            self._health.answered_wrong(f"it answers with an error: {e}")
            return None
        clients = self.state.with_claim_names(status.clients)
        self._health.answered(replace(status, clients=clients))
        return status

    def _is_up(self) -> bool:
        if not self.state.restart_reason and not self._daemons.is_running(self.daemon):
            self._require_restart("its daemon was gone")
        return not self.state.restart_reason

    def _require_restart(self, reason: str) -> None:
        """Record that it has to be started again, by this agent or the next."""
        namespaces = tuple(served.namespace.name for served in self.state.served)
        self._record(reason, namespaces, len(self._health.clients))
        self._file.write_or_retry(replace(self.state, restart_reason=reason))
        log.warning("an MPS server is started again", extra={"server": self.name, "why": reason})

    def _record(self, reason: str, namespaces: tuple[MpsNamespaceName, ...], lost: int) -> None:
        now = self._clock.since_epoch()
        self._files.record(MpsServerRestart(0, self.name, now, reason, namespaces, lost))

    def _restart(self, more: MpsNamespace | None = None) -> None:
        """Kill its daemon and start another with what was served, in the same directory, which
        containers have mounted. *more*: what it is about to serve.

        Only protocol 3 serves several tenants: with an older driver, each gets a server of its own
        once it is asked for again.
        """
        old = self.daemon
        # Containers have what their protocol needs; a driver that is older by now has no other.
        protocol = min(old.protocol, self._daemons.protocol())  # without a driver nothing is ended
        self._daemons.kill(old)
        if protocol < old.protocol:
            self._file.write(self.state.without_tenants())
            if not self.state.served:
                return self._stop()
        namespaces = tuple(served.namespace for served in self.state.served)
        limits = servers.default_limits((*namespaces, more) if more else namespaces)
        daemon = replace(old, token=new_daemon_token(), default_limits=limits, protocol=protocol)
        self._file.write(replace(self.state.without_unusable(), daemon=daemon))
        self._start()

    def _start(self) -> None:
        namespaces = self._namespaces.to_start()
        directories = self._daemons.start(self.daemon, namespaces)
        state = self._namespaces.started(directories)
        restarts = state.restarts + (1 if state.restart_reason else 0)
        self._file.write(replace(state, restart_reason="", restarts=restarts))
        self._health.restarted()

    def _trim(self) -> None:
        now = self._clock.passed()
        if now - self._trimmed_at >= _TRIM_SECONDS:
            self._trimmed_at = now
            self._daemons.trim_logs(self.daemon)

    def _stop(self) -> None:
        self._daemons.stop_and_remove(self.daemon)
        self._file.close()
        self.gone = True

    def _make_room(self, namespace: MpsNamespace) -> None:
        """Raise the defaults of a server of protocol 2, which the environment can only lower."""
        most, needed = self.daemon.default_limits, servers.least_limits(namespace)
        if self.daemon.protocol > 2 or not needed.exceed(most):
            return
        self.check(0)
        if self._health.clients or self._health.problem:
            number = len(self._health.clients)
            busy = f"{number} now" if number else self._health.problem
            raise NodeError(
                f"the MPS server over {', '.join(namespace.gpus)} gives a client at most "
                f"{servers.describe_limits(most)}, and claim {namespace.claim} wants "
                f"{servers.describe_limits(needed)}: it can give more once its clients have "
                f"ended ({busy})"
            )
        self._require_restart("it has to give more than it was started with")
        self._restart(namespace)

    def _answer(self, name: MpsNamespaceName) -> ServedNamespace:
        return next(served for served in self.state.served if served.namespace.name == name)

    def _undo(self, act: Callable[[], None]) -> None:
        try:
            act()
        except DriverError as e:
            self._health.back_off(str(e))
            log.warning("it will be undone later", extra={"server": self.name, "error": str(e)})
