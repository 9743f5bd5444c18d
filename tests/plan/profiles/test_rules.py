"""What a profile's document means, and which of its rules hold for which GPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from api.names import DEVICE_PLUGIN_CONFIG_LABEL as OLDER
from api.names import PROFILE_LABEL
from api.strict import ConfigError
from dra_driver.model.health import Effect, HealthRules, Problem
from dra_driver.model.profiles import (
    AllocationApi,
    AllocationPolicy,
    GpuSelector,
    GuardPolicy,
    GuardRules,
    MigRules,
    MpsServerScope,
    MpsTenants,
    Profile,
    ProfileEntry,
    Rules,
    SharingStrategy,
)
from dra_driver.plan.profiles.rules import (
    decode_profile,
    profile_name,
    rules_by_gpu,
)
from dra_driver.plan.profiles.selection import SelectedProfile, select_file
from tests.builders import gpu

GIB = 1024**3
FILES = Path(__file__).parents[2] / "data/device-plugin"
HEAD = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "NodeProfile"}
WITHOUT_LIMIT: dict[str, Any] = {"limited": False, "guard": GuardRules(GuardPolicy.OFF)}


def document(*entries):
    return {**HEAD, "spec": {"gpus": list(entries)}}


def profile(*entries):
    return decode_profile(document(*entries), "p")


def rules(**entry):
    """The rules of a profile's only entry."""
    (only,) = profile(entry).entries
    return only.rules


def problems(*entries):
    with pytest.raises(ConfigError) as refused:
        profile(*entries)
    return refused.value.problems


def device_plugin(name):
    return decode_profile(yaml.safe_load((FILES / f"{name}.yaml").read_text()), name)


def shared(how="timeSlicing", *resources, **fields):
    return {"sharing": {how: {"resources": list(resources), **fields}}}


def resource(name="nvidia.com/gpu", replicas=2, **fields):
    return {"name": name, "replicas": replicas, **fields}


def test_what_an_entry_does_not_say_is_as_without_a_profile():
    assert profile({}) == Profile("p", (ProfileEntry(GpuSelector(), Rules(), "spec.gpus[0]"),))


def test_every_field_becomes_a_rule():
    assert rules(
        replicas=4,
        rename=True,
        failRequestsGreaterThanOne=True,
        allocationPolicy="Packed",
        strategies=["MPS", "TimeSlicing", "MPS"],
        defaultStrategy="TimeSlicing",
        memory={"least": "2Gi", "step": "512Mi"},
        memoryGuard={"policy": "Warn", "grace": "1m30.5s"},
        memoryLimit="Strict",
        mig={
            "mode": "Dynamic",
            "profiles": ["3g.*", "1g.10gb", "3g.*"],
            "strategy": "Single",
        },
        health={
            "effects": {"gpuLost": "NoExecute", "rowRemapPending": "NoSchedule"},
            "xids": {"79": "NoExecute", "31": "NoSchedule"},
            "recovery": "2m",
        },
    ) == Rules(
        replicas=4,
        rename=True,
        one_share=True,
        allocation_policy=AllocationPolicy.PACKED,
        strategies=(SharingStrategy.MPS, SharingStrategy.TIME_SLICING),
        memory_least=2 * GIB,
        memory_step=GIB // 2,
        guard=GuardRules(GuardPolicy.WARN, 90.5),
        strict=True,
        mig=MigRules(
            dynamic=True,
            profiles=("3g.*", "1g.10gb"),
            single=True,
        ),
        health=HealthRules(
            effects=(
                (Problem.LOST, Effect.NO_EXECUTE),
                (Problem.REMAP_PENDING, Effect.NO_SCHEDULE),
            ),
            xids=((31, Effect.NO_SCHEDULE), (79, Effect.NO_EXECUTE)),
            recovery_seconds=120,
        ),
    )


