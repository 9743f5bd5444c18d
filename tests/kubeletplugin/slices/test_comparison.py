"""What counts as the same content, and what an API server left out of it."""

import pytest

from dra_driver.kubeletplugin.slices.comparison import (
    comparable_spec,
    dropped_fields,
    same_taint_times,
)

TAINT = {"key": "k", "effect": "NoSchedule"}


def spec(**device: object) -> dict[str, object]:
    return {"driver": "d", "devices": [{"name": "a", **device}]}


@pytest.mark.parametrize(
    ("stored", "fields"),
    [
        pytest.param(spec(taints=[TAINT]), (), id="everything is stored"),
        pytest.param(spec(), ("devices[].taints",), id="a field is gone"),
        pytest.param(
            spec(taints=[{**TAINT, "key": "x"}]), ("devices[].taints[].key",), id="a value differs"
        ),
        pytest.param(spec(taints=[TAINT, TAINT]), ("devices[].taints",), id="a list differs"),
    ],
)
def test_what_was_dropped_is_named_by_its_path(stored: dict, fields: tuple[str, ...]) -> None:
    assert dropped_fields(spec(taints=[TAINT]), stored) == fields


@pytest.mark.parametrize(
    ("written", "same"),
    [
        pytest.param("2026-01-01T00:00:00Z", True, id="the same"),
        pytest.param("soon", False, id="no time at all"),
        pytest.param("2026-01-01T00:00:00", False, id="without a zone"),
    ],
)
def test_times_of_taints_that_cannot_be_compared_are_different(written: str, same: bool) -> None:
    def at(time: str) -> dict[str, object]:
        return spec(taints=[{**TAINT, "timeAdded": time}])

    times = {("a", "k", "", "NoSchedule"): "2026-01-01T00:00:00Z"}
    assert same_taint_times(at(written), times) is same


def test_an_amount_that_is_no_quantity_is_compared_as_it_is_written() -> None:
    def holding(amount: object) -> str:
        return comparable_spec(spec(capacity={"memory": {"value": amount}}))

    assert holding("1024Mi") == holding("1Gi") != holding("much")
