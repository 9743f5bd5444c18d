"""Revisions of a NodeProfile: names, ControllerRevisions, numbers, and which may go."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.strict import ConfigError
from dra_driver.model.node_profiles import RevisionChange
from dra_driver.model.profiles import AllocationApi, Profile
from dra_driver.plan.profiles.revisions import (
    canonical_rules,
    decode_rules,
    earlier_revision,
    old_revisions,
    profile_of_revision,
    read_revision,
    revision_change,
    revision_document,
    revision_name,
    revisions_path,
)
from tests.plan.profiles.fleet import gpus, kept, profile

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def document(revision, **metadata):
    """The ControllerRevision as an API server has it."""
    written = revision_document(revision, "gpus")
    written["metadata"] |= {"resourceVersion": "1", **metadata}
    return json.loads(json.dumps(written))


def test_a_revision_is_named_for_the_profile_and_what_it_says():
    name = revision_name("inference", gpus(4))

    assert name == "inference-p8czbchrsj"
    assert profile_of_revision(name) == "inference"
    assert name != revision_name("inference", gpus(5))


def test_the_order_of_keys_makes_no_other_revision():
    one, other = [{"a": 1, "b": [{"c": 2, "d": 3}]}], [{"b": [{"d": 3, "c": 2}], "a": 1}]

    assert canonical_rules({"gpus": one}) == canonical_rules({"gpus": other})


@given(JSON)
def test_any_json_has_a_name_in_kubernetes_alphabet(value):
    name = revision_name("p", canonical_rules({"gpus": [value]}))

    assert re.fullmatch(r"p-[bcdfghjklmnpqrstvwxz2456789]{10}", name)
    assert json.loads(canonical_rules({"gpus": [value]})) == {"gpus": [value]}


def test_revisions_are_in_one_namespace_or_looked_for_in_all():
    of_gpus = "/apis/apps/v1/namespaces/gpus/controllerrevisions"
    assert revisions_path("gpus") == of_gpus
    assert revisions_path("") == "/apis/apps/v1/controllerrevisions"


def test_a_controller_revision_goes_with_its_profile():
    assert revision_document(kept(4, number=3), "gpus") == {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": {
            "name": "inference-p8czbchrsj",
            "namespace": "gpus",
            "labels": {"resource.nvidia.com/node-profile": "inference"},
            "ownerReferences": [
                {
                    "apiVersion": "resource.nvidia.com/v1beta1",
                    "kind": "NodeProfile",
                    "name": "inference",
                    "uid": "uid",
                    "controller": True,
                }
            ],
        },
        "data": {"spec": {"gpus": [{"replicas": 4}]}},
        "revision": 3,
    }


def test_what_is_read_is_what_was_written():
    created = "2026-01-31T12:00:00Z"

    read = read_revision(document(kept(4), creationTimestamp=created, uid="u"))

    assert read == replace(kept(4), created=created)


def test_a_revision_that_nobody_owns_is_read():
    assert read_revision(document(kept(4), ownerReferences=None)).owner_uid == ""


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        pytest.param(None, "should be a mapping", id="no document"),
        pytest.param({"data": {"spec": {"gpus": 4}}}, r"data\.spec\.gpus: 4", id="no list"),
        pytest.param({"data": None}, "data: ", id="no data"),
        pytest.param(
            {"data": {"spec": {"gpus": []}}},
            r"data\.spec: is not what revision 'inference-p8czbchrsj' of NodeProfile "
            "'inference' keeps",
            id="data of another revision",
        ),
        pytest.param({"metadata": {"name": "x"}}, "NodeProfile '' keeps", id="no label"),
    ],
)
def test_garbage_is_refused_with_what_is_wrong(changed, problem):
    with pytest.raises(ConfigError, match=problem):
        read_revision(changed if changed is None else document(kept(4)) | changed)


def test_a_revision_means_what_a_profile_of_its_gpus_means():
    (entry,) = decode_rules(gpus(4), "inference").entries

    assert entry.rules.replicas == 4


def test_a_revision_keeps_the_api_beside_the_gpus():
    spec = {"gpus": [{"replicas": 4}], "api": "DevicePlugin", "priority": 3}
    rules = canonical_rules(spec)
    revision = replace(kept(4), name=revision_name("inference", rules), rules=rules)

    read = read_revision(document(revision))

    assert read == revision
    assert revision.name != revision_name("inference", gpus(4))
    assert decode_rules(read.rules, "inference").api is AllocationApi.DEVICE_PLUGIN


def test_a_revision_may_keep_the_api_alone():
    rules = canonical_rules({"api": "DRA"})
    revision = replace(kept(4), name=revision_name("inference", rules), rules=rules)

    assert read_revision(document(revision)) == revision
    assert decode_rules(rules, "inference") == Profile("inference", api=AllocationApi.DRA)


def test_a_revision_of_a_later_release_is_read_and_says_what_is_not_known():
    rules = '{"gpus":[{}],"later":1}'
    revision = replace(kept(4), name=revision_name("inference", rules), rules=rules)

    read = read_revision(document(revision))

    assert read == revision
    with pytest.raises(ConfigError, match=r"spec\.later: unknown field"):
        decode_rules(read.rules, "inference")


def test_a_revision_that_means_nothing_is_refused_with_the_field():
    with pytest.raises(ConfigError, match=r"spec\.gpus\[0\]\.replicas"):
        decode_rules(gpus("many"), "inference")


def test_the_revision_of_the_spec_is_created_with_the_next_number():
    change = revision_change(profile(2), [kept(1, number=4)])

    assert change == RevisionChange(replace(kept(2, number=5), resource_version=""), exists=False)


def test_a_revision_that_becomes_current_again_gets_the_next_number():
    change = revision_change(profile(1), [kept(1, number=4), kept(2, number=5)])

    assert change == RevisionChange(kept(1, number=6), exists=True)


def test_the_newest_revision_keeps_its_number():
    assert revision_change(profile(2), [kept(1, number=4), kept(2, number=5)]) is None


def test_of_two_revisions_of_one_number_that_of_the_spec_gets_the_next():
    change = revision_change(profile(2), [kept(1, number=4), kept(2, number=4)])

    assert change == RevisionChange(kept(2, number=5), exists=True)


def test_a_revision_that_nobody_owns_becomes_the_profiles():
    change = revision_change(profile(2), [kept(2, number=5, owner="")])

    assert change == RevisionChange(kept(2, number=5), exists=True)


def test_the_oldest_revisions_go_but_none_that_is_in_use():
    revisions = [kept(replicas, number=replicas) for replicas in (3, 1, 4, 2, 5)]
    in_use = {kept(1).name, kept(5).name}

    assert [old.number for old in old_revisions(revisions, in_use, 1)] == [2, 3]
    assert old_revisions(revisions, in_use, 3) == ()
    assert [old.number for old in old_revisions(revisions, in_use, 0)] == [2, 3, 4]


def test_an_undo_goes_to_the_newest_other_revision_or_to_the_one_that_is_named():
    revisions = [kept(1, number=1), kept(2, number=5), kept(3, number=7)]

    assert earlier_revision(revisions, kept(3).name) == revisions[1]
    assert earlier_revision(revisions, kept(3).name, 1) == revisions[0]
    assert earlier_revision(revisions, kept(3).name, 2) is None
    assert earlier_revision(revisions[2:], kept(3).name) is None
