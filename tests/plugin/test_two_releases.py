"""Processes of two releases share a node: one prepares, and the other takes over and takes back."""

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dra_driver.base.codec import RELEASE
from dra_driver.base.errors import DriverError
from dra_driver.node.mps.agent_client import MpsAgentClient
from tests.builders import config
from tests.driver_process import Process
from tests.fakes.api_server import ApiServer
from tests.fakes.kubelet import FakeKubelet
from tests.neighbour_release import NEXT_RELEASE, ROOT, write_next_release
from tests.plugin.conftest import put, whole_process
from tests.waiting import eventually

DRIVER = "gpu.nvidia.com"
SECONDS = 60.0
SIM = "h100x2-615"
LONG = config(sharing={"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}})
MPS = config(sharing={"strategy": "MPS"})
COMMAND = ("mps-agent", f"--sim={SIM}", "--health-interval=0.5")
GREEN = {RELEASE: None, NEXT_RELEASE: "green"}  # which only the next release writes


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Where the source of each release is."""
    return {
        RELEASE: ROOT,
        NEXT_RELEASE: write_next_release(tmp_path_factory.mktemp("next") / "source"),
    }


@pytest.fixture
def start_agent(sources: dict[str, Path], home: Path) -> Iterator[Callable[[str], Process]]:
    """Starts the MPS agent of a release."""
    started: list[Process] = []

    def run(release: str) -> Process:
        process = whole_process(*COMMAND, f"--mps-dir={home}/mps", source=sources[release])
        started.append(process)
        eventually(lambda: answers(home), "the MPS agent", SECONDS)
        return process

    (home / "mps").mkdir()
    yield run
    for process in started:
        process.kill()
        process.communicate()


def answers(home: Path) -> bool:
    try:
        MpsAgentClient(home / "mps/agent.sock").status()
    except DriverError:
        return False
    return True


def end(process: Process) -> None:
    process.send_signal(signal.SIGTERM)
    process.wait(SECONDS)


def documents(directory: Path, kind: str) -> list[dict[str, object]]:
    found = [json.loads(path.read_text()) for path in sorted(directory.rglob("*.json"))]
    return [document[kind] for document in found if kind in document]


@pytest.mark.parametrize(
    ("first", "second"), [(RELEASE, NEXT_RELEASE), (NEXT_RELEASE, RELEASE)], ids=["update", "back"]
)
@pytest.mark.parametrize("agent_first", [False, True], ids=["", "the agent first"])
def test_claims_of_one_release_are_kept_and_taken_back_by_the_other(
    server: ApiServer,
    kubelet: FakeKubelet,
    start: Callable[..., Process],
    start_agent: Callable[[str], Process],
    sources: dict[str, Path],
    home: Path,
    first: str,
    second: str,
    agent_first: bool,
) -> None:
    state, mps = home / "kubelet/plugins" / DRIVER / "state/claims", home / "mps/state"
    flags = {"sim": SIM, "mps_socket": str(home / "mps/agent.sock")}
    agent = start_agent(second if agent_first else first)
    old = start(source=sources[first], pod_uid="old", **flags)
    kubelet.wait_for_plugin(DRIVER)
    claims = [
        put(server, "gpu-0", name="by-turns", configs=(LONG,)),
        put(server, "gpu-1", name="by-mps", configs=(MPS,)),
    ]
    prepared = kubelet.prepare(claims)
    records = documents(state, "ClaimRecord")
    assert [record.get("colours") for record in records] == [
        [GREEN[first]] if GREEN[first] else None
    ] * 2

    new = start(source=sources[second], pod_uid="new", **flags)
    kubelet.wait_for_plugin(DRIVER, 2)
    end(old)
    end(agent)
    start_agent(second)
    kubelet.forget()

    assert kubelet.prepare(claims) == prepared
    assert not list(state.rglob("*.unreadable"))
    (served,) = MpsAgentClient(home / "mps/agent.sock").status().servers
    assert (served.ready, served.restarts, len(served.namespaces)) == (True, 0, 1)
    kubelet.unprepare(claims)
    assert documents(state, "ClaimRecord") == []
    eventually(lambda: documents(mps, "ServerState") == [], "the server to end", SECONDS)
    assert new.poll() is None
