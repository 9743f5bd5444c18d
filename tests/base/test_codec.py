"""Values as JSON documents, there and back, and what is said of a document that is none."""

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.base.codec import RELEASE, Codec, OneOf, Undecodable


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
HEADER = f'{{"version":1,"release":"{RELEASE}",'.encode()


@dataclass(frozen=True, slots=True)
class Box:
    labels: frozenset[str] = frozenset()


def test_what_is_left_of_a_set_is_not_mixed_up_with_what_another_release_wrote():
    codec, labels = Codec[Box](Box), "abcdefgh"
    fields = {"colour": "red", "labels": [*labels]}  # in an order that a set seldom has
    theirs = json.dumps({"version": 1, "release": "0.9.0", "Box": fields}).encode()

    for box in (Box(frozenset(label)) for label in labels):
        assert codec.decode(codec.encode(box, over=theirs)) == box


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
        HEADER + b'"Drawing":{"name":"d","shapes":[{"Circle":{"radius":1.0}}],"colour":1,'
        b'"owner":null,"frame":{"side":1,"rounded":false},"notes":{}}}'
    )
    assert SHAPES.encode(Square()) == HEADER + b'"Square":{"side":1,"rounded":false}}'
    assert SHAPES.decode(HEADER + b'"Circle":{"radius":2}}') == Circle(2.0)


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
        DRAWINGS.decode(HEADER + f'"Drawing":{{{fields}}}}}'.encode())

    assert str(caught.value) == f"Drawing.{problem}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"", "it is not JSON"),
        (b"{", "it is not JSON"),
        (b"\xff\xfe", "it is not JSON"),
        (b"[" * 50000, "it is not JSON"),
        (b"7", "it is 7, not an object"),
        (b'{"Drawing":{"name":"d","shapes":[]}}', "version is missing; release is missing"),
        (b'{"version":2,"Drawing":{"name":"d","shapes":[]}}', "version is 2, not 1"),
        (HEADER + b'"Picture":{}}', "Drawing is missing; Picture is not known"),
        (b'{"version":1}', "Drawing is missing"),
    ],
)
def test_a_document_that_is_none_is_refused(text, problem):
    with pytest.raises(Undecodable) as caught:
        DRAWINGS.decode(text)

    assert str(caught.value).startswith(problem)


def test_a_long_value_is_shown_in_part():
    with pytest.raises(Undecodable, match=r"^version is \"a{58}…, not 1;"):
        DRAWINGS.decode(b'{"version":"%s","Drawing":{"name":"d","shapes":[]}}' % (b"a" * 500))


def of_release(release, drawing, **fields):
    """A document of *drawing* as another release writes it, with more fields."""
    document = json.loads(DRAWINGS.encode(drawing)) | {"release": release}
    document["Drawing"] |= fields
    return document


def test_a_field_that_another_release_wrote_and_we_do_not_know_is_left_out():
    document = of_release("0.9.0", Drawing("d", (Square(2),)), author="me")
    document["Drawing"]["shapes"][0]["Square"]["edge"] = {"width": [1, 2]}
    document["Drawing"]["frame"]["edge"] = None
    document["signature"] = "…"

    assert DRAWINGS.decode(json.dumps(document).encode()) == Drawing("d", (Square(2),))


def test_a_field_that_an_earlier_release_did_not_write_has_its_default():
    document = of_release("0.0.9", Drawing("d", ()))
    del document["Drawing"]["colour"], document["Drawing"]["frame"]["rounded"]

    assert DRAWINGS.decode(json.dumps(document).encode()) == Drawing("d", ())


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("shapes", [{"Star": {}}], "Drawing.shapes[0] is Star, none of 'Circle', 'Square'"),
        ("colour", 7, "Drawing.colour is 7, not 1 or 2"),
        ("name", None, "Drawing.name is null, not a text"),
        ("version", 2, "version is 2, not 1"),
    ],
)
def test_what_only_another_release_understands_is_no_damage(field, value, problem):
    document = of_release("0.9.0", Drawing("d", ()), author="me")
    (document if field == "version" else document["Drawing"])[field] = value

    with pytest.raises(Undecodable) as caught:
        DRAWINGS.decode(json.dumps(document).encode())

    assert caught.value.release == "0.9.0"
    assert str(caught.value) == (
        f"release 0.9.0 wrote it, which {RELEASE} does not understand: {problem}"
    )


