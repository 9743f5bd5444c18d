"""An API server that fails, hangs and talks nonsense while profiles are rolled out."""

from typing import Any

import pytest

from dra_driver.k8s.api import Document, KubernetesApi
from dra_driver.model.node_profiles import Revision
from dra_driver.plan.profiles.revisions import canonical_rules, revision_document
from tests.controller.conftest import QUICK, StartController
from tests.controller.fleet import (
    PROFILE,
    Fleet,
    at_once,
    node_document,
    profile_document,
    revision,
)
from tests.waiting import eventually

NODES = [f"node-{number}" for number in range(6)]
OTHER = "training"


def complete(fleet: Fleet, replicas: int, profile: str = PROFILE) -> None:
    fleet.wait("Complete", profile)
    assert fleet.status(profile)["updated"] == len(NODES)
    assert set(fleet.given().values()) == {revision(replicas, profile)}


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_api_server_is_asked_again(
    fleet: Fleet, controller: StartController, status: int
) -> None:
    fleet.join(*NODES)
    controller()
    for resource in ("nodeprofiles", "/nodes", "controllerrevisions"):
        for method in ("PATCH", "POST", "WATCH", "GET"):
            fleet.server.fail(status, method, resource, times=2, retry_after=0)

    fleet.create(profile_document(4, rollout=at_once(2)))

    complete(fleet, 4)
    assert fleet.most_in_progress() <= 2


def test_a_watch_that_fell_behind_is_begun_anew(fleet: Fleet, controller: StartController) -> None:
    fleet.join(*NODES)
    controller()
    fleet.apply(profile_document(2))
    complete(fleet, 2)

    fleet.server.forget_history()
    fleet.server.end_watches()
    fleet.apply(profile_document(4))

    complete(fleet, 4)


def test_an_api_server_that_is_away_for_a_while_changes_nothing(
    fleet: Fleet, controller: StartController
) -> None:
    fleet.join(*NODES)
    running = controller()
    fleet.apply(profile_document(2))
    complete(fleet, 2)
    eventually(lambda: not running.rollouts.is_writing())

    fleet.server.refuse_connections()
    rounds = running.rollouts.rounds
    running.rollouts.soon()
    eventually(lambda: running.rollouts.rounds > rounds)
    fleet.server.accept_connections()
    fleet.apply(profile_document(4))

    complete(fleet, 4)


def test_what_cannot_be_read_spoils_nothing_else(fleet: Fleet, controller: StartController) -> None:
    fleet.join(*NODES)
    broken = node_document("broken", None, {})
    fleet.server.put(broken)
    fleet.server.put(
        {
            "kind": "ControllerRevision",
            "metadata": {
                "name": "inference-nonsense",
                "namespace": "gpus",
                "labels": {"resource.nvidia.com/node-profile": PROFILE},
            },
            "data": {"spec": 7},
            "revision": 1,
        }
    )
    running = controller()

    fleet.apply(profile_document(4))

    fleet.wait("Complete")
    assert set(fleet.with_revision(4)) >= set(NODES)
    skipped = {name: count() for name, count in running.cluster.skipped().items()}
    assert skipped["controllerrevisions"] == 1


def test_a_profile_whose_writes_fail_holds_up_no_other(
    fleet: Fleet, controller: StartController
) -> None:
    fleet.join(*NODES)
    controller()
    fleet.server.fail(422, "PATCH", f"nodeprofiles/{OTHER}", times=10**6)
    fleet.apply(profile_document(2, OTHER, priority=-1))
    assert fleet.server.wait(lambda: fleet.server.count("PATCH", f"nodeprofiles/{OTHER}") > 2)

    fleet.apply(profile_document(4))

    complete(fleet, 4)


def test_a_profile_whose_writes_hang_holds_up_no_other(
    fleet: Fleet, controller: StartController
) -> None:
    fleet.join(*NODES)
    controller()
    fleet.server.delay(5.0, "PATCH", f"nodeprofiles/{OTHER}")
    fleet.apply(profile_document(2, OTHER, priority=-1))
    assert fleet.server.wait(lambda: fleet.server.count("PATCH", f"nodeprofiles/{OTHER}") > 0)

    fleet.apply(profile_document(4))

    assert fleet.server.wait(lambda: fleet.progress() == "Complete", 4.0)


