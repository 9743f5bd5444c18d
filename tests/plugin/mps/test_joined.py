"""Pods that join a prepared claim under MPS are read once, and told what they cannot use."""

from dataclasses import replace

import pytest

from dra_driver.k8s.claims import Pod, PodUid
from dra_driver.model.profiles import MpsTenants
from dra_driver.plan.mps.containers import pods_to_check, requested_devices, unusable_devices
from dra_driver.plugin.mps.unserved import READS_A_SECOND, READS_AT_ONCE
from tests.builders import ref
from tests.fakes.mps_node import DB, OTHER, WEB, A, B, World
from tests.fakes.pods import container, pod_spec
from tests.plugin.mps.test_claims import World as Preparing
from tests.plugin.mps.test_claims import two_requests


@pytest.fixture
def world():
    return World()


def runs(world, pod, *uses):
    """It has one container with these claims."""
    spec = pod_spec(pod.name, container("main", *((claim.name, "") for claim in uses)))
    world.pods.pods["default", pod.name] = spec


def test_a_container_that_would_have_two_servers_is_told_once(world, caplog):
    world.claim(A, WEB)
    world.claim(B, DB, gpu=OTHER)
    world.look()
    assert world.pods.read_names == []

    runs(world, DB, A, B)
    world.join(A, DB)
    for _ in range(5):
        world.look()

    (event,) = world.events_of("MPSNotServed")
    assert event.regarding.uid == DB.uid
    assert event.message.startswith(
        "claim default/a, which is under MPS on gpu-0 (GPU-0), was prepared before this pod came, "
        "and does not serve all of it: pod default/db, container 'main' uses claim b too"
    )
    assert "write both as requests of one claim" in event.message
    assert world.pods.read_names == ["db"]
    assert caplog.messages == ["a pod that joined a claim is not served by its MPS server"]


def test_a_pod_that_comes_again_by_its_name_is_another_one(world):
    world.claim(A, WEB, DB)
    world.claim(B, DB, gpu=OTHER)
    runs(world, DB, A, B)
    world.look()
    world.leave(A, DB)
    world.leave(B, DB)
    world.look()
    again = Pod("db", PodUid("uid-again"))
    world.join(A, again)
    world.join(B, again)
    world.look()

    assert [event.regarding.uid for event in world.events_of("MPSNotServed")] == [DB.uid]
    # What is read is of the pod before it, also when it is not taken from memory.
    assert world.pods.read_names == ["db", "db", "db"]


def test_a_pod_that_cannot_be_read_is_tried_again_later(world, caplog):
    world.claim(A, WEB, DB)
    world.claim(B, DB, gpu=OTHER)
    runs(world, DB, A, B)
    world.pods.down = True
    for _ in range(5):
        world.look()
    assert world.pods.read_names == ["db"]
    assert [record.error for record in caplog.records] == ["the API server does not answer"]

    world.pods.down = False
    world.go_on(30)
    assert len(world.events_of("MPSNotServed")) == 1


def test_a_pod_that_is_gone_is_told_nothing(world):
    world.claim(A, WEB, DB)
    world.claim(B, DB, gpu=OTHER)
    world.pods.pods.clear()
    for _ in range(5):
        world.look()

    assert world.events == []
    assert world.pods.read_names == ["db", "db"], "what is not in memory is asked for live, once"


def test_many_pods_at_once_are_read_little_by_little(world):
    pods = [Pod(f"p{number}", PodUid(f"uid-p{number}")) for number in range(20)]
    world.claim(A, *pods)
    world.claim(B, *pods, gpu=OTHER)
    for pod in pods:
        runs(world, pod, A, B)
    world.look()
    assert len(world.pods.read_names) <= READS_AT_ONCE + 5 * READS_A_SECOND

    world.go_on(40)
    assert sorted(world.pods.read_names) == sorted(pod.name for pod in pods)
    assert len(world.events_of("MPSNotServed")) == 20


def test_an_api_server_that_takes_its_time_holds_nobody_up(world):
    world.claim(A, WEB, DB)
    world.claim(B, DB, gpu=OTHER)
    runs(world, DB, A, B)
    world.later = []
    world.look()
    world.look()
    assert len(world.later) == 1

    world.later[0]()
    world.look()
    assert len(world.events_of("MPSNotServed")) == 1


def test_a_pod_that_is_read_while_the_others_are_judged_is_judged_at_the_next_look(world):
    third = ref("c")
    world.claim(A, WEB)
    world.claim(B, WEB, gpu=OTHER)
    runs(world, WEB, A, B, third)
    world.look()
    runs(world, DB, A, B)
    for claim in (A, B):
        world.leave(claim, WEB)
        world.join(claim, DB)
        world.join(claim, WEB)
    world.claim(third, WEB)  # which is a new event of its pod

    def emit(event):
        world.events.append(event)
        while world.later:
            world.later.pop()()

    world.later, world.emit = [], emit
    world.look()
    assert DB.uid not in {event.regarding.uid for event in world.events_of("MPSNotServed")}
    assert world.pods.read_names == ["web", "db"]

    world.look()
    assert DB.uid in {event.regarding.uid for event in world.events_of("MPSNotServed")}


