"""The reference pages are fresh, and so are commands and defaults that pages name."""

import ast
import re
import shlex
from typing import Any

import pytest
import yaml

from api import names
from dra_driver.__main__ import command_line
from dra_driver.plan.profiles.rules import decode_profile
from hack.generated import stale
from hack.reference import files, metric_rows, pages, profile_rows, value_rows
from tests.deploy.chart import REPOSITORY

PROSE = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
OPERATE = (REPOSITORY / "docs/operate.md").read_text()


def test_the_pages_are_fresh() -> None:
    assert stale(files()).keys() == set(), "run hack/update-docs"
    assert {path.name for path in (REPOSITORY / "docs/reference").iterdir()} == pages().keys()


def written_defaults() -> list[tuple[str, str]]:
    return [
        (field.strip("`"), default.strip("`"))
        for field, _, default, _ in profile_rows()
        if default.startswith("`")
    ]


@pytest.mark.parametrize(("field", "default"), written_defaults())
def test_a_written_default_is_what_holds_without_the_field(field: str, default: str) -> None:
    entry: Any = yaml.safe_load(default)
    for name in reversed(field.split(".")):
        entry = {name: entry}
    assert rules({**entry, "select": {"index": [0]}}) == rules({"select": {"index": [0]}})


def rules(entry: dict[str, Any]) -> Any:
    document = {
        "apiVersion": names.CONFIG_VERSION,
        "kind": "NodeProfile",
        "spec": {"gpus": [entry]},
    }
    [decoded_entry] = decode_profile(document, "default").entries
    return decoded_entry.rules


def test_a_value_has_the_comment_above_it() -> None:
    text = "# About all.\n\na:\n  # One\n  # two.\n  b: 1\n\n# Three.\nc: {d: []}\n"
    assert value_rows(text) == [("`a.b`", "`1`", "One two."), ("`c`", "`{d: []}`", "Three.")]


def typed_commands() -> list[str]:
    blocks = [
        block
        for page in PROSE
        for block in re.findall(r"^```console\n(.*?)^```", page.read_text(), re.M | re.S)
    ]
    return [
        command.strip()
        for block in blocks
        for command in re.findall(r"(?:^\$ |-- )dra-driver (.*?)(?:  +#.*)?$", block, re.M)
    ]


@pytest.mark.parametrize("command", typed_commands())
def test_a_command_of_the_pages_is_one_that_there_is(command: str) -> None:
    command_line().parse_args(shlex.split(command))


def test_the_messages_that_the_pages_explain_are_those_of_the_code() -> None:
    texts = [
        str(node.value)
        for path in (REPOSITORY / "dra_driver").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
    ]
    page = OPERATE.partition("### Errors")[2].partition("###")[0]
    messages = re.findall(r"`([^`]+)`", "".join(re.findall(r"^\| (.+?) \|", page, re.M)))
    parts = [part.strip(" ,") for message in messages for part in message.split("…")]
    unknown = [part for part in parts if not any(part in text for text in texts)]
    of_the_kernel = ["No space left on device", "Read-only file system"]
    assert unknown == of_the_kernel
    assert len(parts) > 15


def test_the_pages_explain_every_event() -> None:
    sources = (REPOSITORY / "dra_driver").rglob("*.py")
    reasons = re.compile(r'"((?:MPS|MIG|GPU|OtherDriver|ClaimNot)[A-Z]\w+)"')
    events = {reason for path in sources for reason in reasons.findall(path.read_text())}
    page = OPERATE.partition("### Events of a pod")[2]
    heads = "".join(re.findall(r"^\| (.+?) \|", page, re.M))
    assert set(re.findall(r"`([A-Z]\w+)`", heads)) == events


def test_the_metrics_that_the_pages_name_are_served() -> None:
    served = {row[0].strip("`").partition("{")[0] for row in metric_rows()}
    named = {name for page in PROSE for name in re.findall(r"dra_driver_\w+", page.read_text())}
    assert named - served == set()
    assert named
