"""Who is still a client shortly before its pod ends is ended by its server, and only they."""

import pytest

from dra_driver.k8s.claims import Pod, PodUid
from dra_driver.plugin.metrics import Metrics, MpsMetrics
from tests.builders import ref
from tests.fakes.mps_node import DB, GPU, OTHER, WEB, A, B, World


@pytest.fixture
def world():
    return World()


@pytest.fixture
def made(world):
    """The namespace of a claim of the pod web, with process 1 of it as a client."""
    made = world.claim(A, WEB)
    world.process(1, WEB, of=made)
    return made


def test_who_is_still_there_shortly_before_its_pods_end_is_ended_by_its_server(world, caplog):
    caplog.set_level("INFO")
    made = world.claim(A, WEB)
    world.process(1, WEB, of=made)
    world.process(2, WEB, of=made)
    world.process(3, WEB)  # no client: the kubelet ends it
    world.look()
    world.delete(WEB, grace=30)
    world.go_on(26.9)
    assert world.agent.ended == []

    world.go_on(0.2)
    assert world.agent.ended == [(made.name, (1, 2))]
    assert world.metric("drained_clients_total") == 2.0
    assert "ended the MPS clients of a pod that is being deleted" in caplog.messages


def test_a_program_that_ends_by_itself_is_let(world, made):
    world.delete(WEB, grace=30)
    world.go_on(20)
    world.end(1)
    world.go_on(20)

    assert world.agent.ended == []


@pytest.mark.parametrize(("grace", "at"), [(30, 27.0), (6, 3.0), (4, 2.0), (1, 0.5), (0, 0.0)])
def test_a_program_has_its_grace_period_but_for_a_margin(world, made, grace, at):
    world.delete(WEB, grace)
    begun = world.steady
    next_in = world.look(after=0)
    while not world.agent.ended:
        next_in = world.look(after=next_in)

    assert at <= world.steady - begun <= at + 0.1


@pytest.mark.parametrize("hours", [-1, 1])
def test_the_clock_of_the_node_ends_nobody_and_keeps_nobody(world, made, hours):
    world.agent.now += hours * 3600
    world.look()
    world.delete(WEB, grace=30)
    world.go_on(26.9)
    assert world.agent.ended == []

    world.go_on(0.2)
    assert world.agent.ended == [(made.name, (1,))]


def test_who_is_first_seen_when_its_pod_ends_already_is_ended_before_the_kubelet_kills_it(
    world, made
):
    world.delete(WEB, grace=30)
    world.wait(20)  # no plugin runs
    world.go_on(6.9)
    assert world.agent.ended == []

    world.go_on(0.2)
    assert world.agent.ended == [(made.name, (1,))]


def test_where_the_api_server_says_no_time_nobody_is_killed_by_the_kubelet_either(world):
    world.pods.now = None
    made, other = world.claim(A, WEB), world.claim(B, DB)
    world.process(1, WEB, of=made)
    world.look()
    world.wait(4)
    world.delete(WEB, grace=30)
    world.go_on(22.9)
    assert world.agent.ended == []
    world.go_on(0.2)
    assert world.agent.ended == [(made.name, (1,))], "counted from the last look before it"

    world.delete(DB, grace=30)
    world.process(2, DB, of=other)
    world.look(after=0)
    assert world.agent.ended[1:] == [(other.name, (2,))], "it may be over at any moment"


def test_clients_of_other_pods_go_on(world):
    made = world.claim(A, WEB, DB)
    other = world.claim(B, DB)
    world.process(1, WEB, of=made)
    world.process(2, DB, of=made)
    world.process(3, DB, of=other)
    world.delete(WEB, grace=5)
    world.go_on(10)

    assert world.agent.ended == [(made.name, (1,))]


def test_with_protocol_2_the_clients_of_a_pod_are_found_by_their_processes():
    world = World(protocol=2)
    made = world.claim(A, WEB)
    world.claim(B, DB)
    world.process(1, WEB, of=made)
    world.process(2, DB, of=made)  # the server does not tell of which namespace it is
    world.delete(WEB, grace=5)
    world.go_on(10)

    assert world.agent.ended == [(made.name, (1,))]
    assert world.of_claim("claim_clients", A) == 0.0
    assert world.of_claim("claim_clients", B) == 1.0


def test_a_pod_is_read_a_few_times_in_its_grace_period_and_only_while_it_has_clients(world):
    made = world.claim(A, WEB)
    world.claim(B, DB)
    for _ in range(4):
        world.look()
    assert world.pods.read_names == []

    world.process(1, WEB, of=made)
    for _ in range(60):
        world.look(after=0.5)
    assert world.pods.read_names == ["web"] * 3

    world.end(1)
    for _ in range(60):
        world.look(after=0.5)
    assert world.pods.read_names == ["web"] * 3


def test_a_pod_of_the_same_name_that_came_after_it_says_nothing_of_it(world, made):
    world.delete(WEB, grace=5, uid="uid-another")
    world.go_on(10)

    assert world.agent.ended == []


