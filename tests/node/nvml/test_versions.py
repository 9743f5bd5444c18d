"""Versions as NVML prints them become semantic versions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.base.errors import NodeError
from dra_driver.model.gpus import Version
from dra_driver.node.nvml.values import cuda_version, driver_version

numbers = st.integers(0, 9999)


@pytest.mark.parametrize(
    ("printed", "published"),
    [
        ("580.95.05", "580.95.5"),
        ("565.77", "565.77.0"),
        ("615", "615.0.0"),
        ("550.54.15-beta", "550.54.15"),
    ],
)
def test_driver_versions_are_normalised(printed, published):
    assert str(driver_version(printed)) == published


@pytest.mark.point(75)
@given(numbers, numbers, numbers, st.integers(1, 4))
def test_leading_zeros_never_reach_a_version(major, minor, patch, width):
    printed = f"{major}.{minor:0{width}}.{patch:0{width}}"
    assert driver_version(printed) == Version(major, minor, patch)


@given(st.text().filter(lambda text: not text[:1].isdecimal()))
def test_what_is_no_version_is_refused_by_name(text):
    with pytest.raises(NodeError, match="which is none"):
        driver_version(text)


@pytest.mark.parametrize(
    ("number", "published"), [(13000, "13.0.0"), (12080, "12.8.0"), (11040, "11.4.0")]
)
def test_cuda_versions_are_read_from_their_number(number, published):
    assert str(cuda_version(number)) == published


@given(st.integers(1, 99), st.integers(0, 99))
def test_every_cuda_version_survives_being_a_number(major, minor):
    assert cuda_version(major * 1000 + minor * 10) == Version(major, minor)
