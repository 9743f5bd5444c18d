"""What commands print: tables, comma-separated values and single fields."""

from collections.abc import Iterable, Sequence
from typing import Final

from dra_driver.node.sim.mps.options import Words
from dra_driver.node.sim.mps.refusals import Refused

_WIDEST: Final = 24


def drawn(words: Words, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """As a table, or as --format says."""
    asked = words.options.get("format", "table")
    listed = [titles, *rows]
    if asked in ("csv", "csv,noheader"):
        return "\n".join(",".join(row) for row in listed[asked == "csv,noheader" :])
    if asked != "table":
        raise Refused(f"Unknown format '{asked}'")
    widths = [
        min(_WIDEST, max(len(row[column]) for row in listed)) for column in range(len(titles))
    ]
    cut = [[_cut(cell, width) for cell, width in zip(row, widths, strict=True)] for row in listed]
    return "\n".join("  ".join(row).rstrip() for row in cut)


def _cut(cell: str, width: int) -> str:
    """Measured: a table cuts what does not fit, long process numbers as well."""
    return cell.ljust(width) if len(cell) <= width else f"{cell[: width - 3]}..."


def field_of(names: Sequence[str], row: Sequence[str], asked: str) -> str:
    if asked not in names:
        raise Refused(f"Unknown field '{asked}'; there are {', '.join(names)}")
    return row[names.index(asked)]
