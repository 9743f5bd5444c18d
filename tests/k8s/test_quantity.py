"""Quantities: their value, and how Kubernetes writes them."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.k8s.quantity import canonical, parse, rounded_up

SUFFIXES = ("", *"numkMGTPE", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei", "e3")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("12", 12),
        ("-1.5", Fraction(-3, 2)),
        (".5", Fraction(1, 2)),
        ("5.", 5),
        ("100m", Fraction(1, 10)),
        ("1n", Fraction(1, 10**9)),
        ("2k", 2000),
        ("80Gi", 80 * 2**30),
        ("1.5Ki", 1536),
        ("1e3", 1000),
        ("1E-1", Fraction(1, 10)),
        ("1E", 10**18),
        ("9223372036854775807", 2**63 - 1),
    ],
)
def test_a_quantity_has_an_exact_value(text, value):
    assert parse(text) == value


# How a real kube-apiserver 1.36 stored what it was sent.
@pytest.mark.parametrize(
    ("sent", "stored"),
    [
        ("81920Mi", "80Gi"),
        ("85899345920", "85899345920"),
        ("1000000", "1M"),
        ("1024", "1024"),
        ("1500", "1500"),
        ("0.5", "500m"),
        ("0.5Gi", "512Mi"),
        ("1.5Gi", "1536Mi"),
        ("0.5Ki", "512"),
        ("1000Ki", "1000Ki"),
        ("1.0005Ki", "1024512m"),
        ("1e3", "1e3"),
        ("12e5", "1200e3"),
        ("1000m", "1"),
        ("0.0000000001", "1n"),
        ("-0.5", "-500m"),
        ("0Gi", "0"),
        ("0", "0"),
        (".5", "500m"),
        ("1E-1", "100e-3"),
        ("1e1", "10"),
        ("1.00000000001Gi", "1073741824010737419n"),
        ("1023.5Ki", "1048064"),
        ("-1.5Ki", "-1536"),
        ("80000Mi", "80000Mi"),
        ("81251Mi", "81251Mi"),
    ],
)
def test_a_quantity_is_written_as_the_api_server_writes_it(sent, stored):
    assert canonical(sent) == stored


@pytest.mark.parametrize(("written", "stored"), [("+5", "5"), ("5.", "5"), ("1E3", "1e3")])
def test_what_the_api_server_leaves_as_it_was_written_is_the_same_here(written, stored):
    assert canonical(written) == canonical(stored)


@pytest.mark.parametrize("text", ["", "Gi", "1 Gi", "1gi", "1e", "--1", "1.2.3", "0x10", "٣", "1K"])
def test_what_is_no_quantity_is_refused(text):
    with pytest.raises(ValueError, match="not a quantity"):
        parse(text)


def test_a_whole_number_is_rounded_up():
    assert (rounded_up("1500m"), rounded_up("2"), rounded_up("-1500m")) == (2, 2, -1)


@given(st.integers(-(10**12), 10**12), st.integers(0, 999), st.sampled_from(SUFFIXES))
def test_writing_keeps_the_value_down_to_a_nano_and_is_final(number, thousandths, suffix):
    text = f"{number}.{thousandths:03d}{suffix}"
    written = canonical(text)

    assert abs(parse(written) - parse(text)) < Fraction(1, 10**9)
    assert abs(parse(written)) >= abs(parse(text))
    assert canonical(written) == written


@given(st.integers(0, 2**40), st.sampled_from(["Ki", "Mi", "Gi"]))
def test_equal_amounts_of_memory_are_written_alike(number, suffix):
    below = {"Ki": "", "Mi": "Ki", "Gi": "Mi"}[suffix]
    if number * 1024 >= 1024 and below:
        assert canonical(f"{number}{suffix}") == canonical(f"{number * 1024}{below}")
