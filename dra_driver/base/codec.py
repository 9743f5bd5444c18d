"""Values as JSON and back: what is written to disk, and what our processes say to each other.

A document is ``{"version": 1, "release": "0.1.0", "ClaimRecord": {...}}``: whose format it has, and
a dataclass below its name. So is each field that can be one of several dataclasses (``OneOf``).
Reading is strict: a wrong type and a field that is missing or not known are errors that name the
field.

Each release reads the documents of the one before and after it, by these rules:

* A field that is missing has its default. One that this release does not know is left out where
  another release wrote it; in a document of our own it is damage.
* Whoever replaces a document of another release keeps what he does not know of it (``over``).
* A kind, a value or a version that is not known makes a document of another release one that this
  release does not understand (``Undecodable.release``). It is left as it is, and so is what it is
  about, until a release reads it that does.

So a new field has a default, and can be written at once if a release that leaves it out still takes
back all that was done. Anything else is a new kind or value: one release reads it and writes the
old one, the next release writes it. What goes is read for one release more.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Final, Generic, TypeVar, get_args

RELEASE: Final = "0.1.0"
VERSION: Final = 1  # another one only if the rules above cannot be kept
_HEADER: Final = {"version": VERSION, "release": RELEASE}
_MAX_SHOWN: Final = 60

T = TypeVar("T")


class Undecodable(ValueError):
    """It is no such document. Says which field is wrong, and how.

    *release*: another one, which wrote it and may understand it; empty: it is damaged.
    """

    def __init__(self, problem: str, release: str = "") -> None:
        super().__init__(problem)
        self.release = release


class OneOf:
    """Marks a union of dataclasses: ``Annotated[Exclusive | Replica, OneOf()]``."""

    def __init__(self, *kinds: type[Any], is_document: bool = False) -> None:
        self._kinds = kinds
        self._header = _HEADER if is_document else {}

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """A hook of pydantic; this module imports that only for ``Codec``."""
        from pydantic_core import core_schema

        kinds = self._kinds or get_args(source)
        choices = {kind.__name__: self._by_name(kind, handler) for kind in kinds}
        if len(choices) == 1:
            return next(iter(choices.values()))
        return core_schema.tagged_union_schema(choices, _kind_name)

    def _by_name(self, kind: type[Any], handler: Any) -> Any:
        from pydantic_core import core_schema

        name = kind.__name__
        schemas = {name: handler.generate_schema(kind)}
        for field, value in self._header.items():
            schemas[field] = core_schema.literal_schema([value])
        fields = {field: core_schema.typed_dict_field(schema) for field, schema in schemas.items()}
        document = core_schema.typed_dict_schema(fields, extra_behavior="forbid")
        return core_schema.no_info_after_validator_function(
            lambda read: read[name],
            document,
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda value: {**self._header, name: value}, return_schema=document
            ),
        )


def _kind_name(value: Any) -> str | None:
    if isinstance(value, dict):
        return next((name for name in value if name not in _HEADER), None)
    return type(value).__name__


class Codec(Generic[T]):
    """Documents of these dataclasses. To be made once, at import. It is built when it is first
    used, which takes milliseconds."""

    def __init__(self, *kinds: type[T]) -> None:
        from pydantic import ConfigDict, TypeAdapter

        strict = ConfigDict(
            strict=True, extra="forbid", ser_json_inf_nan="constants", defer_build=True
        )
        document = Annotated[Any, OneOf(*kinds, is_document=True)]
        self._adapter: Any = TypeAdapter(document, config=strict)

    def encode(self, value: T, indent: int | None = None, over: bytes | None = None) -> bytes:
        """The same bytes for the same value. What is no Unicode in a text, as in the name of a file
        that an error is about, becomes a question mark.

        *over*: the document that this one replaces. What another release wrote there that this one
        does not know stays, but for that of an item of a list that is gone or not the same.
        """
        if over is not None and _release_of(over) not in ("", RELEASE):
            return self._encode_over(value, indent, over)
        return self._encode(value, indent)

    def decode(self, text: bytes) -> T:
        """What ``encode`` was given. Undecodable: it is no such document."""
        from pydantic import ValidationError

        try:
            value: T = self._adapter.validate_json(text)
        except ValidationError as e:
            if (release := _release_of(text)) and release != RELEASE:
                return self._decode_of(release, json.loads(text))
            raise Undecodable(_problems(e)) from e
        return value

    def schema(self) -> dict[str, Any]:
        """What a document looks like, as JSON schema."""
        schema: dict[str, Any] = self._adapter.json_schema()
        return schema

    def _decode_of(self, release: str, document: dict[str, Any]) -> T:
        """A document of another release, without the fields that are not known."""
        from pydantic import ValidationError

        document["release"] = RELEASE
        while True:
            try:
                value: T = self._adapter.validate_json(json.dumps(document))
            except ValidationError as e:
                unknown = [error["loc"] for error in e.errors() if error["type"] in _UNKNOWN]
                if not any([_remove(document, location) for location in unknown]):
                    raise Undecodable(
                        f"release {release} wrote it, which {RELEASE} does not understand: "
                        f"{_problems(e)}",
                        release,
                    ) from e
            else:
                return value

    def _encode(self, value: T, indent: int | None) -> bytes:
        from pydantic_core import PydanticSerializationError

        try:
            text: bytes = self._adapter.dump_json(value, indent=indent)
        except PydanticSerializationError:
            document = self._adapter.dump_python(value, mode="json")
            return json.dumps(document, indent=indent, ensure_ascii=False).encode(errors="replace")
        return text

    def _encode_over(self, value: T, indent: int | None, over: bytes) -> bytes:
        text = self._encode(value, indent)
        try:
            known = json.loads(self._encode(self.decode(over), None))
        except Undecodable:
            return text
        before, after = json.loads(over), json.loads(text)
        merged = _with_unknown(before, known, after)
        if merged == after:
            return text
        # It is strictly read by neither.
        merged["release"] = "+".join(dict.fromkeys([*before["release"].split("+"), RELEASE]))
        return json.dumps(merged, indent=indent, ensure_ascii=False).encode(errors="replace")


def _release_of(text: bytes) -> str:
    """Empty: it does not say, or it is no document."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    release = document.get("release") if isinstance(document, dict) else None
    return release if isinstance(release, str) else ""


