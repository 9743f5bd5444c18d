"""Where a layout governs a GPU, the profile does not have it cut for claims besides."""

from dra_driver.model.profiles import DEFAULT_PROFILE, Entry, MigRules, Profile, Rules, Selection
from dra_driver.plan.mig.governed import without_cutting
from dra_driver.plan.profiles import rules_by_gpu
from tests.fakes.values import gpu

GPUS = (gpu(0), gpu(1), gpu(2))
CUT = Rules(replicas=2, mig=MigRules(dynamic=True, profiles=("1g.5gb",)))
PROFILE = Profile(
    "p",
    (
        Entry(Selection(frozenset({2})), Rules(), "spec.gpus[0]"),
        Entry(Selection(), CUT, "spec.gpus[1]"),
    ),
)


def dynamic(profile):
    rules, notes = rules_by_gpu(profile, GPUS)
    return [rules[one.uuid].mig.dynamic for one in GPUS], notes


def test_only_what_is_governed_is_not_cut():
    assert dynamic(PROFILE) == ([True, True, False], ())

    found = without_cutting(PROFILE, GPUS, {GPUS[0].uuid, GPUS[2].uuid})

    assert dynamic(found) == ([False, True, False], ())
    rules, _ = rules_by_gpu(found, GPUS)
    assert rules[GPUS[0].uuid].replicas == 2


def test_where_all_that_an_entry_selects_is_governed_nothing_has_no_effect():
    found = without_cutting(PROFILE, GPUS, {one.uuid for one in GPUS})

    assert dynamic(found) == ([False, False, False], ())
    assert [entry.path for entry in found.entries] == ["spec.gpus[0]", "spec.gpus[1]"]


def test_what_makes_no_difference_leaves_the_profile_as_it_is():
    assert without_cutting(PROFILE, GPUS, ()) is PROFILE
    assert without_cutting(PROFILE, GPUS, {GPUS[2].uuid}) is PROFILE
    assert without_cutting(PROFILE, (), {GPUS[0].uuid}) is PROFILE
    assert without_cutting(DEFAULT_PROFILE, GPUS, {GPUS[0].uuid}) is DEFAULT_PROFILE
