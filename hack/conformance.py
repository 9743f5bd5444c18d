"""Which test covers which point of the conformance checklist, as a table for the reader.

The points are in tests/conformance/points.yaml; a test names those it covers:
``@pytest.mark.point(22, 23)``. Tests are read, not imported: that takes a moment, and needs neither
a cluster nor a GPU.
"""

import argparse
import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import yaml

REPOSITORY = Path(__file__).parents[1]
TESTS = REPOSITORY / "tests"
POINTS = TESTS / "conformance/points.yaml"
TABLE = TESTS / "conformance/README.md"

HEAD = """\
# Conformance

What a DRA driver and a device plugin owe Kubernetes, point by point, and the tests that show it.
Written by `hack/update-conformance` from `points.yaml` and the tests' marks
(`@pytest.mark.point(22, 23)`); edit those, not this file.

Level: F is tested with a fake kubelet, A with a real API server, K with a real kubelet. Tests in
`e2e` run on a real Kubernetes (`hack/test`).

Of {all} points {tested} have tests ({partly} of them in part), {later} come with a later release.
"""

Test: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Point:
    """One promise. *later*: why no test covers it yet. *partly*: what its tests leave out."""

    number: int
    area: str
    level: str
    what: str
    later: str | None = None
    partly: str | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """One ``point(...)`` in a test file. *test* is ``file::name``, None where it is on no test;
    *number* is None where it is not a plain number."""

    where: str
    test: str | None
    number: int | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table, or with --check say whether it is fresh. 1: there are problems, printed."""
    parser = argparse.ArgumentParser(prog="hack/update-conformance", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if it is stale")
    check = parser.parse_args(arguments).check
    points, marks = read_points(POINTS.read_text()), list(read_marks(TESTS))
    faults = problems(points, marks)
    text = table(points, marks)
    if not check:
        TABLE.write_text(text)
    elif not TABLE.exists() or TABLE.read_text() != text:
        faults = (*faults, f"{TABLE.relative_to(REPOSITORY)} is stale: run hack/update-conformance")
    for problem in faults:
        print(problem, file=sys.stderr)
    return 1 if faults else 0


def read_points(text: str) -> tuple[Point, ...]:
    """The points of a YAML document ``{area: {number: {level, what, ...}}}``, in its order."""
    areas: Mapping[str, Mapping[int, Mapping[str, Any]]] = yaml.safe_load(text)
    return tuple(
        Point(number, area, **fields)
        for area, points in areas.items()
        for number, fields in points.items()
    )


def read_marks(tests: Path) -> Iterator[Mark]:
    """Every mark in the ``test_*.py`` below *tests*, by file and line."""
    for path in sorted(tests.rglob("test_*.py")):
        yield from marks_in(path.relative_to(tests).as_posix(), path.read_text())


def marks_in(file: str, source: str) -> Iterator[Mark]:
    """The marks in one test file, where pytest sees them: on tests, on their classes and
    parameters, and in the ``pytestmark`` of the module."""
    module = ast.parse(source, filename=file)
    tests = list(_tests(module.body, (), ()))
    placed: set[ast.Call] = set()
    for name, scopes in tests:
        calls = [call for scope in scopes for call in _point_calls(scope)]
        placed.update(calls)
        for call in calls:
            yield from _marks(f"{file}:{call.lineno}", f"{file}::{name}", call)
    for call in _point_calls(module):
        if call not in placed:
            yield Mark(f"{file}:{call.lineno}", None, None)


def problems(points: Sequence[Point], marks: Sequence[Mark]) -> tuple[str, ...]:
    """Everything that is wrong with points and marks, as sentences."""
    numbers = [point.number for point in points]
    covered = _covered(marks)
    return (
        *(f"points.yaml: point {n} is out of order" for n in _out_of_order(numbers)),
        *(f"{mark.where}: this mark is on no test" for mark in marks if mark.test is None),
        *(
            f"{mark.where}: a point is a number of points.yaml, written out"
            for mark in marks
            if mark.test is not None and mark.number not in numbers
        ),
        *(
            f"point {point.number} has neither a test nor a reason why later: {point.what}"
            for point in points
            if point.number not in covered and point.later is None
        ),
        *(
            f"point {point.number} wants a real kubelet: test it in e2e, or say what is left out"
            for point in points
            if point.level == "K" and point.partly is None and point.number in covered
            if not any(test.startswith("e2e/") for test in covered[point.number])
        ),
        *(
            f"point {point.number} has a test: it is not for later, though it may be covered partly"
            for point in points
            if point.number in covered and point.later is not None
        ),
    )


def table(points: Sequence[Point], marks: Sequence[Mark]) -> str:
    """The whole README.md: a table for each area, a row for each point."""
    covered = _covered(marks)
    tested = [point for point in points if point.number in covered]
    lines = HEAD.format(
        tested=len(tested),
        all=len(points),
        partly=sum(point.partly is not None for point in tested),
        later=sum(point.later is not None for point in points),
    ).splitlines()
    for area in dict.fromkeys(point.area for point in points):
        lines += ["", f"## {area}", "", "| point | level | what | tests |", "|---|---|---|---|"]
        lines += [
            _row(point, covered.get(point.number, ())) for point in points if point.area == area
        ]
    return "\n".join(lines) + "\n"


def _row(point: Point, tests: Sequence[str]) -> str:
    shown = [f"`{test}`" for test in tests]
    shown += [f"later: {point.later}"] if point.later else []
    shown += [f"partly: {point.partly}"] if point.partly else []
    return f"| {point.number} | {point.level} | {point.what} | {'<br>'.join(shown)} |"


def _covered(marks: Sequence[Mark]) -> Mapping[int, tuple[str, ...]]:
    """The tests of each point, sorted."""
    pairs = {(mark.number, mark.test) for mark in marks if mark.number and mark.test}
    return {n: tuple(sorted(test for number, test in pairs if number == n)) for n, _ in pairs}


def _out_of_order(numbers: Sequence[int]) -> list[int]:
    """The numbers that are not one more than the one before; the first is 1."""
    return [n for before, n in zip((0, *numbers), numbers, strict=False) if n != before + 1]


def _tests(
    body: Sequence[ast.stmt], names: tuple[str, ...], scopes: tuple[ast.AST, ...]
) -> Iterator[tuple[str, tuple[ast.AST, ...]]]:
    """Each test in *body* as ``Class::name``, with every piece of code that can hold its marks."""
    own = (*scopes, *(statement for statement in body if _is_pytestmark(statement)))
    for statement in body:
        if isinstance(statement, ast.ClassDef) and statement.name.startswith("Test"):
            inner = (*own, *statement.decorator_list)
            yield from _tests(statement.body, (*names, statement.name), inner)
        elif isinstance(statement, Test) and statement.name.startswith("test"):
            yield "::".join((*names, statement.name)), (*own, *statement.decorator_list)


def _is_pytestmark(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Assign) and any(
        isinstance(target, ast.Name) and target.id == "pytestmark" for target in statement.targets
    )


def _point_calls(scope: ast.AST) -> Iterator[ast.Call]:
    """The ``….mark.point(...)`` in *scope*."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("mark.point"):
            yield node


def _marks(where: str, test: str, call: ast.Call) -> Iterator[Mark]:
    for argument in call.args or [ast.Constant(None)]:
        value = argument.value if isinstance(argument, ast.Constant) else None
        yield Mark(where, test, value if type(value) is int else None)


if __name__ == "__main__":
    sys.exit(main())
