"""Processes that bypass MPS are found and told of, and nobody else is."""

import pytest

from dra_driver.k8s.claims import Pod, PodUid
from dra_driver.k8s.events import PodRef
from dra_driver.model.mps import MpsNamespaceName
from tests.fakes.mps_node import DB, GPU, WEB, A, B, C, World


@pytest.fixture
def world():
    return World()


def test_a_process_that_does_not_use_mps_is_told_of_once(world, caplog):
    made = world.claim(A, WEB)
    world.process(1, WEB, of=made)
    world.process(2, WEB)
    world.look()
    assert world.events == []
    assert world.of_claim("bypassing_processes", A) == 0.0

    for _ in range(5):
        world.look()
    (event,) = world.events_of("MPSNotUsed")
    assert event.regarding == PodRef("default", "web", WEB.uid)
    assert "process 2 of the host uses gpu-0 (GPU-0) for claim default/a" in event.message
    assert world.of_claim("bypassing_processes", A) == 1.0
    assert caplog.messages == ["a process of a claim under MPS bypasses it"]

    world.end(2)
    world.look()
    assert world.of_claim("bypassing_processes", A) == 0.0


def test_a_process_that_connects_in_time_is_not_told_of(world):
    made = world.claim(A, WEB)
    world.process(1, WEB)
    for _ in range(10):  # looks that come early do not count for more
        world.look(after=0.4)
    world.agent.connect(1, made)
    for _ in range(3):
        world.look()

    assert world.events == []


def test_a_process_that_loses_its_server_and_goes_on_without_is_told_of(world):
    made = world.claim(A, WEB)
    world.process(1, WEB, of=made)
    world.look()
    world.agent.restart(GPU)
    for _ in range(3):
        world.look()

    assert len(world.events_of("MPSNotUsed")) == 1


def test_while_a_server_is_not_ready_nobody_is_blamed(world):
    world.claim(A, WEB)
    world.process(1, WEB)
    world.agent.ready(GPU, ready=False)
    for _ in range(3):
        world.look()

    assert world.events_of("MPSNotUsed") == []


def test_who_has_the_gpu_without_mps_or_is_no_pod_of_ours_is_left_alone(world):
    world.claim(A, WEB)
    world.other_claim(C, DB)
    world.process(1, DB)
    world.process(2, Pod("stranger", PodUid("uid-stranger")))
    world.on_gpus[GPU] = (1, 2, 3)  # the server itself: in no container
    for _ in range(3):
        world.look()

    assert world.events == []


def test_where_containers_of_a_pod_use_different_claims_each_is_judged_by_its_own(world):
    world.claim(A, WEB)
    world.other_claim(C, WEB)
    world.containers.give(WEB, "mine", A)
    world.containers.give(WEB, "other", C)
    world.process(1, WEB, container="mine")
    world.process(2, WEB, container="other")
    for _ in range(3):
        world.look()

    (event,) = world.events_of("MPSNotUsed")
    assert "process 1 of the host" in event.message


def test_a_gpu_that_does_not_answer_is_said_once_and_changes_nothing(world, caplog):
    world.claim(A, WEB)
    world.process(1, WEB)
    world.look()
    world.look()
    pids, world.on_gpus[GPU] = world.on_gpus[GPU], None
    world.look()
    world.look()
    assert world.of_claim("bypassing_processes", A) == 1.0
    assert caplog.messages.count("it cannot be seen who bypasses MPS") == 1

    world.on_gpus[GPU] = pids
    world.look()
    assert len(world.events_of("MPSNotUsed")) == 1


def test_a_claim_that_is_given_back_meanwhile_is_not_told_of(world):
    world.claim(A, WEB)
    world.claim(B, DB)  # so that the GPU is looked at, and does not answer
    world.process(1, WEB)
    world.look()
    world.on_gpus[GPU] = None
    world.give_back(A)
    world.agent.release(MpsNamespaceName("c_a"))
    world.look()

    assert world.events_of("MPSNotUsed") == []


def test_where_processes_cannot_be_seen_that_is_said_and_clients_are_counted(world, caplog):
    made = world.claim(A, WEB)
    world.process(1, WEB, of=made)
    world.process(2, WEB)
    world.sees = False
    for _ in range(3):
        world.look()

    assert world.events == []
    assert world.of_claim("claim_clients", A) == 1.0
    assert "hostPID" in caplog.records[0].error
