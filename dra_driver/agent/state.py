"""What the agent wrote down: a file for each server, and one of what happened to them.

Layout: ``<mps-dir>/state/<server name>.json`` and ``<mps-dir>/state/incidents.json``. A file is
written before each effect, and replaced whole. So whatever an agent leaves when it is killed, the
next one knows of it: every process of a daemon carries the token that the file says.

Nothing is fsynced: a killed agent loses nothing that it wrote, and no daemon outlives a power cut.
"""

import json
import os
import secrets
import threading
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from dra_driver.errors import NodeError
from dra_driver.kubeletplugin.file_locks import disk_errors
from dra_driver.model.mps import Incident, Served, ServerName, Space, SpaceName, server_name
from dra_driver.node.mps import wire
from dra_driver.node.mps.daemon import Daemon
from dra_driver.plan.mps_servers import most

_INCIDENTS: Final = "incidents"
_KEPT_INCIDENTS: Final = 32


@dataclass(frozen=True, slots=True)
class Kept:
    """A space of a server. One without *served* is none that anybody can use: it is on its way in,
    on its way out, or a crash left it there."""

    space: Space
    served: Served | None = None


@dataclass(frozen=True, slots=True)
class ServerState:
    """One server, as wanted. One without a served space is wanted by nobody."""

    daemon: Daemon
    spaces: tuple[Kept, ...] = ()
    condemned: str = ""  # why it has to be started again; its incident is recorded
    restarts: int = 0

    @property
    def served(self) -> tuple[Served, ...]:
        return tuple(one.served for one in self.spaces if one.served is not None)

    def find(self, name: SpaceName) -> Kept | None:
        return next((one for one in self.spaces if one.space.name == name), None)

    def keep(self, kept: Kept) -> "ServerState":
        """With this space, in place of what it was."""
        others = (one for one in self.spaces if one.space.name != kept.space.name)
        by_name = sorted((*others, kept), key=lambda one: one.space.name)
        return replace(self, spaces=tuple(by_name))

    def drop(self, names: Collection[SpaceName]) -> "ServerState":
        return replace(
            self, spaces=tuple(one for one in self.spaces if one.space.name not in names)
        )


def new_token() -> str:
    """What the processes of one daemon carry; nobody else can know it."""
    return secrets.token_hex(16)


def new_state(space: Space, protocol: int, mps_dir: str) -> ServerState:
    """A server over the GPUs of *space*, in which nothing is."""
    name = server_name(space.gpus)
    gpus, directory = tuple(sorted(space.gpus)), f"{mps_dir}/{name}"
    return ServerState(Daemon(name, gpus, protocol, directory, new_token(), most([space])))


class StateFiles:
    """The directory of the files. One agent at a time uses it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def load(self) -> tuple[ServerState, ...]:
        """Every server. NodeError: a file cannot be read; who runs the node has to decide."""
        with disk_errors(f"read {self._directory}"):
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in self._directory.glob(".*.tmp"):
                path.unlink(missing_ok=True)  # a write that a crash cut short
            paths = sorted(self._directory.glob("*.json"))
        found = [path for path in paths if path.stem != _INCIDENTS]
        return tuple(self._read(path, ServerState) for path in found)

    def write(self, state: ServerState) -> None:
        self._put(state.daemon.name, wire.encode(state))

    def remove(self, name: ServerName) -> None:
        with disk_errors(f"remove what {self._directory} says of the MPS server {name}"):
            (self._directory / f"{name}.json").unlink(missing_ok=True)

    def incidents(self) -> tuple[Incident, ...]:
        path = self._directory / f"{_INCIDENTS}.json"
        return self._read(path, _Incidents).incidents if path.exists() else ()

    def write_incidents(self, incidents: tuple[Incident, ...]) -> None:
        self._put(_INCIDENTS, wire.encode(_Incidents(incidents)))

    def _read(self, path: Path, kind: type[wire.T]) -> wire.T:
        try:
            return wire.decode(kind, wire.parse(path.read_bytes(), str(path)), "it")
        except (OSError, NodeError) as e:
            raise NodeError(
                f"what is written in {path} of an MPS server cannot be read: {e}; start the "
                "release that wrote it, or end the server's daemon and remove the file"
            ) from e

    def _put(self, name: str, document: Any) -> None:
        path, temporary = self._directory / f"{name}.json", self._directory / f".{name}.tmp"
        text = json.dumps({"version": wire.VERSION, **document}, indent=1, sort_keys=True)
        with disk_errors(f"write {path}"):
            try:
                temporary.write_text(text)
                os.replace(temporary, path)
            except OSError:
                with suppress(OSError):
                    temporary.unlink(missing_ok=True)
                raise


@dataclass(frozen=True, slots=True)
class _Incidents:
    incidents: tuple[Incident, ...] = ()


class Incidents:
    """What happened to servers: the last ones, with numbers that go on over restarts of the agent.

    Thread safe.
    """

    def __init__(self, files: StateFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._known = files.incidents()

    def record(self, incident: Incident) -> None:
        """Write it down, with the next number."""
        with self._lock:
            number = self._known[-1].number + 1 if self._known else 1
            known = (*self._known, replace(incident, number=number))[-_KEPT_INCIDENTS:]
            self._files.write_incidents(known)
            self._known = known

    def known(self) -> tuple[Incident, ...]:
        """Oldest first."""
        return self._known
