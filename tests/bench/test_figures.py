"""Figures and aims: what the table and the JSON object say."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hack.benchmark import configs
from hack.benchmark.figures import (
    FIGURES,
    FLEET_FIGURES,
    Measured,
    document,
    median_of,
    percentile,
    table,
)

NUMBERS = st.lists(st.integers(), min_size=1)
SHARES = st.floats(0, 1)


@given(NUMBERS, SHARES)
def test_a_percentile_is_a_value_that_the_share_does_not_exceed(values, share):
    result = percentile(values, share)

    assert result in values
    assert sum(value <= result for value in values) >= share * len(values) * (1 - 1e-12)
    assert sum(value < result for value in values) < max(1, share * len(values))


def test_the_median_is_in_milliseconds_with_the_number_of_samples():
    assert median_of([0.003, 0.001, 0.002], "why") == Measured(2.0, "why", 3)


def everything(value: float = 0.01) -> dict[str, Measured]:
    return {figure.name: Measured(value, samples=10) for figure in FIGURES}


def test_every_figure_is_in_the_json_object_measured_or_not():
    report = document({"rss_mib": Measured(61.25, "own 40", 1)}, {"kubernetes": "1.36.3"})

    assert set(report) >= {figure.name for figure in FIGURES}
    assert report["rss_mib"] == 61.25
    assert report["prepare_p50_ms"] is None
    assert report["kubernetes"] == "1.36.3"
    assert report["where"] == {"rss_mib": "own 40"}
    assert json.loads(json.dumps(report)) == report


@pytest.mark.parametrize(
    ("name", "value", "missed"),
    [
        ("prepare_p95_ms", 8.0, False),
        ("prepare_p95_ms", 8.1, True),
        ("rss_mib", 62.9, False),
        ("rss_mib", 63.0, True),  # more than 66 MB
        ("cpu_idle_percent", 0.08, False),
        ("start_to_slices_ms", 601, True),
        ("unprepare_p50_ms", 1000, False),  # there is no aim for it
    ],
)
def test_an_aim_is_missed_above_it(name, value, missed):
    report = document({name: Measured(value)}, {})

    assert (name in report["missed"]) is missed
    assert not missed or report["aims"][name] < value


@pytest.mark.parametrize(
    ("name", "measured_name", "factor", "more"),
    [
        ("prepare_eight_at_once_p50_ms", "prepare_p50_ms", 4, 0),
        ("prepare_eight_gpus_p50_ms", "prepare_p50_ms", 1.3, 0),
        ("prepare_500_held_p50_ms", "prepare_none_held_p50_ms", 1.05, 0),
        ("mps_next_claim_p50_ms", "mps_whole_prepare_p50_ms", 2, 0),
        ("mig_prepare_p50_ms", "mig_whole_prepare_p50_ms", 3, 0),
        ("pod_start_with_claim_ms", "pod_start_ms", 1, 30),
        ("pod_start_with_ready_claim_ms", "pod_start_ms", 1, 30),
        ("share_pod_start_ms", "pod_start_ms", 1, 30),
    ],
)
def test_an_aim_can_follow_from_what_else_was_measured(name, measured_name, factor, more):
    base = 3.0
    limit = base * factor + more
    within = document({measured_name: Measured(base), name: Measured(limit - 0.01)}, {})
    beyond = document({measured_name: Measured(base), name: Measured(limit + 0.01)}, {})

    assert within["aims"][name] == pytest.approx(limit)
    assert (within["missed"], beyond["missed"]) == ([], [name])


def test_a_prepare_is_compared_with_a_get_and_an_empty_call_together():
    get, empty = Measured(2.0), Measured(0.5)
    results = {"prepare_p50_ms": Measured(4.0), "claim_get_p50_ms": get}

    assert "prepare_p50_ms" not in document(results, {})["aims"]
    report = document(results | {"empty_call_p50_ms": empty}, {})
    assert report["aims"]["prepare_p50_ms"] == pytest.approx(3.75)
    assert report["missed"] == ["prepare_p50_ms"]


@pytest.mark.parametrize(
    ("name", "measured_name", "share"),
    [
        ("fleet_pods_per_second", "fleet_plain_pods_per_second", 0.95),
        (
            "fleet_unthrottled_pods_per_second",
            "fleet_unthrottled_plain_pods_per_second",
            0.75,
        ),
        ("fleet_mig_pods_per_second", "fleet_mig_nvidia_shape_pods_per_second", 2),
    ],
)
def test_a_rate_misses_its_aim_below_it(name, measured_name, share):
    base = Measured(40.0)
    enough = document({measured_name: base, name: Measured(40 * share + 0.1)}, {}, FLEET_FIGURES)
    too_slow = document({measured_name: base, name: Measured(40 * share - 0.1)}, {}, FLEET_FIGURES)

    assert enough["aims"] == {name: pytest.approx(40 * share)}
    assert (enough["missed"], too_slow["missed"]) == ([], [name])


def test_a_rate_that_was_not_measured_misses_nothing():
    report = document({"fleet_plain_pods_per_second": Measured(14.0)}, {}, FLEET_FIGURES)

    assert report["fleet_pods_per_second"] is None
    assert report["missed"] == []
    assert set(report) & {figure.name for figure in FIGURES} == set()


def test_without_the_other_figure_there_is_no_aim():
    report = document({"pod_start_with_claim_ms": Measured(200.0)}, {})

    assert report["missed"] == []
    assert "pod_start_with_claim_ms" not in report["aims"]


def test_the_table_has_a_row_for_each_figure_and_marks_what_misses_its_aim():
    results = everything() | {"rss_mib": Measured(80.0, "own 50.0", 1)}

    lines = table(results).splitlines()

    assert len(lines) == 1 + len(FIGURES)
    assert [line.split()[0] for line in lines[1:]] == [figure.name for figure in FIGURES]
    assert [line.split()[0] for line in lines if "  !" in line] == ["rss_mib"]
    assert "80  !" in table(results) and "own 50.0" in table(results)


def test_the_table_says_why_a_value_is_missing():
    assert "no containers here" in table({"pod_start_ms": Measured(None, "no containers here")})
    assert table({}).count("not measured") == len(FIGURES)


def test_the_costliest_configurations_are_measured():
    (name, measured), *others = configs.measure(1).items()

    assert name in {figure.name for figure in FIGURES} and not others
    assert measured.value is not None and measured.value > 0
