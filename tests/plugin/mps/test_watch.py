"""MPS while claims use it: what is served, who is told, what is counted."""

import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from dra_driver.k8s.claims import Pod, PodUid
from dra_driver.node.state.ledger_files import DamagedRecord
from dra_driver.plugin.mps.start import start
from tests.fakes.mps_agent import FakeMpsAgent
from tests.fakes.mps_node import DB, GPU, OTHER, SECONDS, WEB, A, B, C, World, namespace
from tests.waiting import eventually


@pytest.fixture
def world():
    return World()


# Where there is nothing to do


def test_an_agent_that_serves_nothing_is_asked_once_where_no_claim_is_under_mps(world):
    world.other_claim(C, WEB)
    world.process(1, WEB)
    for _ in range(5):
        world.look()

    assert world.agent.asked == 1
    assert world.metric("agent_up") == 1.0


def test_an_agent_that_is_not_there_and_that_nobody_needs_is_asked_once(world, caplog):
    world.agent.down = True
    for _ in range(20):
        world.look()

    assert world.agent.asked == 1
    assert world.events == []
    assert caplog.records == []


def test_when_the_last_claim_is_gone_it_is_quiet_again(world):
    made = world.claim(A, WEB)
    world.look()
    world.give_back(A)
    world.agent.release(made.name)
    for _ in range(5):
        world.look()

    assert world.agent.asked == 2
    assert world.of_claim("claim_cores_percent", A) is None


def test_a_process_that_is_not_in_charge_does_nothing(world):
    world.claim(A, WEB, served=False)
    world.process(1, WEB)
    world.newest = False
    world.go_on(60)

    assert (world.agent.asked, world.events, world.repaired) == (0, [], [])


# What is served


def test_what_the_agent_lost_is_served_again(world):
    world.claim(A, WEB)
    world.claim(B, DB, gpu=OTHER)
    world.look()
    world.agent.forget()
    world.look()

    assert world.repaired == [A.uid, B.uid]
    assert len(list(world.agent.status().namespaces())) == 2


def test_what_no_claim_has_is_ended(world):
    made = world.claim(A, WEB)
    world.agent.serve(namespace(B))
    world.look()

    assert world.repaired == ["c_b"]
    assert [namespace.namespace for namespace in world.agent.status().namespaces()] == [made]


def test_what_a_claim_may_have_whose_record_cannot_be_read_is_left_alone(world):
    world.agent.serve(namespace(B))
    world.aside = (DamagedRecord(B.uid, Path("b.unreadable"), "no JSON"),)
    world.look()

    assert world.repaired == []


def test_a_claim_that_is_prepared_while_the_agent_is_asked_is_not_ended(world):
    class Agent(FakeMpsAgent):
        def status(self):
            if not world.listed:
                world.claim(A, WEB)
            return super().status()

    world.agent = Agent()
    world.watch = world.begin()
    world.look()

    assert world.repaired == []


def test_one_claim_that_cannot_be_served_again_does_not_keep_others_from_it(world, caplog):
    world.claim(A, WEB, served=False)
    world.claim(B, DB, served=False)
    world.refuses[A.uid] = "the server does not start"
    world.look()
    assert world.repaired == [B.uid]

    for _ in range(5):  # it is not tried at every look
        world.look()
    del world.refuses[A.uid]
    world.look()
    assert world.repaired == [B.uid, A.uid]
    assert [record.error for record in caplog.records] == ["the server does not start"]


# For the status of claims


def test_a_claim_whose_server_does_not_work_is_noted_until_it_does(world):
    parts, changes = world.parts(), []
    parts.health_changed = lambda: changes.append(dict(parts.mps_failures))
    world.parts = lambda: parts
    world.watch = world.begin()
    world.claim(A, WEB)
    world.claim(B, DB, gpu=OTHER)
    world.look()
    world.agent.ready(GPU, False)
    world.look()
    world.look()
    world.agent.ready(GPU, True)
    world.look()

    assert [list(failures) for failures in changes] == [[A.uid], []]


def test_a_claim_that_was_prepared_while_the_agent_was_asked_has_not_failed(world):
    parts = world.parts()
    world.parts = lambda: parts
    world.watch = world.begin()
    world.refuses[A.uid] = "the server does not start"
    world.claim(A, WEB, served=False)
    world.look()
    assert parts.mps_failures == {}

    world.look()
    assert list(parts.mps_failures) == [A.uid]