@pytest.mark.parametrize(
    ("word", "api"),
    [
        (None, AllocationApi.AUTO),
        ("Auto", AllocationApi.AUTO),
        ("DRA", AllocationApi.DRA),
        ("dra", AllocationApi.DRA),
        ("deviceplugin", AllocationApi.DEVICE_PLUGIN),
    ],
)
def test_a_profile_says_by_which_api_gpus_are_given_out(word, api):
    written = {**HEAD, "spec": {"api": word, "gpus": [{}]}}

    assert decode_profile(written, "p") == replace(profile({}), api=api)


def test_a_profile_that_says_of_the_api_alone_changes_nothing_of_gpus():
    decoded = decode_profile({**HEAD, "spec": {"api": "DevicePlugin"}}, "p")

    assert decoded == Profile("p", api=AllocationApi.DEVICE_PLUGIN)


def test_an_api_that_there_is_not_is_told_with_all_else_that_is_wrong():
    with pytest.raises(ConfigError) as refused:
        decode_profile({**HEAD, "spec": {"api": "CDI", "gpus": [{"replicas": 0}]}}, "p")

    api, replicas = refused.value.problems
    assert api == "spec.api: 'CDI' should be 'Auto', 'DRA' or 'DevicePlugin'"
    assert replicas.startswith("spec.gpus[0].replicas: 0")


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (7, "7 should be a string; write it in quotes"),
        (True, "True should be a string; write it in quotes"),
        (["a"], "['a'] should be a valid string"),
    ],
)
def test_a_name_that_yaml_takes_for_something_else_is_to_be_quoted(layout, message):
    with pytest.raises(ConfigError) as error:
        profile({"mig": {"layout": layout}})

    assert error.value.problems == (f"spec.gpus[0].mig.layout: {message}",)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"mig": {"replicas": {"3g.40gb": 2, "1g.10gb": 4}}},
            Rules(mig=MigRules(replicas=(("1g.10gb", 4), ("3g.40gb", 2)))),
        ),
        ({"mig": {"layout": "all-balanced"}}, Rules(mig=MigRules(layout="all-balanced"))),
        ({"mig": "Off"}, Rules()),
        ({"mig": {"strategy": "Mixed"}}, Rules()),
        ({"mig": {"mode": "Off"}}, Rules()),
        ({"health": {"effects": {}}}, Rules()),
        ({"health": {"recovery": "0s"}}, Rules(health=HealthRules(recovery_seconds=0))),
        ({"shares": 8}, Rules(shares=8)),
        ({"fractions": "Never"}, Rules(fractions=False)),
        ({"include": False}, Rules(include=False)),
        ({"memory": {"least": "256Mi"}}, Rules(memory_least=GIB // 4)),
        *(
            ({"memoryGuard": guard}, Rules(guard=rule))
            for guard, rule in (
                ({"policy": "Off"}, GuardRules(GuardPolicy.OFF, 10)),
                ({"grace": "500ms"}, GuardRules(GuardPolicy.KILL, 0.5)),
                ({"grace": "0s"}, GuardRules(GuardPolicy.KILL, 0)),
                ({"grace": "24h"}, GuardRules(GuardPolicy.KILL, 86400)),
                ({}, GuardRules(GuardPolicy.KILL, 10)),
            )
        ),
        (
            {"fractions": "Never", "strategies": ["TimeSlicing"]},
            Rules(fractions=False, strategies=(SharingStrategy.TIME_SLICING,)),
        ),
        (
            {"strategies": ["MPS", "TimeSlicing"]},
            Rules(strategies=(SharingStrategy.MPS, SharingStrategy.TIME_SLICING)),
        ),
        ({"mpsTenants": "Any"}, Rules()),
        ({"mpsTenants": "NonRoot"}, Rules(tenants=MpsTenants.NON_ROOT)),
        (
            {"mpsTenants": "UserNamespaces", "strategies": ["MPS"]},
            Rules(
                tenants=MpsTenants.USER_NAMESPACES,
                strategies=(SharingStrategy.MPS,),
                default_strategy=SharingStrategy.MPS,
            ),
        ),
        (
            {"mpsTenants": "NonRoot", "fractions": "Never"},
            Rules(tenants=MpsTenants.NON_ROOT, fractions=False),
        ),
        ({"timeSliceInterval": "wholeGPUs"}, Rules()),
        ({"timeSliceInterval": "Any"}, Rules(fractions_set_interval=True)),
        ({"mpsServer": "PerNamespace"}, Rules()),
        (
            {"mpsServer": "Shared", "fractions": "Never"},
            Rules(mps_servers=MpsServerScope.SHARED, fractions=False),
        ),
    ],
)
def test_a_field_changes_its_rule_and_no_other(fields, expected):
    assert rules(**fields) == expected


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"select": {}}, "select: is empty; say which GPUs are meant, or leave it out for all"),
        (
            {"mig": {"profiles": ["1g.5gb"]}},
            "mig.profiles: has no effect without mode: Dynamic; add it, or remove this",
        ),
        (
            {"mig": {"mode": "Dynamic", "layout": "all-1g.5gb"}},
            "mig.layout: has no effect with mode: Dynamic, which creates what claims need; remove "
            "one of them",
        ),
        (
            {"fractions": "Never", "mig": {"replicas": {"1g.5gb": 2}}},
            "mig.replicas: has no effect with fractions: Never; remove one of them",
        ),
        (
            {"memoryLimit": "Strict", "mig": {"replicas": {"1g.5gb": 2}}},
            "mig.replicas: has no effect with memoryLimit: Strict, since the GPU's driver limits "
            "no part of a partition; remove one of them",
        ),
        (
            {"include": False, "mig": {"profiles": ["1g.5gb"]}},
            "mig: has no effect with include: false; remove one of them",
        ),
        (
            {"rename": True, "mig": {"mode": "Off"}},
            "rename: has no effect without replicas; write how many, from 2 on",
        ),
        ({"rename": True, "mig": {"replicas": 2}}, "mig.replicas: 2 should be a valid dictionary"),
        ({"rename": True}, "rename: has no effect without replicas; write how many, from 2 on"),
        (
            {"shares": 2, "replicas": 4},
            "shares: has no effect with replicas, which are the shares; remove it",
        ),
        (
            {"strategies": ["MPS"], "defaultStrategy": "TimeSlicing"},
            "defaultStrategy: TimeSlicing is not among strategies: MPS",
        ),
        (
            {"strategies": ["MPS"], "timeSliceInterval": "Any"},
            "timeSliceInterval: has no effect where TimeSlicing is not among "
            "strategies; add it, or remove this",
        ),
        (
            {"replicas": 2, "timeSliceInterval": "WholeGPUs"},
            "timeSliceInterval: has no effect with replicas, each of which may set the interval; "
            "remove it",
        ),
        (
            {"fractions": "Never", "timeSliceInterval": "Any"},
            "timeSliceInterval: has no effect with fractions: Never; remove one of them",
        ),
        (
            {"memory": {"least": "255Mi"}},
            "memory.least: 255Mi is less than a CUDA context takes; write 256Mi or more",
        ),
        *(
            (
                {"memory": {"step": step}},
                f"memory.step: {step} is no multiple of 1Mi; write for example 256Mi",
            )
            for step in ("1500k", "0")
        ),
        (
            {"memoryGuard": {"grace": "25h"}},
            "memoryGuard.grace: '25h' is more than a day; policy Warn never ends a process",
        ),
        (
            {"health": {"recovery": "24h1s"}},
            "health.recovery: '24h1s' is more than a day; write 24h or less",
        ),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else "",
)
def test_rules_that_cannot_hold_are_refused_with_their_path(entry, expected):
    assert problems(entry) == (f"spec.gpus[0].{expected}",)


