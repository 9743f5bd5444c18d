"""The table of problems: what each does by default, and by the rules of a profile."""

import pytest

from dra_driver.model.health import DEFAULT_HEALTH_RULES, Effect, HealthRules, Problem
from dra_driver.plan.health.problems import (
    PROBLEMS,
    RECOVERY_ACTIONS,
    effect_of,
    needs_recovery,
    problem_of,
    taint_key,
)

NONE, NO_SCHEDULE, NO_EXECUTE = Effect.NONE, Effect.NO_SCHEDULE, Effect.NO_EXECUTE
NVIDIAS_APPLICATION_XIDS = (13, 31, 43, 45, 68, 109)  # of its device plugin and its DRA driver


def by_default(problem: Problem, value: str = "") -> Effect:
    return effect_of(problem, value, DEFAULT_HEALTH_RULES)


def test_every_problem_is_in_the_table():
    assert set(PROBLEMS) == set(Problem)


def test_these_problems_keep_pods_away():
    values = {Problem.XID: "79", Problem.RECOVERY_ACTION: "GPU_RESET"}
    effects = {problem: by_default(problem, values.get(problem, "")) for problem in Problem}

    assert set(effects.values()) == {NONE, NO_SCHEDULE}
    assert {problem for problem, effect in effects.items() if effect is NO_SCHEDULE} == {
        Problem.LOST,
        Problem.XID,
        Problem.UNCORRECTABLE_ECC,
        Problem.REMAP_FAILED,
        Problem.RECOVERY_ACTION,
        Problem.RELEASED,
    }


@pytest.mark.parametrize("number", [*NVIDIAS_APPLICATION_XIDS, 63, 92, 94, 154])
def test_xids_of_applications_and_information_have_no_effect(number):
    assert by_default(Problem.XID, str(number)) is NONE


@pytest.mark.parametrize("value", ["46", "48", "62", "64", "74", "79", "95", "119", "140"])
def test_xids_that_need_a_reset_keep_pods_away(value):
    assert by_default(Problem.XID, value) is NO_SCHEDULE


@pytest.mark.parametrize("value", ["0", "1", "173", "100000", "", "?"])
def test_an_xid_that_is_not_known_is_fatal(value):
    assert by_default(Problem.XID, value) is NO_SCHEDULE


@pytest.mark.parametrize("action", ["", "NONE", "RECOVER_IMEX_DOMAIN"])
def test_an_action_that_is_not_about_the_gpu_has_no_effect(action):
    rules = HealthRules(effects=((Problem.RECOVERY_ACTION, NO_EXECUTE),))

    assert not needs_recovery(action)
    assert effect_of(Problem.RECOVERY_ACTION, action, rules) is NONE


@pytest.mark.parametrize("action", sorted(RECOVERY_ACTIONS.keys() - {"RECOVER_IMEX_DOMAIN"}))
def test_an_action_that_the_gpu_needs_keeps_pods_away(action):
    assert needs_recovery(action)
    assert by_default(Problem.RECOVERY_ACTION, action) is NO_SCHEDULE


@pytest.mark.parametrize(
    ("value", "expected"),
    [("79", NO_EXECUTE), ("31", NO_SCHEDULE), ("74", NONE), ("13", NONE), ("48", NO_EXECUTE)],
)
def test_a_profile_says_of_an_xid_by_its_number_and_of_all_others_that_are_fatal(value, expected):
    rules = HealthRules(effects=((Problem.XID, NO_EXECUTE),), xids=((31, NO_SCHEDULE), (74, NONE)))

    assert effect_of(Problem.XID, value, rules) is expected


def test_a_profile_says_of_any_problem():
    rules = HealthRules(effects=((Problem.THERMAL, NO_SCHEDULE), (Problem.LOST, NONE)))

    assert effect_of(Problem.THERMAL, "", rules) is NO_SCHEDULE
    assert effect_of(Problem.LOST, "", rules) is NONE
    assert effect_of(Problem.REMAP_FAILED, "", rules) is NO_SCHEDULE


@pytest.mark.parametrize("problem", Problem)
def test_a_key_names_its_problem(problem):
    assert taint_key(problem) == f"gpu.nvidia.com/{problem.value}"
    assert problem_of(taint_key(problem)) is problem


@pytest.mark.parametrize("key", ["gpu.nvidia.com/other", "xid", "example.com/xid"])
def test_the_key_of_somebody_else_names_none(key):
    assert problem_of(key) is None
