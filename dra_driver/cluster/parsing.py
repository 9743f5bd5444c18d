"""JSON as the API server sends it, with what users wrote into their objects.

An opaque configuration may be nested 5,000 levels deep: the API server takes it. It must not keep
anybody from reading a list of everybody's objects.
"""

import gc
import json
import re
from typing import Any

from dra_driver.errors import ClusterError

LONGEST_ANSWER = 16 << 20  # bytes; of a watch: of one event
_DEEPEST = 100  # levels; no object of Kubernetes that we read has half as many
_CHUNK = 512  # bytes that are looked at together: almost all are shallow, or deep, as a whole
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_STEPS = tuple({ord(c): 1 for c in "[{"}.get(b, -1 if chr(b) in "]}" else 0) for b in range(256))


class TooLong(ClusterError):
    """An answer that is not read to its end."""


def parse(text: bytes) -> Any:
    """What *text* says; null for what is nested too deeply to be read.

    ValueError: it is no JSON, or has integers of thousands of digits.
    """
    try:
        return _read(text)
    except RecursionError:
        return _parse_shallow(text)


def _read(text: bytes) -> Any:
    """What is read has no cycles: of a hundred thousand lists, looking for some took most time."""
    gc.disable()
    try:
        return json.loads(text)
    finally:
        gc.enable()


def _parse_shallow(text: bytes) -> Any:
    try:
        return _read(_shallow(text))
    except RecursionError as e:  # it is no JSON either: brackets are left open
        raise ValueError("it is nested too deeply") from e


def _shallow(text: bytes) -> bytes:
    no_strings = _STRING.sub(lambda found: b" " * len(found[0]), text)
    parts: list[bytes] = []
    depth = begin = 0
    for start in range(0, len(text), _CHUNK):
        chunk = no_strings[start : start + _CHUNK]
        opened = chunk.count(b"[") + chunk.count(b"{")
        closed = chunk.count(b"]") + chunk.count(b"}")
        if depth + opened < _DEEPEST or depth - closed >= _DEEPEST:  # all shallow, or all deep
            depth += opened - closed
            continue
        for place, byte in enumerate(chunk, start):
            before, depth = depth, depth + _STEPS[byte]
            if before < depth == _DEEPEST:
                parts += (text[begin:place], b"null")
            elif before == _DEEPEST > depth:
                begin = place + 1
    if depth >= _DEEPEST:
        raise ValueError("its brackets are left open")
    return b"".join((*parts, text[begin:]))
