"""Values as JSON and back: what is written to disk, and what our processes say to each other.

A document is ``{"version": 1, "ClaimRecord": {...}}``: the version, and a dataclass below its name.
So is each field that can be one of several dataclasses (``OneOf``). Reading is strict: a wrong type
and a field that is missing or not known are errors that name the field.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Final, Generic, TypeVar, get_args

VERSION: Final = 1
_VERSION_FIELD: Final = "version"
_MAX_SHOWN: Final = 60

T = TypeVar("T")


class Undecodable(ValueError):
    """It is no such document. Says which field is wrong, and how."""


class OneOf:
    """Marks a union of dataclasses: ``Annotated[Exclusive | Replica, OneOf()]``."""

    def __init__(self, *kinds: type[Any], versioned: bool = False) -> None:
        self._kinds = kinds
        self._versioned = versioned

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
        version = {_VERSION_FIELD: VERSION} if self._versioned else {}
        if version:
            schemas[_VERSION_FIELD] = core_schema.literal_schema([VERSION])
        fields = {field: core_schema.typed_dict_field(schema) for field, schema in schemas.items()}
        document = core_schema.typed_dict_schema(fields, extra_behavior="forbid")
        return core_schema.no_info_after_validator_function(
            lambda read: read[name],
            document,
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda value: {**version, name: value}, return_schema=document
            ),
        )


def _kind_name(value: Any) -> str | None:
    if isinstance(value, dict):
        return next((name for name in value if name != _VERSION_FIELD), None)
    return type(value).__name__


class Codec(Generic[T]):
    """Documents of these dataclasses. To be made once, at import: that takes milliseconds."""

    def __init__(self, *kinds: type[T]) -> None:
        from pydantic import ConfigDict, TypeAdapter

        strict = ConfigDict(strict=True, extra="forbid", ser_json_inf_nan="constants")
        document = Annotated[Any, OneOf(*kinds, versioned=True)]
        self._adapter: Any = TypeAdapter(document, config=strict)

    def encode(self, value: T, indent: int | None = None) -> bytes:
        """The same bytes for the same value. What is no Unicode in a text, as in the name of a file
        that an error is about, becomes a question mark."""
        from pydantic_core import PydanticSerializationError

        try:
            text: bytes = self._adapter.dump_json(value, indent=indent)
        except PydanticSerializationError:
            document = self._adapter.dump_python(value, mode="json")
            return json.dumps(document, indent=indent, ensure_ascii=False).encode(errors="replace")
        return text

    def decode(self, text: bytes) -> T:
        """What ``encode`` was given. Undecodable: it is no such document."""
        from pydantic import ValidationError

        try:
            value: T = self._adapter.validate_json(text)
        except ValidationError as e:
            errors = e.errors(include_url=False)
            raise Undecodable("; ".join(map(_problem, errors[:3]))) from e
        return value


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
