"""What the terminal that an answer goes to can show."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TextIO

_WIDTH = 100  # where nobody says


@dataclass(frozen=True, slots=True)
class Terminal:
    """The defaults are those of a file or a pipe."""

    width: int = _WIDTH
    unicode: bool = False
    colour: bool = False


def terminal(stream: TextIO, environment: Mapping[str, str]) -> Terminal:
    """The terminal behind *stream*; COLUMNS, NO_COLOR and TERM count as everywhere."""
    seen = stream.isatty()
    encoding = (stream.encoding or "").lower().replace("-", "")
    return Terminal(
        width=_width(stream, environment),
        unicode=encoding == "utf8",
        colour=seen and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb",
    )


def _width(stream: TextIO, environment: Mapping[str, str]) -> int:
    if (said := environment.get("COLUMNS", "")).isdecimal() and int(said):
        return int(said)
    try:
        return os.get_terminal_size(stream.fileno()).columns or _WIDTH
    except (OSError, ValueError):  # no terminal, or no file at all
        return _WIDTH
