"""The socket: who may ask, what is answered, and what clients cannot do to it."""

import os
import socket
import stat
import threading
import time
from dataclasses import replace

import pytest

from dra_driver.agent.service import REQUEST_THREAD, AgentService, lock_directory
from dra_driver.base.deadlines import Deadline
from dra_driver.base.errors import ClaimError, MpsAgentUnreachable, NodeError, SettingsError
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.mps import MpsLimits
from dra_driver.node.mps import agent_protocol
from dra_driver.node.mps.agent_client import MpsAgentClient
from dra_driver.node.mps.agent_protocol import StatusRequest, read_line
from tests.agent.conftest import INSTANCE, ONE, OVER_ONE, Blocking, namespace, raising
from tests.waiting import eventually

SECONDS = 60


@pytest.fixture
def service(host):
    service = AgentService(host.agent(), host.directory)
    service.start()
    yield service
    service.stop()
    for thread in threading.enumerate():  # which may still write into the directory
        if thread.name == REQUEST_THREAD:
            thread.join(SECONDS)
            assert not thread.is_alive()


@pytest.fixture
def agent(service):
    return MpsAgentClient(service.path)


def ask(service, line):
    """The answer to a line."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(SECONDS)
        connection.connect(str(service.path))
        connection.sendall(line)
        return connection.makefile("rb").readline().decode()


STATUS = agent_protocol.REQUESTS.encode(StatusRequest()) + b"\n"


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


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (NodeError("no such GPU"), "no such GPU"),
        (KeyError("bug"), "the MPS agent failed: 'bug'; see its log"),
    ],
)
def test_an_error_and_a_bug_are_answers_too(host, agent, error, message):
    host.daemons.start = raising(error)

    with pytest.raises(NodeError, match=message):
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
        (STATUS.replace(b'"version":1', b'"version":2'), "version is 2, not 1"),
        (STATUS.replace(b"Status", b"Sing"), "it is SingRequest, none of 'ServeRequest'"),
        (STATUS.replace(b"Status", b"Release"), "ReleaseRequest.name is missing"),
    ],
)
def test_what_is_no_request_is_answered_with_what_is_wrong(service, line, problem):
    assert problem in ask(service, line)


def test_a_request_without_end_is_refused(service):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(SECONDS)
        connection.connect(str(service.path))
        try:
            for _ in range(100):
                connection.sendall(b" " * 4096)
            assert connection.recv(1) == b""
        except (BrokenPipeError, ConnectionResetError):
            pass

    assert '"MpsStatus"' in ask(service, STATUS)


def test_clients_that_go_away_harm_no_other(service):
    for line in (b"", STATUS, b"{"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(service.path))
            connection.sendall(line)

    assert '"MpsStatus"' in ask(service, STATUS)


def test_many_can_ask_at_once(agent):
    answers = []
    for _ in range(50):
        threading.Thread(target=lambda: answers.append(agent.status()), daemon=True).start()

    eventually(lambda: len(answers) == 50)


def test_a_silent_client_is_not_waited_for_without_end():
    ours, theirs = socket.socketpair()
    times = iter([0.0, 0.0, 6.0])
    with ours, theirs:
        theirs.sendall(b"{")
        with pytest.raises(TimeoutError, match="a request did not come in 5 s"):
            read_line(ours, Deadline(5.0, clock=lambda: next(times)), 100, "a request")


def test_sockets_of_dead_agents_are_replaced_and_nothing_else_is(host):
    no_sockets = [host.directory / name for name in (".notours", ".0123abcd.tmp", ".89abcdef")]
    for path in no_sockets:
        path.touch()
    for name in ("agent.sock", ".0123abcd"):  # the second was not renamed yet
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(host.directory / name))
    service = AgentService(host.agent(), host.directory)

    service.start()

    assert MpsAgentClient(service.path).status().servers == ()
    assert not (host.directory / ".0123abcd").exists()
    assert all(path.exists() for path in no_sockets)
    service.stop()


def test_a_removed_socket_and_a_stopped_service_are_problems(service, agent):
    assert service.problem() is None
    moved = service.path.rename(f"{service.path}x")
    assert service.problem() == f"{service.path} was removed"
    moved.rename(service.path)
    service.stop()

    assert service.problem() in (f"{service.path} is not served", f"{service.path} was removed")
    with pytest.raises(MpsAgentUnreachable):
        agent.status()


def test_what_is_under_way_is_given_a_moment_to_end(host, service, agent):
    start = host.daemons.start = Blocking(host.daemons.start)
    asking = threading.Thread(target=agent.serve, args=(namespace(),), daemon=True)
    asking.start()
    assert start.begun.wait(SECONDS)
    stopping = threading.Thread(target=service.stop, daemon=True)
    stopping.start()
    start.go_on.set()
    stopping.join(SECONDS)
    asking.join(SECONDS)

    assert host.daemons.of(OVER_ONE).namespaces


def test_a_spare_is_created_for_the_next_claim_after_the_answer(host, agent):
    add = host.daemons.add_namespace = Blocking(host.daemons.add_namespace)
    agent.serve(namespace("c_1"))
    agent.serve(namespace("c_2"))  # takes the spare that the server was started with
    add.go_on.set()

    eventually(lambda: len(host.daemons.of(OVER_ONE).namespaces) == 3)


def test_whoever_ends_the_agent_does_not_wait_for_a_spare(host, service, agent):
    add = host.daemons.add_namespace = Blocking(raising(NodeError("ended")))
    agent.serve(namespace("c_1"))
    agent.serve(namespace("c_2"))
    assert add.begun.wait(SECONDS)

    began = time.monotonic()
    service.stop()
    assert time.monotonic() - began < 40
    add.go_on.set()


def test_a_bug_in_creating_a_spare_harms_no_claim(host, agent, caplog):
    add, host.daemons.add_namespace = host.daemons.add_namespace, raising(KeyError("bug"))
    agent.serve(namespace("c_1"))
    agent.serve(namespace("c_2"))
    eventually(lambda: "no spare MPS namespace could be created" in caplog.messages)
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


def test_a_directory_that_cannot_be_made_is_an_error(mps_dir):
    (mps_dir / "file").touch()

    with pytest.raises(NodeError, match="cannot make the directory for MPS"):
        lock_directory(mps_dir / "file" / "below")