@pytest.mark.parametrize(
    ("entry", "fields", "expected"),
    [
        (
            {"include": False, "replicas": 2, "memory": {}},
            ("replicas", "memory"),
            "has no effect with include: false; remove one of them",
        ),
        (
            {"fractions": "Never", "replicas": 2, "failRequestsGreaterThanOne": True},
            ("replicas", "failRequestsGreaterThanOne"),
            "has no effect with fractions: Never; remove one of them",
        ),
        (
            {"strategies": ["TimeSlicing"], "mpsTenants": "NonRoot", "mpsServer": "Shared"},
            ("mpsTenants", "mpsServer"),
            "has no effect where MPS is not among strategies; add it, or remove this",
        ),
    ],
    ids=["not offered", "no fractions", "no MPS"],
)
def test_every_rule_that_has_no_effect_is_named(entry, fields, expected):
    assert problems(entry) == tuple(f"spec.gpus[0].{field}: {expected}" for field in fields)


def test_replicas_of_partitions_alone_can_be_renamed():
    assert rules(rename=True, mig={"replicas": {"1g.10gb": 2}}).rename


def test_an_entry_behind_one_for_every_gpu_is_refused():
    messages = problems({"select": {"index": [0]}}, {}, {"select": {"index": [1]}}, {})

    assert [gpu.partition(":")[0] for gpu in messages] == ["spec.gpus[2]", "spec.gpus[3]"]
    assert "spec.gpus[1] has no select" in messages[0]


