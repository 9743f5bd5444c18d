"""What administrators write in a NodeProfile, and what they are told when it is wrong."""

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api import strict
from api.node_profile import (
    MAX_REPLICAS,
    MOST_NODES,
    Duration,
    HealthEffectsConfig,
    HealthSectionConfig,
    MigSectionConfig,
    NodeProfile,
    NodeProfileObjectSpec,
)
from api.strict import ConfigError, StrictModel, validated

HEAD = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "NodeProfile"}


def read(*gpus, **fields):
    return validated(NodeProfile, {**HEAD, "spec": {"gpus": list(gpus)}, **fields})


def problems(*gpus, **fields):
    with pytest.raises(ConfigError) as refused:
        read(*gpus, **fields)
    return refused.value.problems


FULL = {
    "select": {"index": [0, 3], "uuid": ["GPU-1"], "product": ["*H100*", "NVIDIA L40S"]},
    "include": True,
    "fractions": "Capacity",
    "replicas": 4,
    "rename": True,
    "failRequestsGreaterThanOne": True,
    "allocationPolicy": "Distributed",
    "strategies": ["TimeSlicing", "MPS"],
    "defaultStrategy": "MPS",
    "mpsTenants": "NonRoot",
    "timeSliceInterval": "Any",
    "mpsServer": "Shared",
    "shares": 8,
    "memory": {"least": "2Gi", "step": "512Mi"},
    "memoryGuard": {"policy": "Warn", "grace": "1m30s"},
    "memoryLimit": "Strict",
    "mig": {
        "mode": "Dynamic",
        "profiles": ["1g.10gb", "*+me"],
        "layout": "all-balanced",
        "strategy": "Single",
        "replicas": {"1g.10gb": 4, "1g.10gb+me.all": 1},
    },
    "health": {
        "effects": {
            "gpuLost": "NoExecute",
            "xid": "NoExecute",
            "uncorrectableEcc": "NoSchedule",
            "rowRemapFailed": "NoExecute",
            "recoveryAction": "None",
            "rowRemapPending": "NoSchedule",
            "correctableEcc": "NoSchedule",
            "thermalSlowdown": "NoSchedule",
            "powerBrake": "NoSchedule",
            "nvlinkDown": "NoExecute",
            "fabric": "NoSchedule",
            "pcieReplays": "NoSchedule",
            "unmonitored": "NoSchedule",
        },
        "xids": {"31": "NoSchedule", "154": "None"},
        "recovery": "5m",
    },
}


def test_the_example_of_a_path_is_true():
    assert doctest.testmod(strict).failed == 0


def test_every_field_is_read():
    profile = read(FULL, metadata={"name": "inference"})

    assert profile.metadata.name == "inference"
    (entry,) = profile.spec.gpus
    assert entry.model_dump(by_alias=True) == FULL


def test_an_entry_may_say_next_to_nothing():
    (entry,) = read({}).spec.gpus

    assert entry.model_fields_set == set()


def test_null_is_the_same_as_absent_also_within_a_list():
    assert read({"replicas": None, "select": None}) == read({})


@pytest.mark.parametrize(
    ("entry", "field", "meant"),
    [
        ({"fractions": "never"}, "fractions", "Never"),
        ({"fractions": "CAPACITY"}, "fractions", "Capacity"),
        ({"defaultStrategy": "timeSlicing"}, "default_strategy", "TimeSlicing"),
        ({"allocationPolicy": "packed"}, "allocation_policy", "Packed"),
        ({"mpsTenants": "any"}, "mps_tenants", "Any"),
        ({"mpsServer": "perNamespace"}, "mps_server", "PerNamespace"),
        ({"mpsTenants": "userNamespaces"}, "mps_tenants", "UserNamespaces"),
        ({"timeSliceInterval": "wholegpus"}, "time_slice_interval", "WholeGPUs"),
        ({"memoryLimit": "bestEffort"}, "memory_limit", "BestEffort"),
        ({"mig": "dynamic"}, "mig", MigSectionConfig(mode="Dynamic")),
        ({"mig": {"strategy": "single"}}, "mig", MigSectionConfig(strategy="Single")),
        (
            {"health": {"effects": {"xid": "noexecute"}, "xids": {31: "none"}}},
            "health",
            HealthSectionConfig(effects=HealthEffectsConfig(xid="NoExecute"), xids={"31": "None"}),
        ),
    ],
)
def test_words_are_read_in_any_case(entry, field, meant):
    assert getattr(read(entry).spec.gpus[0], field) == meant


def test_off_which_yaml_takes_for_false_is_off():
    (entry,) = read({"memoryGuard": {"policy": False}}).spec.gpus

    assert entry.memory_guard.policy == "Off"


