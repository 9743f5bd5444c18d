"""What can be said of a device and a CEL selector without evaluating CEL: yes, no, or unknown.

Understood is what DeviceClasses of GPUs are made of: ``&&``, ``||``, ``!``, ``==``, ``!=``, ``in``
and brackets over the device's driver, its attributes and which capacities it has. All else (calls,
comparisons by size, versions) is unknown, and so is whatever depends on it: an answer that is not
*unknown* is what the scheduler would find too.

    selector = or ; or = and { "||" and } ; and = relation { "&&" relation }
    relation = not [ ("==" | "!=" | "in" | "<" | …) not ] ; not = { "!" } value
    value    = "(" or ")" | "[" [ or { "," or } ] "]" | text | number | "true" | "false" | path
    path     = name { "." name | "[" or "]" | "(" [ or { "," or } ] ")" }
"""

import functools
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from dra_driver.base.frozen import frozen

Document = Mapping[str, Any]


class CelOutcome(Enum):
    """Besides the values of CEL."""

    UNKNOWN = "unknown"
    ERROR = "error"  # a key that is not there: the scheduler takes no such device


@frozen
class AnyBut:
    """A text that is not *text*; nothing else is known of it."""

    text: str


@frozen
class Variables:
    """What is known of a device; any other field of it is unknown."""

    fields: Mapping[str, Any]


class Domains(dict[str, dict[str, Any]]):
    """Attributes or capacities by domain. CEL finds every domain there, if only an empty one."""


UNKNOWN, ERROR = CelOutcome.UNKNOWN, CelOutcome.ERROR

_TOKEN = re.compile(
    r"""\s*(?:(?P<text>"[^"\\\n]*"|'[^'\\\n]*')|(?P<number>\d+)(?![\w.])"""
    r"""|(?P<name>[A-Za-z_]\w*)(?!["'])|(?P<sign>&&|\|\||==|!=|<=|>=|[!<>()\[\],.]))"""
)
_DEEPEST = 50
_SIZES = ("<", ">", "<=", ">=")


def variables_of(device: Document, driver: str) -> Variables:
    """What selectors see of a *device* (as in a slice of v1) of *driver*."""
    return Variables(
        {
            "driver": driver,
            "allowMultipleAllocations": bool(device.get("allowMultipleAllocations")),
            "attributes": _by_domain(device.get("attributes") or {}, driver),
            "capacity": _by_domain({key: {} for key in device.get("capacity") or {}}, driver),
        }
    )


def variables_of_others(driver: str) -> Variables:
    """What selectors see of a device of any other driver than *driver*."""
    return Variables({"driver": AnyBut(driver)})


def may_match(selectors: Sequence[Document], variables: Variables) -> bool:
    """Whether every one of *selectors* (as in a DeviceClass) can be true for these variables."""
    return all(
        evaluate(expression, variables) in (True, UNKNOWN)
        for selector in selectors
        if (expression := (selector.get("cel") or {}).get("expression"))
    )


def evaluate(expression: str, variables: Variables) -> Any:
    """The value of *expression*, UNKNOWN where it is not understood, or ERROR.

    >>> device = variables_of({"attributes": {"type": {"string": "gpu"}}}, "d.example")
    >>> evaluate("device.driver == 'd.example'", device)
    True
    >>> evaluate("device.attributes['d.example'].type in ['mig', 'vfio']", device)
    False
    >>> evaluate("device.attributes['d.example'].type.matches('^g')", device)
    <CelOutcome.UNKNOWN: 'unknown'>
    """
    try:
        return _Reader(_tokens(expression), {"device": variables}).whole()
    except _NotUnderstood:
        return UNKNOWN


class _NotUnderstood(Exception):
    """It may be right, but it is none of what is understood here."""


def _by_domain(entries: Document, driver: str) -> Domains:
    values = Domains()
    for key, entry in entries.items():
        domain, _, name = key.rpartition("/")
        values.setdefault(domain or driver, {})[name] = _plain(entry)
    return values


def _plain(entry: Document) -> Any:
    for kind in ("string", "bool", "int"):
        if kind in entry:
            return entry[kind]
    return UNKNOWN


@functools.lru_cache(maxsize=256)  # a claim's are asked about each device of the cluster
def _tokens(expression: str) -> tuple[tuple[str, str], ...]:
    tokens, at = [], 0
    text = expression.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or match.lastgroup is None:
            raise _NotUnderstood(text[at:])
        tokens.append((match.lastgroup, match[match.lastgroup]))
        at = match.end()
    return tuple(tokens)


