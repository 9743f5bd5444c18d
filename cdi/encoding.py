"""A spec to text and back: JSON is written, JSON and YAML are read.

Writing gives the same bytes for the same spec; reading what was written gives the same spec.

The objects of a document are the dataclasses of ``cdi.spec``, field by field in the CDI SPEC's
order. Reading goes on behind a mistake, so that one pass finds them all, each with its path.
"""

import functools
import json
import re
from collections.abc import Callable, Hashable
from dataclasses import MISSING, Field, dataclass, fields
from types import UnionType
from typing import Any, Final, NoReturn, get_args, get_origin, get_type_hints

import yaml

from cdi.errors import CdiSpecError
from cdi.spec import Annotations, Spec
from cdi.validate import check, oldest_version, version_problem

Document = dict[str, Any]
"""An object as JSON and YAML know it: of dicts, lists, strings, numbers and booleans."""


@dataclass(frozen=True, slots=True)
class ValueCodec:
    """How one sort of value is written, and read from a document with its path and the problems."""

    write: Callable[[Any], Any]
    read: Callable[[Any, str, list[str]], Any]


@dataclass(frozen=True, slots=True)
class FieldCodec:
    """One field of an object: its name in a file and in its class, and the sort of value."""

    name: str
    attribute: str
    codec: ValueCodec
    required: bool
    default: Any  # left out, unless it is required


class ObjectCodec:
    """An object of the format: the class that holds it, and its fields in the SPEC's order."""

    def __init__(self, cls: type[Any]) -> None:
        hints = get_type_hints(cls)
        self._cls = cls
        self._fields = tuple(_field_codec(field, hints[field.name]) for field in fields(cls))

    def write(self, value: Any) -> Document:
        """Give the object; a field that holds its default is left out unless it is required."""
        values = [(field, getattr(value, field.attribute)) for field in self._fields]
        return {
            field.name: field.codec.write(value)
            for field, value in values
            if field.required or value != field.default
        }

    def read(self, document: object, path: str, problems: list[str]) -> Any:
        """Build the value; where ``problems`` grew, it is for the bin."""
        if not isinstance(document, dict):
            problems.append(f"{path}: must be an object")
            return None
        problems.extend(self._unknown(document, path))
        values: dict[str, Any] = {}
        for field in self._fields:
            where = _join(path, field.name)
            # A runtime reads null as "not there" (Go, encoding/json).
            if document.get(field.name) is not None:
                values[field.attribute] = field.codec.read(document[field.name], where, problems)
            elif field.required:
                problems.append(f"{where}: is required")
                values[field.attribute] = None
        return self._cls(**values)

    def _unknown(self, document: dict[Any, Any], path: str) -> list[str]:
        names = {field.name for field in self._fields}
        return [
            f"{_join(path, str(name))}: unknown field{_meant(str(name), names)}"
            for name in document
            if name not in names
        ]


def _field_codec(field: Field[Any], kind: Any) -> FieldCodec:
    first, *words = field.name.split("_")
    name = field.metadata.get("name") or first + "".join(map(str.capitalize, words))
    required = field.default is MISSING or "required" in field.metadata
    return FieldCodec(name, field.name, _codec(kind), required, field.default)


