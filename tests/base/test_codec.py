"""Values as JSON documents, there and back, and what is said of a document that is none."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Annotated

import pytest

from dra_driver.base.codec import Codec, OneOf, Undecodable


class Colour(IntEnum):
    RED = 1
    BLUE = 2


@dataclass(frozen=True, slots=True)
class Circle:
    radius: float


@dataclass(frozen=True, slots=True)
class Square:
    side: int = 1
    rounded: bool = False


@dataclass(frozen=True, slots=True)
class Drawing:
    name: str
    shapes: tuple[Annotated[Circle | Square, OneOf()], ...]
    colour: Colour = Colour.RED
    owner: str | None = None
    frame: Square = Square()
    notes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


DRAWINGS = Codec[Drawing](Drawing)
SHAPES = Codec[Circle | Square](Circle, Square)


def test_a_value_survives_the_way():
    drawing = Drawing("d", (Circle(1.5), Square(2)), Colour.BLUE, "me", Square(3), {"a": (1, 2)})

    assert DRAWINGS.decode(DRAWINGS.encode(drawing)) == drawing
    assert DRAWINGS.decode(DRAWINGS.encode(drawing, indent=2)) == drawing


def test_a_number_without_an_end_survives_the_way():
    assert SHAPES.decode(SHAPES.encode(Circle(math.inf))) == Circle(math.inf)


def test_what_is_no_unicode_becomes_a_question_mark():
    """The name of a file can be any bytes, and an error about it is written all the same."""
    drawing = Drawing("ü\udcff", (Circle(1.5), Square(2)), owner="me")

    assert DRAWINGS.decode(DRAWINGS.encode(drawing)) == replace(drawing, name="ü?")


def test_a_dataclass_stands_below_its_name_where_it_could_be_another():
    assert DRAWINGS.encode(Drawing("d", (Circle(1.0),))) == (
        b'{"version":1,"Drawing":{"name":"d","shapes":[{"Circle":{"radius":1.0}}],"colour":1,'
        b'"owner":null,"frame":{"side":1,"rounded":false},"notes":{}}}'
    )
    assert SHAPES.encode(Square()) == b'{"version":1,"Square":{"side":1,"rounded":false}}'
    assert SHAPES.decode(b'{"version":1,"Circle":{"radius":2}}') == Circle(2.0)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ('"shapes":[]', "name is missing"),
        ('"name":"d","shapes":[],"size":1', "size is not known"),
        ('"name":7,"shapes":[]', "name is 7, not a text"),
        ('"name":"d","shapes":{}', "shapes is {}, not a list"),
        (
            '"name":"d","shapes":[{"Square":{"side":"2"}}]',
            'shapes[0].Square.side is "2", not a whole number',
        ),
        (
            '"name":"d","shapes":[{"Square":{"side":1.5}}]',
            "shapes[0].Square.side is 1.5, not a whole number",
        ),
        (
            '"name":"d","shapes":[{"Square":{"side":true}}]',
            "shapes[0].Square.side is true, not a whole number",
        ),
        (
            '"name":"d","shapes":[{"Circle":{"radius":"x"}}]',
            'shapes[0].Circle.radius is "x", not a number',
        ),
        (
            '"name":"d","shapes":[{"Star":{}}]',
            "shapes[0] is Star, none of 'Circle', 'Square'",
        ),
        ('"name":"d","shapes":[{}]', "shapes[0] is {}, and names no type"),
        (
            '"name":"d","shapes":[{"Circle":{"radius":1},"more":1}]',
            "shapes[0].Circle.more is not known",
        ),
        ('"name":"d","shapes":[],"colour":7', "colour is 7, not 1 or 2"),
        ('"name":"d","shapes":[],"frame":7', "frame is 7, not an object"),
        (
            '"name":"d","shapes":[],"frame":{"rounded":1}',
            "frame.rounded is 1, not true or false",
        ),
    ],
)
def test_a_field_that_does_not_fit_is_named(fields, problem):
    with pytest.raises(Undecodable) as caught:
        DRAWINGS.decode(f'{{"version":1,"Drawing":{{{fields}}}}}'.encode())

    assert str(caught.value) == f"Drawing.{problem}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"", "it is not JSON"),
        (b"{", "it is not JSON"),
        (b"\xff\xfe", "it is not JSON"),
        (b"[" * 50000, "it is not JSON"),
        (b"7", "it is 7, not an object"),
        (b'{"Drawing":{"name":"d","shapes":[]}}', "version is missing"),
        (b'{"version":2,"Drawing":{"name":"d","shapes":[]}}', "version is 2, not 1"),
        (b'{"version":1,"Picture":{}}', "Drawing is missing; Picture is not known"),
        (b'{"version":1}', "Drawing is missing"),
    ],
)
def test_a_document_that_is_none_is_refused(text, problem):
    with pytest.raises(Undecodable) as caught:
        DRAWINGS.decode(text)

    assert str(caught.value).startswith(problem)


def test_a_long_value_is_shown_in_part():
    with pytest.raises(Undecodable, match=r"^version is \"a{58}…, not 1$"):
        DRAWINGS.decode(b'{"version":"%s","Drawing":{"name":"d","shapes":[]}}' % (b"a" * 500))
