"""Profiles rolled out over nodes, from an applied document to what the nodes report."""

from collections import Counter
from typing import Any

from api.names import PROFILE_LABEL
from dra_driver.model.node_profiles import NodeReport
from tests.controller.conftest import StartController
from tests.controller.fleet import (
    PROFILE,
    Fleet,
    at_once,
    profile_document,
    revision,
)
from tests.waiting import eventually

NODES = [f"node-{number:02}" for number in range(50)]


def test_a_profile_reaches_every_node_a_few_at_a_time(
    fleet: Fleet, controller: StartController
) -> None:
    fleet.join(*NODES)
    controller()

    fleet.apply(profile_document(4))
    fleet.wait("Complete")

    assert fleet.given() == dict.fromkeys(NODES, revision(4))
    assert fleet.most_in_progress() == 5
    status = fleet.status()
    assert (status["nodes"], status["updated"], status["failed"]) == (50, 50, 0)
    assert status["currentRevision"] == status["updateRevision"] == revision(4)
    assert status["updating"] == []


def test_the_third_failure_stops_the_rollout_and_says_so(
    fleet: Fleet, controller: StartController
) -> None:
    fleet.join(*NODES)
    fleet.refusing = dict.fromkeys(NODES[5:20], "replicas: GPU 0 has too little memory")
    controller()

    fleet.apply(profile_document(4, rollout=at_once(2)))
    fleet.wait("TooManyFailures")

    status = fleet.status()
    assert 3 <= status["failed"] <= 4  # two were in progress together
    assert status["failures"][0] == {
        "node": "node-05",
        "reason": "replicas: GPU 0 has too little memory",
    }
    given = [name for name, each in fleet.given().items() if each]
    assert given == NODES[: len(given)]
    assert len(given) <= 9
    assert fleet.server.wait(lambda: bool(events(fleet, "RolloutStopped")))
    [event] = events(fleet, "RolloutStopped")
    assert event["type"] == "Warning"
    assert "maxFailures" in event["message"]


def test_going_back_after_a_stopped_rollout_is_a_rollout_of_the_revision_before(
    fleet: Fleet, controller: StartController
) -> None:
    fleet.join(*NODES[:10])
    controller()
    fleet.apply(profile_document(2))
    fleet.wait("Complete")
    fleet.refusing = dict.fromkeys(NODES, "it does not fit")
    fleet.apply(profile_document(4, rollout=at_once(2, maxFailures=2)))
    fleet.wait("TooManyFailures")
    assert fleet.status()["currentRevision"] == revision(2)

    fleet.refusing = {}
    fleet.apply(profile_document(2, rollout=at_once(2)))
    fleet.wait("Complete")

    assert fleet.given() == dict.fromkeys(NODES[:10], revision(2))
    assert numbers(fleet) == {revision(4): 2, revision(2): 3}
    assert fleet.most_in_progress() <= 2


def test_a_paused_rollout_gives_no_further_node_a_change_until_it_is_resumed(
    fleet: Fleet, controller: StartController
) -> None:
    fleet.join(*NODES[:6])
    fleet.silent = set(NODES)
    controller()
    fleet.apply(profile_document(4, rollout=at_once(2)))
    assert fleet.server.wait(lambda: len(given_nodes(fleet)) == 2)

    fleet.apply(profile_document(4, rollout=at_once(2, paused=True)))
    fleet.silent = set()
    fleet.wait("Paused")
    assert fleet.server.wait(lambda: fleet.status()["updated"] == 2)
    assert given_nodes(fleet) == NODES[:2]

    fleet.apply(profile_document(4, rollout=at_once(2, paused=False)))
    fleet.wait("Complete")
    assert given_nodes(fleet) == NODES[:6]


def test_gpus_in_use_are_counted_and_hold_nothing_up(
    fleet: Fleet, controller: StartController
) -> None:
    fleet.join(*NODES[:4])
    fleet.pending = {NODES[0]: ("gpu-0", "gpu-3"), NODES[1]: ("gpu-1",)}
    controller()

    fleet.apply(profile_document(4, rollout=at_once(1)))
    fleet.wait("Complete")

    assert fleet.status()["pending"] == 3


def test_a_node_that_took_the_profile_by_itself_is_adopted_without_a_change(
    fleet: Fleet, controller: StartController
) -> None:
    fleet.join(*NODES[:3])
    controller()
    fleet.apply(profile_document(4))
    fleet.wait("Complete")

    fleet.join("new", report=NodeReport(PROFILE, revision(4)))

    assert fleet.server.wait(lambda: fleet.given()["new"] == revision(4))
    assert fleet.server.wait(lambda: fleet.status()["updated"] == 4)
    assert fleet.most_in_progress() <= 1


def test_five_hundred_nodes_that_join_at_once_are_counted_and_given_their_revision(
    fleet: Fleet, controller: StartController
) -> None:
    fleet.silent = {"*"}
    running = controller()
    fleet.apply(profile_document(4))
    fleet.wait("NoNodes")
    names = [f"joined-{number:03}" for number in range(500)]

    fleet.join(*names, report=NodeReport(PROFILE, revision(4)))

    assert fleet.server.wait(lambda: fleet.status()["nodes"] == 500)
    fleet.wait("Complete")
    assert fleet.server.wait(lambda: set(fleet.given().values()) == {revision(4)})
    assert running.metrics.statuses[PROFILE].updated == 500