# Restarts


def test_the_pods_of_a_server_that_was_restarted_are_told_once(world, caplog):
    made = world.claim(A, WEB)
    world.claim(B, DB)
    world.claim(C, Pod("far", PodUid("uid-far")), gpu=OTHER)
    world.process(1, WEB, of=made)
    world.look()
    world.agent.restart(GPU, reason="it did not answer")
    world.end(1)
    world.look()
    world.look()

    events = world.events_of("MPSServerRestarted")
    assert [event.regarding.name for event in events] == ["web", "db"]
    assert "restarted (it did not answer)" in events[0].message
    assert "for claim default/a was ended" in events[0].message
    assert world.metric("server_restarts_total") == 1.0
    assert caplog.messages == ["an MPS server was restarted"]


def test_a_new_process_tells_of_the_last_minutes(world):
    world.claim(A, WEB)
    world.agent.restart(GPU, reason="old")
    world.wait(121)
    world.agent.restart(GPU, reason="new")
    world.wait(119)
    world.look(after=0)

    (event,) = world.events_of("MPSServerRestarted")
    assert "(new)" in event.message
    assert world.metric("server_restarts_total") == 0.0, "an earlier process counted it"


def test_an_agent_that_counts_anew_is_listened_to(world):
    world.claim(A, WEB)
    for _ in range(3):
        world.agent.restart(GPU)
    world.look()
    world.agent.forget()
    world.look()
    world.agent.restart(GPU, reason="again")
    world.look()

    assert "(again)" in world.events_of("MPSServerRestarted")[-1].message
    assert len(world.events_of("MPSServerRestarted")) == 4


# An agent that does not answer


@pytest.mark.parametrize("how", ["down", "hangs"])
def test_an_agent_that_does_not_answer_is_said_once_and_its_pods_are_told_later(world, caplog, how):
    caplog.set_level("INFO")
    made = world.claim(A, WEB)
    world.process(1, WEB, of=made)
    world.look()
    setattr(world.agent, how, True)
    world.go_on(59)
    assert world.metric("agent_up") == 0.0
    assert world.events == []
    assert world.of_claim("claim_clients", A) is None
    assert world.of_claim("claim_cores_percent", A) == 30.0

    world.go_on(300)
    (event,) = world.events_of("MPSAgentDown")
    assert event.regarding.name == "web"
    assert "not answered for 60 s: claim default/a goes on with its limits" in event.message

    setattr(world.agent, how, False)
    world.look()
    assert world.metric("agent_up") == 1.0
    assert world.of_claim("claim_clients", A) == 1.0
    assert caplog.messages == [
        "the MPS agent of this node does not answer",
        "the MPS agent answers again",
    ]


def test_an_agent_that_was_not_needed_is_not_blamed_for_the_time_before(world):
    world.agent.down = True
    world.look()
    world.wait(3600)
    world.claim(A, WEB, served=False)
    world.look()

    assert world.events == []


# What is counted


def test_claims_are_counted_while_they_are_there(world):
    made = world.claim(A, WEB, percent=70)
    world.claim(B, DB)
    world.process(1, WEB, of=made)
    world.look()
    assert world.of_claim("claim_cores_percent", A) == 70.0
    assert world.of_claim("claim_clients", A) == 1.0
    assert world.of_claim("claim_clients", B) == 0.0

    world.give_back(A)
    world.look()
    for name in ("claim_cores_percent", "claim_clients", "bypassing_processes"):
        assert world.of_claim(name, A) is None
        assert world.of_claim(name, B) is not None


# The loop


def watch_threads():
    return [thread for thread in threading.enumerate() if thread.name == "mps-watch"]


def test_it_begins_at_once_is_woken_by_claims_under_mps_and_ends_with_the_process(world):
    with ExitStack() as stack:
        parts = world.parts()
        start(parts, stack, 3600.0)
        (changed,) = parts.claim_listeners
        eventually(lambda: world.agent.asked == 1)
        made = world.claim(A, WEB)
        changed(world.listed[0])
        eventually(lambda: world.agent.asked == 2)
        world.other_claim(C, DB)
        changed(world.listed[1])
        time.sleep(0.05)
        assert world.agent.asked == 2
        world.give_back(A)
        changed(None)
        eventually(lambda: made.name in world.repaired)
        (thread,) = watch_threads()
    thread.join(SECONDS)
    assert not thread.is_alive()
