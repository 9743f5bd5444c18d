"""What of YAML is read, and what is refused before it grows."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.base.yaml_documents import load_document, load_documents
from tests.fakes.work import calls

# Eight values, then eight times what stands above: a billion of them in ten lines.
LAUGHS = "\n".join(
    [f"l0: &l0 [{','.join('x' * 8)}]"]
    + [f"l{n}: &l{n} [{','.join([f'*l{n - 1}'] * 8)}]" for n in range(1, 10)]
)


def test_aliases_are_read_where_they_stand_for_little():
    text = "a: &a [1, 2]\nb: [*a, *a]\nc: &c {x: *a}\nd: {<<: *c, y: 3}"

    assert load_document(text) == {
        "a": [1, 2],
        "b": [[1, 2], [1, 2]],
        "c": {"x": [1, 2]},
        "d": {"x": [1, 2], "y": 3},
    }


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (LAUGHS, "aliases stand for more than 10000 values"),
        ("a: &a [*a]", "an alias stands for what it is in"),
        ("a: &a {b: [1, *a]}", "an alias stands for what it is in"),
        ("a: *b", "undefined alias"),
        ("[" * 5000, "nested too deeply"),
        ("a: " * 3, "mapping values are not allowed"),
        ("a: " + "1" * 5000, "no YAML"),
        ("a: 2026-99-99", "no YAML: month"),
        ("a: !!bool 7", "no YAML"),
        ("a: !!timestamp x", "no YAML"),
        ('a: !!int ""', "no YAML"),
        ("a: 1\na: 2", "'a' is there twice"),
    ],
    ids=lambda text: text[:20],
)
def test_what_cannot_be_read_says_why_in_one_line(text, problem):
    with pytest.raises(ValueError, match=problem) as refused:
        load_documents(text)

    assert "\n" not in str(refused.value)
    assert type(refused.value) is ValueError


def test_a_mistake_is_said_by_its_line_and_without_words_for_programmers():
    with pytest.raises(ValueError, match=r'got .* in "this file", line 2, column 6'):
        load_documents(b"a: 1\nb: [1")
    with pytest.raises(ValueError, match=r"integer string conversion: value has 5000 digits$"):
        load_documents("a: " + "1" * 5000)


def test_aliases_are_refused_before_they_grow():
    def read():
        with pytest.raises(ValueError):
            load_documents(LAUGHS)

    assert calls(read) < 100_000  # written out it has a billion values


def test_several_documents_are_read_and_one_is_asked_for():
    assert load_documents("a: 1\n---\nb: &x [2]\n---\n") == [{"a": 1}, {"b": [2]}, None]
    assert load_document("") is None
    with pytest.raises(ValueError, match="has 2 documents; write one"):
        load_document("a: 1\n---\nb: 2\n")


YAML = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
)


@given(YAML)
def test_what_is_written_is_read(value):
    assert load_document(yaml.safe_dump([value, value])) == [value, value]


@given(st.text() | st.text("[]{}&*a:- \n!?|>'\"#%@`<,01"))
def test_any_text_is_read_or_refused(text):
    try:
        load_documents(text)
    except ValueError as refused:
        assert str(refused)