@pytest.mark.parametrize("entry", [None, 7, {"select": 7}])
def test_an_entry_that_is_wrong_is_not_taken_for_one_for_every_gpu(entry):
    (message,) = problems(entry, {})

    assert message.startswith("spec.gpus[0]")


def test_everything_that_is_wrong_is_reported_at_once():
    """Also what can be told only of fields that are right by themselves."""
    entries = [
        {"select": {"index": [-1]}, "replica": 4, "memory": {"step": "1500"}},
        {"select": {}, "replicas": "four", "rename": True, "shares": 0},
        7,
        {"fractions": "Never", "rename": True, "mig": {"profiles": ["1g.5gb"]}, "memory": []},
        {"select": {"index": [0]}},
    ]

    with pytest.raises(ConfigError) as refused:
        decode_profile(document(*entries) | {"kind": "Profile"}, "p")

    assert [message.partition(":")[0] for message in refused.value.problems] == [
        "kind",
        *("spec.gpus[0].select.index[0]", "spec.gpus[0].replica"),
        *("spec.gpus[1].replicas", "spec.gpus[1].shares", "spec.gpus[2]", "spec.gpus[3].memory"),
        *("spec.gpus[0].memory.step", "spec.gpus[1].select"),
        *("spec.gpus[3].rename", "spec.gpus[3].mig.profiles", "spec.gpus[4]"),
    ]