@pytest.mark.parametrize("release", [7, None, ""])
def test_a_release_that_is_none_is_damage(release):
    with pytest.raises(Undecodable, match="release is") as caught:
        DRAWINGS.decode(json.dumps(of_release(release, Drawing("d", ()))).encode())

    assert not caught.value.release


SIDES = st.integers(0, 3)
DRAWN = st.builds(
    Drawing,
    shapes=st.lists(st.builds(Square, SIDES) | st.builds(Circle, SIDES.map(float))).map(tuple),
    notes=st.dictionaries(st.text(), st.just((1, 2)), max_size=2),
)
UNKNOWN = st.dictionaries(
    st.sampled_from(["new", "newer"]),
    st.none() | st.integers() | st.lists(st.text()) | st.dictionaries(st.text(), st.none()),
)


def objects(value):
    """The objects of dataclasses in a document, however deep."""
    if isinstance(value, list):
        for item in value:
            yield from objects(item)
    elif isinstance(value, dict):
        if not value.keys() & {"Circle", "Square"}:
            yield value
        for name, item in value.items():
            if name != "notes":
                yield from objects(item)


@given(DRAWN, st.data())
def test_whatever_another_release_adds_a_document_is_read_and_nothing_of_it_is_lost(drawing, data):
    document = json.loads(DRAWINGS.encode(drawing)) | {"release": "0.9.0"}
    for each in objects(document):
        each |= data.draw(UNKNOWN)
    text = json.dumps(document).encode()

    assert DRAWINGS.decode(text) == drawing
    changed = json.loads(DRAWINGS.encode(replace(drawing, name="n", frame=Square(7)), over=text))

    assert DRAWINGS.decode(json.dumps(changed).encode()) == replace(
        drawing, name="n", frame=Square(7)
    )
    document["Drawing"] |= {
        "name": "n",
        "frame": document["Drawing"]["frame"] | {"side": 7, "rounded": False},
    }
    assert changed | {"release": ""} == document | {"release": ""}


def test_a_document_that_two_releases_wrote_is_read_by_both():
    drawing = Drawing("d", (Square(2), Square(3)))
    text = json.dumps(of_release("0.9.0", drawing, author="me")).encode()

    for name in ("e", "f"):
        drawing = replace(drawing, name=name)
        text = DRAWINGS.encode(drawing, over=text)
        assert json.loads(text)["release"] == f"0.9.0+{RELEASE}"
        assert json.loads(text)["Drawing"]["author"] == "me"
        assert DRAWINGS.decode(text) == drawing


def test_what_another_release_wrote_of_an_item_goes_with_the_item():
    drawing = Drawing("d", (Square(2), Square(3), Square(4)))
    document = of_release("0.9.0", drawing)
    for shape in document["Drawing"]["shapes"]:
        shape["Square"]["edge"] = shape["Square"]["side"]
    text = json.dumps(document).encode()

    changed = json.loads(
        DRAWINGS.encode(replace(drawing, shapes=(Square(4), Square(5))), over=text)
    )

    assert changed["Drawing"]["shapes"] == [
        {"Square": {"side": 4, "rounded": False, "edge": 4}},
        {"Square": {"side": 5, "rounded": False}},
    ]


@pytest.mark.parametrize("text", [b"", b"[]", b"{", HEADER + b'"Drawing":{}}'])
def test_what_is_replaced_and_was_damaged_or_ours_leaves_nothing(text):
    drawing = Drawing("d", ())

    assert DRAWINGS.encode(drawing, over=text) == DRAWINGS.encode(drawing)


def test_a_document_of_another_release_without_anything_new_becomes_one_of_ours():
    drawing = Drawing("d", (Square(2),))
    text = json.dumps(of_release("0.0.9", drawing)).encode()

    assert DRAWINGS.encode(drawing, over=text) == DRAWINGS.encode(drawing)


def test_the_release_is_that_of_the_project():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())

    assert project["project"]["version"] == RELEASE
