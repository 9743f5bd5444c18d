"""What a daemon has written, for the error that says why it does not start."""

from pathlib import Path
from typing import Final

_LINES: Final = 6  # of each file
_MOST: Final = 4000  # characters of each file that are looked at


def last_lines(directory: str) -> str:
    """The last lines of each file in *directory* and below, behind a line feed; or nothing."""
    said = []
    for file in sorted(Path(directory).rglob("*")):
        try:
            with open(file, "rb") as opened:
                opened.seek(max(0, opened.seek(0, 2) - _MOST))
                text = opened.read().decode(errors="replace")
        except OSError:
            continue  # a directory, or gone
        lines = [line for line in text.splitlines() if line.strip()][-_LINES:]
        said += [f"{file.name}: {line}" for line in lines]
    return "".join(f"\n{line}" for line in said)