def _codec(kind: Any) -> ValueCodec:
    """For values of the type *kind*."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    if get_origin(kind) is UnionType:
        return _codec(get_args(kind)[0])
    if get_origin(kind) is tuple:
        return _list_codec(_codec(get_args(kind)[0]))
    codec = ObjectCodec(kind)
    # Objects are values, and their documents are only read: device nodes and mounts are the same in
    # spec after spec of a machine.
    return ValueCodec(functools.lru_cache(maxsize=256)(codec.write), codec.read)


def _meant(name: str, names: set[str]) -> str:
    meant = [known for known in names if known.lower() == name.lower()]
    return f", write {meant[0]!r}" if meant else ""


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _scalar(kind: type[Any], description: str) -> ValueCodec:
    def read(value: object, path: str, problems: list[str]) -> object:
        # Not isinstance: True is an int.
        if type(value) is not kind:
            problems.append(f"{path}: must be {description}")
        return value

    return ValueCodec(lambda value: value, read)


def _list_codec(item: ValueCodec) -> ValueCodec:
    def read(value: object, path: str, problems: list[str]) -> tuple[object, ...]:
        if not isinstance(value, list):
            problems.append(f"{path}: must be a list")
            return ()
        return tuple(item.read(part, f"{path}[{i}]", problems) for i, part in enumerate(value))

    return ValueCodec(lambda values: [item.write(value) for value in values], read)


def _read_pairs(value: object, path: str, problems: list[str]) -> tuple[tuple[Any, Any], ...]:
    if not isinstance(value, dict):
        problems.append(f"{path}: must be an object")
        return ()
    odd = [key for key, text in value.items() if not (type(key) is type(text) is str)]
    problems.extend(f"{_join(path, str(key))}: must be a string" for key in odd)
    return tuple(value.items())


_PLAIN: Final = {
    str: _scalar(str, "a string"),
    int: _scalar(int, "a whole number"),
    bool: _scalar(bool, "true or false"),
    Annotations: ValueCodec(dict, _read_pairs),
}
_SPEC: Final = ObjectCodec(Spec)


def from_document(document: object) -> Spec:
    """Read a document; problems of shape are reported before problems of content."""
    if not isinstance(document, dict):
        raise CdiSpecError(["a spec must be an object"])
    body = dict(document)
    version = body.pop("cdiVersion", None)
    problems: list[str] = []
    if not isinstance(version, str):
        problems.append("cdiVersion: must be a string")
    spec: Spec = _SPEC.read(body, "", problems)
    if problems:
        raise CdiSpecError(problems)
    if problem := version_problem(version, spec):
        raise CdiSpecError([f"cdiVersion: {problem}"])
    check(spec)
    return spec


# Runtimes read JSON files with a YAML parser (Go library, ParseSpec). YAML refuses these characters
# or takes them for ends of lines, so they are written as \uXXXX; all others must not be, since YAML
# does not join the two halves that JSON would write for characters beyond U+FFFF.
_NOT_IN_YAML: Final = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


def to_json(spec: Spec) -> str:
    """Give the text of a ``.json`` file: one line, as the Go library writes it.

    >>> from cdi.spec import ContainerEdits, CdiDevice
    >>> edits = ContainerEdits(env=("A=1",))
    >>> spec = Spec("vendor.example/gpu", devices=(CdiDevice("gpu-0", (), edits),))
    >>> print(to_json(spec), end="")  # doctest: +NORMALIZE_WHITESPACE
    {"cdiVersion": "0.3.0", "kind": "vendor.example/gpu",
    "devices": [{"name": "gpu-0", "containerEdits": {"env": ["A=1"]}}]}
    """
    check(spec)
    document = {"cdiVersion": oldest_version(spec), **_SPEC.write(spec)}
    text = json.dumps(document, ensure_ascii=False)
    return _NOT_IN_YAML.sub(lambda character: f"\\u{ord(character[0]):04x}", text) + "\n"


def from_text(text: str) -> Spec:
    """Read a file's text, JSON or YAML, as strictly as a runtime does, or raise ``CdiSpecError``.

    >>> from_text('{"cdiVersion": "0.3.0", "kind": "vendor.example/gpu", "device": []}')
    Traceback (most recent call last):
    cdi.errors.CdiSpecError: device: unknown field; devices: is required
    """
    return from_document(parse_text(text))


def parse_text(text: str) -> object:
    """Read JSON or YAML whose objects have no key twice; the content is not looked at."""
    try:
        return _parse(text)
    # ValueError: YAML's dates and very long numbers. RecursionError: nesting without end.
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        raise CdiSpecError([f"neither JSON nor YAML: {e}"]) from e


def _parse(text: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError:
        return yaml.load(text, Loader=_StrictYamlLoader)  # safe: a SafeLoader


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    document = dict(pairs)
    if len(document) < len(pairs):
        _refuse_twice([name for name, _ in pairs])
    return document


def _refuse_twice(names: list[str]) -> NoReturn:
    twice = sorted({name for name in names if names.count(name) > 1})
    raise CdiSpecError([f"{name}: is there twice in one object" for name in twice])


class _StrictYamlLoader(yaml.SafeLoader):
    """YAML that refuses a key given twice, as the Go library does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = [str(key.value) for key, _ in node.value]
        if len(set(names)) < len(names):
            _refuse_twice(names)
        return super().construct_mapping(node, deep)