@pytest.mark.parametrize("section", [False, "Off", "off", {"mode": False}, {"mode": "OFF"}])
def test_partitions_that_are_not_created_are_off(section):
    (entry,) = read({"mig": section}).spec.gpus

    assert entry.mig == MigSectionConfig(mode="Off")


def test_an_amount_of_memory_may_be_a_number_of_bytes():
    (entry,) = read({"memory": {"least": 2**30}}).spec.gpus

    assert entry.memory.least == str(2**30)


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"select": {"index": []}}, "select.index: is empty; say what is meant, or leave it out"),
        ({"select": {"index": [-1]}}, "select.index[0]: -1"),
        ({"select": {"index": [True]}}, "select.index[0]: True"),
        ({"select": {"uuid": ["MIG-1"]}}, "select.uuid[0]: 'MIG-1' is no GPU; write GPU-…"),
        ({"select": {"product": [""]}}, "select.product[0]: ''"),
        ({"replicas": 0}, "replicas: 0"),
        ({"replicas": MAX_REPLICAS + 1}, "replicas: "),
        ({"shares": 0}, "shares: 0"),
        ({"strategies": []}, "strategies: is empty"),
        (
            {"mpsTenants": "Root"},
            "mpsTenants: 'Root' should be 'Any', 'NonRoot' or 'UserNamespaces'",
        ),
        (
            {"timeSliceInterval": "Default"},
            "timeSliceInterval: 'Default' should be 'WholeGPUs' or 'Any'",
        ),
        ({"strategies": ["MPS", "mig"]}, "strategies[1]: 'mig' should be 'TimeSlicing' or 'MPS'"),
        ({"include": "no"}, "include: 'no' should be a valid boolean"),
        ({"fractions": False}, "fractions: 'Off' should be"),
        (
            {"memory": {"least": "much"}},
            "memory.least: 'much' is not a quantity; write for example 1Gi",
        ),
        ({"memory": {"step": "-1Mi"}}, "memory.step: '-1Mi'"),
        ({"memory": {"step": True}}, "memory.step: True"),
        (
            {"memoryGuard": {"grace": "10"}},
            "memoryGuard.grace: '10' is not a duration; write for example 10s",
        ),
        ({"memoryGuard": {"grace": "-1s"}}, "memoryGuard.grace: '-1s'"),
        ({"memoryGuard": {"grace": ""}}, "memoryGuard.grace: ''"),
        ({"replica": 4}, "replica: unknown field; did you mean replicas?"),
        ({"colour": 4}, "colour: unknown field; remove it"),
        ({"select": []}, "select: [] should be a mapping"),
        ({"mig": "Static"}, "mig.mode: 'Static' should be 'Dynamic' or 'Off'"),
        ({"mig": True}, "mig.mode: True should be"),
        ({"mig": 7}, "mig: 7 should be a mapping"),
        ({"mig": {"profiles": []}}, "mig.profiles: is empty"),
        ({"mig": {"profiles": [""]}}, "mig.profiles[0]: ''"),
        ({"mig": {"layout": "a b"}}, "mig.layout: 'a b' is no name"),
        ({"mig": {"replicas": {"1g.10gb": 0}}}, "mig.replicas.1g.10gb: 0"),
        (
            {"mig": {"replicas": {"gpu": 2}}},
            "mig.replicas.gpu.[key]: 'gpu' is no MIG profile; write for example 1g.10gb",
        ),
        (
            {"health": {"xids": {"all": "None"}}},
            "health.xids.all.[key]: 'all' is no number of an Xid; write for example 79",
        ),
        (
            {"health": {"xids": {"79": "Evict"}}},
            "health.xids.79: 'Evict' should be 'None', 'NoSchedule' or 'NoExecute'",
        ),
        (
            {"health": {"effects": {"xids": "None"}}},
            "health.effects.xids: unknown field",
        ),
        ({"health": {"effects": {"released": "None"}}}, "health.effects.released: unknown field"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_value_that_cannot_be_is_refused_with_its_path(entry, problem):
    (message,) = problems(entry)

    assert message.startswith(f"spec.gpus[0].{problem}")


def test_everything_that_is_wrong_is_said_at_once():
    messages = problems(
        {"replicas": 0}, 5, {"select": {"index": []}}, metadata={"name": "a b"}, status={}
    )

    assert [each.partition(": ")[0] for each in messages] == [
        "metadata.name",
        "spec.gpus[0].replicas",
        "spec.gpus[1]",
        "spec.gpus[2].select.index",
        "status",
    ]


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({**HEAD}, "spec: missing"),
        ({**HEAD, "spec": {}}, "spec: {} says nothing of GPUs; write gpus, or api"),
        ({**HEAD, "spec": {"gpus": []}}, "spec.gpus: is empty; say what is meant, or leave it out"),
        ({**HEAD, "spec": {"gpus": {}}}, "spec.gpus: {} should be a valid list"),
    ],
)
def test_a_profile_without_entries_is_refused(document, problem):
    with pytest.raises(ConfigError) as refused:
        validated(NodeProfile, document)

    assert refused.value.problems == (problem,)