@pytest.mark.parametrize("spec", [None, [], {"gpus": {}}])
def test_where_there_are_no_entries_only_that_is_wrong(spec):
    with pytest.raises(ConfigError) as refused:
        decode_profile(HEAD | {"spec": spec}, "p")

    assert len(refused.value.problems) == 1


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("text", ["'text' is no profile; write a NodeProfile"]),
        ([], ["[] is no profile; write a NodeProfile"]),
        (
            {"apiVersion": "v1", "kind": "ConfigMap"},
            [
                "apiVersion: 'v1' is unknown; write resource.nvidia.com/v1beta1",
                "kind: 'ConfigMap' is unknown; write NodeProfile",
                "spec: missing",
            ],
        ),
        (
            {"kind": "NodeProfile", "spec": {"gpus": [{}]}},
            ["apiVersion: None is unknown; write resource.nvidia.com/v1beta1"],
        ),
        ({"mig-configs": {}}, ["mig-configs: unknown field; remove it"]),
        (
            shared("timeSlicing", resource(), resource(replicas=3)),
            [
                "sharing.timeSlicing.resources[1].name: nvidia.com/gpu is in "
                "sharing.timeSlicing.resources[0] already; a NodeProfile can divide GPUs of one "
                "node differently"
            ],
        ),
        (
            shared("mps", resource("nvidia.com/gpus"), resource("example.com/gpu")),
            [
                f"sharing.mps.resources[{number}].name: {name!r} is not known here; write "
                "nvidia.com/gpu"
                for number, name in enumerate(("nvidia.com/gpus", "example.com/gpu"))
            ],
        ),
        (
            {
                "sharing": {
                    "timeSlicing": {"resources": [resource("a")]},
                    "mps": {"resources": [resource()]},
                }
            },
            [
                "sharing.timeSlicing and sharing.mps exclude each other, as in NVIDIA's device "
                "plugin; remove one of them",
                "sharing.timeSlicing.resources[0].name: 'a' is not known here; write "
                "nvidia.com/gpu",
            ],
        ),
        (
            shared("mps", resource("a")) | {"flags": {"gdsEnabled": "yes"}, "config": {}},
            [
                "flags.gdsEnabled: 'yes' should be a valid boolean",
                "config: unknown field; remove it",
                "sharing.mps.resources[0].name: 'a' is not known here; write nvidia.com/gpu",
            ],
        ),
    ],
)
def test_a_document_that_cannot_be_a_profile_is_refused(content, expected):
    with pytest.raises(ConfigError) as refused:
        decode_profile(content, "p")

    assert list(refused.value.problems) == expected


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ({"metadata": {"name": "a"}}, "a"),
        ({"metadata": {"name": 5}}, "stem"),
        ({"metadata": {}}, "stem"),
        ({"metadata": []}, "stem"),
        ({}, "stem"),
        ("text", "stem"),
    ],
)
def test_a_profile_is_called_as_it_says_or_like_its_file(content, name):
    assert profile_name(content, "stem") == name


@pytest.mark.parametrize(
    ("flag", "labels", "name", "origin"),
    [
        ("a", {PROFILE_LABEL: "b"}, "b", f"label {PROFILE_LABEL} of node n"),
        ("a", {PROFILE_LABEL: ""}, "a", "--profile"),
        ("", {PROFILE_LABEL: "b", OLDER: "c"}, "b", f"label {PROFILE_LABEL} of node n"),
        ("", {PROFILE_LABEL: "b"}, "b", f"label {PROFILE_LABEL} of node n"),
        ("", {PROFILE_LABEL: "", OLDER: "c"}, "c", f"label {OLDER} of node n"),
        ("", {PROFILE_LABEL: "", OLDER: ""}, "default", "nothing chooses another"),
        ("", {}, "default", "nothing chooses another"),
    ],
)
def test_a_label_chooses_else_the_flag_else_nobody(flag, labels, name, origin):
    assert select_file(flag, "n", labels) == SelectedProfile(name, origin)


def test_a_time_slicing_file_divides_every_gpu_and_limits_nothing():
    assert device_plugin("time-slicing") == Profile(
        "time-slicing",
        (
            ProfileEntry(
                GpuSelector(),
                Rules(replicas=4, rename=True, one_share=True, **WITHOUT_LIMIT),
                "sharing.timeSlicing.resources[0]",
                (("rename", "sharing.timeSlicing.renameByDefault"),),
            ),
        ),
        ("flags.migStrategy: has no meaning here: partitions that exist are always offered",),
    )


