"""The text formats of MPS: what a daemon is configured with, and what its program prints.

A daemon of protocol 3 reads a TOML file once; the program prints tables, sizes and percentages.
"""

import csv
import json
import re
from collections.abc import Iterator, Sequence
from typing import Final

from dra_driver.model.mps import MpsLimits, MpsNamespace, MpsPriority
from dra_driver.node.mps.daemon import SERVER, ControlDaemon

_MIB: Final = 1 << 20
_UNITS: Final = {"": 1, "K": 1 << 10, "M": _MIB, "G": 1 << 30, "T": 1 << 40}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_RULE: Final = re.compile(r"[\s|+=-]+")  # the lines of a table
_NO_LIMIT: Final = frozenset({"", "-", "none", "unlimited", "n/a", "0"})


def parse_table(text: str, columns: Sequence[str]) -> list[dict[str, str]]:
    """The lines of a list by the names of their *columns*, which are in this order unless a head
    in front says otherwise; the last takes what commas it has.

    >>> parse_table("4711,c_1,python a,b", ("pid", "namespace", "command"))
    [{'pid': '4711', 'namespace': 'c_1', 'command': 'python a,b'}]
    >>> parse_table("| Pipe_Directory | Name |\\n+------+\\n| /p | x |", ("name", "pipe-directory"))
    [{'pipe-directory': '/p', 'name': 'x'}]
    """
    rows: list[dict[str, str]] = []
    names = list(columns)
    for line in text.split("\n"):  # no other character ends one: a process can be called so
        if not line.strip() or (_RULE.fullmatch(line) and "," not in line):
            continue
        cells = _cells(line)
        if not rows and set(columns[:2]) <= {_plain(cell) for cell in cells}:
            names = [_plain(cell) for cell in cells]
            continue
        last = ",".join(cells[len(names) - 1 :])
        rows.append(dict(zip(names, [*cells[: len(names) - 1], last], strict=False)))
    return rows


def _cells(line: str) -> list[str]:
    if line.lstrip().startswith("|"):
        return [cell.strip() for cell in line.strip().strip("|").split("|")]
    try:
        cells = next(csv.reader([line], skipinitialspace=True))
    except csv.Error:  # as no program writes it; a tenant can call one anything
        cells = line.split(",")
    return [cell.strip() for cell in cells]


def _plain(cell: str) -> str:
    return re.sub(r"[\s_]+", "-", cell.strip().casefold())


def parse_size(text: str) -> int | None:
    """Bytes; None: no limit. ValueError: it is no size.

    >>> parse_size("4G"), parse_size("512.00M"), parse_size("unlimited")
    (4294967296, 536870912, None)
    """
    word = text.strip()
    if word.casefold() in _NO_LIMIT:
        return None
    match = _SIZE.fullmatch(word)
    if match is None:
        raise ValueError(f"{text!r} is no size")
    return round(float(match[1]) * _UNITS[match[2].upper()])


def format_size(size_bytes: int) -> str:
    """Whole MiB, as the program wants it: less rather than more.

    >>> format_size(5 << 30)
    '5120M'
    """
    return f"{size_bytes // _MIB}M"


def parse_percent(text: str) -> int:
    """ValueError: it is none.

    >>> parse_percent("30.00"), parse_percent("30 %")
    (30, 30)
    """
    return round(float(text.strip().removesuffix("%")))


_BARE: Final = re.compile("[a-z0-9_]+")
DEFAULT_NAMESPACE: Final = "default"  # the namespace that a server has by itself
# No client is meant to be in it. It cannot be removed, so it gets as little as there is.
_DEFAULT_ALLOWANCE: Final = MpsLimits(percent=1)


def daemon_config(daemon: ControlDaemon, namespaces: Sequence[MpsNamespace]) -> str:
    """One server over the daemon's GPUs, and a namespace for each of *namespaces*."""
    lines = [
        'schema_version = "1.0"',
        "",
        f"[servers.{SERVER}]",
        f"allowed_devices = {_string(','.join(daemon.gpus))}",
        *_namespace(DEFAULT_NAMESPACE, _DEFAULT_ALLOWANCE, MpsPriority.NORMAL),
    ]
    for namespace in sorted(namespaces, key=lambda namespace: namespace.name):
        lines += _namespace(namespace.name, namespace.limits, namespace.priority)
    # Clients that share a context are not told apart where their memory is counted.
    lines += ["", "[features.context-share]", "enabled = false"]
    return "\n".join(lines) + "\n"


def _namespace(name: str, limits: MpsLimits, priority: MpsPriority) -> Iterator[str]:
    yield ""
    yield f"[servers.{SERVER}.namespaces.{name if _BARE.fullmatch(name) else _string(name)}]"
    yield f"active_thread_percentage = {_string(str(limits.percent))}"
    if limits.memory_bytes is not None:
        yield f"pinned_memory_limit = {_string(format_size(limits.memory_bytes))}"
    yield f"client_priority = {_string(str(int(priority)))}"


def _string(text: str) -> str:
    """A basic string of TOML, which escapes what JSON does, and the character DEL too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
