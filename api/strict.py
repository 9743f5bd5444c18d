"""Documents that people write: read strictly, every problem told with its field path."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, core_schema

_LONGEST_SHOWN = 80
_LONGEST_NAME = 64  # of a field that is looked for among those that there are
_MOST_PLACES = 3  # where a field may belong
_WORDS = {
    True: ("true", "on and yes, too"),
    False: ("false", "off and no, too"),
    None: ("null", "~ and nothing at all"),
}
"""What YAML 1.1 makes of words: what they are then, and which words."""

Model = TypeVar("Model", bound=BaseModel)


class StrictModel(BaseModel):
    """A part of a document. Fields are written in camelCase; unknown ones are errors."""

    # Built when a document is read: of most kinds, most processes never read one.
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        alias_generator=to_camel,
        populate_by_name=False,
        defer_build=True,
    )


@dataclass(frozen=True, slots=True)
class Text:
    """In an annotation: the text matches all of *pattern*. *otherwise* is said of one that does
    not, and *called* is what the reference pages call it."""

    pattern: str
    otherwise: str
    called: str = "text"

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        # No word of JSON schema: pydantic would take it for the pattern of a mapping's keys.
        words = {"matches": self.pattern, "otherwise": self.otherwise, "format": self.called}
        return handler(schema) | words

    def _checked(self, text: str) -> str:
        if not re.fullmatch(self.pattern, text):
            raise ValueError(self.otherwise)
        return text


class ConfigError(ValueError):
    """What is wrong with one document: one line per problem, each starting with its field path."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


def all_defaults(model: type[Model], **required: str) -> Model:
    """A *model* of which no field is given but the *required* ones, by their names in documents.
    Nothing is checked: for that, pydantic would build the class while it is imported."""
    return model.model_construct(None, **required)


def validated(model: type[Model], document: Any) -> Model:
    """*document* as a *model*, or a ConfigError with every problem."""
    try:
        return model.model_validate(without_nulls(document))
    except pydantic.ValidationError as e:
        raise ConfigError([problem_message(error, model) for error in e.errors()]) from e


def valid_part(model: type[Model], document: Any) -> Model:
    """*document* as a *model* without required fields, where each field that is wrong is left out:
    what is wrong with the others can be reported at the same time."""
    fields = document.items() if isinstance(document, dict) else ()
    return validated(model, {k: v for k, v in fields if _is_valid(model, {k: v})})


def _is_valid(model: type[Model], document: dict[Any, Any]) -> bool:
    try:
        validated(model, document)
    except ConfigError:
        return False
    return True


def without_nulls(value: Any) -> Any:
    """An absent field and a null one are the same in the API conventions of Kubernetes."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [without_nulls(inner) for inner in value]
    return value


def field_path(path: str, *parts: str | int) -> str:
    """The path of a field below *path*.

    >>> field_path("", "spec", "gpus", 0, "select")
    'spec.gpus[0].select'
    """
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def show_value(value: Any) -> str:
    """*value* as a message shows it: not all of it, if it is long."""
    try:
        return _short(repr(value))
    except RecursionError:
        return "a value nested too deeply"
    except ValueError:  # of integers with thousands of digits
        return "a number that is too long"


def show_name(name: str) -> str:
    """*name* as a path shows it: such that it can be printed, and not all of it, if it is long."""
    return _short(name if name.isprintable() else repr(name)[1:-1])


def suggestion(name: Any, model: type[BaseModel]) -> str:
    """What to write instead of a field that there is not, anywhere in *model*."""
    import difflib  # most documents are right

    known = _places(model)
    if name in known:
        return f"it belongs elsewhere: {' or '.join(known[name][:_MOST_PLACES])}"
    word = str(name)
    near = difflib.get_close_matches(word, known, n=1) if len(word) <= _LONGEST_NAME else ()
    return f"did you mean {near[0]}?" if near else "remove it"


@cache
def _places(model: type[BaseModel]) -> Mapping[str, tuple[str, ...]]:
    """The names of all fields in *model*, with their paths. Making a schema costs milliseconds."""
    schema = model.model_json_schema()
    places: dict[str, dict[str, None]] = defaultdict(dict)
    for name, path in _schema_fields(schema, schema.get("$defs", {}), ""):
        places[name][path] = None
    return {name: tuple(places[name]) for name in sorted(places)}


def _schema_fields(schema: Any, parts: Any, path: str) -> Iterator[tuple[str, str]]:
    """The fields of *schema*, which is at *path*, with their paths."""
    if reference := schema.get("$ref"):
        schema = parts[reference.rpartition("/")[2]]
    fields = schema.get("properties", {})
    yield from ((name, field_path(path, name)) for name in fields)
    for name, inner in fields.items():
        yield from _schema_fields(inner, parts, field_path(path, name))
    if "items" in schema:
        yield from _schema_fields(schema["items"], parts, f"{path}[]")
    for inner in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from _schema_fields(inner, parts, path)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def _no_text(path: Sequence[str | int], key: Any) -> str:
    """YAML takes more for something else than text than people do: 7, on, 2020-01-01."""
    where = f"{field_path('', *path)}: " if path else ""
    if key is None or isinstance(key, bool):
        word, written = _WORDS[key]
        return f"{where}a key is {word}, as YAML reads {written}; write it in quotes"
    kind = "a number" if isinstance(key, int | float) else "no text"
    return f'{where}the key {key} is {kind} to YAML; write it in quotes: "{key}"'


def problem_message(error: Any, model: type[BaseModel]) -> str:
    """*error* of pydantic's about a *model* in our words: the field, and how to mend it."""
    where = field_path("", *error["loc"])
    match error["type"]:
        case "missing":
            return f"{where}: missing"
        case "extra_forbidden":
            return f"{where}: unknown field; {suggestion(error['loc'][-1], model)}"
        case "too_short":
            return f"{where}: is empty; say what is meant, or leave it out"
        case "model_type" | "model_attributes_type":
            return f"{where}: {show_value(error['input'])} should be a mapping"
        case "invalid_key":  # of a mapping with fields
            return _no_text(error["loc"][:-1], error["input"])
        case "string_type" if error["loc"][-1] == "[key]":
            return _no_text(error["loc"][:-2], error["input"])
        case "string_type" if not isinstance(error["input"], list | dict):
            return f"{where}: {show_value(error['input'])} should be a string; write it in quotes"
    message = error["msg"].removeprefix("Input ").removeprefix("Value error, ")
    return f"{where}: {show_value(error['input'])} {message}"
