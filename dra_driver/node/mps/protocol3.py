"""Protocol 3 of MPS: the commands of a daemon, and how its answers are parsed.

A daemon has one server here, with a namespace for each claim. What is set by command is lost when
the daemon ends; only its configuration file stays.
"""

import logging
import os
import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from dra_driver.base.deadlines import Deadline, within_request
from dra_driver.base.errors import CommandFailed, NodeError, TimedOut
from dra_driver.base.frozen import frozen
from dra_driver.model.mps import ALL_CORES, MpsClient, MpsLimits, MpsNamespace, MpsNamespaceName
from dra_driver.node.driver.commands import Command
from dra_driver.node.mps.control import ControlProgram, unless_gone
from dra_driver.node.mps.daemon import SERVER, ControlDaemon, DaemonStatus
from dra_driver.node.mps.draining import TerminateClient
from dra_driver.node.mps.formats import (
    DEFAULT_NAMESPACE,
    daemon_config,
    format_size,
    parse_percent,
    parse_size,
    parse_table,
)

log = logging.getLogger(__name__)

READY: Final = "ready"
_ON_SERVER: Final = f"--server={SERVER}"
_LIST: Final = "--format=csv,noheader"  # a table cuts long numbers of processes
_NAMESPACE: Final = (
    "name",
    "server",
    "server-status",
    "pinned-memory-limit",
    "active-thread-percentage",
    "client-priority",
    "pipe-directory",
)
_CLIENT: Final = ("pid", "server", "device", "namespace", "command")
_VERBS: Final = ("create", "delete", "list", "set", "get")
# One over a GPU that is not there is made, and ends.
_NO_SERVER: Final = "is its GPU there (nvidia-smi -L)?"
_BROKEN: Final = re.compile("fault|fail|error", re.IGNORECASE)
_UNKNOWN: Final = re.compile(
    r"\b(?:no|no such|unknown|invalid) server\b"
    r"|\bserver\b[^\n]{0,80}\b(?:not found|unknown|does not exist|doesn't exist)\b",
    re.IGNORECASE,
)
_SHOWN: Final = 1000  # characters of an answer, that is shown
_ROUNDED: Final = 0.01  # of a limit: a daemon may write 4.88G for 5000M


@frozen
class NamespaceRow:
    """One line of the list of namespaces."""

    name: str
    status: str  # of its server
    limits: MpsLimits
    pipe_directory: str


