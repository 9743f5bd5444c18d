"""The table of conformance points says what the tests do, and every point has its say."""

import pytest

from hack.conformance import (
    POINTS,
    TABLE,
    TESTS,
    Mark,
    Point,
    marks_in,
    problems,
    read_marks,
    read_points,
    table,
)

ONE = Point(1, "Registration", "F", "It registers.")
TWO = Point(2, "Registration", "AF", "It stays registered.")
TEST = Mark("a/test_b.py:7", "a/test_b.py::test_c", 1)


def test_the_table_is_fresh():
    expected = table(read_points(POINTS.read_text()), tuple(read_marks(TESTS)))

    assert expected == TABLE.read_text(), "run hack/update-conformance"


def test_every_point_has_a_test_or_a_reason():
    unexplained = problems(read_points(POINTS.read_text()), tuple(read_marks(TESTS)))

    assert not unexplained, "\n" + "\n".join(unexplained)


def test_the_checklist_is_whole():
    points = read_points(POINTS.read_text())

    assert [point.number for point in points] == list(range(1, 161))
    assert {point.level for point in points} <= {"F", "A", "K", "AF"}


@pytest.mark.parametrize(
    ("source", "marks"),
    [
        pytest.param(
            "@pytest.mark.point(3, 4)\ndef test_a(): ...",
            [("test_x.py::test_a", 3), ("test_x.py::test_a", 4)],
            id="on a test",
        ),
        pytest.param(
            "@mark.point(3)\nclass TestA:\n  def test_b(self): ...\n  def test_c(self): ...",
            [("test_x.py::TestA::test_b", 3), ("test_x.py::TestA::test_c", 3)],
            id="on a class",
        ),
        pytest.param(
            "pytestmark = [pytest.mark.cluster, pytest.mark.point(3)]\ndef test_a(): ...",
            [("test_x.py::test_a", 3)],
            id="on a module",
        ),
        pytest.param(
            "@pytest.mark.parametrize('a', [pytest.param(1, marks=pytest.mark.point(3))])\n"
            "async def test_a(a): ...",
            [("test_x.py::test_a", 3)],
            id="on one row of a table",
        ),
        pytest.param("@pytest.mark.point(3)\ndef fake(): ...", [(None, None)], id="on no test"),
        pytest.param(
            "@pytest.mark.point(N)\ndef test_a(): ...", [("test_x.py::test_a", None)], id="a name"
        ),
        pytest.param(
            "@pytest.mark.point()\ndef test_a(): ...", [("test_x.py::test_a", None)], id="nothing"
        ),
    ],
)
def test_marks_are_found_where_pytest_finds_them(source, marks):
    assert [(mark.test, mark.number) for mark in marks_in("test_x.py", source)] == marks


@pytest.mark.parametrize(
    ("points", "marks", "message"),
    [
        pytest.param([ONE], [], "point 1 has neither a test nor a reason", id="uncovered"),
        pytest.param([], [TEST], "a/test_b.py:7: a point is a number of points.yaml", id="unknown"),
        pytest.param(
            [ONE], [TEST, Mark("f:1", None, None)], "f:1: this mark is on no test", id="stray"
        ),
        pytest.param([TWO], [Mark("f:1", "f::t", 2)], "point 2 is out of order", id="a gap"),
        pytest.param(
            [Point(1, "CDI", "K", "It runs.")],
            [TEST],
            "point 1 wants a real kubelet: test it in e2e, or say what is left out",
            id="a fake where the real thing is meant",
        ),
        pytest.param(
            [Point(1, "CDI", "F", "It writes.", later="it waits")],
            [TEST],
            "point 1 has a test: it is not for later",
            id="a reason that time has overtaken",
        ),
    ],
)
def test_what_is_wrong_is_said(points, marks, message):
    (problem,) = problems(points, marks)

    assert message in problem


def test_a_row_shows_tests_in_order_and_what_is_left_out():
    partly = Point(2, "CDI", "K", "It runs.", partly="one runtime only")
    later = Point(3, "CDI", "K", "It heals.", later="it waits")
    marks = [Mark("f:9", "f::t", 2), Mark("a:9", "a::t", 2), Mark("a:8", "a::t", 2), TEST]

    assert problems([ONE, partly, later], marks) == ()
    shown = table([ONE, partly, later], marks)

    assert "Of 3 points 2 have tests (1 of them in part), 1 come with a later release." in shown
    assert shown.endswith(
        "| 1 | F | It registers. | `a/test_b.py::test_c` |\n"
        "\n## CDI\n\n| point | level | what | tests |\n|---|---|---|---|\n"
        "| 2 | K | It runs. | `a::t`<br>`f::t`<br>partly: one runtime only |\n"
        "| 3 | K | It heals. | later: it waits |\n"
    )