class _Reader:
    """Reads and evaluates at once, from left to right."""

    def __init__(self, tokens: Sequence[tuple[str, str]], names: Mapping[str, Any]) -> None:
        self._tokens = [*tokens, ("end", "")]
        self._at = 0
        self._depth = 0
        self._names = names

    def whole(self) -> Any:
        value = self._or()
        if self._tokens[self._at][0] != "end":
            raise _NotUnderstood(self._tokens[self._at][1])
        return value

    def _take(self, *signs: str) -> str:
        """The next token, if it is one of *signs*."""
        kind, text = self._tokens[self._at]
        if kind in ("sign", "name") and text in signs:
            self._at += 1
            return text
        return ""

    def _expect(self, sign: str) -> None:
        if not self._take(sign):
            raise _NotUnderstood(self._tokens[self._at][1])

    def _or(self) -> Any:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise _NotUnderstood("too deep")
        values = [self._and()]
        while self._take("||"):
            values.append(self._and())
        self._depth -= 1
        return values[0] if len(values) == 1 else _decided(values, by=True)

    def _and(self) -> Any:
        values = [self._relation()]
        while self._take("&&"):
            values.append(self._relation())
        return values[0] if len(values) == 1 else _decided(values, by=False)

    def _not(self) -> Any:
        turns = 0
        while self._take("!"):
            turns += 1
        value = self._value()
        if not turns or value is ERROR:
            return value
        return value is (turns % 2 == 0) if isinstance(value, bool) else UNKNOWN

    def _relation(self) -> Any:
        left = self._not()
        sign = self._take("==", "!=", "in", *_SIZES)
        return _compared(left, sign, self._not()) if sign else left

    def _value(self) -> Any:
        kind, text = self._tokens[self._at]
        if self._take("("):
            value = self._or()
            self._expect(")")
            return value
        if self._take("["):
            return self._list("]")
        self._at += 1
        match kind:
            case "text":
                return text[1:-1]
            case "number":
                return int(text)
            case "name":
                return self._path(text)
            case _:
                raise _NotUnderstood(text)

    def _list(self, end: str) -> list[Any]:
        values: list[Any] = []
        while not self._take(end):
            if values:
                self._expect(",")
            values.append(self._or())
        return values

    def _path(self, name: str) -> Any:
        value = {"true": True, "false": False}.get(name, self._names.get(name, UNKNOWN))
        while sign := self._take(".", "[", "("):
            if sign == "(":
                self._list(")")
                value = ERROR if value is ERROR else UNKNOWN
            elif sign == "[":
                value = _below(value, self._or())
                self._expect("]")
            else:
                kind, key = self._tokens[self._at]
                if kind != "name":
                    raise _NotUnderstood(key)
                self._at += 1
                value = _below(value, key)
        return value


def _below(value: Any, key: Any) -> Any:
    if value is ERROR or key is ERROR:
        return ERROR
    if not isinstance(key, str):
        return UNKNOWN
    match value:
        case Variables(fields=fields):
            return fields.get(key, UNKNOWN)
        case Domains():
            return value.get(key, {})
        case dict():
            return value.get(key, ERROR)
        case _:
            return UNKNOWN


def _decided(values: Sequence[Any], by: bool) -> Any:
    """``||`` is decided *by* one that is true, ``&&`` by one that is false; an error by neither."""
    if any(value is by for value in values):
        return by
    if any(value is ERROR for value in values):
        others = [value for value in values if value is not ERROR]
        return ERROR if all(isinstance(value, bool) for value in others) else UNKNOWN
    return (not by) if all(isinstance(value, bool) for value in values) else UNKNOWN


def _compared(left: Any, sign: str, right: Any) -> Any:
    if left is ERROR or right is ERROR:
        return ERROR
    if sign in _SIZES:
        return UNKNOWN
    if sign == "in":
        return _contained(left, right)
    same = _same(left, right)
    return same if sign == "==" or not isinstance(same, bool) else not same


def _contained(left: Any, right: Any) -> Any:
    if isinstance(right, list):
        return _decided([False, *(_same(left, each) for each in right)], by=True)
    if isinstance(right, dict) and not isinstance(right, Domains) and isinstance(left, str):
        return left in right
    return UNKNOWN


def _same(left: Any, right: Any) -> Any:
    if isinstance(right, AnyBut):
        left, right = right, left
    if isinstance(left, AnyBut):
        return False if left.text == right else UNKNOWN
    plain = isinstance(left, str | bool | int) and type(left) is type(right)
    return left == right if plain else UNKNOWN