def test_a_third_claim_is_seen_without_reading_the_pod_again(world):
    third = ref("c")
    world.claim(A, DB)
    world.claim(B, DB, gpu=OTHER)
    runs(world, DB, A, B, third)
    world.look()
    world.claim(third, DB)
    world.look()

    messages = [event.message for event in world.events_of("MPSNotServed")]
    assert len(messages) == 3  # of a with b, of a with both, of b with the third
    assert "uses claim b, c too" in messages[1]
    assert world.pods.read_names == ["db"]


@pytest.mark.parametrize(
    ("first", "later", "message"),
    [
        pytest.param(["a", "b"], ["ab"], "uses requests a, b together", id="apart, then together"),
        pytest.param(["ab"], ["a", "b"], "its MPS server is over gpu-0, gpu-1", id="split"),
        pytest.param(["ab"], ["ab"], "", id="alike"),
    ],
)
def test_what_was_prepared_for_one_pod_is_not_what_another_needs(tmp_path, first, later, message):
    """Each word is a container, and each letter one of the requests that it uses."""
    preparing = Preparing(tmp_path)
    specs = {
        name: pod_spec(
            name, *(container(word, *(("claim", letter) for letter in word)) for word in words)
        )
        for name, words in (("first", first), ("later", later))
    }
    preparing.run(*specs.values())
    preparing.prepare(two_requests(pods=["first"]))
    preparing.preparer.prepared_claims.note_pods(two_requests(pods=["first", "later"]))

    records, whole = preparing.ledger.records(), preparing.ledger.record(ref().uid)
    problems = {
        use.pod.name: unusable_devices(use, specs[use.pod.name], requested_devices(whole), records)
        for use in pods_to_check(records)
    }
    assert problems["first"] == ()
    assert bool(problems["later"]) == bool(message)
    assert all(message in problem for problem in problems["later"])


def keeps_out(world, claim, tenants):
    """The profile said so when the claim was prepared."""
    world.listed = tuple(
        replace(
            record, holdings=tuple(replace(holding, tenants=tenants) for holding in record.holdings)
        )
        if record.claim == claim
        else record
        for record in world.listed
    )


def test_clients_of_a_pod_that_the_profile_keeps_out_are_ended_as_they_come(world, caplog):
    made = world.claim(A, WEB, DB)
    keeps_out(world, A, MpsTenants.NON_ROOT)
    user = container("main", (A.name, ""), root=False)
    world.pods.pods["default", WEB.name] = pod_spec(WEB.name, user)
    runs(world, DB, A)
    world.process(1, WEB, of=made)
    world.process(2, DB, of=made)
    world.look()
    assert world.agent.ended == [(made.name, (2,))]

    world.look()
    assert world.agent.ended == [(made.name, (2,))]
    world.process(3, DB, of=made)
    world.look()

    assert world.agent.ended == [(made.name, (2,)), (made.name, (3,))]
    (event,) = world.events_of("MPSNotServed")
    assert event.regarding.uid == DB.uid
    assert "can run as root or become it" in event.message
    assert event.message.endswith("its clients are ended")
    assert caplog.messages.count("ended MPS clients of a pod that the profile keeps out") == 2


def test_who_gets_an_ephemeral_container_that_is_root_is_kept_out_from_then_on(world):
    made = world.claim(A, WEB)
    keeps_out(world, A, MpsTenants.NON_ROOT)
    user = container("main", (A.name, ""), root=False)
    world.pods.pods["default", WEB.name] = pod_spec(WEB.name, user)
    world.process(1, WEB, of=made)
    world.go_on(30)
    assert world.agent.ended == []

    world.pods.pods["default", WEB.name] = pod_spec(WEB.name, user, container("debugger"))
    world.go_on(30)

    assert world.agent.ended[0] == (made.name, (1,))
    (event,) = world.events_of("MPSNotServed")
    assert "container 'debugger' can run as root" in event.message


def test_a_pod_that_left_a_claim_that_keeps_it_out_is_forgotten(world):
    made = world.claim(A, WEB, DB)
    keeps_out(world, A, MpsTenants.USER_NAMESPACES)
    runs(world, DB, A)
    world.look()
    assert world.watch.unserved_pods.keeps_out(A.uid, DB.uid)

    world.leave(A, DB)
    world.process(1, WEB, of=made)
    world.look()

    assert not world.watch.unserved_pods.keeps_out(A.uid, DB.uid)
    assert world.agent.ended == []


def test_where_clients_cannot_be_ended_the_others_are_looked_after(world):
    made = world.claim(A, DB)
    keeps_out(world, A, MpsTenants.NON_ROOT)
    runs(world, DB, A)
    world.process(1, DB, of=made)
    world.agent.wedged = True
    world.look()
    assert len(world.events_of("MPSNotServed")) == 1

    world.agent.wedged = False
    world.look()
    assert world.agent.ended[-1] == (made.name, (1,))
    assert world.agent.status().servers[0].clients == ()
