"""NodeProfiles as documents of the API server."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.strict import ConfigError
from dra_driver.model.node_profiles import (
    NodeFailure,
    NodeProfileObject,
    ProfileCondition,
    ProfileStatus,
    RolloutRules,
)
from dra_driver.plan.profiles.objects import read_node_profile, status_document
from dra_driver.plan.profiles.revisions import revision_name
from tests.plan.profiles.fleet import profile

STATUS = ProfileStatus(
    observed_generation=3,
    current_revision="inference-a",
    update_revision="inference-b",
    nodes=50,
    updated=12,
    pending=7,
    failed=1,
    updating=("node-1", "node-2"),
    failures=(NodeFailure("node-3", "it does not fit"),),
    conditions=(
        ProfileCondition("Complete", False, "RollingOut", "…", "2026-01-31T12:00:00Z", 3),
        ProfileCondition("Progressing", True, "RollingOut", "…", "2026-01-31T12:00:00Z", 3),
    ),
)


def document(spec=None, status=None, **metadata) -> dict[str, Any]:
    return {
        "apiVersion": "resource.nvidia.com/v1beta1",
        "kind": "NodeProfile",
        "metadata": {
            "name": "inference",
            "uid": "uid",
            "resourceVersion": "1",
            "generation": 1,
            "managedFields": [{"manager": "kubectl"}],
            **metadata,
        },
        "spec": {"gpus": [{"replicas": 1}]} if spec is None else spec,
        "status": status,
    }


def test_a_profile_that_says_no_more_than_gpus_has_the_defaults():
    assert read_node_profile(document()) == profile(1)


def test_every_field_is_read():
    read = read_node_profile(
        document(
            {
                "gpus": [{"replicas": 4}],
                "api": "DRA",
                "nodeSelector": {"pool": "x"},
                "priority": 7,
                "rollout": {
                    "maxUnavailable": 5,
                    "maxFailures": 2,
                    "progressDeadlineSeconds": 60,
                    "paused": True,
                },
                "revisionHistoryLimit": 3,
            },
            status_document(STATUS),
            creationTimestamp="2026-01-31T12:00:00Z",
            deletionTimestamp="2026-01-31T13:00:00Z",
        )
    )

    assert read == NodeProfileObject(
        "inference",
        "uid",
        "1",
        1,
        created="2026-01-31T12:00:00Z",
        deleting=True,
        rules='{"api":"DRA","gpus":[{"replicas":4}]}',
        revision=revision_name("inference", '{"api":"DRA","gpus":[{"replicas":4}]}'),
        node_selector={"pool": "x"},
        priority=7,
        rollout=RolloutRules(5, False, 2, 60.0, True),
        revision_history_limit=3,
        status=STATUS,
    )


def test_a_percentage_of_nodes_is_rounded_up_and_at_least_one():
    rollout = {"maxUnavailable": "15%"}
    rules = read_node_profile(document({"gpus": [{}], "rollout": rollout})).rollout

    assert [rules.nodes_at_once(nodes) for nodes in (0, 1, 7, 20, 21)] == [1, 1, 2, 3, 4]
    assert rules.nodes_at_once(100_000) == 250


def test_the_revision_is_of_the_gpus_as_the_api_server_has_them():
    read = read_node_profile(document({"gpus": [{"a field of later": None}]}))

    assert (read.rules, read.problem) == ('{"gpus":[{"a field of later":null}]}', "")


def test_a_profile_may_say_of_the_api_alone():
    read = read_node_profile(document({"api": "DRA", "nodeSelector": {"pool": "x"}}))

    assert (read.rules, read.problem) == ('{"api":"DRA"}', "")


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        pytest.param({}, "spec: {} says nothing of GPUs; write gpus, or api", id="no gpus"),
        pytest.param("x", "spec: 'x' should be a mapping", id="no spec"),
        pytest.param(
            {"gpus": [{}], "rollout": {"strategy": "x"}},
            "spec.rollout.strategy: unknown field",
            id="a field of a later release",
        ),
        pytest.param(
            {"gpus": [{}], "api": "CDI"}, "spec.api: 'CDI' should be", id="an API of later"
        ),
        pytest.param(
            {"gpus": [{}], "rollout": {"maxUnavailable": 0}},
            "spec.rollout.maxUnavailable: 0 is no number of nodes",
            id="a value that is not allowed",
        ),
    ],
)
def test_a_spec_that_cannot_be_read_is_the_problem_of_the_profile(spec, problem):
    read = read_node_profile(document(spec, status_document(STATUS)))

    assert read.problem.startswith(problem)
    assert replace(read, problem="") == NodeProfileObject("inference", "uid", "1", 1, status=STATUS)


@pytest.mark.parametrize("garbage", [None, "x", {}, {"metadata": {"name": ""}}])
def test_what_is_no_object_is_refused(garbage):
    with pytest.raises(ConfigError):
        read_node_profile(garbage)


@given(
    st.recursive(
        st.none() | st.text() | st.integers(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_no_spec_and_no_status_is_too_odd_to_be_read(garbage):
    read = read_node_profile(document(["x", garbage], [garbage]))

    assert read.problem
    assert read.status == ProfileStatus()


def test_a_status_that_cannot_be_read_is_as_none():
    read = read_node_profile(document(status=["x"]))

    assert (read.problem, read.status) == ("", ProfileStatus())


def test_the_status_is_written_with_every_field_and_read_back():
    written = json.loads(json.dumps(status_document(STATUS)))

    assert read_node_profile(document(status=written)).status == STATUS
    assert written["conditions"][0] == {
        "type": "Complete",
        "status": "False",
        "reason": "RollingOut",
        "message": "…",
        "lastTransitionTime": "2026-01-31T12:00:00Z",
        "observedGeneration": 3,
    }
    assert set(status_document(ProfileStatus())) == set(written)
