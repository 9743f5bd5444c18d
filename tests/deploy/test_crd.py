"""The CRD of NodeProfiles is written from their models, and a node agrees with it.

What the API server makes of it: ``test_crd_on_cluster``.
"""

import json
from typing import Any

import pytest

from api.strict import ConfigError
from dra_driver.plan.profiles.rules import decode_profile
from hack.crd import CRD, crd
from tests.deploy.chart import GOLDEN, objects
from tests.fakes.judged_profiles import EVERYTHING, OTHERWISE_SPELLED, RIGHT, WRONG, Entries

CHART = objects(GOLDEN.read_text())


def version() -> dict[str, Any]:
    [only] = CHART["CustomResourceDefinition"]["spec"]["versions"]
    return dict(only)


def spec_fields() -> dict[str, Any]:
    schema = version()["schema"]["openAPIV3Schema"]
    return dict(schema["properties"]["spec"]["properties"])


def decoded(entries: Entries) -> Any:
    """As on a node."""
    head = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "NodeProfile"}
    return decode_profile({**head, "spec": {"gpus": entries}}, "judged")


def test_the_crd_is_fresh() -> None:
    assert CRD.read_text() == crd(), "run hack/update-crd"


def test_the_crd_outlives_the_release_and_takes_the_status_apart() -> None:
    definition = CHART["CustomResourceDefinition"]
    assert definition["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert definition["spec"]["scope"] == "Cluster"
    assert version()["subresources"] == {"status": {}}
    assert [column["name"] for column in version()["additionalPrinterColumns"]] == [
        *("Nodes", "Updated", "Pending", "Failed", "Status", "Priority", "Revision", "Age")
    ]


def test_what_somebody_wrote_of_gpus_gets_no_default() -> None:
    assert '"default"' not in json.dumps(spec_fields()["gpus"])
    assert spec_fields()["rollout"]["default"] == {}


@pytest.mark.parametrize("entries", RIGHT.values(), ids=RIGHT)
def test_what_the_api_server_takes_is_right_on_a_node(entries: Entries) -> None:
    assert len(decoded(entries).entries) == len(entries)


@pytest.mark.parametrize(("entries", "place", "words"), WRONG.values(), ids=WRONG)
def test_what_the_api_server_refuses_is_refused_on_a_node(
    entries: Entries, place: str, words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        decoded(entries)

    assert any(
        problem.startswith(f"spec.gpus{place}") and words in problem
        for problem in refused.value.problems
    ), refused.value.problems


@pytest.mark.parametrize("entries", OTHERWISE_SPELLED.values(), ids=OTHERWISE_SPELLED)
def test_files_may_spell_things_otherwise(entries: Entries) -> None:
    assert decoded(entries)


def test_every_field_of_an_entry_is_in_the_schema_and_in_the_examples() -> None:
    fields = spec_fields()["gpus"]["items"]["properties"]

    assert fields.keys() == {*EVERYTHING, "timeSliceInterval", "shares"}
