"""The door to the MPS agent of this node: asks it over its socket.

The agent is another process, which may be replaced at any time. So each call is a connection of
its own, every wait is bounded, and without an agent the error says what to start.
"""

import socket
from collections.abc import Collection
from pathlib import Path
from typing import Final, TypeVar

from dra_driver.base.deadlines import Deadline, seconds_within_request
from dra_driver.base.errors import MpsAgentUnreachable, NodeError, TimedOut
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.mps import MpsNamespace, MpsNamespaceName, MpsStatus, ServedNamespace
from dra_driver.node.mps import agent_protocol
from dra_driver.node.mps.agent_protocol import (
    AgentError,
    AgentRequest,
    LetGoRequest,
    ReleaseRequest,
    RequestDone,
    ServeRequest,
    StatusRequest,
    TerminateRequest,
)

# The agent answers before: ``agent.dependencies``.
SERVE_SECONDS: Final = 20.0  # a daemon may have to be ended and another started
SECONDS: Final = 10.0
_ANSWER: Final = "the answer of the MPS agent"

T = TypeVar("T")


class MpsAgentClient:
    """Thread safe; it keeps nothing open."""

    def __init__(self, socket: Path, serve_seconds: float = SERVE_SECONDS) -> None:
        self._socket = str(socket)
        self._serve_seconds = serve_seconds

    def serve(self, namespace: MpsNamespace) -> ServedNamespace:
        """Have *namespace* served; repeating it gives the same answer.

        NodeError: it cannot be, and nothing is left of it. TimedOut: it may be served later.
        """
        return self._ask(ServeRequest(namespace), ServedNamespace, self._serve_seconds)

    def release(self, name: MpsNamespaceName) -> None:
        """End the namespace; an unknown one is fine."""
        self._ask(ReleaseRequest(name), RequestDone, SECONDS, undoing=True)

    def terminate(self, name: MpsNamespaceName, pids: Collection[int]) -> None:
        """End these clients of the namespace, by the host's PIDs; those that are none are
        ignored."""
        self._ask(TerminateRequest(name, tuple(sorted(pids))), RequestDone, SECONDS)

    def let_go(self, gpus: Collection[GpuUuid], until: float) -> None:
        """End the servers over these GPUs and MIG instances that have no clients, and start none
        *until* then (seconds since the epoch); servers of others are started again."""
        self._ask(LetGoRequest(tuple(sorted(gpus)), until), RequestDone, SECONDS)

    def status(self) -> MpsStatus:
        """What the agent knows. Clients are as of the last second."""
        return self._ask(StatusRequest(), MpsStatus, SECONDS)

    def _ask(
        self, request: AgentRequest, kind: type[T], seconds: float, undoing: bool = False
    ) -> T:
        seconds = seconds_within_request(seconds, undoing)
        line = agent_protocol.REQUESTS.encode(request) + b"\n"
        if len(line) > agent_protocol.MAX_REQUEST_BYTES:
            raise NodeError(
                f"a question of {len(line)} bytes is more than the MPS agent reads "
                f"({agent_protocol.MAX_REQUEST_BYTES}): ask for fewer at once"
            )
        name = type(request).__name__
        answer = agent_protocol.decode(
            agent_protocol.ANSWERS, self._exchange(line, name, seconds), _ANSWER
        )
        if isinstance(answer, AgentError):
            raise answer.error
        if not isinstance(answer, kind):
            raise NodeError(f"{_ANSWER} to {name} is {type(answer).__name__}")
        return answer

    def _exchange(self, line: bytes, name: str, seconds: float) -> bytes:
        """The line that answers *line*, a request that is called *name*."""
        deadline = Deadline(seconds, f"a request before the MPS agent is asked ({name})")
        try:
            deadline.check()
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(seconds)
                connection.connect(self._socket)
                connection.sendall(line)
                answer = agent_protocol.read_line(
                    connection, deadline, agent_protocol.MAX_ANSWER_BYTES, _ANSWER
                )
        except TimeoutError as e:
            raise TimedOut(
                f"waited {seconds:g} s for the MPS agent at {self._socket} ({name}): look at "
                "its log"
            ) from e
        except OSError as e:
            raise self._unreachable(e.strerror or str(e)) from e
        if not answer:
            raise self._unreachable("it ended before it answered")
        return answer

    def _unreachable(self, why: str) -> MpsAgentUnreachable:
        return MpsAgentUnreachable(
            f"the MPS agent of this node does not answer at {self._socket} ({why}): start "
            "`dra-driver mps-agent` (DaemonSet …-mps-agent); the claim is served once it is back"
        )
