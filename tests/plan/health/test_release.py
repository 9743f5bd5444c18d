"""Which GPUs an administrator has the driver let go of, and for how long."""

import math

import pytest

from api.names import PAUSE_LABELS, RELEASE_ANNOTATION, RELEASED_ANNOTATION
from api.strict import ConfigError
from dra_driver.plan.health.release import Release, new_release, requested_release

NOW = 1_800_000_000.0  # 2027-01-15T08:00:00Z
SOON, PAST = "2027-01-15T08:10:00Z", "2027-01-15T07:59:59Z"


def wanted(request=None, answer=None, now=NOW, **labels):
    given = {RELEASE_ANNOTATION: request, RELEASED_ANNOTATION: answer}
    annotations = {name: value for name, value in given.items() if value is not None}
    return requested_release(labels, annotations, now)


@pytest.mark.parametrize(
    ("request_text", "release"),
    [
        (f"all {SOON}", Release("all", SOON, NOW + 600)),
        (f"gpu-0, gpu-3 {SOON}", Release("gpu-0,gpu-3", SOON, NOW + 600)),
        ("gpu-0,GPU-7 2027-01-15T09:10:00+01:00", None),
        ("gpu-0", Release("gpu-0", SOON, NOW + 600)),
        ("gpu-0 , gpu-3", Release("gpu-0,gpu-3", SOON, NOW + 600)),
        (f"all {PAST}", Release("all", PAST, NOW - 1)),
    ],
)
def test_the_annotation_names_gpus_and_until_when(request_text, release):
    if release is None and "+" in request_text:
        assert wanted(request_text).ends == NOW + 600
    else:
        assert wanted(request_text) == release


def test_nothing_is_let_go_of_where_nobody_asks_for_it():
    assert wanted(None, f"all {SOON}") is None


def test_a_request_without_a_time_holds_for_ten_minutes_from_when_it_was_answered():
    answer = str(wanted("gpu-0"))

    for later in (0, 599):
        assert wanted("gpu-0", f"{answer} it waits", NOW + later) == Release(
            "gpu-0", SOON, NOW + 600
        )
    assert wanted("gpu-0", answer, NOW + 700).ends == NOW + 600
    assert wanted("gpu-1", answer, NOW + 300).ends == NOW + 900  # another request


@pytest.mark.parametrize("label", PAUSE_LABELS)
def test_the_operator_pauses_all_gpus_as_long_as_its_label_stays(label):
    paused = {label: "paused-for-driver-upgrade"}

    assert wanted(f"gpu-0 {SOON}", **paused) == Release("all", label, math.inf)
    assert wanted(None, **{label: "true"}) is None


@pytest.mark.parametrize(
    ("request_text", "problem"),
    [
        ("", "'' names no GPU: write for example all 2026-"),
        (SOON, f"'{SOON}' names no GPU"),
        ("gpu-0 soon", "'soon' is no time: write for example"),
        ("all 2027-15-01T00:00:00Z", "'2027-15-01T00:00:00Z' is no time: write for example"),
        ("all 2027-01-15T00:00:00", "'2027-01-15T00:00:00' has no time zone: write for example"),
    ],
)
def test_a_wrong_annotation_is_refused(request_text, problem):
    with pytest.raises(ConfigError, match=problem):
        wanted(request_text)


def test_what_a_command_asks_for_is_read_as_it_was_meant():
    release = new_release("gpu-0", NOW + 600.7)

    assert wanted(str(release)) == release == Release("gpu-0", SOON, NOW + 600)
