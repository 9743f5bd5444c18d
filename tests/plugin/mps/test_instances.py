"""MPS over MIG instances while claims use it: who bypasses it, and what is gone."""

from dataclasses import replace

import pytest

from dra_driver.base.errors import MigInstanceNotFound, NodeError
from dra_driver.model.gpus import GpuUuid
from tests.fakes.mps_node import DB, GPU, INSTANCE, WEB, A, B, World

KEY = INSTANCE.key


@pytest.fixture
def world():
    return World()


def test_claims_of_an_instance_are_looked_after_like_those_of_a_gpu(world):
    made = world.partition(A, WEB)
    world.process(1, WEB, INSTANCE.uuid, of=made)
    world.process(2, WEB, INSTANCE.uuid)
    world.go_on(20)

    assert world.of_claim("claim_cores_percent", A, INSTANCE.uuid) == 30.0
    assert world.of_claim("claim_clients", A, INSTANCE.uuid) == 1.0
    assert world.of_claim("bypassing_processes", A, INSTANCE.uuid) == 1.0
    (event,) = world.events_of("MPSNotUsed")
    assert event.message.startswith(
        "process 2 of the host uses gpu-0-mig-3g20gb-9-4 (MIG-0) for claim default/a"
    )
    assert world.repaired == []


def test_what_runs_on_the_gpu_around_an_instance_bypasses_nothing(world):
    world.partition(A, WEB)
    world.process(2, WEB, GPU)
    world.go_on(20)

    assert world.events_of("MPSNotUsed") == []


def test_a_server_that_was_restarted_is_named_by_its_partition(world):
    world.partition(A, WEB)
    world.look()
    world.agent.restart(INSTANCE.uuid)
    world.look()

    (event,) = world.events_of("MPSServerRestarted")
    assert "the MPS server of gpu-0-mig-3g20gb-9-4 (MIG-0) was restarted" in event.message


def test_what_the_agent_lost_over_an_instance_is_served_again(world):
    world.partition(A, WEB, served=False)
    world.look()

    assert world.repaired == [A.uid]
    assert [namespace.protocol for namespace in world.agent.status().namespaces()] == [2]


@pytest.mark.parametrize(
    "now",
    [
        pytest.param(MigInstanceNotFound("it is gone"), id="nothing"),
        pytest.param(replace(INSTANCE, uuid=GpuUuid("MIG-9")), id="another one"),
    ],
)
def test_the_server_of_an_instance_that_is_gone_is_ended(world, now):
    world.partition(A, WEB, DB)
    world.claim(B, DB)
    world.look()
    world.instances[KEY] = now
    world.go_on(60)

    assert [namespace.namespace.claim for namespace in world.agent.status().namespaces()] == [B.uid]
    assert world.repaired == []  # nor is it served again


def test_an_instance_that_comes_back_is_served_again(world):
    world.partition(A, WEB)
    world.instances[KEY] = MigInstanceNotFound("it is gone")
    world.look()
    assert list(world.agent.status().namespaces()) == []

    world.instances[KEY] = INSTANCE
    world.look()
    assert world.repaired == [A.uid]
    assert len(list(world.agent.status().namespaces())) == 1
    world.instances[KEY] = MigInstanceNotFound("it is gone")
    world.look()
    assert list(world.agent.status().namespaces()) == []


def test_a_gpu_that_does_not_answer_has_lost_nothing(world):
    world.partition(A, WEB)
    world.look()
    world.instances[KEY] = NodeError("the GPU does not answer")
    world.go_on(20)
    assert len(list(world.agent.status().namespaces())) == 1

    world.instances[KEY] = MigInstanceNotFound("it is gone")
    world.look()
    world.instances[KEY] = NodeError("the GPU does not answer")
    world.go_on(20)
    assert (list(world.agent.status().namespaces()), world.repaired) == ([], [])


def test_a_server_that_cannot_be_ended_is_tried_again(world, caplog):
    world.partition(A, WEB)
    world.look()
    world.instances[KEY] = MigInstanceNotFound("it is gone")
    released = []

    def release(name):
        released.append(name)
        raise NodeError("processes do not end")

    world.agent.release = release
    world.go_on(60)
    assert len(released) == 3  # every half a minute
    assert [record.error for record in caplog.records if record.levelname == "WARNING"] == [
        "processes do not end"
    ]

    del world.agent.release
    world.go_on(40)
    assert list(world.agent.status().namespaces()) == []
