"""How the driver's MPS program writes lists, sizes and percentages."""

import csv
import re
from collections.abc import Sequence
from typing import Final

_MIB: Final = 1 << 20
_UNITS: Final = {"": 1, "K": 1 << 10, "M": _MIB, "G": 1 << 30, "T": 1 << 40}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_RULE: Final = re.compile(r"[\s|+=-]+")  # the lines of a table
_NO_LIMIT: Final = frozenset({"", "-", "none", "unlimited", "n/a", "0"})


def rows(text: str, columns: Sequence[str]) -> list[dict[str, str]]:
    """The lines of a list by the names of their *columns*, which are in this order unless a head
    in front says otherwise; the last takes what commas it has.

    >>> rows("4711,gpu,0,c_1,python a,b", ("pid", "server", "device", "namespace", "command"))
    [{'pid': '4711', 'server': 'gpu', 'device': '0', 'namespace': 'c_1', 'command': 'python a,b'}]
    >>> rows("| Pipe_Directory | Name |\\n+------+\\n| /p | x |", ("name", "pipe-directory"))
    [{'pipe-directory': '/p', 'name': 'x'}]
    """
    found: list[dict[str, str]] = []
    names = list(columns)
    for line in text.split("\n"):  # no other character ends one: a process can be called so
        if not line.strip() or (_RULE.fullmatch(line) and "," not in line):
            continue
        cells = _cells(line)
        if not found and set(columns[:2]) <= {_plain(cell) for cell in cells}:
            names = [_plain(cell) for cell in cells]
            continue
        last = ",".join(cells[len(names) - 1 :])
        found.append(dict(zip(names, [*cells[: len(names) - 1], last], strict=False)))
    return found


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


def size(text: str) -> int | None:
    """Bytes; None: no limit. ValueError: it is no size.

    >>> size("4G"), size("512.00M"), size("unlimited")
    (4294967296, 536870912, None)
    """
    word = text.strip()
    if word.casefold() in _NO_LIMIT:
        return None
    match = _SIZE.fullmatch(word)
    if match is None:
        raise ValueError(f"{text!r} is no size")
    return round(float(match[1]) * _UNITS[match[2].upper()])


def size_text(size_bytes: int) -> str:
    """Whole MiB, as the program wants it: less rather than more.

    >>> size_text(5 << 30)
    '5120M'
    """
    return f"{size_bytes // _MIB}M"


def percent(text: str) -> int:
    """ValueError: it is none.

    >>> percent("30.00"), percent("30 %")
    (30, 30)
    """
    return round(float(text.strip().removesuffix("%")))
