"""Leaders that are killed, or paused and go on, at every write of a rollout."""

import pytest

from tests.controller.conftest import StartController
from tests.controller.fleet import Fleet, at_once, profile_document, revision
from tests.fakes.mortal_api import MortalApi, PausedApi
from tests.waiting import eventually

NODES = [f"node-{number}" for number in range(5)]
AT_ONCE = 2
WRITES = 14  # of such a rollout, or fewer: some steps go together


def begin(fleet: Fleet, controller: StartController) -> None:
    """Every node has the revision with two replicas."""
    fleet.join(*NODES)
    first = controller()
    fleet.apply(profile_document(2, rollout=at_once(AT_ONCE)))
    fleet.wait("Complete")
    eventually(lambda: not first.rollouts.is_writing())
    first.stop()


def is_done(fleet: Fleet, replicas: int) -> None:
    expected = dict.fromkeys(NODES, revision(replicas))
    eventually(lambda: fleet.given() == expected and fleet.reported() == expected)
    eventually(lambda: fleet.is_complete() and not fleet.status()["updating"])
    assert fleet.most_in_progress() <= AT_ONCE
    status = fleet.status()
    assert (status["updated"], status["failed"]) == (5, 0)
    assert status["currentRevision"] == revision(replicas)


@pytest.mark.parametrize("carried_out", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("write", range(1, WRITES + 1))
def test_whoever_leads_next_finishes_what_a_killed_leader_began(
    fleet: Fleet, controller: StartController, write: int, carried_out: bool
) -> None:
    begin(fleet, controller)
    killed: list[MortalApi] = []

    def mortal(api):
        killed.append(MortalApi(api, write, carried_out))
        return killed[0]

    first = controller(mortal)
    fleet.apply(profile_document(4, rollout=at_once(AT_ONCE)))
    eventually(lambda: killed[0].dead.is_set() or fleet.is_complete())
    first.stop()

    controller()

    is_done(fleet, 4)


@pytest.mark.parametrize("write", range(1, WRITES + 1))
@pytest.mark.parametrize("then", [4, 2], ids=["goes on", "is undone"])
def test_a_paused_leader_that_goes_on_gives_no_more_nodes_a_change_than_allowed(
    fleet: Fleet, controller: StartController, write: int, then: int
) -> None:
    """It believes that it still leads, although another one does by now."""
    begin(fleet, controller)
    paused: list[PausedApi] = []

    def pausing(api):
        paused.append(PausedApi(api, write))
        return paused[0]

    controller(pausing)
    fleet.apply(profile_document(4, rollout=at_once(AT_ONCE)))
    eventually(lambda: paused[0].paused.is_set() or fleet.is_complete())
    controller()
    fleet.apply(profile_document(then, rollout=at_once(AT_ONCE)))
    eventually(lambda: len(fleet.with_revision(then)) >= 2)

    paused[0].resume()

    is_done(fleet, then)
