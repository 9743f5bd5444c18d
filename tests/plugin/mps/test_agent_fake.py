"""The agent in memory refuses what the real one refuses, and loses what that loses."""

from dataclasses import replace

import pytest

from dra_driver.base.errors import MpsAgentUnreachable, NodeError, TimedOut
from dra_driver.k8s.claims import ClaimUid
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.mps import MpsNamespace, MpsNamespaceName, mps_server_name
from tests.fakes.mps_agent import FakeMpsAgent

GPU = GpuUuid("GPU-0")
FIRST = MpsNamespace(MpsNamespaceName("c_1"), ClaimUid("uid-1"), (GPU,), 30)
SECOND = MpsNamespace(MpsNamespaceName("c_2"), ClaimUid("uid-2"), (GPU,), 70)


@pytest.fixture
def agent():
    return FakeMpsAgent()


def pids(agent):
    return [client.pid for server in agent.status().servers for client in server.clients]


def test_the_same_namespace_again_is_the_same_answer_and_other_limits_are_refused(agent):
    assert agent.serve(FIRST) == agent.serve(FIRST)
    with pytest.raises(NodeError, match="other limits"):
        agent.serve(replace(FIRST, percent=31))


@pytest.mark.parametrize("name", ["", "C-1", "c" * 65])
def test_a_name_that_no_namespace_can_have_is_refused(agent, name):
    with pytest.raises(NodeError, match="no name"):
        agent.serve(replace(FIRST, name=MpsNamespaceName(name)))


def test_namespaces_of_the_same_gpus_share_a_server_that_goes_with_the_last(agent):
    agent.serve(FIRST)
    agent.serve(SECOND)
    agent.connect(1, FIRST)
    agent.connect(2, SECOND)
    (server,) = agent.status().servers
    assert server.name == mps_server_name([GPU])

    agent.release(FIRST.name)
    assert pids(agent) == [2]
    agent.release(SECOND.name)
    agent.release(SECOND.name)  # unknown: fine
    assert agent.status().servers == ()


def test_nobody_connects_to_what_is_not_served(agent):
    agent.serve(FIRST)
    with pytest.raises(NodeError, match="not served"):
        agent.connect(1, SECOND)


def test_a_restart_loses_clients_and_keeps_namespaces(agent):
    agent.serve(FIRST)
    agent.connect(1, FIRST)
    agent.restart(GPU)
    agent.restart(GPU)

    assert pids(agent) == []
    assert [served.namespace for served in agent.status().namespaces()] == [FIRST]
    assert [(incident.number, incident.clients) for incident in agent.status().incidents] == [
        (1, 1),
        (2, 0),
    ]


def test_clients_are_ended_unless_the_server_is_wedged(agent):
    agent.serve(FIRST)
    for pid in (1, 2):
        agent.connect(pid, FIRST)
    agent.terminate(FIRST.name, [1, 99])
    assert pids(agent) == [2]

    agent.wedged = True
    with pytest.raises(TimedOut):
        agent.terminate(FIRST.name, [2])
    assert pids(agent) == [2]


def test_protocol_2_does_not_tell_of_which_namespace_a_client_is():
    agent = FakeMpsAgent(protocol=2)
    agent.serve(FIRST)
    agent.connect(1, FIRST)

    assert [client.namespace for server in agent.status().servers for client in server.clients] == [
        None
    ]


@pytest.mark.parametrize(("how", "error"), [("down", MpsAgentUnreachable), ("hangs", TimedOut)])
def test_an_agent_that_does_not_answer_does_nothing(agent, how, error):
    setattr(agent, how, True)
    for ask in (
        agent.status,
        lambda: agent.serve(FIRST),
        lambda: agent.release(FIRST.name),
        lambda: agent.terminate(FIRST.name, [1]),
    ):
        with pytest.raises(error):
            ask()
