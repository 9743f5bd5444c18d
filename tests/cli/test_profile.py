"""The rollout of a NodeProfile, as a person sees and directs it."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from api.names import GPUS_CONFIGURED, PROFILE_REVISION_ANNOTATION
from dra_driver.model.node_profiles import NodeReport, Revision
from dra_driver.plan.profiles.report import report_condition
from dra_driver.plan.profiles.revisions import canonical_rules, revision_document, revision_name
from tests.cli.conftest import Answer, Type
from tests.fakes.api_server import ApiServer


class AnyAge:
    def __eq__(self, other: object) -> bool:
        return re.fullmatch("[0-9]+s", str(other)) is not None


ANY_AGE = AnyAge()
NAMESPACE = "dra-driver-gpu"
WHOLE: list[Any] = [{"fractions": "Never"}]
QUARTERS: list[Any] = [{"replicas": 4}]
HALVES: list[Any] = [{"replicas": 2}]


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with ApiServer() as running:
        yield running


@pytest.fixture
def ask(server: ApiServer, type_in: Type, tmp_path: Path) -> Type:
    """``dra-driver profile``, with a kubeconfig."""
    kubeconfig = server.kubeconfig(tmp_path / "kubeconfig")

    def run(*words: str) -> Answer:
        return type_in("profile", *words, "--kubeconfig", kubeconfig)

    return run


def named(gpus: Sequence[Any], profile: str = "inference") -> str:
    return revision_name(profile, canonical_rules({"gpus": gpus}))


def put_profile(server: ApiServer, gpus: Sequence[Any], **status: Any) -> None:
    """The NodeProfile "inference", with its status as the controller has written it."""
    document: dict[str, Any] = {
        "apiVersion": "resource.nvidia.com/v1beta1",
        "kind": "NodeProfile",
        "metadata": {"name": "inference"},
        "spec": {"gpus": list(gpus)},
    }
    generation = server.put(document)["metadata"]["generation"]
    server.put({**document, "status": {"observedGeneration": generation, **status}})


def put_revisions(server: ApiServer, *gpus: Sequence[Any], owner_uid: str = "") -> None:
    """Revisions of the profile, oldest first, numbered from 1 on."""
    uid = owner_uid or server.objects("nodeprofiles")[0]["metadata"]["uid"]
    for number, each in enumerate(gpus, 1):
        revision = Revision(named(each), "inference", number, canonical_rules({"gpus": each}), uid)
        server.put(revision_document(revision, NAMESPACE))


def put_node(
    server: ApiServer, name: str, report: NodeReport, given: str = "", ready: bool = True
) -> None:
    condition = report_condition(report)
    server.put(
        {
            "kind": "Node",
            "metadata": {"name": name, "annotations": {PROFILE_REVISION_ANNOTATION: given}},
            "status": {
                "conditions": [
                    {"type": "Ready", "status": str(ready)},
                    {
                        "type": GPUS_CONFIGURED,
                        "status": condition.status,
                        "reason": condition.reason,
                        "message": condition.message,
                    },
                ]
            },
        }
    )


def spec(server: ApiServer) -> Any:
    return server.objects("nodeprofiles")[0]["spec"]


def progressing(reason: str, message: str) -> list[dict[str, str]]:
    return [{"type": "Progressing", "status": "True", "reason": reason, "message": message}]


def put_rollout(server: ApiServer) -> None:
    """Quarters are rolled out where GPUs were given out whole: one node has them, one of its GPUs
    follows; one failed, one is being given them, one is not ready, and one has its turn later."""
    old, new = named(WHOLE), named(QUARTERS)
    put_profile(
        server,
        QUARTERS,
        currentRevision=old,
        updateRevision=new,
        nodes=5,
        updated=1,
        pending=1,
        failed=1,
        updating=["n3"],
        failures=[{"node": "n2", "reason": "no GPU is an H100"}],
        conditions=progressing("RollingOut", "1 of 5 nodes have it"),
    )
    put_revisions(server, WHOLE, QUARTERS)
    has_old = NodeReport("inference", old)
    put_node(server, "n1", NodeReport("inference", new, pending=1, pending_gpus=("gpu-3",)), new)
    put_node(server, "n2", NodeReport("inference", new, refusal="no GPU is an H100"), new)
    put_node(server, "n3", has_old, new)
    put_node(server, "n4", has_old, old, ready=False)
    put_node(server, "n5", has_old, old)
    put_node(server, "n6", NodeReport("inference", new, not_possible="gpu-2: full"), new)
    put_node(server, "of-a-file", NodeReport("default", of_files=True))


def test_status_says_how_far_the_rollout_is_and_which_nodes_it_waits_for(
    server: ApiServer, ask: Type
) -> None:
    put_rollout(server)
    old, new = named(WHOLE), named(QUARTERS)

    answer = ask("status", "inference")

    assert answer.code == 0
    assert [re.split(" {3,}", line) for line in answer.out.splitlines()] == [
        ['NodeProfile "inference": 1 of 5 nodes have it'],
        [""],
        ["NAME", "NODES", "UPDATED", "PENDING", "FAILED", "STATUS", "AGE"],
        ["inference", "5", "1", "1", "1", "RollingOut", ANY_AGE],
        [""],
        ["NODE", "STATE", "HAS", "WHY"],
        ["n2", "failed", "-", "no GPU is an H100"],
        ["n4", "not ready", old, "it gets the update when it is Ready"],
        ["n3", "updating", old, "it has not reported yet"],
        ["n1", "pending", new, "1 GPU changes when no claim holds it: gpu-3"],
        ["n6", "partly", new, "in force; not possible: gpu-2: full"],
        [""],
        ["REVISION", "NAME", "AGE", "USED"],
        ["2", new, ANY_AGE, "update"],
        ["1", old, ANY_AGE, "current"],
    ]


def test_status_says_the_same_to_programs(server: ApiServer, ask: Type) -> None:
    put_rollout(server)

    document = json.loads(ask("status", "inference", "-o", "json").out)

    assert document["nodes"] == 5
    assert document["failed"] == 1
    assert {node["node"]: node["state"] for node in document["nodeStates"]} == {
        "n1": "pending",
        "n2": "failed",
        "n3": "updating",
        "n4": "not ready",
        "n6": "partly",
    }
    assert [(each["number"], each["update"]) for each in document["revisions"]] == [
        (2, True),
        (1, False),
    ]


def test_status_names_twenty_nodes_of_a_kind_and_counts_the_others(
    server: ApiServer, ask: Type
) -> None:
    put_rollout(server)
    for number in range(25):
        put_node(server, f"late-{number:02}", NodeReport("inference", named(WHOLE)), ready=False)

    out = ask("status", "inference").out

    assert "late-19" in out
    assert "late-20" not in out
    assert "and 6 more not ready (-o json names all)" in out


def test_status_says_that_the_controller_has_not_seen_the_last_change(
    server: ApiServer, ask: Type
) -> None:
    put_profile(server, WHOLE, observedGeneration=0)

    assert "the controller has not seen the last change yet (generation 1; it has seen 0)" in (
        ask("status", "inference").out
    )


def test_status_without_the_right_to_list_nodes_says_the_rest(server: ApiServer, ask: Type) -> None:
    put_rollout(server)
    server.deny("list", "nodes")

    answer = ask("status", "inference")

    assert answer.code == 0
    assert "The nodes are not listed: " in answer.out
    assert "no GPU is an H100" in answer.out
    assert json.loads(ask("status", "inference", "-o", "json").out)["nodeStates"] is None


def test_a_rollout_is_paused_and_resumed(server: ApiServer, ask: Type) -> None:
    put_profile(server, WHOLE)

    assert ask("pause", "inference") == Answer(0, 'NodeProfile "inference" paused\n', "")
    assert spec(server)["rollout"] == {"paused": True}
    assert ask("pause", "inference").out == 'NodeProfile "inference" is paused already\n'

    assert ask("resume", "inference").out == 'NodeProfile "inference" resumed\n'
    assert spec(server)["rollout"] == {"paused": False}
    assert ask("resume", "inference").out == 'NodeProfile "inference" is not paused\n'


def test_undo_goes_back_to_the_revision_before(server: ApiServer, ask: Type) -> None:
    put_profile(server, QUARTERS)
    put_revisions(server, HALVES, WHOLE, QUARTERS)

    answer = ask("undo", "inference")

    assert answer.out == f'NodeProfile "inference" is back at revision 2 ({named(WHOLE)})\n'
    assert spec(server) == {"gpus": WHOLE}


def test_undo_brings_back_the_api_too(server: ApiServer, ask: Type) -> None:
    put_profile(server, WHOLE)
    put_revisions(server, WHOLE)
    [document] = server.objects("nodeprofiles")
    server.put({**document, "spec": {"gpus": WHOLE, "api": "DRA"}})

    assert ask("undo", "inference").code == 0
    assert spec(server) == {"gpus": WHOLE}


def test_undo_goes_back_to_the_revision_that_is_asked_for(server: ApiServer, ask: Type) -> None:
    put_profile(server, QUARTERS)
    put_revisions(server, HALVES, WHOLE, QUARTERS)

    assert ask("undo", "inference", "--to-revision", "1").code == 0
    assert spec(server) == {"gpus": HALVES}

    again = ask("undo", "inference", "--to-revision", "1")

    assert again.out == 'NodeProfile "inference": its spec is revision 1 already\n'


def test_undo_of_a_profile_that_is_paused_says_that_it_waits(server: ApiServer, ask: Type) -> None:
    put_profile(server, QUARTERS)
    put_revisions(server, WHOLE, QUARTERS)
    ask("pause", "inference")

    assert "it is paused, and rolled out when it is resumed" in ask("undo", "inference").out
    assert spec(server) == {"gpus": WHOLE, "rollout": {"paused": True}}


def test_undo_takes_no_revision_of_an_earlier_profile_of_that_name(
    server: ApiServer, ask: Type
) -> None:
    put_profile(server, QUARTERS)
    put_revisions(server, WHOLE, owner_uid="uid-of-the-earlier-one")

    answer = ask("undo", "inference")

    assert answer.code == 1
    assert 'NodeProfile "inference" has no other revision to go back to' in answer.err


def test_undo_to_a_revision_that_is_gone_names_those_that_are_there(
    server: ApiServer, ask: Type
) -> None:
    put_profile(server, QUARTERS)
    put_revisions(server, WHOLE, QUARTERS)

    answer = ask("undo", "inference", "--to-revision", "7")

    assert answer.code == 1
    assert 'NodeProfile "inference" has no revision 7; it has: 1, 2' in answer.err


def test_undo_is_tried_again_when_the_controller_wrote_the_status_meanwhile(
    server: ApiServer, ask: Type
) -> None:
    put_profile(server, QUARTERS)
    put_revisions(server, WHOLE, QUARTERS)
    server.fail(409, "PATCH", "nodeprofiles", times=2)

    assert ask("undo", "inference").code == 0
    assert spec(server) == {"gpus": WHOLE}


def test_undo_that_never_gets_its_turn_changes_nothing(server: ApiServer, ask: Type) -> None:
    put_profile(server, QUARTERS)
    put_revisions(server, WHOLE, QUARTERS)
    server.fail(409, "PATCH", "nodeprofiles", times=100)

    answer = ask("undo", "inference")

    assert answer.code == 1
    assert "was changed by somebody else meanwhile; nothing was undone" in answer.err
    assert spec(server) == {"gpus": QUARTERS}


@pytest.mark.parametrize("action", ["status", "pause", "resume", "undo"])
def test_a_profile_that_is_not_there_is_answered_with_those_that_are(
    server: ApiServer, ask: Type, action: str
) -> None:
    put_profile(server, WHOLE)

    answer = ask(action, "inferenec")

    assert answer == Answer(
        1, "", 'dra-driver: there is no NodeProfile "inferenec"; there are: inference\n'
    )


def test_a_cluster_without_the_resource_is_told_from_one_without_the_profile(
    server: ApiServer, ask: Type
) -> None:
    server.fail(404, "GET", "nodeprofiles", times=2)

    answer = ask("status", "inference")

    assert answer.code == 1
    assert "install the chart with controller.enabled=true" in answer.err


@pytest.mark.parametrize("action", ["pause", "undo"])
def test_who_lacks_the_right_is_told_which(server: ApiServer, ask: Type, action: str) -> None:
    put_profile(server, QUARTERS)
    put_revisions(server, WHOLE, QUARTERS)
    server.deny("patch", "nodeprofiles")

    answer = ask(action, "inference")

    assert answer.code == 1
    assert 'cannot patch resource "nodeprofiles"' in answer.err


def test_a_profile_that_cannot_be_read_says_so(server: ApiServer, ask: Type) -> None:
    put_profile(server, WHOLE)
    document = server.objects("nodeprofiles")[0]
    server.put({**document, "spec": {"gpus": WHOLE, "priority": "high"}})

    assert "spec.priority" in ask("status", "inference").out


def test_the_kubeconfig_of_who_asks_is_taken_where_none_is_given(
    server: ApiServer, type_in: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_profile(server, WHOLE)
    (tmp_path / ".kube").mkdir()
    server.kubeconfig(tmp_path / ".kube/config")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)

    assert type_in("profile", "status", "inference").code == 0