def test_writes_that_fail_are_tried_again_less_and_less_often(
    fleet: Fleet, controller: StartController
) -> None:
    fleet.join(*NODES)
    running = controller()
    fleet.server.fail(422, "PATCH", "nodeprofiles", times=10**6)
    fleet.apply(profile_document(4))
    assert fleet.server.wait(lambda: fleet.server.count("PATCH", "nodeprofiles") > 3)

    rounds, tried = running.rollouts.rounds, fleet.server.count("PATCH", "nodeprofiles")
    while running.rollouts.rounds < rounds + 20:
        fleet.join(f"joined-{running.rollouts.rounds}")

    wait = QUICK.last_retry
    assert fleet.server.count("PATCH", "nodeprofiles") - tried < 20, f"a try every {wait} s at most"


def test_a_replica_that_does_not_lead_writes_nothing_and_goes_on_following(
    fleet: Fleet, controller: StartController
) -> None:
    fleet.join(*NODES)
    standing_by = controller()
    standing_by.leads = False
    fleet.apply(profile_document(4))
    eventually(lambda: PROFILE in standing_by.cluster.now().profiles)
    rounds = standing_by.rollouts.rounds
    while standing_by.rollouts.rounds < rounds + 2:
        standing_by.rollouts.soon()
    assert fleet.writes() == []

    standing_by.leads = True
    standing_by.rollouts.soon()

    complete(fleet, 4)


def test_a_revision_that_somebody_deleted_is_kept_again(
    fleet: Fleet, controller: StartController
) -> None:
    fleet.join(*NODES)
    controller()
    fleet.apply(profile_document(4))
    complete(fleet, 4)

    fleet.server.remove("controllerrevisions", revision(4), "gpus")

    assert fleet.server.wait(lambda: len(fleet.server.objects("controllerrevisions")) == 1)


def test_a_profile_that_was_deleted_without_its_revisions_can_be_applied_again(
    fleet: Fleet, controller: StartController
) -> None:
    kept = Revision(revision(4), PROFILE, 3, canonical_rules({"gpus": [{"replicas": 4}]}), "former")
    orphan = revision_document(kept, "gpus")
    orphan["metadata"].pop("ownerReferences")
    fleet.create(orphan)
    fleet.join(*NODES)
    controller()

    fleet.apply(profile_document(4))

    complete(fleet, 4)
    (adopted,) = fleet.server.objects("controllerrevisions")
    assert adopted["metadata"]["ownerReferences"][0]["name"] == PROFILE
    assert adopted["revision"] == 3


def test_an_annotation_that_somebody_removed_is_given_again(
    fleet: Fleet, controller: StartController
) -> None:
    fleet.join(*NODES)
    controller()
    fleet.apply(profile_document(4))
    complete(fleet, 4)

    fleet.annotate(NODES[0], None)

    assert fleet.server.wait(lambda: fleet.given()[NODES[0]] == revision(4))


def test_a_node_that_cannot_be_written_slows_no_other_down(
    fleet: Fleet, controller: StartController
) -> None:
    fleet.join(*NODES)
    fleet.server.fail(403, "PATCH", f"/nodes/{NODES[0]}", times=10**6)
    running = controller()

    fleet.apply(profile_document(4, rollout=at_once(2)))

    assert fleet.server.wait(lambda: fleet.status().get("updated") == len(NODES) - 1)
    assert fleet.progress() == "RollingOut"
    assert fleet.status()["updating"] == [NODES[0]]
    failed = running.metrics.registry.get_sample_value(
        "dra_driver_controller_write_errors_total", {"resource": "nodes"}
    )
    assert failed and failed > 0


def test_a_profile_of_a_newer_release_changes_no_node_and_says_so(
    fleet: Fleet, controller: StartController
) -> None:
    """Another release may have written it, before this one was installed again."""
    fleet.join(*NODES)
    controller()
    fleet.apply(profile_document(4))
    complete(fleet, 4)

    newer = profile_document(4)
    newer["spec"] |= {"gpus": [{"replicas": 8}], "notYetInvented": True}
    fleet.create(newer)

    fleet.wait("Unreadable")
    assert set(fleet.given().values()) == {revision(4)}


def test_a_fault_of_ours_with_one_profile_holds_up_no_other(
    fleet: Fleet, controller: StartController, caplog: pytest.LogCaptureFixture
) -> None:
    class Faulty:
        def __init__(self, api: KubernetesApi) -> None:
            self._api = api

        def __getattr__(self, name: str) -> Any:
            return getattr(self._api, name)

        def patch(self, path: str, patch: Document) -> Document:
            if OTHER in path:
                raise RuntimeError("nobody thought of this")
            return self._api.patch(path, patch)

    fleet.join(*NODES)
    controller(Faulty)
    fleet.apply(profile_document(2, OTHER, priority=-1))
    eventually(lambda: "a profile was not decided" in caplog.text)

    fleet.apply(profile_document(4))

    complete(fleet, 4)
