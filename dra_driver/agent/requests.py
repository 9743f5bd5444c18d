"""What the agent is asked, as values: parsed once, strictly."""

import re
from dataclasses import dataclass
from typing import Any, Final

from dra_driver.errors import ClaimError, NodeError
from dra_driver.model.mps import ALL_CORES, Allowance, Space, SpaceName
from dra_driver.model.uuids import is_instance
from dra_driver.node.mps import wire

_NAME: Final = re.compile(r"[a-z0-9_]{1,64}")  # what MPS takes for a namespace
_GPU: Final = re.compile(r"[A-Za-z0-9-]{1,96}")
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Serve:
    space: Space


@dataclass(frozen=True, slots=True)
class Release:
    name: SpaceName


@dataclass(frozen=True, slots=True)
class Terminate:
    name: SpaceName
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Status:
    """Asks for what is known."""


Request = Serve | Release | Terminate | Status

_KINDS: Final = {"serve": Serve, "release": Release, "terminate": Terminate, "status": Status}


def parse_request(line: bytes) -> Request:
    """NodeError: it is none. ClaimError: it asks for what cannot be."""
    document = wire.parse(line, "the request")
    call: Any = document.get("call")
    kind = _KINDS.get(call) if isinstance(call, str) else None
    if kind is None:
        raise NodeError(f"the call {call!r} is unknown: {', '.join(_KINDS)} are known")
    request: Request = wire.decode(kind, document, "the request")
    if isinstance(request, Serve):
        _check(request.space)
    return request


def _check(space: Space) -> None:
    """What becomes arguments and paths of a program that runs as root has to look the part."""
    wrong = []
    if not _NAME.fullmatch(space.name):
        wrong.append(f"its name {space.name!r} is not 1 to 64 of a-z, 0-9 and _")
    if not space.gpus or len(set(space.gpus)) != len(space.gpus):
        wrong.append(f"its GPUs are none, or one comes twice: {list(space.gpus)}")
    wrong += [f"{gpu!r} is no UUID of a GPU" for gpu in space.gpus if not _GPU.fullmatch(gpu)]
    if len(space.gpus) > 1 and any(map(is_instance, space.gpus)):
        wrong.append("a MIG instance has a server of its own")
    if space.memory_bytes and len(space.memory_bytes) != len(space.gpus):
        wrong.append(f"{len(space.memory_bytes)} memory limits for {len(space.gpus)} GPUs")
    sizes = [size for size in space.memory_bytes if size is not None]
    for allowance in (Allowance(space.percent), *(Allowance(memory_bytes=one) for one in sizes)):
        wrong += _wrong(allowance)
    wrong += _wrong(space.most)
    if wrong:
        raise ClaimError(f"claim {space.claim} cannot have this MPS space: {'; '.join(wrong)}")


def _wrong(allowance: Allowance) -> list[str]:
    wrong = []
    if not 1 <= allowance.percent <= ALL_CORES:
        wrong.append(f"{allowance.percent} % of the multiprocessors is not 1 to {ALL_CORES}")
    size = allowance.memory_bytes
    if size is not None and (size < _MIB or size % _MIB):
        wrong.append(f"a memory limit of {size} bytes is not 1 or more whole MiB")
    return wrong
