"""The chart's values: few, explained, all used, and closed against misspelling."""

import re
from collections.abc import Iterator
from typing import Any

import yaml

from tests.deploy.chart import CHART, REPOSITORY, schema, values

MOST_VALUES = 60
# What they hold is the affair of Helm, in every part of a larger chart, and of Kubernetes.
FREE = {"/properties/global", "/$defs/ofKubernetes"}
# Any key, but only strings, quantities or profiles.
MAPS = {"/$defs/strings", "/$defs/quantities", "/properties/profiles"}
ONE = "resources"  # one value, whatever it holds
OF_NVIDIAS_CHART = {"$ref": "#/$defs/ofNvidiasChart"}


def leaves(value: Any, path: str = "") -> Iterator[str]:
    """Paths of the values: a map with content is a group, except `resources`: one value."""
    if isinstance(value, dict) and value and path.rpartition(".")[2] != ONE:
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}".lstrip("."))
    else:
        yield path


def object_schemas(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(node, dict):
        if node.get("type") == "object":
            yield path, node
        for key, inner in node.items():
            yield from object_schemas(inner, f"{path}/{key}")


def named(node: dict[str, Any], path: str = "") -> Iterator[str]:
    """Paths of the leaves that the schema names, but for those of another chart."""
    for key, inner in node["properties"].items():
        if inner == OF_NVIDIAS_CHART:
            continue
        if "properties" in inner and key != ONE:
            yield from named(inner, f"{path}{key}.")
        else:
            yield f"{path}{key}"


def test_there_are_at_most_sixty_values() -> None:
    assert len(list(leaves(values()))) <= MOST_VALUES


def test_every_value_has_a_comment_that_says_when_to_change_it() -> None:
    lines = (CHART / "values.yaml").read_text().splitlines()
    keys = {path.rpartition(".")[2] for path in leaves(values())}
    without = [
        line
        for above, line in zip(["", *lines], lines, strict=False)
        if (key := re.match(r"^(?:  )?(\w+):", line))
        and key.group(1) in keys
        and not above.lstrip().startswith("#")
    ]
    assert without == []


def test_every_object_of_the_schema_is_closed() -> None:
    schemas = dict(object_schemas(schema()))
    closed = {path for path, node in schemas.items() if node.get("additionalProperties") is False}
    assert schemas.keys() - closed == MAPS | FREE
    assert all(isinstance(schemas[path]["additionalProperties"], dict) for path in MAPS)


def test_schema_and_values_name_the_same_things() -> None:
    assert set(named(schema())) - {"global"} == set(leaves(values()))


def test_every_value_is_used_and_nothing_else_is() -> None:
    templates = "".join(path.read_text() for path in sorted((CHART / "templates").iterdir()))
    used = set(re.findall(r"\.Values\.([A-Za-z.]+)", templates))
    assert used == set(leaves(values()))


def test_every_template_holds_one_object_and_is_named_for_component_and_kind() -> None:
    for path in sorted((CHART / "templates").glob("*.yaml")):
        kinds = re.findall(r"^kind: (\w+)$", path.read_text(), re.MULTILINE)
        expected = [] if path.stem == "guards" else [path.stem.rpartition("-")[2]]
        assert [kind.lower() for kind in kinds] == expected, path.name


def test_the_chart_has_the_version_of_the_driver() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = re.search(r'^version = "(.*)"$', (REPOSITORY / "pyproject.toml").read_text(), re.M)
    assert project
    assert chart["version"] == chart["appVersion"] == project.group(1)
