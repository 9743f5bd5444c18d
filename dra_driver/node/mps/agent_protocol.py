"""The protocol of the MPS agent's socket: one request a connection; request and answer are a line.

::

    {…, "ServeRequest": {"namespace": {"name": "c_0", "claim": "…", "gpus": ["GPU-…"]}}}
    {…, "ServedNamespace": {"namespace": {…}, "protocol": 3, "pipe_directory": "/…"}}
    {…, "AgentError": {"kind": "NodeError", "message": "…"}}

The two may be of neighbouring releases (``base.codec``).
"""

import socket
from typing import Final, TypeVar

from dra_driver.base.codec import Codec, Undecodable
from dra_driver.base.deadlines import Deadline
from dra_driver.base.errors import ClaimError, DriverError, NodeError, TimedOut
from dra_driver.base.frozen import frozen
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.mps import MpsNamespace, MpsNamespaceName, MpsStatus, ServedNamespace

MAX_REQUEST_BYTES: Final = 64 * 1024
MAX_ANSWER_BYTES: Final = 1024 * 1024
# The kinds that a client can tell apart.
_ERRORS: Final = {kind.__name__: kind for kind in (ClaimError, TimedOut, NodeError)}

T = TypeVar("T")


@frozen
class ServeRequest:
    namespace: MpsNamespace


@frozen
class ReleaseRequest:
    name: MpsNamespaceName


@frozen
class TerminateRequest:
    name: MpsNamespaceName
    pids: tuple[int, ...]


@frozen
class StatusRequest:
    """Asks for an ``MpsStatus``."""


@frozen
class LetGoRequest:
    """Let go of exactly these GPUs and MIG instances: end their servers that have no clients, and
    start none until then."""

    gpus: tuple[GpuUuid, ...]
    until: float  # seconds since the epoch


AgentRequest = ServeRequest | ReleaseRequest | TerminateRequest | StatusRequest | LetGoRequest


@frozen
class RequestDone:
    """The request was carried out."""


@frozen
class AgentError:
    """A request that was refused, or failed."""

    kind: str  # the name of its class
    message: str

    @classmethod
    def of(cls, error: DriverError) -> "AgentError":
        names = (name for name, kind in _ERRORS.items() if isinstance(error, kind))
        return cls(next(names, NodeError.__name__), str(error))

    @property
    def error(self) -> DriverError:
        """As the client raises it."""
        return _ERRORS.get(self.kind, NodeError)(self.message)


AgentAnswer = ServedNamespace | MpsStatus | RequestDone | AgentError

REQUESTS: Final = Codec[AgentRequest](
    ServeRequest, ReleaseRequest, TerminateRequest, StatusRequest, LetGoRequest
)
ANSWERS: Final = Codec[AgentAnswer](ServedNamespace, MpsStatus, RequestDone, AgentError)


def decode(codec: Codec[T], line: bytes, name: str) -> T:
    """NodeError: *name* ("the answer of the MPS agent") is none of the documents of *codec*."""
    try:
        return codec.decode(line)
    except Undecodable as e:
        raise NodeError(
            f"{name} cannot be read: {e}; let the plugin and the MPS agent be of one release"
        ) from e


def read_line(connection: socket.socket, deadline: Deadline, max_bytes: int, name: str) -> bytes:
    """One line; empty: the other side ended before it. The deadline is that of the whole line.

    TimeoutError: it did not come in time. NodeError: *name* is longer than *max_bytes*.
    """
    received = bytearray()
    while not received.endswith(b"\n"):
        if (seconds := deadline.remaining) <= 0:
            raise TimeoutError(f"{name} did not come in {deadline.seconds:g} s")
        connection.settimeout(seconds)
        if not (chunk := connection.recv(65536)):
            return b""
        received += chunk
        if len(received) > max_bytes:
            raise NodeError(f"{name} is longer than {max_bytes} bytes")
    return bytes(received)
