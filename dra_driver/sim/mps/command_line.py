"""The command line of the simulated program: options, errors, and the tables that it prints."""

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from dra_driver.base.frozen import frozen


class CommandRefused(Exception):
    """The daemon says no; with its words."""


@frozen
class ParsedCommand:
    """A command, taken apart."""

    plain: tuple[str, ...]
    options: dict[str, str]  # --key=value; --flag has the value ""

    def allow(self, most_plain: int, *options: str) -> None:
        """CommandRefused: there is more than that."""
        if len(self.plain) > most_plain:
            raise CommandRefused(f"Unexpected argument '{self.plain[most_plain]}'")
        for name in self.options:
            if name not in options:
                raise CommandRefused(f"Unknown option '--{name}'")

    def need(self, index: int, meaning: str) -> str:
        """The plain word at *index*."""
        if index >= len(self.plain):
            raise CommandRefused(f"Missing argument: {meaning}")
        return self.plain[index]

    def option(self, name: str) -> str:
        """The value of an option that must be there."""
        if not self.options.get(name):
            raise CommandRefused(f"Missing option: --{name}=<value>")
        return self.options[name]

    def flag(self, name: str) -> bool:
        if self.options.get(name):
            raise CommandRefused(f"Option --{name} takes no value")
        return name in self.options


def parse_command(words: Collection[str]) -> ParsedCommand:
    """Plain words and options, in whatever order."""
    plain, options = [], {}
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            options[name] = value
        elif word.startswith("-"):
            raise CommandRefused(f"Unknown option '{word}'")
        else:
            plain.append(word)
    return ParsedCommand(tuple(plain), options)


def parse_number(text: str, meaning: str) -> int:
    if not text.isdecimal():
        raise CommandRefused(f"Invalid {meaning} '{text}'")
    return int(text)


def parse_boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise CommandRefused(f"Invalid value '{text}': true or false")
    return text == "true"


_WIDEST: Final = 24


def format_table(words: ParsedCommand, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """As a table, or as --format says."""
    table_format = words.options.get("format", "table")
    listed = [titles, *rows]
    if table_format in ("csv", "csv,noheader"):
        return "\n".join(",".join(row) for row in listed[table_format == "csv,noheader" :])
    if table_format != "table":
        raise CommandRefused(f"Unknown format '{table_format}'")
    widths = [
        min(_WIDEST, max(len(row[column]) for row in listed)) for column in range(len(titles))
    ]
    cells = [
        [_truncate(cell, width) for cell, width in zip(row, widths, strict=True)] for row in listed
    ]
    return "\n".join("  ".join(row).rstrip() for row in cells)


def _truncate(cell: str, width: int) -> str:
    """Measured: a table cuts what does not fit, long process numbers as well."""
    return cell.ljust(width) if len(cell) <= width else f"{cell[: width - 3]}..."


def select_field(names: Sequence[str], row: Sequence[str], name: str) -> str:
    if name not in names:
        raise CommandRefused(f"Unknown field '{name}'; there are {', '.join(names)}")
    return row[names.index(name)]