def test_a_pod_that_is_gone_from_the_api_server_is_left_to_the_kubelet(world, made):
    world.pods.pods.clear()
    world.go_on(20)

    assert world.agent.ended == []


def test_a_deletion_that_is_hurried_up_is_noticed(world, made):
    world.delete(WEB, grace=600)
    world.go_on(12)
    world.delete(WEB, grace=15)
    world.go_on(13)

    assert world.agent.ended == [(made.name, (1,))]


def test_an_agent_that_could_not_end_them_is_asked_again(world, made):
    world.delete(WEB, grace=10)
    world.go_on(6)
    world.agent.wedged = True
    world.go_on(2.5)
    world.agent.wedged = False
    world.go_on(1.5)

    assert len(world.agent.ended) >= 2
    assert world.metric("drained_clients_total") == 1.0


def test_a_pod_that_does_not_end_is_not_looked_at_all_the_time(world, made):
    world.agent.wedged = True
    world.delete(WEB, grace=2)
    world.go_on(20)
    before = world.agent.asked
    world.go_on(60)

    assert world.agent.asked - before <= 13


def test_a_client_that_takes_long_to_end_does_not_hold_up_others(world):
    first, second = world.claim(A, WEB), world.claim(B, DB, gpu=OTHER)
    world.process(1, WEB, GPU, of=first)
    world.process(2, DB, OTHER, of=second)
    world.delete(WEB, grace=5)
    world.delete(DB, grace=8)
    world.look(after=0)
    world.later = []
    world.go_on(8)

    assert len(world.later) == 2  # both are under way, each once
    for work in world.later:
        work()
    assert sorted(world.agent.ended) == [(first.name, (1,)), (second.name, (2,))]


def test_what_was_known_of_a_pod_counts_while_the_api_server_is_away(world, made, caplog):
    world.delete(WEB, grace=30)
    world.look()
    world.pods.down = True
    world.go_on(30)

    assert world.agent.ended == [(made.name, (1,))]
    messages = [message for message in caplog.messages if "which pods" in message]
    assert len(messages) == 1


def test_an_api_server_that_takes_its_time_holds_up_nobody_whose_time_has_come(world):
    first, second = world.claim(A, WEB), world.claim(B, DB, gpu=OTHER)
    world.process(1, WEB, GPU, of=first)
    world.delete(WEB, grace=5)
    world.look(after=0)
    world.later = []
    world.process(2, DB, OTHER, of=second)
    world.look(after=0.5)
    assert len(world.later) == 1  # it is asked about the new pod, and does not answer
    world.go_on(3)

    for work in world.later[1:]:
        work()
    assert world.agent.ended == [(first.name, (1,))]


def test_an_ending_that_is_seen_is_looked_after_at_once(world, made):
    woken = []
    world.watch.drain.on_ending = lambda: woken.append(world.steady)
    world.look()
    assert woken == []

    world.delete(WEB, grace=30)
    world.go_on(12)
    assert len(woken) == 1


def test_an_older_answer_takes_no_deletion_back(world, made):
    before = world.pods.pods["default", "web"]
    world.delete(WEB, grace=30)
    world.look(after=0)
    world.pods.pods["default", "web"] = before
    world.go_on(29)

    assert world.agent.ended == [(made.name, (1,))]


def test_who_connects_just_before_its_pods_time_is_ended_too(world, made):
    """What the agent says of clients can be a second old."""
    world.delete(WEB, grace=30)
    world.go_on(27.0)
    assert world.agent.ended == [(made.name, (1,))]

    world.process(2, WEB, of=made)  # connected before, and is listed from now on
    world.go_on(2.0)
    assert world.agent.ended == [(made.name, (1,)), (made.name, (2,))]


def test_of_two_processes_in_a_rolling_update_the_newest_drains_and_tells(world, made):
    old = world.watch
    world.go_on(10)
    world.newest = False
    world.delete(WEB, grace=10)
    world.agent.restart(GPU)
    world.process(1, WEB, of=made)
    world.go_on(10)
    assert (world.agent.ended, world.events) == ([], [])

    world.newest = True
    world.watch = world.begin(MpsMetrics(Metrics()))
    world.delete(WEB, grace=10)
    world.go_on(10)
    assert world.agent.ended == [(made.name, (1,))]
    assert len(world.events_of("MPSServerRestarted")) == 1
    assert old is not world.watch


def test_where_pods_cannot_be_read_one_is_tried_at_a_time(world):
    for number in range(5):
        pod = Pod(f"p{number}", PodUid(f"uid-{number}"))
        made = world.claim(ref(f"c{number}"), pod)
        world.process(number + 1, pod, of=made)
    world.pods.down = True
    world.look()
    assert len(world.pods.read_names) == 1

    world.pods.down = False
    world.look()
    assert set(world.pods.read_names) == {f"p{number}" for number in range(5)}


def test_a_missing_right_is_said_once(world, made, caplog):
    world.pods.allowed = False
    for _ in range(5):
        world.look()

    assert [record.error for record in caplog.records] == ["pods may not be read"]