@pytest.mark.parametrize(
    ("file", "expected", "fields_without_meaning"),
    [
        ("time-slicing-short", Rules(replicas=10, **WITHOUT_LIMIT), []),
        ("mps", Rules(replicas=10, one_share=True, default_strategy=SharingStrategy.MPS), []),
        (
            "mps-many-shares",
            Rules(replicas=2, rename=True, default_strategy=SharingStrategy.MPS),
            ["flags.mpsRoot"],
        ),
        (
            "mixed-partitions",
            Rules(
                replicas=2,
                mig=MigRules(replicas=(("1g.10gb", 3), ("2g.20gb", 5))),
                **WITHOUT_LIMIT,
            ),
            [],
        ),
    ],
)
def test_a_file_of_the_device_plugin_becomes_rules(file, expected, fields_without_meaning):
    decoded = device_plugin(file)

    assert [entry.rules for entry in decoded.entries] == [expected]
    assert [note.partition(":")[0] for note in decoded.warnings] == fields_without_meaning


def test_a_file_about_partitions_alone_limits_nothing_either():
    content = shared("timeSlicing", resource("nvidia.com/mig-1g.10gb.me", replicas=4))

    (entry,) = decode_profile(content, "p").entries
    assert entry.rules == Rules(mig=MigRules(replicas=(("1g.10gb+me", 4),)), **WITHOUT_LIMIT)
    assert entry.path == "sharing.timeSlicing.resources[0]"


@pytest.mark.parametrize(
    ("strategy", "entries"),
    [
        (
            "single",
            (
                ProfileEntry(
                    GpuSelector(),
                    Rules(mig=MigRules(single=True)),
                    "flags.migStrategy",
                    (("mig", "flags.migStrategy"), ("mig.strategy", "flags.migStrategy")),
                ),
            ),
        ),
        ("mixed", ()),
        ("none", ()),
    ],
)
def test_the_strategy_for_partitions_says_whether_they_serve_claims_for_gpus(strategy, entries):
    assert decode_profile({"flags": {"migStrategy": strategy}}, "p").entries == entries


def test_under_single_what_divides_gpus_divides_every_partition_and_what_divides_one_kind_that():
    resources = (resource(replicas=4), resource("nvidia.com/mig-1g.10gb", replicas=2))
    content = shared("timeSlicing", *resources) | {"flags": {"migStrategy": "single"}}

    (entry,) = decode_profile(content, "p").entries
    assert entry.rules.mig == MigRules(single=True, replicas=(("1g.10gb", 2), ("*", 4)))
    assert entry.rules.replicas == 4


def test_no_partition_is_divided_for_mps():
    content = shared("mps", resource("nvidia.com/mig-1g.10gb"))

    decoded = decode_profile(content, "p")
    assert decoded.entries == ()
    (note,) = decoded.warnings
    assert note.startswith("sharing.mps.resources[0].name: 'nvidia.com/mig-1g.10gb' has no meaning")


def test_what_else_a_file_says_of_partitions_beside_mps_is_told_field_by_field():
    fields = {"renameByDefault": True, "failRequestsGreaterThanOne": False}

    _, *warnings = decode_profile(shared("mps", resource("mig-1g.10gb"), **fields), "p").warnings

    assert warnings == [
        "sharing.mps.renameByDefault: has no meaning here: nothing that the file names is divided",
        "sharing.mps.failRequestsGreaterThanOne: has no meaning here: nothing that the file names "
        "is divided",
    ]


def test_beside_gpus_the_same_words_have_their_meaning_for_those():
    fields = {"renameByDefault": True, "failRequestsGreaterThanOne": False}

    decoded = decode_profile(shared("mps", resource(), resource("mig-1g.10gb"), **fields), "p")

    (entry,) = decoded.entries
    assert (entry.rules.rename, entry.rules.one_share) == (True, False)
    assert [note.partition(":")[0] for note in decoded.warnings] == [
        "sharing.mps.resources[1].name"
    ]


def test_that_single_divides_no_partition_for_mps_is_told():
    (note,) = decode_profile(
        shared("mps", resource()) | {"flags": {"migStrategy": "single"}}, "p"
    ).warnings

    assert note.startswith("flags.migStrategy: single has no effect on sharing.mps: ")


