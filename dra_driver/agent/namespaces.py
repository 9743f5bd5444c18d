"""The namespaces of one MPS server: those of claims, and with protocol 3 a spare one.

The next claim gets the spare, so that its pod waits as little as possible. A spare is recorded
before it is created, except the one that a daemon is started with. To hand it out takes one write,
after its limits are set and before the answer; an agent that is killed in between leaves a spare of
unknown limits. A namespace that has to be created first is recorded twice: before that, and once it
can be used. A tenant that is root can change what its server grants: that is repaired, but not
without end.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Final

from dra_driver.agent.server_health import ServerHealth
from dra_driver.agent.state import (
    NamespaceState,
    ServerState,
    ServerStateFile,
    SpareNamespace,
    new_namespace_name,
)
from dra_driver.base.errors import NodeError, TimedOut
from dra_driver.model.mps import MpsClient, MpsNamespace, MpsNamespaceName, ServedNamespace
from dra_driver.node.mps.daemon import ControlDaemon, DaemonStatus
from dra_driver.node.mps.daemons import MpsDaemons
from dra_driver.plan.mps.servers import compare_namespaces, describe_limits

log = logging.getLogger(__name__)

_MAX_REPAIRS: Final = 3  # of one namespace by one agent, which may misread what the daemon says
_ANY_SPARE: Final = MpsNamespaceName("")
_LIMIT_ATTEMPTS: Final = 3  # to set limits before the next client connects

TerminateClients = Callable[[Collection[int]], bool]
"""Ends clients. False: they end with the server, which is started again."""

Record = Callable[[str, tuple[MpsNamespaceName, ...], int], None]
"""Records an incident: why, which namespaces, how many clients were lost."""


class ServerNamespaces:
    """The server has to run, where nothing else is said. NodeError: something could not be done;
    what is written then is for ``remove_unusable``."""

    def __init__(
        self, state_file: ServerStateFile, daemons: MpsDaemons, health: ServerHealth
    ) -> None:
        self._file = state_file
        self._daemons = daemons
        self._health = health
        self._repairs: Counter[MpsNamespaceName] = Counter()
        self._ready: MpsNamespace | None = None  # the spare, if this agent set its limits
        self._last: MpsNamespace | None = None  # that was served
        self._failed = False  # the last attempt to create a spare

    @property
    def _state(self) -> ServerState:
        return self._file.state

    @property
    def _daemon(self) -> ControlDaemon:
        return self._state.daemon

    def put(self, namespace: MpsNamespace) -> None:
        """Have it served."""
        if not self._give_spare(namespace):
            if self._daemon.protocol > 2:  # with protocol 2 nothing is made
                self._file.write(self._state.with_namespace(NamespaceState(namespace)))
            self._add(NamespaceState(namespace))
        self._last, self._failed = namespace, False

    def remove_unusable(self) -> None:
        """Remove the namespaces that no claim can use."""
        unusable = self._state.unusable
        with self._health.counting_timeouts():
            for name in unusable:
                self._daemons.remove_namespace(self._daemon, name)
        if unusable:
            self._file.write_or_retry(self._state.without_unusable())

    def to_start(self) -> tuple[MpsNamespace, ...]:
        """The namespaces that its daemon is started with: those that are written, and a spare."""
        self._last = self._last or self._state.namespaces[-1].namespace
        namespaces = tuple(entry.in_daemon for entry in self._state.namespaces)
        self._ready = None
        if self._daemon.protocol > 2:
            self._ready = self._like_the_last(self._state.spare)
            namespaces += (self._ready,)
        return namespaces

    def started(self, directories: Mapping[MpsNamespaceName, str]) -> ServerState:
        """The state to be written: what the daemon serves since it was started."""
        ready = self._ready
        self._failed = False
        namespaces = [
            self._served_in(entry, directories[entry.in_daemon.name])
            for entry in self._state.namespaces
        ]
        return replace(
            self._state,
            namespaces=tuple(namespaces),
            spare=SpareNamespace(ready.name, directories[ready.name]) if ready else None,
        )

    @property
    def lacks_spare(self) -> bool:
        state = self._state
        if state.daemon.protocol == 2 or not state.served or self._failed:
            return False
        last = self._last
        return state.spare is None or (last is not None and not _can_become(self._ready, last))

    def make_spare(self) -> None:
        """With the limits that the last namespace got. Once, until the next is served."""
        self._failed = True
        if self._state.spare:
            self._spoil(self._state.spare)
            self.remove_unusable()
        namespace = self._like_the_last(None)
        self._file.write(replace(self._state, spare=SpareNamespace(namespace.name)))
        with self._health.counting_timeouts():
            directory = self._daemons.add_namespace(self._daemon, namespace)
        self._file.write(replace(self._state, spare=SpareNamespace(namespace.name, directory)))
        self._ready, self._failed = namespace, False

    def repair(self, status: DaemonStatus, record: Record, terminate: TerminateClients) -> None:
        """A tenant that is root can change what its server grants: grant again what is written."""
        served = {
            entry.in_daemon.name: entry
            for entry in self._state.namespaces
            if entry.served is not None
        }
        changes = compare_namespaces(
            [entry.in_daemon for entry in served.values()], status.namespaces
        )
        spare = self._state.spare
        for name in changes.unwanted:
            if spare is None or name != spare.name:
                self._daemons.remove_namespace(self._daemon, name)
        if spare is not None and self._is_changed(spare, status):
            self._spoil(spare)
            self.remove_unusable()
        for namespace in changes.missing:
            entry = served[namespace.name]
            if self._begin_repair(entry, "it was removed", status.clients, record) is not None:
                self._add(entry)
        for namespace, limits in changes.loose:
            entry = served[namespace.name]
            reason = (
                f"its limits were changed: {describe_limits(limits)} instead of "
                f"{describe_limits(namespace.limits)}"
            )
            pids = self._begin_repair(entry, reason, status.clients, record)
            if pids is not None:
                self._restore_limits(namespace, pids, terminate)

    def _is_changed(self, spare: SpareNamespace, status: DaemonStatus) -> bool:
        if spare.name not in status.namespaces:
            return True
        if self._ready is None:  # which limits it should have is not known
            return False
        limits = {spare.name: status.namespaces[spare.name]}
        return bool(compare_namespaces([self._ready], limits).loose) and self._may_repair(
            _ANY_SPARE
        )

    def _may_repair(self, name: MpsNamespaceName) -> bool:
        self._repairs[name] += 1
        return self._repairs[name] <= _MAX_REPAIRS

    def _begin_repair(
        self, entry: NamespaceState, reason: str, clients: Collection[MpsClient], record: Record
    ) -> list[int] | None:
        """Record it. The clients that are in the namespace; None: it was repaired too often."""
        if not self._may_repair(entry.in_daemon.name):
            return None
        name = entry.namespace.name
        log.error("somebody changed an MPS namespace", extra={"namespace": name, "why": reason})
        pids = _clients_in(clients, entry.in_daemon.name)
        record(reason, (name,), len(pids))
        return pids

    def _restore_limits(
        self, namespace: MpsNamespace, pids: Collection[int], terminate: TerminateClients
    ) -> None:
        """Its clients are ended first, since limits of a namespace with clients cannot be set. Its
        directory stays what it is, since containers have it mounted."""
        for attempts_left in reversed(range(_LIMIT_ATTEMPTS)):
            if not terminate(pids):
                return
            try:
                return self._daemons.limit_namespace(self._daemon, namespace)
            except NodeError as e:
                if isinstance(e, TimedOut) or not attempts_left:
                    raise
            pids = _clients_in(self._daemons.check(self._daemon).clients, namespace.name)

    def _add(self, entry: NamespaceState) -> None:
        with self._health.counting_timeouts():
            directory = self._daemons.add_namespace(self._daemon, entry.in_daemon)
        self._file.write(self._state.with_namespace(self._served_in(entry, directory)))

    def _give_spare(self, namespace: MpsNamespace) -> bool:
        """Serve *namespace* with what is ready, at the price of one run of the program at most."""
        spare, ready = self._state.spare, self._ready
        if spare is None or not spare.directory or not self._daemons.is_there(spare.directory):
            return False
        if not _can_become(ready, namespace):
            return False
        self._ready = None
        entry = self._served_in(NamespaceState(namespace, daemon_name=spare.name), spare.directory)
        if ready is None or not _same_limits(ready, namespace):
            try:
                with self._health.counting_timeouts():
                    self._daemons.limit_namespace(self._daemon, entry.in_daemon)
            except NodeError as e:
                self._spoil(spare)
                if isinstance(e, TimedOut):
                    raise
                log.warning("a spare MPS namespace is of no use", extra={"error": str(e)})
                self.remove_unusable()
                return False
        self._file.write(replace(self._state.with_namespace(entry), spare=None))
        return True

    def _spoil(self, spare: SpareNamespace) -> None:
        """Record that no claim gets it."""
        self._ready = None
        self._file.write_or_retry(replace(self._state, spare=replace(spare, directory="")))

    def _like_the_last(self, spare: SpareNamespace | None) -> MpsNamespace:
        last = self._last or self._state.served[-1].namespace
        return replace(last, name=spare.name if spare else new_namespace_name())

    def _served_in(self, entry: NamespaceState, directory: str) -> NamespaceState:
        daemon = self._daemon
        shm = daemon.shm if daemon.protocol == 2 else ""
        served = ServedNamespace(entry.namespace, daemon.protocol, directory, shm)
        return replace(entry, served=served)


def _clients_in(clients: Collection[MpsClient], namespace: MpsNamespaceName) -> list[int]:
    """The clients of a namespace, as the daemon calls it."""
    return [client.pid for client in clients if client.namespace == namespace]


def _can_become(ready: MpsNamespace | None, namespace: MpsNamespace) -> bool:
    """A limit of memory can be changed, and not be taken away."""
    if namespace.limits.memory_bytes is not None:
        return True
    return ready is not None and ready.limits.memory_bytes is None


def _same_limits(spare: MpsNamespace, namespace: MpsNamespace) -> bool:
    return (spare.limits, spare.priority) == (namespace.limits, namespace.priority)
