"""Where a layout governs a GPU, the profile does not have it cut for claims besides."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from dra_driver.model.profiles import (
    DEFAULT_PROFILE,
    GpuSelector,
    MigRules,
    Profile,
    ProfileEntry,
    Rules,
)
from dra_driver.plan.mig.manager.layouts import (
    profile_until_gpus_seen,
    profile_until_layouts_known,
    without_dynamic_mig,
)
from dra_driver.plan.profiles.rules import rules_by_gpu
from tests.builders import gpu

GPUS = (gpu(0), gpu(1), gpu(2))
CUT = Rules(replicas=2, mig=MigRules(dynamic=True, profiles=("1g.5gb",)))
PROFILE = Profile(
    "p",
    (
        ProfileEntry(GpuSelector(frozenset({2})), Rules(), "spec.gpus[0]"),
        ProfileEntry(GpuSelector(), CUT, "spec.gpus[1]"),
    ),
)


def dynamic(profile):
    rules, warnings = rules_by_gpu(profile, GPUS)
    return [rules[gpu.uuid].mig.dynamic for gpu in GPUS], warnings


def test_only_what_is_governed_is_not_cut():
    assert dynamic(PROFILE) == ([True, True, False], ())

    limited = without_dynamic_mig(PROFILE, GPUS, {GPUS[0].uuid, GPUS[2].uuid})

    assert dynamic(limited) == ([False, True, False], ())
    rules, _ = rules_by_gpu(limited, GPUS)
    assert rules[GPUS[0].uuid].replicas == 2


def test_where_all_that_an_entry_selects_is_governed_nothing_has_no_effect():
    limited = without_dynamic_mig(PROFILE, GPUS, {gpu.uuid for gpu in GPUS})

    assert dynamic(limited) == ([False, False, False], ())
    assert [entry.path for entry in limited.entries] == ["spec.gpus[0]", "spec.gpus[1]"]


def test_what_makes_no_difference_leaves_the_profile_as_it_is():
    assert without_dynamic_mig(PROFILE, GPUS, ()) is PROFILE
    assert without_dynamic_mig(PROFILE, GPUS, {GPUS[2].uuid}) is PROFILE
    assert without_dynamic_mig(PROFILE, (), {GPUS[0].uuid}) is PROFILE
    assert without_dynamic_mig(DEFAULT_PROFILE, GPUS, {GPUS[0].uuid}) is DEFAULT_PROFILE


def test_of_what_was_not_looked_at_only_that_is_cut_that_no_layout_can_be_meant_for():
    assert profile_until_gpus_seen(PROFILE, GPUS, False) is PROFILE
    assert dynamic(profile_until_gpus_seen(PROFILE, GPUS, True)) == ([True, True, False], ())
    assert dynamic(profile_until_gpus_seen(PROFILE, GPUS[:1], True)) == ([True, False, False], ())
    assert dynamic(profile_until_gpus_seen(PROFILE, (), True)) == ([False, False, False], ())

    named = replace(CUT, mig=replace(CUT.mig, layout="all-1g.5gb"))
    limited = profile_until_gpus_seen(
        Profile("p", (ProfileEntry(GpuSelector(), named, "spec.gpus[0]"),)), GPUS[:1], False
    )
    assert dynamic(limited) == ([True, False, False], ())


RULES = st.builds(
    Rules,
    replicas=st.integers(1, 3),
    mig=st.builds(MigRules, dynamic=st.booleans(), layout=st.sampled_from(["", "l"])),
)
MINORS = st.frozensets(st.integers(0, 2))


@given(st.lists(st.tuples(MINORS, RULES), max_size=4), MINORS, MINORS, st.booleans())
def test_whatever_the_profile_says_only_the_cutting_of_some_gpus_is_different(
    entries, there, governed, expected
):
    parts = [
        ProfileEntry(GpuSelector(gpu_rules), rules, f"{n}")
        for n, (gpu_rules, rules) in enumerate(entries)
    ]
    profile = Profile("p", tuple(parts))
    seen = [GPUS[minor] for minor in sorted(there)]
    of_layouts = {GPUS[minor].uuid for minor in governed & there}

    limited = profile_until_gpus_seen(
        without_dynamic_mig(profile, seen, of_layouts), seen, expected
    )

    before, idle = rules_by_gpu(profile, GPUS)
    after, idle_after = rules_by_gpu(limited, GPUS)
    for minor, node_gpu in enumerate(GPUS):
        gpu_rules = before[node_gpu.uuid]
        strange = minor not in there and (expected or gpu_rules.mig.layout)
        stops = node_gpu.uuid in of_layouts or strange
        cut = gpu_rules.mig.dynamic and not stops
        if minor in there or strange:
            assert after[node_gpu.uuid] == replace(
                gpu_rules, mig=replace(gpu_rules.mig, dynamic=cut)
            )
    if len(there) == len(GPUS):
        assert idle_after == idle


def test_as_long_as_nothing_is_known_nothing_is_cut_and_that_is_noted():
    limited = profile_until_layouts_known(PROFILE)

    assert dynamic(limited) == ([False, False, False], ())
    rules, _ = rules_by_gpu(limited, GPUS)
    assert rules[GPUS[0].uuid] == replace(CUT, mig=replace(CUT.mig, dynamic=False))
    assert limited.entries[0] == PROFILE.entries[0]
    (note,) = limited.warnings
    assert note.startswith(
        "profile 'p': partitions are created for claims once it is known whether the node"
    )


def test_a_profile_that_has_nothing_cut_waits_for_nothing():
    assert profile_until_layouts_known(DEFAULT_PROFILE) is DEFAULT_PROFILE
    plain = replace(PROFILE, entries=PROFILE.entries[:1])
    assert profile_until_layouts_known(plain) is plain