class Protocol3:
    """Commands to daemons of this protocol."""

    def __init__(self, control: ControlProgram) -> None:
        self._control = control
        self._default: dict[str, str] = {}  # its pipe directory, by the token of a daemon

    def command(self, daemon: ControlDaemon, namespaces: Sequence[MpsNamespace]) -> Command:
        """Starts it in the background, for several users; its configuration is written."""
        config = Path(daemon.config)
        config.write_text(daemon_config(daemon, namespaces))
        config.chmod(0o600)
        return self._control.command("-p", "3", "-m", "-d", "-a", daemon.config)

    def configure_when_ready(
        self, daemon: ControlDaemon, namespaces: Sequence[MpsNamespace], deadline: Deadline
    ) -> Mapping[MpsNamespaceName, str] | None:
        """The pipe directory of each namespace; None: not yet. NodeError: it will never be."""
        rows = {row.name: row for row in self.namespace_rows(daemon, deadline)}
        if DEFAULT_NAMESPACE not in rows:
            raise NodeError(f"it has no server: {_NO_SERVER}")
        state = rows[DEFAULT_NAMESPACE].status
        if _BROKEN.search(state):
            raise NodeError(f"its server says {state!r}")
        if state.casefold() != READY:
            return None
        if not {DEFAULT_NAMESPACE, *(namespace.name for namespace in namespaces)} <= rows.keys():
            return None
        for namespace in namespaces:
            if not limits_match(rows[namespace.name].limits, namespace.limits):
                raise NodeError(
                    f"namespace {namespace.name} of {daemon.name} was started with "
                    f"{namespace.limits}, and the daemon says {rows[namespace.name].limits}"
                )
        self._default[daemon.token] = rows[DEFAULT_NAMESPACE].pipe_directory
        return {namespace.name: rows[namespace.name].pipe_directory for namespace in namespaces}

    def forget(self, daemon: ControlDaemon) -> None:
        """It is stopped, or another one is started in its place."""
        self._default.pop(daemon.token, None)

    def namespace_rows(self, daemon: ControlDaemon, deadline: Deadline) -> list[NamespaceRow]:
        """All of the server; none: there is no server."""
        return parse_namespaces(self._listed(daemon, deadline, "namespace"))

    def check(self, daemon: ControlDaemon, deadline: Deadline) -> DaemonStatus:
        # First, as the server can go in between: then it has no namespaces.
        clients = parse_clients(self._listed(daemon, deadline, "client"))
        rows = self.namespace_rows(daemon, deadline)
        if not rows:
            return DaemonStatus(False, f"no server: {_NO_SERVER}")
        return DaemonStatus(
            ready=rows[0].status.casefold() == READY,
            state=rows[0].status,
            clients=clients,
            namespaces={
                MpsNamespaceName(row.name): row.limits
                for row in rows
                if row.name != DEFAULT_NAMESPACE
            },
        )

    def add_namespace(
        self, daemon: ControlDaemon, namespace: MpsNamespace, deadline: Deadline
    ) -> str:
        """Two runs of the program, as a rule: each takes some milliseconds of a claim's start."""
        try:
            self._control.ask(daemon, deadline, "namespace", "create", namespace.name, _ON_SERVER)
        except TimedOut:
            raise
        except NodeError:
            row = self._find(daemon, namespace.name, deadline)
            if row is None:
                raise
            if limits_match(row.limits, namespace.limits):
                return row.pipe_directory
            if row.limits != MpsLimits():
                raise NodeError(
                    f"namespace {namespace.name} of MPS server {daemon.name} has other limits "
                    f"already ({row.limits}, not {namespace.limits}): delete the pods of "
                    "its claim"
                ) from None
            # A crash came between its creation and its limits: no client was let in.
        try:
            self.limit_namespace(daemon, namespace, deadline)
            return self._directory(daemon, namespace.name, deadline)
        except NodeError:
            # Without its limits no claim may have it.
            self.remove_namespace(
                daemon, namespace.name, within_request(deadline.seconds, "namespace delete")
            )
            raise

    def limit_namespace(
        self, daemon: ControlDaemon, namespace: MpsNamespace, deadline: Deadline
    ) -> None:
        """It is refused while a client is in there."""
        limits = namespace.limits
        memory = limits.memory_bytes
        self._control.ask(
            daemon,
            deadline,
            *("namespace", "set", namespace.name, _ON_SERVER),
            *([] if memory is None else [f"--pinned-memory-limit={format_size(memory)}"]),
            f"--active-thread-percentage={limits.percent}",
            f"--client-priority={int(namespace.priority)}",
        )

    def remove_namespace(
        self, daemon: ControlDaemon, namespace: MpsNamespaceName, deadline: Deadline
    ) -> None:
        with unless_gone(lambda: self._find(daemon, namespace, deadline) is not None):
            self._control.ask(
                daemon, deadline, "namespace", "delete", namespace, _ON_SERVER, "--force"
            )

    def terminators(
        self, daemon: ControlDaemon, pids: Collection[int], deadline: Deadline
    ) -> Mapping[int, TerminateClient]:
        """How to end each of *pids* that is a client."""
        clients = self._clients(daemon, deadline) & set(pids)
        return {pid: partial(self._terminate, daemon, pid) for pid in clients}

    def quit(self, daemon: ControlDaemon, deadline: Deadline) -> None:
        self._control.ask(daemon, deadline, "-q")

    def _terminate(self, daemon: ControlDaemon, pid: int, deadline: Deadline) -> None:
        with unless_gone(lambda: pid in self._clients(daemon, deadline)):
            self._control.ask(daemon, deadline, "client", "terminate", str(pid))

    def _clients(self, daemon: ControlDaemon, deadline: Deadline) -> set[int]:
        return {client.pid for client in parse_clients(self._listed(daemon, deadline, "client"))}

    def _directory(
        self, daemon: ControlDaemon, namespace: MpsNamespaceName, deadline: Deadline
    ) -> str:
        """Beside that of the default namespace, if that is known; else the daemon is asked."""
        if default := self._default.get(daemon.token):
            sibling = os.path.join(os.path.dirname(default), namespace)
            if os.path.isdir(sibling):
                return sibling
        rows = {row.name: row for row in self.namespace_rows(daemon, deadline)}
        if namespace not in rows:
            raise NodeError(
                f"MPS server {daemon.name} has lost namespace {namespace}, which was just made"
            )
        if DEFAULT_NAMESPACE in rows:
            self._default[daemon.token] = rows[DEFAULT_NAMESPACE].pipe_directory
        return rows[namespace].pipe_directory

    def _listed(self, daemon: ControlDaemon, deadline: Deadline, kind: str) -> str:
        """The list of clients or namespaces; empty: there is no server."""
        try:
            return self._control.ask(daemon, deadline, kind, "list", _ON_SERVER, _LIST)
        except TimedOut:
            raise
        except NodeError as e:
            if says_unknown(e):
                return ""
            raise

    def _find(
        self, daemon: ControlDaemon, namespace: MpsNamespaceName, deadline: Deadline
    ) -> NamespaceRow | None:
        rows = self.namespace_rows(daemon, deadline)
        return next((row for row in rows if row.name == namespace), None)


