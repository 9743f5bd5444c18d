"""What is certain of a CEL selector, and that nothing is taken for certain that is not."""

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.cli.doctor.scheduling import selectors
from dra_driver.cli.doctor.scheduling.selectors import (
    ERROR,
    UNKNOWN,
    evaluate,
    may_match,
    variables_of,
    variables_of_others,
)

DRIVER = "gpu.nvidia.com"
DEVICE = {
    "name": "gpu-0",
    "allowMultipleAllocations": True,
    "attributes": {
        "type": {"string": "gpu"},
        "nvlinkPeers": {"int": 7},
        "fast": {"bool": True},
        "driverVersion": {"version": "580.95.5"},
        "resource.kubernetes.io/numaNode": {"int": 0},
    },
    "capacity": {"memory": {"value": "80Gi"}, "shares": {"value": "48"}},
}
OURS = variables_of(DEVICE, DRIVER)
THEIRS = variables_of_others(DRIVER)
A = f"device.attributes['{DRIVER}']"


def test_the_examples_in_the_module_hold():
    assert doctest.testmod(selectors).failed == 0


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (f"device.driver == '{DRIVER}'", True),
        (f'device.driver == "{DRIVER}"', True),
        ("device.driver != 'other.example'", True),
        ("device.driver in ['a', 'b']", False),
        (f"{A}.type == 'gpu'", True),
        (f"{A}['type'] == 'mig'", False),
        (f"{A}.type in ['gpu', 'gpu-shared']", True),
        (f"!({A}.type == 'gpu')", False),
        (f"!!{A}.fast", True),
        (f"!{A}.fast == false", True),
        (f"{A}.fast", True),
        (f"{A}.nvlinkPeers == 7", True),
        ("device.attributes['resource.kubernetes.io'].numaNode == 0", True),
        (f"'shares' in device.capacity['{DRIVER}']", True),
        (f"!('cores' in device.capacity['{DRIVER}'])", True),
        (f"'type' in {A}", True),
        ("device.allowMultipleAllocations", True),
        ("true && (false || true)", True),
        ("false && nonsense(1)", False),
        (f"{A}.missing == 'x'", ERROR),
        ("device.attributes['other.example'].type == 'gpu'", ERROR),
        (f"{A}.missing == 'x' || {A}.type == 'gpu'", True),
        (f"{A}.missing == 'x' && {A}.type == 'mig'", False),
        (f"{A}.missing == 'x' || {A}.type == 'mig'", ERROR),
        (f"{A}.missing == 'x' || nonsense", UNKNOWN),
        (f"!({A}.missing == 'x')", ERROR),
    ],
)
def test_what_is_understood_has_the_value_that_cel_gives_it(expression, expected):
    assert evaluate(expression, OURS) is expected


@pytest.mark.parametrize(
    "expression",
    [
        f"{A}.type.matches('^gpu')",
        f"{A}.driverVersion.isGreaterThan(semver('580.0.0'))",
        f"device.capacity['{DRIVER}'].memory.compareTo(quantity('40Gi')) >= 0",
        f"{A}.nvlinkPeers > 3",
        f"{A}.nvlinkPeers + 1 == 8",
        f"has({A}.type)",
        f"{A}.type == 'gpu' ? false : false",
        f"{A}[?'type'].orValue('') == 'mig'",
        "['a', 'b'].exists(x, x == 'c')",
        f"{A}.nvlinkPeers == '7'",
        f"{A}.nvlinkPeers == 7u",
        f"{A}.driverVersion == '1.0.0'",
        "device.newField == 'x'",
        "device.driver == r'x'",
        "device.driver == 'a\\x62'",
        "device.driver == '''x'''",
        "'a.example' in device.attributes",
        "device.driver == 'x' // && true",
        "device.driver ==",
        "(((",
        "device.",
        "device..driver",
        "",
        "(" * 500 + "false" + ")" * 500,
    ],
)
def test_what_is_not_understood_is_unknown_and_may_match(expression):
    assert evaluate(expression, OURS) is UNKNOWN
    assert may_match([{"cel": {"expression": expression}}], OURS)


def test_of_what_is_unknown_the_rest_can_still_decide():
    assert evaluate(f"{A}.type.matches('x') && {A}.type == 'mig'", OURS) is False
    assert evaluate(f"{A}.type.matches('x') || {A}.type == 'gpu'", OURS) is True
    assert evaluate(f"!({A}.type.matches('x'))", OURS) is UNKNOWN


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (f"device.driver == '{DRIVER}' && {A}.type == 'gpu'", False),
        (f"device.driver in ['{DRIVER}']", False),
        (f"device.driver in ['{DRIVER}', 'other.example']", UNKNOWN),
        ("device.driver == 'other.example'", UNKNOWN),
        (f"device.driver != '{DRIVER}'", True),
        (f"{A}.type == 'gpu'", UNKNOWN),
    ],
)
def test_a_device_of_another_driver_is_told_by_its_driver_alone(expression, expected):
    assert evaluate(expression, THEIRS) is expected


def test_every_selector_has_to_match_and_one_without_cel_does():
    yes, no = ({"cel": {"expression": text}} for text in ("true", "false"))

    assert may_match([], OURS)
    assert may_match([yes, {}], OURS)
    assert not may_match([yes, no], OURS)


LEAVES = st.sampled_from(
    ["true", "false", "unknown(1)", f"{A}.missing", f"{A}.type == 'gpu'", f"{A}.type == 'mig'"]
)
EXPRESSIONS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["&&", "||"]), inner).map(
            lambda parts: f"({parts[0]}) {parts[1]} ({parts[2]})"
        ),
        inner.map(lambda text: f"!({text})"),
    ),
    max_leaves=12,
)


@given(EXPRESSIONS)
def test_whatever_the_unknown_parts_turn_out_to_be_the_answer_stands(expression):
    """Every unknown is replaced by each value that CEL could find; an error counts as no match."""
    answer = evaluate(expression, OURS)

    for truth in ("true", "false", f"{A}.missing"):
        settled = evaluate(expression.replace("unknown(1)", truth), OURS)
        assert answer is UNKNOWN or answer is settled or {answer, settled} <= {ERROR, False}


@given(st.text(max_size=60))
def test_no_text_breaks_the_reader(text):
    evaluate(text, OURS)


@given(
    st.lists(
        st.sampled_from(
            [
                "device",
                ".",
                "driver",
                "==",
                "'x'",
                "(",
                ")",
                "[",
                "]",
                "!",
                "&&",
                "||",
                "in",
                ",",
                "1",
                "true",
            ]
        ),
        max_size=25,
    )
)
def test_no_order_of_words_breaks_the_reader(words):
    evaluate(" ".join(words), OURS)
