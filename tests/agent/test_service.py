"""The socket: who may ask, what is answered, and what clients cannot do to it."""

import os
import socket
import stat
import threading
import time
from dataclasses import replace

import pytest

from dra_driver.agent import service as door
from dra_driver.agent.service import AgentService, lock_directory
from dra_driver.base.deadlines import Deadline
from dra_driver.base.errors import ClaimError, MpsAgentUnreachable, NodeError, SettingsError
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.mps import MpsLimits, mps_server_name
from dra_driver.node.mps.agent_client import MpsAgentClient
from dra_driver.node.mps.agent_protocol import read_line
from tests.agent.conftest import INSTANCE, ONE, namespace

SECONDS = 60


@pytest.fixture
def service(host):
    made = AgentService(host.agent(), host.directory)
    made.start()
    yield made
    made.stop()
    for thread in threading.enumerate():  # which may still write into the directory
        if thread.name == door.REQUEST_THREAD:
            thread.join(SECONDS)
            assert not thread.is_alive()


@pytest.fixture
def agent(service):
    return MpsAgentClient(service.path)


def told(service, line):
    """What is answered to a line."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(SECONDS)
        connection.connect(str(service.path))
        connection.sendall(line)
        return connection.makefile("rb").readline().decode()


def test_a_namespace_is_served_through_the_socket_and_ends(host, agent):
    served = agent.serve(namespace("c_1", percent=30, mib=1024))

    assert served.pipe_directory.startswith(str(host.directory))
    assert tuple(agent.status().namespaces()) == (served,)
    agent.terminate("c_1", [7])
    agent.release("c_1")
    assert agent.status().servers == ()
    assert host.daemons.running == {}


def test_only_root_may_ask(service):
    assert stat.S_IMODE(os.stat(service.path).st_mode) == 0o600


def test_an_error_comes_back_as_what_it_was(host, agent):
    host.daemons.absent = {ONE}

    with pytest.raises(NodeError, match="no such GPU"):
        agent.serve(namespace())


def test_a_bug_is_an_answer_too(host, agent):
    def broken(daemon, namespaces):
        raise KeyError("bug")

    host.daemons.start = broken

    with pytest.raises(NodeError, match=r"the MPS agent failed: 'bug'; see its log"):
        agent.serve(namespace())
    assert host.left() == ["agent.sock"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (namespace("C 1"), "its name 'C 1' is not"),
        (namespace("x" * 65), "is not 1 to 64"),
        (replace(namespace(), gpus=()), "its GPUs are none"),
        (namespace("c_1", ONE, ONE), "comes twice"),
        (namespace("c_1", GpuUuid('GPU"\n')), "is no UUID of a GPU"),
        (namespace("c_1", INSTANCE, ONE), "a MIG instance has a server of its own"),
        (namespace("c_1", INSTANCE, GpuUuid("MIG-2")), "a MIG instance has a server of its own"),
        (namespace("c_1", GpuUuid("GPU-1/19/0")), "'GPU-1/19/0' is no UUID of a GPU"),
        (namespace(percent=0), "0 % of the multiprocessors is not 1 to 100"),
        (namespace(percent=101), "101 % of the multiprocessors is not 1 to 100"),
        (replace(namespace(), memory_bytes=(1,)), "a memory limit of 1 bytes"),
        (replace(namespace(), memory_bytes=(-(1 << 20),)), "a memory limit of -1048576 bytes"),
        (replace(namespace(), memory_bytes=(None, None)), "2 memory limits for 1 GPUs"),
        (namespace(default_limits=MpsLimits(0, 7)), "0 % of the.*limit of 7 bytes"),
    ],
)
def test_what_no_program_should_get_as_an_argument_is_refused(host, agent, wrong, message):
    with pytest.raises(ClaimError, match=message):
        agent.serve(wrong)

    assert host.daemons.calls == []


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"hello\n", "the request cannot be read: it is not JSON"),
        (b'{"version":2,"StatusRequest":{}}\n', "version is 2, not 1"),
        (b'{"version":1,"SingRequest":{}}\n', "it is SingRequest, none of 'ServeRequest'"),
        (b'{"version":1,"ReleaseRequest":{}}\n', "ReleaseRequest.name is missing"),
    ],
)
def test_what_is_no_request_is_answered_with_what_is_wrong(service, line, problem):
    assert problem in told(service, line)


def test_a_request_without_end_is_cut_off(service):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(SECONDS)
        connection.connect(str(service.path))
        try:
            for _ in range(100):
                connection.sendall(b" " * 4096)
            assert connection.recv(1) == b""
        except (BrokenPipeError, ConnectionResetError):
            pass

    assert '"MpsStatus"' in told(service, b'{"version":1,"StatusRequest":{}}\n')


def test_clients_that_go_away_harm_nobody(service):
    for line in (b"", b'{"version":1,"StatusRequest":{}}\n', b"{"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(service.path))
            connection.sendall(line)

    assert '"MpsStatus"' in told(service, b'{"version":1,"StatusRequest":{}}\n')


def test_many_can_ask_at_once(agent):
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(agent.status()), daemon=True)
        for _ in range(50)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)

    assert len(answers) == 50


def test_who_says_nothing_is_not_waited_for_without_end():
    ours, theirs = socket.socketpair()
    times = iter([0.0, 0.0, 6.0])
    with ours, theirs:
        theirs.sendall(b"{")
        with pytest.raises(TimeoutError, match="a request did not come in 5 s"):
            read_line(ours, Deadline(5.0, clock=lambda: next(times)), 100, "a request")


def test_a_socket_that_a_dead_agent_left_is_replaced(host):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(host.directory / "agent.sock"))
    service = AgentService(host.agent(), host.directory)

    service.start()

    assert MpsAgentClient(service.path).status().servers == ()
    service.stop()


def test_sockets_of_agents_that_were_killed_before_they_were_named_are_removed(host):
    kept = [host.directory / ".notours", host.directory / ".0123abcd.tmp"]
    for path in kept:
        path.touch()
    (host.directory / ".89abcdef").touch()  # no socket
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(host.directory / ".0123abcd"))
    service = AgentService(host.agent(), host.directory)

    service.start()

    assert not (host.directory / ".0123abcd").exists()
    assert all(path.exists() for path in [*kept, host.directory / ".89abcdef"])
    service.stop()


def test_nobody_answers_once_it_stopped(service, agent):
    assert service.problem() is None
    service.stop()

    assert "nobody serves" in service.problem() or not service.path.exists()
    with pytest.raises(MpsAgentUnreachable):
        agent.status()


def test_a_socket_that_somebody_removed_is_said(service):
    service.path.unlink()

    assert service.problem() == f"{service.path} was removed"


def test_what_is_under_way_is_given_a_moment_to_end(host, service, agent):
    begun, go_on = threading.Event(), threading.Event()
    start = host.daemons.start

    def slow(daemon, namespaces):
        begun.set()
        assert go_on.wait(SECONDS)
        return start(daemon, namespaces)

    host.daemons.start = slow
    asking = threading.Thread(target=agent.serve, args=(namespace(),), daemon=True)
    asking.start()
    assert begun.wait(SECONDS)
    stopping = threading.Thread(target=service.stop, daemon=True)
    stopping.start()
    go_on.set()
    stopping.join(SECONDS)
    asking.join(SECONDS)

    assert host.daemons.of(mps_server_name([ONE])).namespaces


def test_something_is_made_ready_for_the_next_claim_after_the_answer(host, agent):
    made, go_on = threading.Event(), threading.Event()
    add = host.daemons.add_namespace

    def slow(daemon, namespace):
        assert go_on.wait(SECONDS)
        directory = add(daemon, namespace)
        made.set()
        return directory

    host.daemons.add_namespace = slow
    agent.serve(namespace("c_1"))
    agent.serve(namespace("c_2"))  # takes the spare that the server was started with
    go_on.set()

    assert made.wait(SECONDS)
    assert len(host.daemons.of(mps_server_name([ONE])).namespaces) == 3


def test_nobody_who_ends_the_agent_waits_for_what_is_made_ready(host, service, agent):
    begun, never = threading.Event(), threading.Event()

    def hangs(daemon, namespace):
        begun.set()
        never.wait(50)
        raise NodeError("ended")

    host.daemons.add_namespace = hangs
    agent.serve(namespace("c_1"))
    agent.serve(namespace("c_2"))
    assert begun.wait(SECONDS)

    before = time.monotonic()
    service.stop()
    assert time.monotonic() - before < 40
    never.set()


def test_a_bug_in_making_something_ready_harms_nobody(host, agent, caplog):
    def broken(daemon, namespace):
        raise KeyError("bug")

    add, host.daemons.add_namespace = host.daemons.add_namespace, broken
    agent.serve(namespace("c_1"))
    agent.serve(namespace("c_2"))
    deadline = time.monotonic() + SECONDS
    while "nothing could be made ready for the next claim" not in caplog.messages:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    host.daemons.add_namespace = add

    assert agent.serve(namespace("c_3")).namespace.name == "c_3"


def test_a_second_agent_in_the_same_directory_is_refused(mps_dir):
    lock = lock_directory(mps_dir / "new")
    try:
        with pytest.raises(SettingsError, match="another MPS agent serves"):
            lock_directory(mps_dir / "new", seconds=0.05)
    finally:
        os.close(lock)

    os.close(lock_directory(mps_dir / "new"))


def test_a_directory_that_cannot_be_made_is_said(mps_dir):
    (mps_dir / "file").touch()

    with pytest.raises(NodeError, match="cannot make the directory for MPS"):
        lock_directory(mps_dir / "file" / "below")