@pytest.mark.parametrize("name", ["a", "A100.v2_x", "x" * 63])
def test_a_name_is_what_a_label_can_have_as_its_value(name):
    assert read({}, metadata={"name": name}).metadata.name == name


@pytest.mark.parametrize("name", ["", "-a", "a/b", "x" * 64, "a\n"])
def test_a_name_that_no_label_can_have_is_refused(name):
    (problem,) = problems({}, metadata={"name": name})

    assert problem.startswith("metadata.name: ")


def test_a_long_value_is_not_shown_to_its_end():
    (problem,) = problems({"fractions": "x" * 1000})

    assert len(problem) < 200


class Waiting(StrictModel):
    time: Duration


@given(
    st.lists(
        st.tuples(st.decimals(0, 999, places=2), st.sampled_from("smh")), min_size=1, max_size=4
    )
)
def test_every_sum_of_times_is_a_duration(parts):
    text = "".join(f"{number}{unit}" for number, unit in parts[:5])

    assert validated(Waiting, {"time": text}).time == text


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5))
def test_anything_else_than_a_profile_is_refused_and_nothing_breaks(value):
    with pytest.raises(ConfigError):
        validated(NodeProfile, {**HEAD, "spec": value})


IN_A_FILE = "has no effect in a file; apply the profile with kubectl, or remove it"


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("nodeSelector", {"pool": "a"}, "{'pool': 'a'}"),
        ("priority", 10, "10"),
        ("rollout", {}, "{}"),
        ("revisionHistoryLimit", 0, "0"),
    ],
)
def test_what_only_objects_say_is_refused_in_a_file(field, value, shown):
    assert problems(spec={"gpus": [{}], field: value}) == (f"spec.{field}: {shown} {IN_A_FILE}",)


def object_spec(**fields):
    return validated(NodeProfileObjectSpec, {"gpus": [{"replicas": 2}], **fields})


def test_every_field_of_an_object_is_read():
    spec = object_spec(
        api="DevicePlugin",
        nodeSelector={"cloud.example.com/pool": "gpu", "empty": ""},
        priority=-5,
        rollout={
            "maxUnavailable": 2,
            "maxFailures": 1,
            "progressDeadlineSeconds": 30,
            "paused": True,
        },
        revisionHistoryLimit=0,
    )

    assert spec.model_dump() == {
        "api": "DevicePlugin",
        "gpus": [{"replicas": 2}],
        "node_selector": {"cloud.example.com/pool": "gpu", "empty": ""},
        "priority": -5,
        "rollout": {
            "max_unavailable": 2,
            "max_failures": 1,
            "progress_deadline_seconds": 30,
            "paused": True,
        },
        "revision_history_limit": 0,
    }


def test_an_object_that_says_nothing_of_nodes_holds_for_all_and_changes_a_tenth_at_a_time():
    assert object_spec().model_dump() == {
        "api": None,
        "gpus": [{"replicas": 2}],
        "node_selector": {},
        "priority": 0,
        "rollout": {
            "max_unavailable": "10%",
            "max_failures": 3,
            "progress_deadline_seconds": 600,
            "paused": False,
        },
        "revision_history_limit": 10,
    }


AT_ONCE = "is no number of nodes from 1 on, and no percentage; write for example 10%"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        *(
            (
                {"rollout": {"maxUnavailable": value}},
                f"spec.rollout.maxUnavailable: {value!r} {AT_ONCE}",
            )
            for value in (0, MOST_NODES + 1, True, "0%", "101%", "10", 1.5)
        ),
        (
            {"nodeSelector": {"pool a": "b"}},
            "spec.nodeSelector.pool a.[key]: 'pool a' is no key that a node's label can have",
        ),
        (
            {"nodeSelector": {"pool": "a b"}},
            "spec.nodeSelector.pool: 'a b' is no value that a node's label can have",
        ),
        ({"priority": 1_000_001}, "spec.priority: 1000001 should be less than or equal to 1000000"),
    ],
)
def test_wrong_fields_of_an_object_are_named(fields, problem):
    with pytest.raises(ConfigError) as refused:
        object_spec(**fields)

    assert [f"spec.{text}" for text in refused.value.problems] == [problem]


@pytest.mark.parametrize("value", [1, MOST_NODES, "1%", "99%", "100%"])
def test_nodes_at_a_time_are_a_number_or_a_percentage(value):
    assert object_spec(rollout={"maxUnavailable": value}).rollout.max_unavailable == value
