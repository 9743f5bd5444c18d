"""Asking the MPS agent, and what is said when it is not there or not well."""

import json
import socket
import tempfile
import threading
from pathlib import Path

import pytest

from dra_driver.base.errors import MpsAgentUnreachable, NodeError, TimedOut
from dra_driver.k8s.claims import ClaimUid
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.mps import MpsNamespace, MpsNamespaceName, MpsStatus, ServedNamespace
from dra_driver.node.mps import agent_protocol
from dra_driver.node.mps.agent_client import MpsAgentClient
from dra_driver.node.mps.agent_protocol import AgentError, RequestDone

SPACE = MpsNamespace(MpsNamespaceName("c_1"), ClaimUid("uid"), (GpuUuid("GPU-1"),))
SERVED = ServedNamespace(SPACE, 3, "/run/x/pipe/gpu/c_1")


def line(answer):
    return agent_protocol.ANSWERS.encode(answer) + b"\n"


class OddAgent:
    """Answers every connection with the same bytes; None: it does not answer."""

    def __init__(self, path, answer):
        self.asked = []
        self._answer = answer
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            connection, _ = self._socket.accept()
        except OSError:
            return
        with connection:
            self.asked.append(json.loads(connection.makefile("rb").readline()))
            if self._answer is None:
                self._over.wait(5)
            else:
                try:
                    connection.sendall(self._answer)
                except OSError:  # who asked has heard enough
                    return

    def close(self):
        self._over.set()
        self._socket.close()
        self._thread.join(5)


@pytest.fixture
def path():
    with tempfile.TemporaryDirectory(prefix="mps", dir="/tmp") as directory:
        yield Path(directory, "agent.sock")


@pytest.fixture
def answering(path):
    started = []

    def start(answer):
        started.append(OddAgent(path, answer))
        return started[-1]

    yield start
    for agent in started:
        agent.close()


def test_a_namespace_is_asked_for_in_whole(path, answering):
    agent = answering(line(SERVED))

    assert MpsAgentClient(path).serve(SPACE) == SERVED
    assert agent.asked == [
        {
            "version": 1,
            "ServeRequest": {
                "namespace": {
                    "name": "c_1",
                    "claim": "uid",
                    "gpus": ["GPU-1"],
                    "percent": 100,
                    "memory_bytes": [],
                    "priority": 0,
                    "default_limits": {"percent": 100, "memory_bytes": None},
                    "tenant": "",
                }
            },
        }
    ]


@pytest.mark.parametrize(
    ("ask", "asked"),
    [
        (lambda agent: agent.release("c_1"), {"ReleaseRequest": {"name": "c_1"}}),
        (
            lambda agent: agent.terminate("c_1", {9, 7}),
            {"TerminateRequest": {"name": "c_1", "pids": [7, 9]}},
        ),
    ],
)
def test_other_calls_have_no_answer_but_that_it_is_done(path, answering, ask, asked):
    agent = answering(line(RequestDone()))

    assert ask(MpsAgentClient(path)) is None
    assert agent.asked == [{"version": 1, **asked}]


def test_the_status_is_what_the_agent_knows(path, answering):
    answering(line(MpsStatus(unmanaged=("other",))))

    assert MpsAgentClient(path).status() == MpsStatus(unmanaged=("other",))


def test_an_error_of_the_agent_is_raised_here(path, answering):
    answering(line(AgentError.of(TimedOut("the daemon does not answer"))))

    with pytest.raises(TimedOut, match="the daemon does not answer"):
        MpsAgentClient(path).serve(SPACE)


def test_nobody_there_is_said_with_what_to_start(path):
    with pytest.raises(MpsAgentUnreachable) as caught:
        MpsAgentClient(path).status()

    assert str(caught.value) == (
        f"the MPS agent of this node does not answer at {path} (No such file or directory): start "
        "`dra-driver mps-agent` (DaemonSet …-mps-agent); the claim is served once it is back"
    )


def test_a_socket_that_a_dead_agent_left_is_nobody(path):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))

    with pytest.raises(MpsAgentUnreachable, match="Connection refused"):
        MpsAgentClient(path).status()


def test_a_path_that_is_no_place_for_a_socket_is_nobody(path):
    with pytest.raises(MpsAgentUnreachable, match="too long"):
        MpsAgentClient(path / ("x" * 120)).status()


@pytest.mark.parametrize("answer", [b"", b'{"version":1,'])
def test_an_agent_that_ends_while_it_works_is_down(path, answering, answer):
    answering(answer)

    with pytest.raises(MpsAgentUnreachable, match="it ended before it answered"):
        MpsAgentClient(path).status()


def test_an_agent_that_hangs_is_not_waited_for_without_end(path, answering):
    answering(None)

    with pytest.raises(TimedOut, match=r"waited 0.05 s for the MPS agent at .* \(ServeRequest\)"):
        MpsAgentClient(path, serve_seconds=0.05).serve(SPACE)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"hello\n", "the answer of the MPS agent cannot be read: it is not JSON"),
        (b'{"version":1,"RequestDone":{}}\n', "agent to StatusRequest is RequestDone"),
        (b'{"version":1,"MpsStatus":{"servers":7}}\n', "MpsStatus.servers is 7, not a list"),
        (b" " * (agent_protocol.MAX_ANSWER_BYTES + 1), "longer than 1048576 bytes"),
    ],
)
def test_an_answer_that_is_none_is_an_error_of_this_node(path, answering, answer, message):
    answering(answer)

    with pytest.raises(NodeError, match=message):
        MpsAgentClient(path).status()


def test_too_much_at_once_is_not_even_asked(path):
    with pytest.raises(NodeError, match="more than the MPS agent reads"):
        MpsAgentClient(path).terminate(MpsNamespaceName("c_1"), range(100000))
