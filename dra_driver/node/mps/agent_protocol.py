"""What the MPS agent and those who ask it say to each other: one request a connection, a line each.

::

    {"version": 1, "ServeRequest": {"namespace": {"name": "c_0", "claim": "…", "gpus": ["GPU-…"]}}}
    {"version": 1, "ServedNamespace": {"namespace": {…}, "protocol": 3, "pipe_directory": "/…"}}
    {"version": 1, "AgentError": {"kind": "NodeError", "message": "…"}}
"""

from dataclasses import dataclass
from typing import Final, TypeVar

from dra_driver.base.codec import Codec, Undecodable
from dra_driver.base.errors import ClaimError, DriverError, NodeError, TimedOut
from dra_driver.model.mps import MpsNamespace, MpsNamespaceName, MpsStatus, ServedNamespace

MAX_REQUEST_BYTES: Final = 64 * 1024
MAX_ANSWER_BYTES: Final = 1024 * 1024
_ERRORS: Final = (ClaimError, TimedOut, NodeError)  # what the other side can tell apart

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServeRequest:
    namespace: MpsNamespace


@dataclass(frozen=True, slots=True)
class ReleaseRequest:
    name: MpsNamespaceName


@dataclass(frozen=True, slots=True)
class TerminateRequest:
    name: MpsNamespaceName
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StatusRequest:
    """Asks for what is known."""


AgentRequest = ServeRequest | ReleaseRequest | TerminateRequest | StatusRequest


@dataclass(frozen=True, slots=True)
class RequestDone:
    """There is nothing more to say of it."""


@dataclass(frozen=True, slots=True)
class AgentError:
    """A request that was refused, or failed."""

    kind: str  # the name of its class
    message: str

    @classmethod
    def of(cls, error: DriverError) -> "AgentError":
        kind = next((kind for kind in _ERRORS if isinstance(error, kind)), NodeError)
        return cls(kind.__name__, str(error))

    @property
    def error(self) -> DriverError:
        """As the one who asked raises it."""
        kinds = {kind.__name__: kind for kind in _ERRORS}
        return kinds.get(self.kind, NodeError)(self.message)


AgentAnswer = ServedNamespace | MpsStatus | RequestDone | AgentError

REQUESTS: Final = Codec[AgentRequest](ServeRequest, ReleaseRequest, TerminateRequest, StatusRequest)
ANSWERS: Final = Codec[AgentAnswer](ServedNamespace, MpsStatus, RequestDone, AgentError)


def decode(codec: Codec[T], line: bytes, what: str) -> T:
    """NodeError: *what* ("the answer of the MPS agent") is none of the documents of *codec*."""
    try:
        return codec.decode(line)
    except Undecodable as e:
        raise NodeError(
            f"{what} cannot be read: {e}; let the plugin and the MPS agent be of one release"
        ) from e