def test_a_node_that_goes_in_the_middle_of_a_rollout_is_forgotten(
    fleet: Fleet, controller: StartController
) -> None:
    fleet.join(*NODES[:4])
    fleet.silent = {NODES[0]}
    controller()
    fleet.apply(profile_document(4, rollout=at_once(1)))
    assert fleet.server.wait(lambda: given_nodes(fleet) == NODES[:1])

    fleet.server.remove("nodes", NODES[0])

    fleet.wait("Complete")
    assert fleet.status()["nodes"] == 3


def test_a_profile_that_is_deleted_leaves_its_nodes_to_the_files(
    fleet: Fleet, controller: StartController
) -> None:
    fleet.join(*NODES[:5])
    controller()
    fleet.apply(profile_document(4))
    fleet.wait("Complete")

    fleet.server.remove("nodeprofiles", PROFILE)

    assert fleet.server.wait(lambda: set(fleet.given().values()) == {""})


def test_without_the_crd_nodes_go_back_to_the_files_until_it_is_there_again(
    fleet: Fleet, controller: StartController
) -> None:
    fleet.join(*NODES[:5])
    controller()
    fleet.apply(profile_document(4))
    fleet.wait("Complete")

    fleet.server.remove_crd("nodeprofiles")
    assert fleet.server.wait(lambda: set(fleet.given().values()) == {""})

    fleet.server.collect_garbage()
    fleet.server.add_crd("nodeprofiles")
    fleet.apply(profile_document(4))
    fleet.wait("Complete")
    assert set(fleet.given().values()) == {revision(4)}


def test_of_two_profiles_of_one_priority_the_older_holds_and_both_say_so(
    fleet: Fleet, controller: StartController
) -> None:
    fleet.join(*NODES[:2])
    controller()
    fleet.apply(profile_document(4))
    fleet.wait("Complete")

    fleet.apply(profile_document(8, "younger"))

    fleet.wait("NoNodes", "younger")
    assert fleet.server.wait(lambda: fleet.reason("Tied") == "SamePriority")
    assert fleet.reason("Tied", "younger") == "SamePriority"
    assert fleet.given() == dict.fromkeys(NODES[:2], revision(4))
    assert fleet.server.wait(lambda: len(events(fleet, "Tied")) == 2)


def test_a_label_of_a_person_takes_a_node_out_of_the_profile_that_selects_it(
    fleet: Fleet, controller: StartController
) -> None:
    fleet.join(*NODES[:3])
    fleet.join("odd", labels={PROFILE_LABEL: "files-of-mine"})
    controller()

    fleet.apply(profile_document(4))
    fleet.wait("Complete")

    assert fleet.status()["nodes"] == 3
    assert fleet.given()["odd"] is None


def test_a_rollout_that_has_ended_says_so_in_an_event(
    fleet: Fleet, controller: StartController
) -> None:
    fleet.join(*NODES[:2])
    controller()

    fleet.apply(profile_document(4))

    assert fleet.server.wait(lambda: bool(events(fleet, "RolledOut")))
    [event] = events(fleet, "RolledOut")
    assert event["metadata"]["namespace"] == "default"
    assert event["involvedObject"]["name"] == PROFILE
    assert event["type"] == "Normal"


def test_nothing_is_written_while_nothing_changes(
    fleet: Fleet, controller: StartController
) -> None:
    fleet.join(*NODES[:10])
    running = controller()
    fleet.apply(profile_document(4))
    fleet.wait("Complete")
    eventually(lambda: not running.rollouts.is_writing())
    fleet.server.forget_requests()

    for number in range(20):
        fleet.heartbeat(NODES[number % 10])
        running.rollouts.soon()
    eventually(lambda: running.rollouts.rounds > 5)

    assert fleet.writes() == []
    assert fleet.server.count("GET", "nodes") == 0


def test_a_rollout_needs_no_more_writes_than_a_few_for_each_step(
    fleet: Fleet, controller: StartController
) -> None:
    fleet.join(*NODES)
    controller()

    fleet.apply(profile_document(4))
    fleet.wait("Complete")

    writes = Counter(write.rpartition("/")[2] for write in fleet.writes())
    assert sum(writes[name] for name in NODES) == len(NODES)
    assert writes["controllerrevisions"] == 1


def events(fleet: Fleet, reason: str) -> list[dict[str, Any]]:
    return [each for each in fleet.server.objects("events") if each["reason"] == reason]


def numbers(fleet: Fleet) -> dict[str, int]:
    """The numbers of the revisions that there are."""
    revisions = fleet.server.objects("controllerrevisions")
    return {each["metadata"]["name"]: each["revision"] for each in revisions}


def given_nodes(fleet: Fleet) -> list[str]:
    return sorted(name for name, given in fleet.given().items() if given)
