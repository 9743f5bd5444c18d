"""JSON that users wrote parts of: what is read of it, whatever they did."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.cluster.parsing import parse
from tests.fakes.configs import claim_text, shapes

LEAVES = st.none() | st.booleans() | st.integers() | st.text()
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20
)


@given(JSON)
def test_what_is_written_is_read(value):
    assert parse(json.dumps(value).encode()) == value


@pytest.mark.parametrize("nested", ["lists in lists", "maps in maps"])
def test_what_is_nested_too_deeply_is_null_and_all_else_is_read(nested):
    text = f'{{"items":[{claim_text(shapes()[nested], 2)},{{"a":"[{{\\"é"}}]}}'

    deep, other = parse(text.encode())["items"]

    assert other == {"a": '[{"é'}
    assert deep["metadata"]["name"] == "worst"
    for config in deep["status"]["allocation"]["devices"]["config"]:
        assert config["opaque"]["parameters"]["kind"] == "GpuConfig"


@given(st.lists(st.text(), max_size=5), st.lists(JSON, max_size=3))
def test_brackets_in_texts_are_no_nesting(texts, others):
    deep = f"{'[' * 5000}{json.dumps(texts)}{']' * 5000}"
    text = json.dumps([texts, *others])[:-1] + f", {deep}]"

    assert parse(text.encode())[:-1] == [texts, *others]


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
        parse(text)
