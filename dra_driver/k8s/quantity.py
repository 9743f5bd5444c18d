"""Kubernetes quantities, ``80Gi``: their value, and the one way the API server writes each.

The API server rewrites quantities when it stores them (``1024Mi`` comes back as ``1Gi``), so what
was sent and what came back are compared by value. Rules: k8s.io/apimachinery/pkg/api/resource.
"""

import functools
import math
import re
from fractions import Fraction

_FORM = re.compile(
    r"(?P<number>[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))"
    r"(?:(?P<binary>[KMGTPE]i)|(?P<decimal>[numkMGTPE])|[eE](?P<exponent>[+-]?[0-9]{1,2}))?"
)
_BINARY = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_DECIMAL = {-9: "n", -6: "u", -3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P", 18: "E"}
_EXPONENT = {suffix: exponent for exponent, suffix in _DECIMAL.items()}


def parse(text: str) -> Fraction:
    """The value of *text*, exact.

    ValueError: it is no quantity.

    >>> parse("1.5Ki"), parse("250m")
    (Fraction(1536, 1), Fraction(1, 4))
    """
    return _parse(text)[0]


def rounded_up(text: str) -> int:
    """The value of *text*, fractions rounded up, as ``Quantity.Value()`` does. ValueError: none.

    >>> rounded_up("10Gi"), rounded_up("1500m")
    (10737418240, 2)
    """
    return math.ceil(parse(text))


def canonical(text: str) -> str:
    """*text* as the API server writes it. ValueError: it is no quantity.

    >>> canonical("81920Mi"), canonical("1000000"), canonical("0.5"), canonical("1.5Gi")
    ('80Gi', '1M', '500m', '1536Mi')
    """
    value, form = _parse(text)
    if form == "binary" and abs(value) >= 1024 and value.denominator == 1:
        return _scaled(int(value), 1024, _BINARY)
    # Nothing is kept below a nano: rounded away from zero.
    nanos = math.ceil(abs(value) * 10**9) * (1 if value >= 0 else -1)
    exponent = -9
    while nanos and nanos % 1000 == 0 and exponent < 18:
        nanos, exponent = nanos // 1000, exponent + 3
    if not nanos:
        return "0"
    if form == "exponent":
        return f"{nanos}e{exponent}" if exponent else str(nanos)
    return f"{nanos}{_DECIMAL[exponent]}"


def _scaled(number: int, base: int, suffixes: tuple[str, ...]) -> str:
    steps = 0
    while number % base == 0 and steps < len(suffixes) - 1:
        number, steps = number // base, steps + 1
    return f"{number}{suffixes[steps]}"


@functools.lru_cache(maxsize=64)  # claims for the same share are asked about many times
def _parse(text: str) -> tuple[Fraction, str]:
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a quantity, like 80Gi, 500m or 12")
    number = Fraction(match["number"])
    if match["binary"]:
        return number * 1024 ** _BINARY.index(match["binary"]), "binary"
    if match["exponent"]:
        return number * Fraction(10) ** int(match["exponent"]), "exponent"
    return number * Fraction(10) ** _EXPONENT[match["decimal"] or ""], "decimal"
