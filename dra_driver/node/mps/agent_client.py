"""The door to the MPS agent of this node: asks it over its socket.

The agent is another process, which may be replaced at any time. So each call is a connection of
its own, every wait is bounded, and nobody at the other end is an error that says whom to start.
"""

import socket
from collections.abc import Collection
from pathlib import Path
from typing import Final, TypeVar

from dra_driver.base.deadlines import Deadline
from dra_driver.base.errors import MpsAgentUnreachable, NodeError, TimedOut
from dra_driver.model.mps import MpsNamespace, MpsNamespaceName, MpsStatus, ServedNamespace
from dra_driver.node.mps import agent_protocol
from dra_driver.node.mps.agent_protocol import (
    AgentError,
    AgentRequest,
    ReleaseRequest,
    RequestDone,
    ServeRequest,
    StatusRequest,
    TerminateRequest,
)

# The agent knows both, and answers before: ``agent.dependencies``.
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
        """Have *namespace* served; the same again is the same answer.

        NodeError: it cannot be, and nothing is left of it. TimedOut: it may be by and by.
        """
        return self._ask(ServeRequest(namespace), ServedNamespace, self._serve_seconds)

    def release(self, name: MpsNamespaceName) -> None:
        """The namespace is no longer served; an unknown one is fine."""
        self._ask(ReleaseRequest(name), RequestDone, SECONDS)

    def terminate(self, name: MpsNamespaceName, pids: Collection[int]) -> None:
        """End these clients (processes of the host) of the namespace; those that are none are
        fine."""
        self._ask(TerminateRequest(name, tuple(sorted(pids))), RequestDone, SECONDS)

    def status(self) -> MpsStatus:
        """What the agent knows. Clients are as of the last second."""
        return self._ask(StatusRequest(), MpsStatus, SECONDS)

    def _ask(self, request: AgentRequest, kind: type[T], seconds: float) -> T:
        line = agent_protocol.REQUESTS.encode(request) + b"\n"
        if len(line) > agent_protocol.MAX_REQUEST_BYTES:
            raise NodeError(
                f"a question of {len(line)} bytes is more than the MPS agent reads "
                f"({agent_protocol.MAX_REQUEST_BYTES}): ask for fewer at once"
            )
        call = type(request).__name__
        text = self._carried(line, call, seconds)
        answer = agent_protocol.decode(agent_protocol.ANSWERS, text, _ANSWER)
        if isinstance(answer, AgentError):
            raise answer.error
        if not isinstance(answer, kind):
            raise NodeError(f"{_ANSWER} to {call} is {type(answer).__name__}")
        return answer

    def _carried(self, line: bytes, call: str, seconds: float) -> bytes:
        deadline = Deadline(seconds)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(seconds)
            try:
                connection.connect(self._socket)
            except OSError as e:
                raise self._down(e.strerror or str(e)) from e
            try:
                connection.sendall(line)
                return self._answer(connection, deadline)
            except TimeoutError as e:
                raise TimedOut(
                    f"waited {seconds:g} s for the MPS agent at {self._socket} ({call}): look at "
                    "its log"
                ) from e
            except OSError as e:  # it was ended while it worked
                raise self._down(e.strerror or str(e)) from e

    def _answer(self, connection: socket.socket, deadline: Deadline) -> bytes:
        """A line. The deadline is of all of it: an agent that drips is none the better."""
        received = bytearray()
        while not received.endswith(b"\n"):
            if (seconds := deadline.remaining) <= 0:
                raise TimeoutError
            connection.settimeout(seconds)
            chunk = connection.recv(65536)
            if not chunk:
                raise self._down("it ended before it answered")
            received += chunk
            if len(received) > agent_protocol.MAX_ANSWER_BYTES:
                raise NodeError(f"{_ANSWER} is longer than {agent_protocol.MAX_ANSWER_BYTES} bytes")
        return bytes(received)

    def _down(self, why: str) -> MpsAgentUnreachable:
        return MpsAgentUnreachable(
            f"the MPS agent of this node does not answer at {self._socket} ({why}): start "
            "`dra-driver mps-agent` (DaemonSet …-mps-agent); the claim is served once it is back"
        )