def _remove(document: Any, location: Sequence[str | int]) -> bool:
    """Remove the field there; False: there is none."""
    *path, field = location
    for part in path:
        if not isinstance(document, dict) or part in document:
            document = document[part]  # else: the name of a dataclass, as choice and as field
    return document.pop(field, _MISSING) is not _MISSING


_MISSING: Final = object()
_UNKNOWN: Final = ("extra_forbidden", "unexpected_keyword_argument")


def _with_unknown(before: Any, known: Any, after: Any) -> Any:
    """*after*, with what *before* has and *known* has not: the same, as this release knows it."""
    match before, known, after:
        case dict(), dict(), dict():
            merged = {
                name: _with_unknown(before[name], known[name], value)
                if name in before and name in known
                else value
                for name, value in after.items()
            }
            return merged | {name: before[name] for name in before if name not in known}
        case list(), list(), list():
            remaining = list(zip(known, before, strict=True))
            return [_take_equal(remaining, item) for item in after]
    return after


def _take_equal(remaining: list[tuple[Any, Any]], item: Any) -> Any:
    """What another release wrote of *item*, taken out of *remaining*; else *item*."""
    if not isinstance(item, dict | list):  # of a set, perhaps, which has another order each time
        return item
    places = (place for place, (known, _) in enumerate(remaining) if known == item)
    place = next(places, None)
    return item if place is None else remaining.pop(place)[1]


def _problems(error: Any) -> str:
    return "; ".join(map(_problem, error.errors(include_url=False)[:3]))


_EXPECTED: Final = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "frozen_set_type": "a list",
    "dict_type": "an object",
    "dataclass_type": "an object",
}


def _problem(error: Any) -> str:
    field = _path(error["loc"]) or "it"
    context, kind = error.get("ctx", {}), error["type"]
    match kind:
        case "json_invalid":
            return f"it is not JSON ({context['error']})"
        case "missing":
            return f"{field} is missing"
        case "extra_forbidden" | "unexpected_keyword_argument":
            return f"{field} is not known"
        case "union_tag_not_found":
            return f"{field} is {_shown(error['input'])}, and names no type"
        case "union_tag_invalid":
            return f"{field} is {context['tag']}, none of {context['expected_tags']}"
        case "enum" | "literal_error":
            return f"{field} is {_shown(error['input'])}, not {context['expected']}"
    expected = _EXPECTED.get(kind)
    wrong = f", not {expected}" if expected else f" ({error['msg']})"
    return f"{field} is {_shown(error['input'])}{wrong}"


def _path(location: Sequence[str | int]) -> str:
    """As in JSON: ``ClaimRecord.holdings[0].gpu``."""
    text = ""
    for index, part in enumerate(location):
        if index and part == location[index - 1]:
            continue  # the name of a dataclass, as choice and as field
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 1]}…"
