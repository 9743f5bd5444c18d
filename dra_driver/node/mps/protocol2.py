"""Protocol 2 of MPS: the commands of a daemon, and how its answers are parsed.

Commands are lines on standard input. All clients share one pipe directory; what the daemon sets are
defaults for all of them, and the environment of a client can only lower these. A server is started
for the first client, so a daemon without a server is well.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from dra_driver.base.deadlines import Deadline
from dra_driver.base.errors import NodeError
from dra_driver.model.mps import MpsClient, MpsNamespace, MpsNamespaceName
from dra_driver.node.driver.commands import Command
from dra_driver.node.mps.control import ControlProgram, unless_gone
from dra_driver.node.mps.daemon import ControlDaemon, DaemonStatus
from dra_driver.node.mps.draining import TerminateClient
from dra_driver.node.mps.formats import format_size, parse_percent

_GPUS: Final = "CUDA_VISIBLE_DEVICES"
_PERCENT: Final = "get_default_active_thread_percentage"
_SERVERS: Final = "get_server_list"


class Protocol2:
    """Commands to daemons of this protocol."""

    def __init__(self, control: ControlProgram) -> None:
        self._control = control

    def command(self, daemon: ControlDaemon, namespaces: Sequence[MpsNamespace]) -> Command:
        """Starts it in the background, for several users."""
        command = self._control.command("-d", "-M")
        return replace(command, variables=((_GPUS, ",".join(daemon.gpus)),))

    def configure_when_ready(
        self, daemon: ControlDaemon, namespaces: Sequence[MpsNamespace], deadline: Deadline
    ) -> Mapping[MpsNamespaceName, str] | None:
        """Set its limits. The pipe directory of each namespace. NodeError: they are refused."""
        output = self._control.ask(daemon, deadline, stdin=limits_text(daemon))
        percents = [_percent(line) for line in output.splitlines()]
        if not percents or percents[-1] != daemon.default_limits.percent:
            raise NodeError(
                f"MPS server {daemon.name} does not take its limits "
                f"({daemon.default_limits}): {output.strip() or 'it output nothing'}"
            )
        return {namespace.name: daemon.pipe for namespace in namespaces}

    def forget(self, daemon: ControlDaemon) -> None:
        """Nothing is remembered of it."""

    def check(self, daemon: ControlDaemon, deadline: Deadline) -> DaemonStatus:
        servers = self._numbers(daemon, _SERVERS, deadline)
        clients = {
            client for server in servers for client in self._clients(daemon, server, deadline)
        }
        state = "Ready" if servers else "no server yet"
        return DaemonStatus(True, state, tuple(MpsClient(pid) for pid in sorted(clients)))

    def add_namespace(
        self, daemon: ControlDaemon, namespace: MpsNamespace, deadline: Deadline
    ) -> str:
        """Nothing is created: the limits are in the environment of its containers."""
        if namespace.limits.exceed(daemon.default_limits):
            raise NodeError(
                f"MPS server {daemon.name} has other limits already: it gives a client at most "
                f"{daemon.default_limits}, and {namespace.name} is to have {namespace.limits}; "
                "that changes when no claim uses this GPU's MPS any more: delete their pods"
            )
        return daemon.pipe

    def limit_namespace(
        self, daemon: ControlDaemon, namespace: MpsNamespace, deadline: Deadline
    ) -> None:
        """The daemon has none of its own for a namespace."""

    def remove_namespace(
        self, daemon: ControlDaemon, namespace: MpsNamespaceName, deadline: Deadline
    ) -> None:
        """There is nothing of it."""

    def terminators(
        self, daemon: ControlDaemon, pids: Collection[int], deadline: Deadline
    ) -> Mapping[int, TerminateClient]:
        """How to end each of *pids* that is a client."""
        return {
            pid: partial(self._terminate, daemon, server, pid)
            for server in self._numbers(daemon, _SERVERS, deadline)
            for pid in self._clients(daemon, server, deadline) & set(pids)
        }

    def quit(self, daemon: ControlDaemon, deadline: Deadline) -> None:
        self._control.ask(daemon, deadline, stdin="quit -t 1\n")

    def _terminate(self, daemon: ControlDaemon, server: int, pid: int, deadline: Deadline) -> None:
        with unless_gone(lambda: pid in self._clients(daemon, server, deadline)):
            self._control.ask(daemon, deadline, stdin=f"terminate_client {server} {pid}\n")

    def _clients(self, daemon: ControlDaemon, server: int, deadline: Deadline) -> set[int]:
        return set(self._numbers(daemon, f"get_client_list {server}", deadline))

    def _numbers(self, daemon: ControlDaemon, question: str, deadline: Deadline) -> list[int]:
        return parse_pids(self._control.ask(daemon, deadline, stdin=f"{question}\n"))


def limits_text(daemon: ControlDaemon) -> str:
    """The lines that set a daemon's defaults, and a question whose answer shows that it took them.

    GPUs by their index: limits for a UUID were seen to be ignored.
    """
    limits = daemon.default_limits
    memory = limits.memory_bytes
    lines = [
        f"set_default_device_pinned_mem_limit {index} {format_size(memory)}"
        for index, _ in enumerate(daemon.gpus)
        if memory is not None
    ]
    lines += [f"set_default_active_thread_percentage {limits.percent}", _PERCENT]
    return "".join(f"{line}\n" for line in lines)


def parse_pids(output: str) -> list[int]:
    """The numbers of processes, one a line; other lines are words.

    >>> parse_pids("4711\\n4712\\n")
    [4711, 4712]
    """
    return [int(line) for line in output.split("\n") if line.strip().isdecimal()]


def _percent(line: str) -> int | None:
    try:
        return parse_percent(line)
    except ValueError:
        return None
