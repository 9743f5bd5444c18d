"""The agent's state on disk: a file for each server, and one of restarts.

Layout: ``<mps-dir>/state/<server name>.json`` and ``<mps-dir>/state/incidents.json``. A file is
replaced as a whole, before each effect. So the next agent knows what a killed one left: every
process of a daemon carries the token that the file names. Only a removal goes on where the disk has
no room for its record, so that pods can end: an agent that is killed before there is room leaves a
namespace that the plugin ends again.

A server whose file another release wrote and this one does not understand (``base.codec``) runs on
as it is, and serves nobody anew.

Nothing is fsynced: a killed agent loses nothing that it wrote, and no daemon survives a power cut.
"""

import logging
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from dra_driver.base.codec import Codec, Undecodable
from dra_driver.base.errors import NodeError
from dra_driver.base.files import disk_errors, write_atomically
from dra_driver.base.frozen import frozen
from dra_driver.model.mps import (
    MpsClient,
    MpsNamespace,
    MpsNamespaceName,
    MpsServerName,
    MpsServerRestart,
    ServedNamespace,
)
from dra_driver.node.mps.daemon import ControlDaemon
from dra_driver.plan.mps.servers import default_limits

log = logging.getLogger(__name__)

_INCIDENTS: Final = "incidents"
_MAX_INCIDENTS: Final = 32
_ASIDE: Final = ".unreadable"
_NUMBER: Final = re.compile(rb'"number": ?([0-9]{1,15})\b')


@frozen
class NamespaceState:
    """A namespace of a server. Nobody can use one without *served*: it is being created or removed,
    or a crash left it there."""

    namespace: MpsNamespace
    served: ServedNamespace | None = None
    daemon_name: MpsNamespaceName | None = None  # what its daemon calls it; None: as the namespace

    @property
    def in_daemon(self) -> MpsNamespace:
        """As its daemon knows it."""
        return replace(self.namespace, name=self.daemon_name or self.namespace.name)


@frozen
class SpareNamespace:
    """A namespace that no claim has yet. Its limits are not recorded: an agent that did not set
    them itself sets them again."""

    name: MpsNamespaceName
    directory: str = ""  # empty: it is on its way in or out, or a crash left it there


@frozen
class ServerState:
    """One server, as it should be. One without a served namespace is to be stopped."""

    daemon: ControlDaemon
    namespaces: tuple[NamespaceState, ...] = ()
    restart_reason: str = ""  # why it has to be started again; its incident is recorded
    restarts: int = 0
    spare: SpareNamespace | None = None

    @property
    def served(self) -> tuple[ServedNamespace, ...]:
        return tuple(entry.served for entry in self.namespaces if entry.served is not None)

    def find(self, name: MpsNamespaceName) -> NamespaceState | None:
        return next((entry for entry in self.namespaces if entry.namespace.name == name), None)

    def with_namespace(self, entry: NamespaceState) -> "ServerState":
        """With this entry in place of the one of the same name."""
        by_name = {each.namespace.name: each for each in (*self.namespaces, entry)}
        return replace(self, namespaces=tuple(by_name[name] for name in sorted(by_name)))

    @property
    def unusable(self) -> tuple[MpsNamespaceName, ...]:
        """The namespaces that no claim can use, as the daemon calls them."""
        names = [entry.in_daemon.name for entry in self.namespaces if entry.served is None]
        if self.spare is not None and not self.spare.directory:
            names.append(self.spare.name)
        return tuple(names)

    def without_unusable(self) -> "ServerState":
        namespaces = tuple(entry for entry in self.namespaces if entry.served is not None)
        spare = self.spare if self.spare and self.spare.directory else None
        return replace(self, namespaces=namespaces, spare=spare)

    @property
    def tenant(self) -> str:
        """The tenant of all namespaces; empty: they are of several."""
        tenants = {entry.namespace.tenant for entry in self.namespaces}
        return tenants.pop() if len(tenants) == 1 else ""

    def without_tenants(self) -> "ServerState":
        """Without the namespaces of tenants, who share no server of protocol 2."""
        namespaces = tuple(entry for entry in self.namespaces if not entry.namespace.tenant)
        return replace(self, namespaces=namespaces)

    def with_claim_names(self, clients: Iterable[MpsClient]) -> tuple[MpsClient, ...]:
        """*clients* with the claim's name of their namespace, in place of the daemon's."""
        names = {entry.in_daemon.name: entry.namespace.name for entry in self.namespaces}
        return tuple(
            replace(client, namespace=names.get(client.namespace, client.namespace))
            if client.namespace is not None
            else client
            for client in clients
        )


def new_namespace_name() -> MpsNamespaceName:
    """For a spare. Short, because it is part of the path of a socket."""
    return MpsNamespaceName(f"n_{secrets.token_hex(8)}")


def new_daemon_token() -> str:
    """Marks the processes of one daemon; a tenant cannot guess it."""
    return secrets.token_hex(16)


def new_server_state(
    name: MpsServerName, namespace: MpsNamespace, protocol: int, mps_dir: str
) -> ServerState:
    """An empty server over the GPUs of *namespace*, in their order: limits count GPUs by that."""
    limits = default_limits([namespace])
    directory = f"{mps_dir}/{name}"
    return ServerState(
        ControlDaemon(name, namespace.gpus, protocol, directory, new_daemon_token(), limits)
    )


@frozen
class IncidentDocument:
    """The last restarts of servers, oldest first."""

    incidents: tuple[MpsServerRestart, ...] = ()


SERVER_STATES: Final = Codec[ServerState](ServerState)
INCIDENT_LOGS: Final = Codec[IncidentDocument](IncidentDocument)


