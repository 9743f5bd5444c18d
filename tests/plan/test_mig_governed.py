"""Where a layout governs a GPU, the profile does not have it cut for claims besides."""

from dataclasses import replace

from dra_driver.model.profiles import DEFAULT_PROFILE, Entry, MigRules, Profile, Rules, Selection
from dra_driver.plan.mig.governed import until_known, without_cutting
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


def test_as_long_as_nothing_is_known_nothing_is_cut_and_that_is_noted():
    found = until_known(PROFILE)

    assert dynamic(found) == ([False, False, False], ())
    rules, _ = rules_by_gpu(found, GPUS)
    assert rules[GPUS[0].uuid] == replace(CUT, mig=replace(CUT.mig, dynamic=False))
    assert found.entries[0] == PROFILE.entries[0]
    (note,) = found.notes
    assert note.startswith("profile 'p': GPUs are cut for claims once it is known whether the node")


def test_a_profile_that_has_nothing_cut_waits_for_nothing():
    assert until_known(DEFAULT_PROFILE) is DEFAULT_PROFILE
    plain = replace(PROFILE, entries=PROFILE.entries[:1])
    assert until_known(plain) is plain
