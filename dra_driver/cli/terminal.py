"""What a terminal can show: its width, colours and marks, and text in columns and amounts."""

import os
from collections.abc import Mapping, Sequence
from typing import TextIO

from dra_driver.base.frozen import frozen


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """*rows* below *head*, each column as wide as its widest cell."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return "\n".join(
        "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    )


def even(texts: Sequence[str]) -> list[str]:
    """All as wide as the widest."""
    return [text.ljust(longest(texts)) for text in texts]


def longest(texts: Sequence[str]) -> int:
    return max(map(len, texts), default=0)


MIB, GIB = 1024**2, 1024**3


def format_gib(size: int) -> str:
    """
    >>> format_gib(81559 * 1024**2)
    '79.6 GiB'
    """
    return f"{size / GIB:.1f} GiB"


def format_memory(size: int) -> str:
    """In MiB where it is less than a GiB.

    >>> format_memory(81559 * 1024**2), format_memory(3 * 1024**2)
    ('79.6 GiB', '3 MiB')
    """
    return format_gib(size) if size >= GIB else f"{size // MIB} MiB"


_WIDTH = 100  # where it is not known


@frozen
class Terminal:
    """The defaults are those of a file or a pipe."""

    width: int = _WIDTH
    unicode: bool = False
    colour: bool = False


def terminal(stream: TextIO, environment: Mapping[str, str]) -> Terminal:
    """The terminal behind *stream*; COLUMNS, NO_COLOR and TERM count as everywhere."""
    is_terminal = stream.isatty()
    encoding = (stream.encoding or "").lower().replace("-", "")
    return Terminal(
        width=_width(stream, environment),
        unicode=encoding == "utf8",
        colour=is_terminal
        and not environment.get("NO_COLOR")
        and environment.get("TERM") != "dumb",
    )


def _width(stream: TextIO, environment: Mapping[str, str]) -> int:
    if (columns := environment.get("COLUMNS", "")).isdecimal() and int(columns):
        return int(columns)
    try:
        return os.get_terminal_size(stream.fileno()).columns or _WIDTH
    except (OSError, ValueError):  # no terminal, or no file at all
        return _WIDTH


_SGR_COLOURS = (36, 33, 35, 32, 34, 31)  # SGR: cyan, yellow, magenta, green, blue, red
_RESET = "\x1b[0m"


@frozen
class BarStyle:
    """What a bar is drawn with."""

    marks: str  # of the first claim, the second, …, and again from the start
    free: str
    admin_access: str
    edge: str  # between two blocks of memory units
    colour: bool = False

    def mark(self, place: int, number: int = 1) -> str:
        """*number* cells of the claim at *place* on its GPU."""
        return self.coloured(place, self.marks[place % len(self.marks)] * number)

    def coloured(self, place: int, text: str) -> str:
        if not self.colour or not text:
            return text
        return f"\x1b[{_SGR_COLOURS[place % len(_SGR_COLOURS)]}m{text}{_RESET}"


def bar_style(terminal: Terminal) -> BarStyle:
    if terminal.unicode:
        return BarStyle("█▓▒", "·", "○", "│", terminal.colour)
    return BarStyle("#=+*%", ".", "o", "|", terminal.colour)
