"""The namespaces of one MPS server: those of claims, and with protocol 3 a spare one.

The next claim gets the spare, so that its pod waits as little as possible. A spare is recorded
before it is created, except the one that a daemon is started with. To hand it out takes one write,
after its limits are set and before the answer; an agent that is killed in between leaves a spare of
unknown limits. A namespace that has to be created first is recorded twice: before that, and once it
can be used. A tenant that is root can change its server: ``DriftRepair`` says what changed, and
limits how often that is repaired.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final

from dra_driver.agent.dependencies import DaemonManager
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
from dra_driver.plan.mps.servers import compare_namespaces, describe_limits

_MAX_REPAIRS: Final = (
    3  # times that one agent mends a namespace: it may misread what the daemon says
)
_ANY_SPARE: Final = MpsNamespaceName("")
_TRIES: Final = 3  # to change limits before the next client is there


@dataclass(frozen=True, slots=True)
class ServerDrift:
    """Found in one server."""

    unmanaged: tuple[MpsNamespaceName, ...] = ()  # namespaces that are not recorded
    spare_changed: bool = False
    namespaces: tuple[tuple[NamespaceState, str], ...] = ()  # and why
    missing: frozenset[MpsNamespaceName] = frozenset()  # those of them that are gone altogether


class DriftRepair:
    """Of one server."""

    def __init__(self) -> None:
        self._times: Counter[MpsNamespaceName] = Counter()

    def drift(
        self, state: ServerState, spare: MpsNamespace | None, look: DaemonStatus
    ) -> ServerDrift:
        """*spare*: with the limits that it has to have; None: they are not known."""
        kept = {
            entry.in_daemon.name: entry for entry in state.namespaces if entry.served is not None
        }
        differences = compare_namespaces(
            [entry.in_daemon for entry in kept.values()], look.namespaces
        )
        spare_name = state.spare.name if state.spare else None
        spare_changed = spare_name is not None and spare_name not in look.namespaces
        if spare is not None and not spare_changed:
            changed = compare_namespaces([spare], {spare.name: look.namespaces[spare.name]}).loose
            spare_changed = bool(changed) and self._again(_ANY_SPARE)
        why = {namespace.name: "it was removed" for namespace in differences.missing}
        for namespace, actual_limits in differences.loose:
            limits = describe_limits(namespace.limits)
            why[namespace.name] = (
                f"its limits were changed: {describe_limits(actual_limits)} instead of {limits}"
            )
        return ServerDrift(
            tuple(name for name in differences.unwanted if name != spare_name),
            spare_changed,
            tuple((kept[name], reason) for name, reason in why.items() if self._again(name)),
            frozenset(namespace.name for namespace in differences.missing),
        )

    def _again(self, name: MpsNamespaceName) -> bool:
        self._times[name] += 1
        return self._times[name] <= _MAX_REPAIRS


def clients_in(clients: Collection[MpsClient], namespace: MpsNamespaceName) -> list[int]:
    """The clients of a namespace, as the daemon calls it."""
    return [client.pid for client in clients if client.namespace == namespace]


TerminateClients = Callable[[Collection[int]], bool]
"""Ends clients. False: they end with the server, which is started again."""


def restore_limits(
    daemons: DaemonManager,
    daemon: ControlDaemon,
    namespace: MpsNamespace,
    pids: Collection[int],
    end: TerminateClients,
) -> None:
    """Its clients are ended first: with some in there it is refused. Its directory stays what it
    is, since containers have it mounted."""
    for tries_left in reversed(range(_TRIES)):
        if not end(pids):
            return
        try:
            return daemons.limit(daemon, namespace)
        except NodeError as e:
            if isinstance(e, TimedOut) or not tries_left:
                raise
        pids = clients_in(daemons.check(daemon).clients, namespace.name)


log = logging.getLogger(__name__)

Record = Callable[[str, tuple[MpsNamespaceName, ...], int], None]
"""Writes down that something happened: why, to which namespaces, how many clients were lost."""


class ServerNamespaces:
    """Of a server that runs, where nothing else is said. NodeError: something could not be done;
    what is written then is for ``remove_unusable``."""

    def __init__(
        self, state_file: ServerStateFile, daemons: DaemonManager, health: ServerHealth
    ) -> None:
        self._file = state_file
        self._daemons = daemons
        self._health = health
        self._repair = DriftRepair()
        self._ready: MpsNamespace | None = None  # the spare, if its limits were set here
        self._last: MpsNamespace | None = None  # that was served
        self._failed = False  # the last try to make a spare

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
        """Take out what is written and nobody can use."""
        unusable = self._state.unusable
        with self._health.counting_timeouts():
            for name in unusable:
                self._daemons.remove(self._daemon, name)
        if unusable:
            self._file.write_or_retry(self._state.without_unusable())

    def to_start(self, first: MpsNamespace | None = None) -> tuple[MpsNamespace, ...]:
        """What its daemon is started with, as that knows it: what is written, and a spare."""
        self._last = first or self._last
        namespaces = tuple(entry.in_daemon for entry in self._state.namespaces)
        self._ready = None
        if self._daemon.protocol > 2:
            self._ready = self._like_the_last(self._state.spare)
            namespaces += (self._ready,)
        return namespaces

    def started(self, directories: Mapping[MpsNamespaceName, str]) -> ServerState:
        """What is served now; to be written."""
        ready = self._ready
        self._failed = False
        namespaces = [
            self._served(entry, directories[entry.in_daemon.name])
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
            directory = self._daemons.add(self._daemon, namespace)
        self._file.write(replace(self._state, spare=SpareNamespace(namespace.name, directory)))
        self._ready, self._failed = namespace, False

    def repair(self, look: DaemonStatus, record: Record, end: TerminateClients) -> None:
        """A tenant that is root can change what its server grants."""
        drift = self._repair.drift(self._state, self._ready, look)
        for name in drift.unmanaged:
            self._daemons.remove(self._daemon, name)
        if drift.spare_changed and self._state.spare:
            self._spoil(self._state.spare)
            self.remove_unusable()
        for kept, reason in drift.namespaces:
            namespace, in_daemon = kept.namespace.name, kept.in_daemon
            log.error(
                "somebody changed an MPS namespace", extra={"namespace": namespace, "why": reason}
            )
            clients = clients_in(look.clients, in_daemon.name)
            record(reason, (namespace,), len(clients))
            if in_daemon.name in drift.missing:
                self._add(kept)
            else:
                restore_limits(self._daemons, self._daemon, in_daemon, clients, end)

    def _add(self, kept: NamespaceState) -> None:
        with self._health.counting_timeouts():
            directory = self._daemons.add(self._daemon, kept.in_daemon)
        self._file.write(self._state.with_namespace(self._served(kept, directory)))

    def _give_spare(self, namespace: MpsNamespace) -> bool:
        """Serve *namespace* with what is ready, at the price of one run of the program at most."""
        spare, ready = self._state.spare, self._ready
        if spare is None or not spare.directory or not self._daemons.is_there(spare.directory):
            return False
        if not _can_become(ready, namespace):
            return False
        self._ready = None
        kept = self._served(NamespaceState(namespace, daemon_name=spare.name), spare.directory)
        if ready is None or not _same_limits(ready, namespace):
            try:
                with self._health.counting_timeouts():
                    self._daemons.limit(self._daemon, kept.in_daemon)
            except NodeError as e:
                self._spoil(spare)
                if isinstance(e, TimedOut):
                    raise
                log.warning("a spare MPS namespace is of no use", extra={"error": str(e)})
                self.remove_unusable()
                return False
        self._file.write(replace(self._state.with_namespace(kept), spare=None))
        return True

    def _spoil(self, spare: SpareNamespace) -> None:
        """From here on nobody gets it."""
        self._ready = None
        self._file.write_or_retry(replace(self._state, spare=replace(spare, directory="")))

    def _like_the_last(self, spare: SpareNamespace | None) -> MpsNamespace:
        last = self._last or self._state.served[-1].namespace
        return replace(last, name=spare.name if spare else new_namespace_name())

    def _served(self, kept: NamespaceState, directory: str) -> NamespaceState:
        daemon = self._daemon
        shm = daemon.shm if daemon.protocol == 2 else ""
        return replace(
            kept, served=ServedNamespace(kept.namespace, daemon.protocol, directory, shm)
        )


def _can_become(ready: MpsNamespace | None, namespace: MpsNamespace) -> bool:
    """A limit of memory can be changed, and not be taken away."""
    if namespace.limits.memory_bytes is not None:
        return True
    return ready is not None and ready.limits.memory_bytes is None


def _same_limits(spare: MpsNamespace, other: MpsNamespace) -> bool:
    return (spare.limits, spare.priority) == (other.limits, other.priority)
