"""Asking the MPS agent, and what is said when it is not there or not well."""

import json
import socket
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from dra_driver.base.codec import RELEASE
from dra_driver.base.errors import MpsAgentUnreachable, NodeError, TimedOut
from dra_driver.k8s.claims import ClaimUid
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.mps import MpsNamespace, MpsNamespaceName, MpsStatus, ServedNamespace
from dra_driver.node.mps import agent_protocol
from dra_driver.node.mps.agent_client import MpsAgentClient
from dra_driver.node.mps.agent_protocol import AgentError, RequestDone

NAMESPACE = MpsNamespace(MpsNamespaceName("c_1"), ClaimUid("uid"), (GpuUuid("GPU-1"),))
SERVED = ServedNamespace(NAMESPACE, 3, "/run/x/pipe/gpu/c_1")


def line(answer):
    return agent_protocol.ANSWERS.encode(answer) + b"\n"


@pytest.fixture
def path():
    with tempfile.TemporaryDirectory(prefix="mps", dir="/tmp") as directory:
        yield Path(directory, "agent.sock")


@pytest.fixture
def answering(path):
    """Answers one connection with these bytes (None: not at all). The requests, as documents."""
    threads, over = [], threading.Event()

    def start(answer):
        requests = []
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen()

        def run():
            with listener, listener.accept()[0] as connection, suppress(OSError):
                requests.append(json.loads(connection.makefile("rb").readline()))
                if answer is None:
                    over.wait(60)
                else:
                    connection.sendall(answer)  # the client may have read enough

        threads.append(threading.Thread(target=run, daemon=True))
        threads[-1].start()
        return requests

    yield start
    over.set()
    for thread in threads:
        thread.join(60)


def test_a_namespace_is_asked_for_in_whole(path, answering):
    requests = answering(line(SERVED))

    assert MpsAgentClient(path).serve(NAMESPACE) == SERVED
    assert requests == [
        {
            "version": 1,
            "release": RELEASE,
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
    ("ask", "request_document"),
    [
        (lambda agent: agent.release("c_1"), {"ReleaseRequest": {"name": "c_1"}}),
        (
            lambda agent: agent.terminate("c_1", {9, 7}),
            {"TerminateRequest": {"name": "c_1", "pids": [7, 9]}},
        ),
        (
            lambda agent: agent.let_go(["GPU-2", "GPU-1"], 5.0),
            {"LetGoRequest": {"gpus": ["GPU-1", "GPU-2"], "until": 5.0}},
        ),
    ],
)
def test_other_calls_have_no_answer_but_that_it_is_done(path, answering, ask, request_document):
    requests = answering(line(RequestDone()))

    assert ask(MpsAgentClient(path)) is None
    assert requests == [{"version": 1, "release": RELEASE, **request_document}]


def test_the_status_is_what_the_agent_knows(path, answering):
    answering(line(MpsStatus(unmanaged=("other",))))

    assert MpsAgentClient(path).status() == MpsStatus(unmanaged=("other",))


def test_without_an_agent_the_error_says_what_to_start(path):
    with pytest.raises(MpsAgentUnreachable) as caught:
        MpsAgentClient(path).status()

    assert str(caught.value) == (
        f"the MPS agent of this node does not answer at {path} (No such file or directory): start "
        "`dra-driver mps-agent` (DaemonSet …-mps-agent); the claim is served once it is back"
    )


def test_a_socket_of_a_dead_agent_and_an_impossible_path_are_nobody(path):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))

    with pytest.raises(MpsAgentUnreachable, match="Connection refused"):
        MpsAgentClient(path).status()
    with pytest.raises(MpsAgentUnreachable, match="too long"):
        MpsAgentClient(path / ("x" * 120)).status()


def test_an_agent_that_hangs_is_not_waited_for_without_end(path, answering):
    answering(None)

    with pytest.raises(TimedOut, match=r"waited 0.05 s for the MPS agent at .* \(ServeRequest\)"):
        MpsAgentClient(path, serve_seconds=0.05).serve(NAMESPACE)


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (line(AgentError.of(TimedOut("no answer"))), TimedOut, "no answer"),
        (b"", MpsAgentUnreachable, "it ended before it answered"),
        (b'{"version":1,', MpsAgentUnreachable, "it ended before it answered"),
        (b"hello\n", NodeError, "the answer of the MPS agent cannot be read: it is not JSON"),
        (line(RequestDone()), NodeError, "agent to StatusRequest is RequestDone"),
        (
            line(MpsStatus()).replace(b'"servers":[]', b'"servers":7'),
            NodeError,
            "MpsStatus.servers is 7, not a list",
        ),
        (b" " * (agent_protocol.MAX_ANSWER_BYTES + 1), NodeError, "longer than 1048576 bytes"),
    ],
)
def test_an_answer_that_is_none_is_an_error(path, answering, answer, error, message):
    answering(answer)

    with pytest.raises(error, match=message):
        MpsAgentClient(path).status()


def test_too_much_at_once_is_not_even_asked(path):
    with pytest.raises(NodeError, match="more than the MPS agent reads"):
        MpsAgentClient(path).terminate(MpsNamespaceName("c_1"), range(100000))
