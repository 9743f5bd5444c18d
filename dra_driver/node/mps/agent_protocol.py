"""What the MPS agent and those who ask it say to each other, and what the agent writes down.

One JSON object a line, one request a connection::

    {"version": 1, "call": "serve", "namespace": {"name": "c_0", "claim": "…", "gpus": […], …}}
    {"version": 1, "served": {"namespace": {…}, "protocol": 3, "pipe_directory": "/…"}}
    {"version": 1, "error": {"kind": "NodeError", "message": "…"}}

The fields are those of the values in ``model.mps``. A field that is not known is ignored, one that
is missing has its default; one of another type is an error that names it.
"""

import dataclasses
import json
import types
from collections.abc import Mapping
from enum import IntEnum
from functools import cache
from typing import Any, Final, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

from dra_driver.base.errors import ClaimError, DriverError, NodeError, TimedOut

VERSION: Final = 1
MAX_REQUEST_BYTES: Final = 64 * 1024
MAX_ANSWER_BYTES: Final = 1024 * 1024
_ERRORS: Final = (ClaimError, TimedOut, NodeError)  # what the other side can tell apart

T = TypeVar("T")


def dump(document: Mapping[str, Any]) -> bytes:
    """A line: *document* with the version."""
    text = json.dumps({"version": VERSION, **document}, sort_keys=True, separators=(",", ":"))
    return text.encode() + b"\n"


def parse(line: bytes, what: str) -> dict[str, Any]:
    """What ``dump`` was given. NodeError: *what* ("the answer of the MPS agent") is not one."""
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise NodeError(f"{what} is not JSON: {e or type(e).__name__}") from e
    if not isinstance(document, dict):
        raise NodeError(f"{what} is {_shown(document)}, not an object")
    version = document.get("version")
    if isinstance(version, bool) or version != VERSION:
        raise NodeError(
            f"{what} has the version {_shown(version)}; this release knows {VERSION}: let the "
            "plugin and the MPS agent be of one release"
        )
    return document


def encode(value: Any) -> Any:
    """A value as JSON has it."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is tuple:
        return [encode(one) for one in value]
    if dataclasses.is_dataclass(kind):
        return {name: encode(getattr(value, name)) for name in _names(kind)}
    return int(value) if isinstance(value, IntEnum) else value


def decode(kind: type[T], document: Any, where: str) -> T:
    """The value of *kind* that ``encode`` made into *document*.

    NodeError: it is none; *where* ("served") is what the error calls it.
    """
    value: T = _decode(kind, document, where)
    return value


def encode_error(problem: DriverError) -> dict[str, Any]:
    """An error as the other side is told of it."""
    kind = next((one for one in _ERRORS if isinstance(problem, one)), NodeError)
    return {"error": {"kind": kind.__name__, "message": str(problem)}}


def decode_error(document: Any) -> DriverError:
    """The error that the other side told of."""
    if not isinstance(document, dict) or not isinstance(document.get("message"), str):
        return NodeError(f"the MPS agent told of an error without a message: {_shown(document)}")
    kind = next((one for one in _ERRORS if one.__name__ == document.get("kind")), NodeError)
    return kind(document["message"])


def _decode(kind: Any, found: Any, where: str) -> Any:
    if isinstance(kind, NewType):
        kind = kind.__supertype__
    if get_origin(kind) in (Union, types.UnionType):  # of something and None
        (kind,) = (one for one in get_args(kind) if one is not types.NoneType)
        return None if found is None else _decode(kind, found, where)
    if get_origin(kind) is tuple:
        return _decode_tuple(get_args(kind)[0], found, where)
    if dataclasses.is_dataclass(kind):
        return _decode_fields(kind, found, where)
    return _decode_plain(kind, found, where)


def _decode_tuple(kind: Any, found: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(found, list):
        raise NodeError(f"{where} is {_shown(found)}, not a list")
    return tuple(_decode(kind, one, f"{where}[{index}]") for index, one in enumerate(found))


def _decode_fields(kind: Any, found: Any, where: str) -> Any:
    if not isinstance(found, dict):
        raise NodeError(f"{where} is {_shown(found)}, not an object")
    values = {
        name: _decode(hint, found[name], f"{where}.{name}")
        for name, hint in _hints(kind).items()
        if name in found
    }
    missing = sorted(_required(kind) - values.keys())
    if missing:
        raise NodeError(f"{where} lacks {', '.join(missing)}")
    return kind(**values)


def _decode_plain(kind: Any, found: Any, where: str) -> Any:
    if issubclass(kind, IntEnum):
        if not _is_number(found, int) or found not in {one.value for one in kind}:
            known = ", ".join(str(one.value) for one in kind)
            raise NodeError(f"{where} is {_shown(found)}, none of {known}")
        return kind(found)
    if kind is float and _is_number(found, int | float):
        return float(found)
    fits = _is_number(found, int) if kind is int else isinstance(found, kind)
    if not fits:
        raise NodeError(f"{where} is {_shown(found)}, not {_WORDS[kind]}")
    return found


def _is_number(found: Any, kind: Any) -> bool:
    return isinstance(found, kind) and not isinstance(found, bool)


_WORDS: Final = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


_PLAIN: Final = frozenset(_WORDS) | {types.NoneType}  # most of what there is


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(one.name for one in dataclasses.fields(kind))


@cache
def _hints(kind: Any) -> Mapping[str, Any]:
    return get_type_hints(kind)


@cache
def _required(kind: Any) -> frozenset[str]:
    return frozenset(
        one.name
        for one in dataclasses.fields(kind)
        if one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
    )


def _shown(found: Any) -> str:
    text = json.dumps(found, default=str)
    return text if len(text) <= 60 else text[:59] + "…"