@pytest.mark.parametrize(
    ("resources", "strategy", "rename", "entry_rename"),
    [
        pytest.param((resource("mig-2g.20gb"), resource()), "mixed", True, True, id="both"),
        pytest.param((resource("mig-2g.20gb"),), "mixed", True, True, id="partitions"),
        pytest.param((resource(),), "single", True, True, id="partitions that serve as GPUs"),
        pytest.param((resource("mig-2g.20gb"),), "mixed", False, False, id="not renamed"),
    ],
)
def test_replicas_of_partitions_are_renamed_as_those_of_gpus(
    resources, strategy, rename, entry_rename
):
    content = shared("timeSlicing", *resources, renameByDefault=rename)

    decoded = decode_profile(content | {"flags": {"migStrategy": strategy}}, "p")

    (entry,) = decoded.entries
    assert entry.rules.rename is entry_rename
    assert entry.where("rename") == "sharing.timeSlicing.renameByDefault"
    assert decoded.warnings == ()


@pytest.mark.parametrize(
    ("word", "policy"),
    [("packed", AllocationPolicy.PACKED), ("distributed", AllocationPolicy.DISTRIBUTED)],
)
@pytest.mark.parametrize(
    ("sharing", "rules"),
    [
        ({}, Rules()),
        (shared("timeSlicing", resource()), Rules(replicas=2, **WITHOUT_LIMIT)),
        (
            shared("mps", resource()),
            Rules(replicas=2, one_share=True, default_strategy=SharingStrategy.MPS),
        ),
    ],
    ids=["nothing shared", "time-slicing", "MPS"],
)
def test_a_file_says_which_replicas_and_partitions_are_given_out(word, policy, sharing, rules):
    flags = {"flags": {"plugin": {"sharedDevicesAllocationPolicy": word}}}

    decoded = decode_profile(sharing | flags, "p")

    (entry,) = decoded.entries
    assert entry.rules == replace(rules, allocation_policy=policy)
    assert entry.where("allocationPolicy") == "flags.plugin.sharedDevicesAllocationPolicy"
    assert decoded.warnings == ()


def test_nobody_gets_two_shares_of_a_partition_where_a_file_says_so():
    content = shared("timeSlicing", resource("mig-1g.10gb"), failRequestsGreaterThanOne=True)

    decoded = decode_profile(content, "p")

    (entry,) = decoded.entries
    assert entry.rules.one_share
    assert decoded.warnings == ()


def test_a_file_says_each_field_of_partitions_in_a_place_of_its_own():
    resources = (resource(), resource("mig-1g.10gb"), resource("nvidia.com/mig-9g.5gb"))
    content = shared("timeSlicing", *resources) | {"flags": {"migStrategy": "single"}}

    (entry,) = decode_profile(content, "p").entries

    first, second = (f"sharing.timeSlicing.resources[{n}].name" for n in (1, 2))
    assert entry.where("mig.replicas", "9g.5gb") == second
    assert entry.where("mig.replicas", "1g.10gb") == first
    assert entry.where("mig.strategy") == "flags.migStrategy"
    assert entry.where("mig") == f"flags.migStrategy, {first}, {second}"
    assert entry.where("memoryLimit") == "sharing.timeSlicing.resources[0].memoryLimit"


def test_a_file_that_shares_nothing_changes_nothing():
    decoded = device_plugin("no-sharing")

    assert decoded.entries == ()
    assert len(decoded.warnings) == 2


def test_a_file_with_every_field_is_accepted_and_each_without_meaning_is_told():
    decoded = device_plugin("everything")

    (entry,) = decoded.entries
    mig = MigRules(single=True, replicas=(("*", 4),))
    policy = AllocationPolicy.PACKED
    assert entry.rules == Rules(replicas=4, mig=mig, allocation_policy=policy, **WITHOUT_LIMIT)
    paths = [note.partition(":")[0] for note in decoded.warnings]
    assert len(paths) == len(set(paths)) == 32
    assert all(": has no meaning here: " in note for note in decoded.warnings)