class ServerStateFiles:
    """The directory of the files. One agent at a time uses it; ``load`` comes first."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self.set_aside: dict[MpsServerName, str] = {}  # servers with an unreadable file, and why
        self._of_other_release: dict[MpsServerName, tuple[str, bytes]] = {}  # why, and the files
        self._before: dict[str, bytes] = {}  # the files that were there
        self.incidents: tuple[MpsServerRestart, ...] = ()  # the last ones, oldest first

    def load(self) -> tuple[ServerState, ...]:
        """Every server, and the incidents. A damaged file is ``set_aside``, and one that only
        another release understands stays: the other servers go on. NodeError: a file cannot be read
        now, which says nothing of what is in it."""
        with disk_errors(f"read {self._directory}"):
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in self._directory.glob(".*.tmp"):
                path.unlink(missing_ok=True)  # a write that a crash interrupted
            paths = sorted(self._directory.glob("*.json"))
        self.incidents = self._load_incidents()
        states = (self._load_state(path) for path in paths if path.stem != _INCIDENTS)
        return tuple(state for state in states if state is not None)

    @property
    def of_other_release(self) -> dict[MpsServerName, str]:
        """Servers that only another release understands, and why they are left alone."""
        return {name: why for name, (why, _) in self._of_other_release.items()}

    def refuse_other_release(self, name: MpsServerName | MpsNamespaceName) -> None:
        """NodeError: it is one of these servers, or in one of them."""
        for server, (why, text) in self._of_other_release.items():
            if name == server or f'"{name}"'.encode() in text:
                raise NodeError(f"the MPS server {server} cannot be changed: {why}")

    def write(self, state: ServerState) -> None:
        name = state.daemon.name
        self._put(name, SERVER_STATES.encode(state, over=self._before.get(name)))

    def remove(self, name: MpsServerName) -> None:
        with disk_errors(f"remove what {self._directory} says of the MPS server {name}"):
            (self._directory / f"{name}.json").unlink(missing_ok=True)
        self._before.pop(name, None)

    def record(self, incident: MpsServerRestart) -> None:
        """Record an incident, with the next number: numbers go on over restarts of the agent."""
        with self._lock:
            number = self.incidents[-1].number + 1 if self.incidents else 1
            incidents = (*self.incidents, replace(incident, number=number))[-_MAX_INCIDENTS:]
            _unless_full(lambda: self.write_incidents(incidents))
            self.incidents = incidents

    def write_incidents(self, incidents: tuple[MpsServerRestart, ...]) -> None:
        before = self._before.get(_INCIDENTS)
        self._put(_INCIDENTS, INCIDENT_LOGS.encode(IncidentDocument(incidents), over=before))

    def _load_incidents(self) -> tuple[MpsServerRestart, ...]:
        """If they are damaged, one incident that has their last number, as far as it is found."""
        path = self._directory / f"{_INCIDENTS}.json"
        if (text := _read(path)) is None:
            return ()
        try:
            incidents = INCIDENT_LOGS.decode(text).incidents
        except Undecodable as e:
            numbers = [int(number) for number in _NUMBER.findall(text)]
            self._put_aside(path, _problem(path, e))
            reason = f"what was written of earlier incidents is lost: {_problem(path, e)}"
            lost = (MpsServerRestart(max(numbers, default=0) + 1, MpsServerName(""), 0.0, reason),)
            _unless_full(lambda: self.write_incidents(lost))
            return lost
        self._before[_INCIDENTS] = text
        return incidents

    def _load_state(self, path: Path) -> ServerState | None:
        if (text := _read(path)) is None:
            return None
        name = MpsServerName(path.stem)
        try:
            state = SERVER_STATES.decode(text)
        except Undecodable as e:
            if e.release:
                self._of_other_release[name] = _problem(path, e), text
            else:
                self.set_aside[name] = _problem(path, e)
                self._put_aside(path, _problem(path, e))
            return None
        self._before[name] = text
        return state

    def _put_aside(self, path: Path, why: str) -> None:
        aside = path.with_suffix(_ASIDE)
        log.error("a file is set aside", extra={"file": str(aside), "error": why})
        try:
            os.replace(path, aside)
        except OSError as e:  # it is looked at again by the next agent
            log.warning("a file stays", extra={"file": str(path), "error": str(e)})

    def _put(self, name: str, text: bytes) -> None:
        path = self._directory / f"{name}.json"
        with disk_errors(f"write {path}"):
            write_atomically(path, text)


class ServerStateFile:
    """The state of one server, and whether the disk has it."""

    def __init__(self, state: ServerState, files: ServerStateFiles) -> None:
        self.state = state
        self._files = files
        self._is_written = True

    def write(self, state: ServerState) -> None:
        """Before an effect that the next agent has to know. NodeError: it cannot be written."""
        self._files.write(state)
        self.state, self._is_written = state, True

    def write_or_retry(self, state: ServerState) -> None:
        """Before a removal: if it cannot be written now, it is written later."""
        self.state, self._is_written = state, False
        self.retry_write()

    def retry_write(self) -> None:
        if not self._is_written:
            self._is_written = _unless_full(lambda: self._files.write(self.state))

    def close(self) -> None:
        self._files.remove(self.state.daemon.name)


def _problem(path: Path, error: Undecodable) -> str:
    return f"what is written in {path} cannot be read: {error}"


def _read(path: Path) -> bytes | None:
    """None: it is not there."""
    with disk_errors(f"read {path}"):
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None


def _unless_full(write: Callable[[], None]) -> bool:
    """Whether the disk took it."""
    try:
        write()
    except NodeError as e:
        log.warning("it goes on without being written down", extra={"error": str(e)})
        return False
    return True