def speaks_protocol3(control: ControlProgram, deadline: Deadline) -> bool:
    """Whether the driver's program knows this protocol, with everything that is needed of it.

    MpsStateUnknown, TimedOut: it does not say.
    """
    try:
        help_text = control.run(control.command("-p", "3", "namespace", "--help"), deadline)
    except CommandFailed:
        return False
    return all(re.search(rf"\b{verb}\b", help_text) for verb in _VERBS)


def limits_match(reported: MpsLimits, expected: MpsLimits) -> bool:
    """Whether a daemon that reports the one was given the other."""
    if reported.percent != expected.percent:
        return False
    if reported.memory_bytes is None or expected.memory_bytes is None:
        return reported.memory_bytes == expected.memory_bytes
    return abs(reported.memory_bytes - expected.memory_bytes) <= expected.memory_bytes * _ROUNDED


def parse_namespaces(text: str) -> list[NamespaceRow]:
    """NodeError: it is no list of namespaces."""
    try:
        return [
            NamespaceRow(
                name=row["name"],
                status=row["server-status"],
                limits=MpsLimits(
                    _percent_or_all(row["active-thread-percentage"]),
                    parse_size(row["pinned-memory-limit"]),
                ),
                pipe_directory=row["pipe-directory"],
            )
            for row in parse_table(text, _NAMESPACE)
        ]
    except (KeyError, ValueError) as e:
        excerpt = text.strip()[:_SHOWN]
        raise NodeError(f"no list of MPS namespaces ({e!r}): {excerpt!r}") from e


def parse_clients(text: str) -> tuple[MpsClient, ...]:
    """Each once, on however many GPUs it is. NodeError: it is no list of clients.

    A line ends with the name of a process, which may contain line feeds. So a line after a client's
    that is none is more of that name, and no fault of the daemon, which would be restarted for it.
    """
    clients: set[MpsClient] = set()
    for row in parse_table(text, _CLIENT):
        try:
            clients.add(_client(row))
        except (KeyError, ValueError) as e:
            if not clients:
                raise _no_clients(text) from e
    return tuple(sorted(clients, key=_by_number))


def _no_clients(text: str) -> NodeError:
    """Tenants read the error: what the daemon says of others is in the log alone."""
    extra = {"said": text[:_SHOWN]}
    log.warning("an MPS daemon was asked for its clients, and answers otherwise", extra=extra)
    return NodeError("no list of MPS clients: the log of the MPS agent has what it said")


def _client(row: Mapping[str, str]) -> MpsClient:
    """KeyError: it has fewer columns. ValueError: it has no number."""
    if len(row) < len(_CLIENT):
        raise KeyError(_CLIENT[-1])
    namespace = row["namespace"]
    return MpsClient(
        int(row["pid"]), None if namespace in ("", "-") else MpsNamespaceName(namespace)
    )


def _by_number(client: MpsClient) -> tuple[int, str]:
    return client.pid, client.namespace or ""


def _percent_or_all(text: str) -> int:
    return ALL_CORES if text.casefold() in ("", "-", "unlimited") else parse_percent(text)


def says_unknown(error: NodeError) -> bool:
    """Whether the program does not know the server, by its own output: the command names the server
    too. Its words for that are not documented."""
    return isinstance(error, CommandFailed) and bool(_UNKNOWN.search(error.output))
