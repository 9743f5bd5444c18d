"""On a GPU that a layout governs no partitions are created for claims."""

from dataclasses import replace

import pytest
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
DYNAMIC = Rules(replicas=2, mig=MigRules(dynamic=True, profiles=("1g.5gb",)))
LAYOUT = replace(DYNAMIC, mig=replace(DYNAMIC.mig, layout="all-1g.5gb"))
PROFILE = Profile(
    "p",
    (
        ProfileEntry(GpuSelector(frozenset({2})), Rules(), "spec.gpus[0]"),
        ProfileEntry(GpuSelector(), DYNAMIC, "spec.gpus[1]"),
    ),
)
WITH_LAYOUT = Profile("p", (ProfileEntry(GpuSelector(), LAYOUT, "spec.gpus[0]"),))


def dynamic(profile):
    """The GPUs on which partitions are created for claims; there are no warnings."""
    rules, warnings = rules_by_gpu(profile, GPUS)
    assert warnings == ()
    return [node_gpu.minor for node_gpu in GPUS if rules[node_gpu.uuid].mig.dynamic]


@pytest.mark.parametrize(
    ("governed", "expected"), [({0, 2}, [1]), ({0, 1, 2}, []), ({2}, [0, 1]), ((), [0, 1])]
)
def test_only_on_governed_gpus_nothing_is_created(governed, expected):
    limited = without_dynamic_mig(PROFILE, GPUS, {GPUS[minor].uuid for minor in governed})

    assert dynamic(limited) == expected
    assert rules_by_gpu(limited, GPUS)[0][GPUS[0].uuid].replicas == 2
    if expected == []:
        assert [entry.path for entry in limited.entries] == ["spec.gpus[0]", "spec.gpus[1]"]
    assert (limited is PROFILE) == (expected == dynamic(PROFILE))


def test_what_makes_no_difference_leaves_the_profile_as_it_is():
    plain = replace(PROFILE, entries=PROFILE.entries[:1])

    assert without_dynamic_mig(PROFILE, (), {GPUS[0].uuid}) is PROFILE
    assert without_dynamic_mig(DEFAULT_PROFILE, GPUS, {GPUS[0].uuid}) is DEFAULT_PROFILE
    assert profile_until_gpus_seen(PROFILE, GPUS, False) is PROFILE
    assert profile_until_layouts_known(DEFAULT_PROFILE) is DEFAULT_PROFILE
    assert profile_until_layouts_known(plain) is plain


@pytest.mark.parametrize(
    ("profile", "count", "expected", "dynamic_gpus"),
    [
        (PROFILE, 3, True, [0, 1]),
        (PROFILE, 1, True, [0]),
        (PROFILE, 0, True, []),
        (WITH_LAYOUT, 1, False, [0]),
    ],
)
def test_on_unseen_gpus_nothing_is_created_where_a_layout_may_govern_them(
    profile, count, expected, dynamic_gpus
):
    assert dynamic(profile_until_gpus_seen(profile, GPUS[:count], expected)) == dynamic_gpus


RULES = st.builds(
    Rules,
    replicas=st.integers(1, 3),
    mig=st.builds(MigRules, dynamic=st.booleans(), layout=st.sampled_from(["", "l"])),
)
MINORS = st.frozensets(st.integers(0, 2))


@given(st.lists(st.tuples(MINORS, RULES), max_size=4), MINORS, MINORS, st.booleans())
def test_whatever_the_profile_says_only_the_partitions_of_some_gpus_are_different(
    entries, seen_minors, governed, expected
):
    profile = Profile(
        "p",
        tuple(
            ProfileEntry(GpuSelector(minors), rules, f"{number}")
            for number, (minors, rules) in enumerate(entries)
        ),
    )
    seen = [GPUS[minor] for minor in sorted(seen_minors)]
    of_layouts = {GPUS[minor].uuid for minor in governed & seen_minors}

    limited = profile_until_gpus_seen(
        without_dynamic_mig(profile, seen, of_layouts), seen, expected
    )

    before, warnings = rules_by_gpu(profile, GPUS)
    after, warnings_after = rules_by_gpu(limited, GPUS)
    for minor, node_gpu in enumerate(GPUS):
        rules = before[node_gpu.uuid]
        unknown = minor not in seen_minors and (expected or rules.mig.layout)
        is_dynamic = rules.mig.dynamic and not (node_gpu.uuid in of_layouts or unknown)
        if minor in seen_minors or unknown:
            assert after[node_gpu.uuid] == replace(
                rules, mig=replace(rules.mig, dynamic=is_dynamic)
            )
    if len(seen_minors) == len(GPUS):
        assert warnings_after == warnings


def test_while_it_is_not_known_what_layouts_govern_nothing_is_created_and_a_warning_says_so():
    limited = profile_until_layouts_known(PROFILE)

    assert dynamic(limited) == []
    rules, _ = rules_by_gpu(limited, GPUS)
    assert rules[GPUS[0].uuid] == replace(DYNAMIC, mig=replace(DYNAMIC.mig, dynamic=False))
    assert limited.entries[0] == PROFILE.entries[0]
    (warning,) = limited.warnings
    assert warning.startswith(
        "profile 'p': partitions are created for claims once it is known whether the node"
    )
