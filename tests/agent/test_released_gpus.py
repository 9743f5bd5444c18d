"""An administrator has the driver let go of GPUs: their servers end, and come back."""

import pytest

from dra_driver.base.errors import NodeError
from tests.agent.conftest import (
    INSTANCE,
    ONE,
    OVER_ONE,
    TWO,
    names,
    namespace,
    the_server,
)


@pytest.fixture
def until(host):
    """In ten minutes, in seconds since the epoch."""
    return host.seconds + 1e9 + 600


def running(host):
    return sorted(daemon.daemon.gpus for daemon in host.daemons.running.values())


def test_servers_of_released_gpus_end_and_come_back_with_all_that_they_served(host, agent, until):
    before = agent.serve(namespace("c_1", percent=30))
    agent.serve(namespace("c_2", TWO))

    agent.let_go([ONE], until)
    host.pass_time(agent, 60)
    assert running(host) == [(TWO,)]
    assert names(agent) == ["c_1", "c_2"]  # which are not served at the moment

    agent.let_go([], 0.0)
    host.pass_time(agent, 1)
    assert running(host) == [(ONE,), (TWO,)]
    assert agent.serve(namespace("c_1", percent=30)).pipe_directory == before.pipe_directory


def test_they_come_back_when_the_time_is_over_though_nobody_says_so(host, agent, until):
    agent.serve(namespace())
    agent.let_go([ONE], until)

    host.pass_time(agent, 599)
    assert running(host) == []
    host.pass_time(agent, 2)
    assert running(host) == [(ONE,)]
    assert the_server(agent).ready


def test_a_server_with_clients_ends_after_them(host, agent, until):
    agent.serve(namespace())
    host.connect(agent, 77, "c_1")

    agent.let_go([ONE], until)
    assert running(host) == [(ONE,)]
    host.daemons.of(OVER_ONE).clients.clear()
    host.pass_time(agent, 15)
    assert running(host) == []


def test_a_server_that_hangs_is_ended_as_it_would_be_otherwise(host, agent, until):
    agent.serve(namespace())
    host.connect(agent, 77, "c_1")
    host.daemons.of(OVER_ONE).unanswering = True
    agent.let_go([ONE], until)
    assert running(host) == [(ONE,)]  # maybe it is only slow

    for _ in range(5):
        host.pass_time(agent, 10)
    assert running(host) == []
    agent.let_go([], 0.0)
    host.pass_time(agent, 1)
    assert the_server(agent).ready


@pytest.mark.parametrize("gpus", [(ONE,), (TWO, ONE)])
def test_no_server_is_started_over_a_released_gpu(host, agent, until, gpus):
    agent.let_go([ONE], until)

    with pytest.raises(NodeError, match=r"no MPS server is started over .*GPU-1"):
        agent.serve(namespace("c_1", *gpus))
    assert host.left() == []
    agent.serve(namespace("c_2", TWO))
    agent.serve(namespace("c_3", INSTANCE))
    assert running(host) == [(TWO,), (INSTANCE,)]


def test_a_claim_is_taken_back_while_its_gpu_is_released(host, agent, until):
    agent.serve(namespace())
    agent.let_go([ONE], until)

    agent.release("c_1")

    assert (host.left(), agent.status().servers) == ([], ())


def test_while_gpus_are_released_nothing_is_tried_more_often(host, agent, until):
    agent.serve(namespace())
    agent.let_go([ONE], until)

    assert agent.maintain() is None


def test_the_next_agent_lets_go_once_it_is_asked_again(host, agent, until):
    agent.serve(namespace())
    agent.let_go([ONE], until)

    successor = host.agent()
    successor.let_go([ONE], until)
    host.pass_time(successor, 60)

    assert running(host) == []
