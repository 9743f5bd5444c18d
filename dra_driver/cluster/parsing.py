"""JSON as the API server sends it, with what users wrote into their objects.

An opaque configuration may be nested 5,000 levels deep: the API server takes it. It must not keep
anybody from reading a list of everybody's objects.
"""

import json
import re
from array import array
from contextlib import suppress
from itertools import accumulate
from typing import Any

from dra_driver.errors import ClusterError

LONGEST_ANSWER = 16 << 20  # bytes; of a watch: of one event
_DEEPEST = 100  # levels; no object of Kubernetes that we read has half as many
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_STEPS = tuple({ord(c): 1 for c in "[{"}.get(b, -1 if chr(b) in "]}" else 0) for b in range(256))


class TooLong(ClusterError):
    """An answer that is not read to its end."""


def parse(text: bytes) -> Any:
    """What *text* says; null for what is nested too deeply to be read.

    ValueError: it is no JSON, or has integers of thousands of digits.
    """
    try:
        return json.loads(text)
    except RecursionError:
        return _parse_shallow(text)


def _parse_shallow(text: bytes) -> Any:
    try:
        return json.loads(_shallow(text))
    except RecursionError as e:  # it is no JSON either: brackets are left open
        raise ValueError("it is nested too deeply") from e


def _shallow(text: bytes) -> bytes:
    no_strings = _STRING.sub(lambda found: b" " * len(found[0]), text)
    depths = array("i", accumulate(map(_STEPS.__getitem__, no_strings)))
    parts: list[bytes] = []
    begin = 0
    with suppress(ValueError):  # there is no more of it
        while True:
            opens = depths.index(_DEEPEST, begin)
            closes = depths.index(_DEEPEST - 1, opens)
            parts += (text[begin:opens], b"null")
            begin = closes + 1
    return b"".join((*parts, text[begin:]))
