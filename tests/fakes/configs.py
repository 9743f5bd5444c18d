"""Opaque configurations that are as long as the API server takes them, in shapes that cost."""

import json
import string
from collections.abc import Callable

LONGEST = 10 * 1024  # bytes of one (resource.k8s.io: OpaqueParametersMaxLength)
MOST = 32  # in a claim
TOO_DEEP = frozenset({"lists in lists", "maps in maps", "lists at the edge"})  # for Python's JSON

_CHARACTERS = string.ascii_letters + string.digits
_HEAD = '{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig"'
_MPS = '"sharing":{"strategy":"MPS","mpsConfig":{'
_LIMITS = f'{_MPS}"defaultPerDevicePinnedMemoryLimit":{{'


def _filled(begin: str, each: Callable[[int], str], end: str, length: int) -> str:
    """A configuration of at most *length* bytes, with as many of *each* as fit."""
    text, room = f"{_HEAD},{begin}", length - len(end)
    parts: list[str] = []
    size = len(text)
    while size + len(part := each(len(parts))) + 1 <= room:
        parts.append(part)
        size += len(part) + 1
    return text + ",".join(parts) + end


def _nested(begin: str, end: str, length: int) -> str:
    levels = (length - len(_HEAD) - 20) // (len(begin) + len(end))
    return f'{_HEAD},"x":{begin * levels}1{end * levels}}}'


def _at_the_edge(number: int) -> str:
    """One that is too deep to be read at once, then many that only just are to be left out."""
    levels = 1000 if number == 0 else 16
    return "[" * levels + "]" * levels


def _long(begin: str, character: str, end: str, length: int) -> str:
    return f"{_HEAD},{begin}{character * (length - len(_HEAD) - len(begin) - len(end) - 1)}{end}"


def _short(number: int) -> str:
    """Names of two letters or digits, as long as there are some."""
    high, low = divmod(number, len(_CHARACTERS))
    return _CHARACTERS[high] + _CHARACTERS[low]


def shapes(length: int = LONGEST) -> dict[str, str]:
    """The JSON texts, by what there is much of."""
    return {
        "unknown fields": _filled("", lambda n: f'"f{n}":1', "}", length),
        "short fields": _filled("", lambda n: f'"{_short(n)}":1', "}", length),
        "fields nearly right": _filled("", lambda n: f'"sharin{n}":1', "}", length),
        "nulls": _filled("", lambda n: f'"f{n}":null', "}", length),
        "a map": _filled('"x":{', lambda n: f'"f{n}":1', "}}", length),
        "maps": _filled('"sharing":{', lambda n: f'"f{n}":{{}}', "}}", length),
        "lists": _filled('"x":[', lambda n: "[]", "]}", length),
        "lists for sharing": _filled('"sharing":[', lambda n: "[]", "]}", length),
        "lists for a strategy": _filled('"sharing":{"strategy":[', lambda n: "[]", "]}}", length),
        "numbers": _filled('"x":[', lambda n: "1", "]}", length),
        "limits": _filled(_LIMITS, lambda n: f'"{n}":"1G"', "}}}}", length),
        "wrong limits": _filled(_LIMITS, lambda n: f'"{n}":1', "}}}}", length),
        "lists in lists": _nested("[", "]", length),
        "maps in maps": _nested('{"a":', "}", length),
        "many lists in lists": _filled('"x":[', lambda n: "[" * 97 + "]" * 97, "]}", length),
        "lists at the edge": _filled(f'"x":{"[" * 92}', _at_the_edge, f"{']' * 92}}}", length),
        "a long name": _long('"', "x", '":1}', length),
        "a long strategy": _long('"sharing":{"strategy":"', "x", '"}}', length),
        "a long quantity": _long(f'{_MPS}"defaultPinnedDeviceMemoryLimit":"', "1", '"}}}', length),
        "many digits": _long('"x":0.', "1", "}", length),
    }


def claim_text(parameters: str, count: int = MOST, name: str = "worst") -> str:
    """A claim with so many configurations, allocated ``gpu-0``, as the API server sends it."""
    opaque = f'{{"driver":"gpu.nvidia.com","parameters":{parameters}}}'
    configs = ",".join([f'{{"source":"FromClaim","opaque":{opaque}}}'] * count)
    result = {"request": "gpu", "driver": "gpu.nvidia.com", "pool": "node-1", "device": "gpu-0"}
    devices = f'{{"results":[{json.dumps(result)}],"config":[{configs}]}}'
    metadata = {"namespace": "default", "name": name, "uid": f"uid-{name}"}
    return (
        '{"apiVersion":"resource.k8s.io/v1","kind":"ResourceClaim",'
        f'"metadata":{json.dumps(metadata)},"status":{{"allocation":{{"devices":{devices}}}}}}}'
    )