def test_the_first_entry_that_selects_a_gpu_holds_for_it():
    chosen = profile(
        {"select": {"index": [1]}, "replicas": 2},
        {"select": {"product": ["*H100*"]}, "replicas": 3},
        {"replicas": 4},
    )
    gpus = [gpu(0), gpu(1), gpu(2, product_name="NVIDIA L40S")]

    rules_of, idle = rules_by_gpu(chosen, gpus)

    assert [rules_of[gpu.uuid].replicas for gpu in gpus] == [3, 2, 4]
    assert idle == ()


def test_every_field_of_a_selection_has_to_match():
    chosen = profile(
        {"select": {"index": [0, 1], "uuid": [gpu(1).uuid, gpu(2).uuid]}, "replicas": 2}
    )
    gpus = [gpu(0), gpu(1), gpu(2)]

    rules_of, _ = rules_by_gpu(chosen, gpus)

    assert [rules_of[gpu.uuid].replicas for gpu in gpus] == [1, 2, 1]


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("NVIDIA H100 80GB HBM3", True),
        ("*H100*", True),
        ("NVIDIA ?100 *", True),
        ("NVIDIA [AH]100*", True),
        ("H100", False),
        ("*h100*", False),
    ],
)
def test_products_are_patterns_as_of_a_shell(pattern, matches):
    rules_of, _ = rules_by_gpu(profile({"select": {"product": [pattern]}, "replicas": 2}), [gpu(0)])

    assert (rules_of[gpu(0).uuid].replicas == 2) is matches


def test_an_entry_that_selects_no_gpu_of_the_node_is_told():
    chosen = profile(
        {"select": {"index": [7]}}, {"select": {"index": [0]}}, {"select": {"uuid": [gpu(0).uuid]}}
    )

    _, idle = rules_by_gpu(chosen, [gpu(0)])

    assert idle == (
        "profile 'p', spec.gpus[0]: selects no GPU of this node",
        "profile 'p', spec.gpus[2]: earlier entries hold for all that it selects of this node",
    )


def test_of_several_entries_in_one_place_none_is_idle_where_one_holds():
    chosen = profile({"replicas": 2})
    (entry,) = chosen.entries
    first = replace(entry, selection=GpuSelector(uuids=frozenset({gpu(0).uuid})))
    chosen = replace(chosen, entries=(first, entry))

    assert rules_by_gpu(chosen, [gpu(0)])[1] == ()
    assert rules_by_gpu(chosen, [gpu(0), gpu(1)])[1] == ()
    elsewhere = replace(chosen, entries=(first, replace(entry, path="spec.gpus[1]")))
    assert len(rules_by_gpu(elsewhere, [gpu(0)])[1]) == 1


def test_a_node_without_gpus_has_nothing_to_tell():
    assert rules_by_gpu(profile({}), []) == ({}, ())


@given(
    st.lists(st.sets(st.integers(0, 7), min_size=1), max_size=5),
    st.sets(st.integers(0, 7)),
)
def test_rules_are_those_of_the_first_match_whatever_is_there(selections, listed):
    entries = [
        {"select": {"index": sorted(minors)}, "replicas": number}
        for number, minors in enumerate(selections, 2)
    ]
    chosen = profile(*entries) if entries else Profile("p")
    gpus = [gpu(minor) for minor in sorted(listed)]

    rules_of, idle = rules_by_gpu(chosen, gpus)

    def first(minor):
        return next((n for n, minors in enumerate(selections, 2) if minor in minors), 1)

    assert {uuid: gpu_rules.replicas for uuid, gpu_rules in rules_of.items()} == {
        device.uuid: first(device.minor) for device in gpus
    }
    used = {gpu_rules.replicas for gpu_rules in rules_of.values()} - {1}
    assert len(idle) == (len(selections) - len(used) if gpus else 0)
