"""JSON that users wrote parts of: what is read of it, whatever they did."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.k8s.responses import parse_json
from tests.fakes.configs import TOO_DEEP, claim_text, shapes

LEAVES = st.none() | st.booleans() | st.integers() | st.text()
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20
)


@given(JSON)
def test_what_is_written_is_read(value):
    assert parse_json(json.dumps(value).encode()) == value


@pytest.mark.parametrize("nested", sorted(TOO_DEEP))
def test_what_is_nested_too_deeply_is_null_and_all_else_is_read(nested):
    text = f'{{"items":[{claim_text(shapes()[nested], 2)},{{"a":"[{{\\"é"}}]}}'

    deep, plain = parse_json(text.encode())["items"]

    assert plain == {"a": '[{"é'}
    assert deep["metadata"]["name"] == "worst"
    for config in deep["status"]["allocation"]["devices"]["config"]:
        assert config["opaque"]["parameters"]["kind"] == "GpuConfig"


@given(st.lists(st.text(), max_size=5), st.lists(JSON, max_size=3))
def test_brackets_in_texts_are_no_nesting(texts, others):
    deep = f"{'[' * 5000}{json.dumps(texts)}{']' * 5000}"
    text = json.dumps([texts, *others])[:-1] + f", {deep}]"

    assert parse_json(text.encode())[:-1] == [texts, *others]


@given(st.lists(st.integers(-60, 60), max_size=8))
def test_only_what_is_too_deep_is_null_wherever_it_begins_and_ends(changes):
    """Lists in lists that rise and fall by *changes* levels, one after another."""
    text, depth = "[1", 1
    for change in changes:
        if change > 0:
            text += ",[1" * change
        else:
            change = max(change, 1 - depth)
            text += "]" * -change
        depth += change
    text += "]" * depth
    deep = "[" * 5000 + "]" * 5000

    read, last = parse_json(f"[{text},{deep}]".encode())

    assert read == _cut(json.loads(text), 2)
    assert last == _cut(json.loads("[" * 200 + "]" * 200), 2)


def _cut(value, depth):
    """*value*, with null for lists at 100 levels; its own, if it is one, is at *depth*."""
    if not isinstance(value, list):
        return value
    return None if depth == 100 else [_cut(item, depth + 1) for item in value]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[" * 5000,
        b"[" * 5000 + b"]" * 4000,
        b'"' + b"[" * 5000,
        b"]" * 5000,
        b"[" * 200 + b"]" * 5000,
        b"1" * 5000,
        b"\xff",
    ],
    ids=lambda text: f"{text[:1]!r} {len(text)}",
)
def test_what_is_no_json_is_a_value_error(text):
    with pytest.raises(ValueError):
        parse_json(text)
