"""MPS servers over MIG instances: one for each, with protocol 2, gone before the instance is."""

import pytest

from dra_driver.base.errors import TimedOut
from dra_driver.model.mps import mps_server_name
from tests.agent.conftest import INSTANCE, ONE, Host, limits_of, namespace

OVER_INSTANCE = mps_server_name([INSTANCE])


@pytest.fixture
def agent(host):
    return host.agent()


def daemon(host):
    return host.daemons.of(OVER_INSTANCE).daemon


@pytest.mark.parametrize("newest", [2, 3])
def test_an_instance_is_served_with_protocol_2_whatever_the_driver_knows(mps_dir, newest):
    host = Host(mps_dir, newest)
    agent = host.agent()
    on_instance, on_gpu = (
        agent.serve(namespace("c_1", INSTANCE)),
        agent.serve(namespace("c_2", ONE)),
    )

    assert (on_instance.protocol, on_gpu.protocol) == (2, newest)
    assert on_instance.pipe_directory == f"{mps_dir}/{OVER_INSTANCE}/pipe"
    assert on_instance.shm_directory == f"{mps_dir}/{OVER_INSTANCE}/shm"
    assert daemon(host).gpus == (INSTANCE,)


def test_the_claims_of_an_instance_share_its_server(host, agent):
    agent.serve(
        namespace("c_1", INSTANCE, percent=30, mib=1024, default_limits=limits_of(60, 4096))
    )
    agent.serve(
        namespace("c_2", INSTANCE, percent=60, mib=2048, default_limits=limits_of(60, 4096))
    )
    host.daemons.connect(OVER_INSTANCE, 71, "c_1")
    host.seconds += 2

    (server,) = agent.status().servers
    assert (server.gpus, server.protocol, server.ready) == ((INSTANCE,), 2, True)
    assert [namespace.namespace.name for namespace in server.namespaces] == ["c_1", "c_2"]
    assert [client.pid for client in server.clients] == [71]
    assert daemon(host).default_limits == limits_of(60, 4096)


def test_another_agent_finds_it_again(host, agent):
    before = agent.serve(namespace("c_1", INSTANCE))
    calls = list(host.daemons.calls)

    later = host.agent()
    assert later.serve(namespace("c_1", INSTANCE)) == before
    later.release("c_1")
    assert host.daemons.calls == [*calls, f"kill {OVER_INSTANCE}"]
    assert host.left() == []


def test_what_dies_over_an_instance_is_started_again_with_protocol_2(host, agent):
    agent.serve(namespace("c_1", INSTANCE))
    host.daemons.crash(OVER_INSTANCE)
    host.pass_time(agent, 5)

    (server,) = agent.status().servers
    assert (server.ready, server.protocol, server.restarts) == (True, 2, 1)
    assert daemon(host).protocol == 2


def test_a_release_says_so_while_a_server_holds_the_instance_and_ends_it_when_asked_again(
    host, agent
):
    """Whoever removes the instance after that finds it free."""
    agent.serve(namespace("c_1", INSTANCE))
    host.daemons.stuck = {INSTANCE}

    with pytest.raises(TimedOut, match="do not end"):
        agent.release("c_1")
    assert [server.ready for server in agent.status().servers] == [False]

    host.daemons.stuck = set()
    agent.release("c_1")
    assert host.left() == []


def test_a_release_of_one_claim_leaves_the_server_to_the_others(host, agent):
    agent.serve(namespace("c_1", INSTANCE))
    agent.serve(namespace("c_2", INSTANCE))
    agent.release("c_1")

    assert [namespace.namespace.name for namespace in agent.status().namespaces()] == ["c_2"]
    assert daemon(host).gpus == (INSTANCE,)


def test_an_instance_that_was_cut_anew_under_the_same_uuid_is_served_as_the_first(host, agent):
    agent.serve(namespace("c_1", INSTANCE))
    agent.release("c_1")

    assert agent.serve(namespace("c_2", INSTANCE)).protocol == 2
    assert [server.restarts for server in agent.status().servers] == [0]
