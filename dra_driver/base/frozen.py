"""Classes of values, in less time and memory than ``dataclass(frozen=True, slots=True)`` takes.

For each of those, Python writes and compiles six methods when it is imported, ten with an order.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")

_Comparison = Callable[[Any, Any], bool]


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[T]) -> type[T]:
    """A dataclass with slots. Nobody sets a field of it: the type checker sees to that, and nothing
    does when it runs. Of dataclasses, only such a one may inherit from it. Methods that the class
    has itself stay: with ``__eq__`` it needs ``__hash__``, too. ``field(hash=…)`` is not known."""
    return _made(cls, operator.eq)


@dataclass_transform(frozen_default=True, order_default=True, field_specifiers=(field,))
def ordered(cls: type[T]) -> type[T]:
    """Like :func:`frozen`, and its values are ordered by their fields."""
    return _made(cls, operator.eq, operator.lt, operator.le, operator.gt, operator.ge)


def _made(cls: type[T], *comparisons: _Comparison) -> type[T]:
    # Else ``dataclass`` writes one, from the signature, where the program runs without docstrings.
    cls.__doc__ = cls.__doc__ or cls.__name__
    own = vars(cls).keys()
    made = dataclass(slots=True, repr=False, eq=False)(cls)
    for name, method in _methods(made, comparisons).items():
        if name not in own:
            setattr(made, name, method)
    return made


def _methods(cls: Any, comparisons: Sequence[_Comparison]) -> Mapping[str, Callable[..., Any]]:
    values = _values_of([each.name for each in fields(cls) if each.compare])

    def hashed(self: Any) -> int:
        return hash(values(self))

    compared = {f"__{each.__name__}__": _compared(each, values) for each in comparisons}
    return {**compared, "__hash__": hashed, "__repr__": _described}


def _compared(comparison: _Comparison, values: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    def compared(self: Any, other: Any) -> Any:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return comparison(values(self), values(other))

    return compared


def _values_of(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    if not names:
        return lambda value: ()
    values = operator.attrgetter(*names)
    return values if len(names) > 1 else lambda value: (values(value),)


def _described(self: Any) -> str:
    shown = (f"{each.name}={getattr(self, each.name)!r}" for each in fields(self) if each.repr)
    return f"{self.__class__.__qualname__}({', '.join(shown)})"
