"""Objects of a document, read and written by a table of their fields.

Reading goes on behind a mistake, so that one pass finds them all, each with its path.
"""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any, Final

Document = dict[str, Any]
"""An object as JSON and YAML know it: of dicts, lists, strings, numbers and booleans."""


@dataclass(frozen=True, slots=True)
class Codec:
    """How one sort of value is written, and read from a document with its path and the problems."""

    write: Callable[[Any], Any]
    read: Callable[[Any, str, list[str]], Any]


@dataclass(frozen=True, slots=True)
class Field:
    """One row of a table: the name in a file, the attribute of the class, and the sort of value."""

    name: str
    attribute: str
    codec: Codec
    required: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """An object of the format: the class that holds it and its fields in the SPEC's order."""

    cls: type[Any]
    fields: tuple[Field, ...]

    def write(self, value: Any) -> Document:
        """Give the object; a field that holds its default is left out unless it is required."""
        usual = _defaults(self.cls)
        found = [(f, getattr(value, f.attribute)) for f in self.fields]
        return {
            f.name: f.codec.write(held)
            for f, held in found
            if f.required or held != usual[f.attribute]
        }

    def read(self, document: object, path: str, problems: list[str]) -> Any:
        """Build the value; where ``problems`` grew, it is for the bin."""
        if not isinstance(document, dict):
            problems.append(f"{path}: must be an object")
            return None
        problems.extend(self._unknown(document, path))
        # A runtime reads null as "not there" (Go, encoding/json).
        given = {f.attribute: f for f in self.fields if document.get(f.name) is not None}
        missing = [f for f in self.fields if f.required and f.attribute not in given]
        problems.extend(f"{_join(path, f.name)}: is required" for f in missing)
        held = {
            attribute: f.codec.read(document[f.name], _join(path, f.name), problems)
            for attribute, f in given.items()
        }
        return self.cls(**dict.fromkeys((f.attribute for f in missing), None), **held)

    def _unknown(self, document: dict[Any, Any], path: str) -> list[str]:
        names = {f.name for f in self.fields}
        return [
            f"{_join(path, str(name))}: unknown field{_meant(str(name), names)}"
            for name in document
            if name not in names
        ]

    @property
    def codec(self) -> Codec:
        """Use the record as the value of a field of another."""
        return Codec(self.write, self.read)


def _meant(name: str, names: set[str]) -> str:
    meant = [known for known in names if known.lower() == name.lower()]
    return f", write {meant[0]!r}" if meant else ""


def _defaults(cls: type[Any]) -> dict[str, Any]:
    return {
        f.name: f.default if f.default_factory is MISSING else f.default_factory()
        for f in fields(cls)
    }


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _scalar(of: type[Any], says: str) -> Codec:
    def read(value: object, path: str, problems: list[str]) -> object:
        # Not isinstance: True is an int.
        if type(value) is not of:
            problems.append(f"{path}: must be {says}")
        return value

    return Codec(lambda value: value, read)


def many(item: Codec) -> Codec:
    """Make a codec for lists of what another codec knows."""

    def read(value: object, path: str, problems: list[str]) -> tuple[object, ...]:
        if not isinstance(value, list):
            problems.append(f"{path}: must be a list")
            return ()
        return tuple(item.read(part, f"{path}[{i}]", problems) for i, part in enumerate(value))

    return Codec(lambda values: [item.write(value) for value in values], read)


def _read_pairs(value: object, path: str, problems: list[str]) -> tuple[tuple[Any, Any], ...]:
    if not isinstance(value, dict):
        problems.append(f"{path}: must be an object")
        return ()
    odd = [key for key, held in value.items() if not (type(key) is type(held) is str)]
    problems.extend(f"{_join(path, str(key))}: must be a string" for key in odd)
    return tuple(value.items())


TEXT: Final = _scalar(str, "a string")
NUMBER: Final = _scalar(int, "a whole number")
FLAG: Final = _scalar(bool, "true or false")
TEXTS: Final = many(TEXT)
PAIRS: Final = Codec(dict, _read_pairs)
