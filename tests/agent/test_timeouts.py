"""Nobody waits longer for the agent than it says, whatever hangs."""

import os
import signal
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from dra_driver.agent.dependencies import AgentDependencies, MpsRequestTimeouts
from dra_driver.agent.state import ServerStateFiles
from dra_driver.agent.supervisor import MpsSupervisor
from dra_driver.base.errors import NodeError, TimedOut
from dra_driver.node.mps.agent_client import SECONDS, SERVE_SECONDS
from dra_driver.node.mps.control import DaemonTimeouts
from tests.agent.conftest import OVER_ONE, Blocking, namespace
from tests.fakes.daemon_host import DaemonHost
from tests.waiting import eventually

KILLING = 1.0  # to end a program that hangs: node.commands
BRIEF = MpsRequestTimeouts(serve=1.5, undoing=0.5, release=0.6, terminate=0.6)
SLACK = 1.5 + KILLING  # of a machine that does other things, too


def test_what_the_agent_takes_is_less_than_who_asks_waits():
    timeouts, daemon = MpsRequestTimeouts(), DaemonTimeouts()

    assert timeouts.serve + KILLING < SERVE_SECONDS
    assert max(timeouts.release, timeouts.terminate) + KILLING < SECONDS
    assert timeouts.undoing > daemon.kill
    # One that starts as slowly as it may can be served, and one client be found wedged.
    assert daemon.start + timeouts.undoing < timeouts.serve
    assert 2.0 + daemon.drain < timeouts.terminate <= daemon.drain_all


@pytest.fixture
def node():
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        host = DaemonHost(Path(directory), 3)
        yield host
        host.close()


@pytest.fixture
def agent(node):
    Path(node.mps_dir).mkdir()
    files = ServerStateFiles(Path(node.mps_dir, "state"))
    daemons = node.daemons(DaemonTimeouts())
    agent = MpsSupervisor(AgentDependencies(daemons, files, node.mps_dir, timeouts=BRIEF))
    agent.recover()
    yield agent
    for state in files.load():
        node.tokens.append(state.daemon.token)


def took(act, *arguments):
    """Seconds, and the error that came of it."""
    began = time.monotonic()
    with pytest.raises(NodeError) as caught:
        act(*arguments)
    return time.monotonic() - began, str(caught.value)


def serve(agent, namespace):
    """However slow the machine is: the timeouts are brief."""

    def served():
        with suppress(TimedOut):
            return agent.serve(namespace)

    return eventually(served)


def stop_answering(node, agent):
    """Its daemon and server stop, and every program that asks them hangs."""
    for state in ServerStateFiles(Path(node.mps_dir, "state")).load():
        node.tokens.append(state.daemon.token)
    for pid in node.processes():
        os.kill(pid, signal.SIGSTOP)


def test_the_error_of_a_daemon_that_does_not_come_up_arrives_in_time(node, agent):
    node.change(mps="hangs")

    seconds, message = took(agent.serve, node.namespace(1))

    assert seconds < BRIEF.serve + SLACK
    assert "does not start" in message
    assert "into the background" in message
    node.change(mps="works")
    assert serve(agent, node.namespace(1)).namespace == node.namespace(1)
    agent.release(node.namespace(1).name)


def test_a_daemon_that_is_wedged_holds_up_no_request_longer_than_that(node, agent):
    serve(agent, node.namespace(1))
    serve(agent, node.namespace(2))
    stop_answering(node, agent)

    assert took(agent.serve, node.namespace(3))[0] < BRIEF.serve + SLACK
    assert took(agent.release, node.namespace(2).name)[0] < BRIEF.release + SLACK
    seconds, _ = took(agent.terminate, node.namespace(1).name, [os.getpid()])
    assert seconds < BRIEF.terminate + SLACK


def test_the_last_one_of_a_wedged_server_ends_by_and_by(node, agent):
    serve(agent, node.namespace(1))
    stop_answering(node, agent)

    began = time.monotonic()
    try:
        agent.release(node.namespace(1).name)
    except NodeError:
        assert time.monotonic() - began < BRIEF.release + SLACK
        agent.maintain()

    assert agent.status().servers == ()
    assert node.processes() == []


def test_a_request_that_waits_for_another_one_waits_no_longer_than_it_may(host):
    files, timeouts = ServerStateFiles(host.directory / "state"), MpsRequestTimeouts(serve=0.2)
    agent = MpsSupervisor(
        AgentDependencies(host.daemons, files, str(host.directory), timeouts=timeouts)
    )
    agent.recover()
    start = host.daemons.start = Blocking(host.daemons.start)
    first = threading.Thread(target=agent.serve, args=(namespace("c_1"),))
    first.start()
    assert start.begun.wait(60)

    with pytest.raises(TimedOut, match=f"the MPS server {OVER_ONE} is being started"):
        agent.serve(namespace("c_2"))
    start.go_on.set()
    first.join(60)
