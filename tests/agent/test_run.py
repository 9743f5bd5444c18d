"""The whole agent as a process, on a simulated node."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from dra_driver.agent.run import run_concurrently
from dra_driver.base.errors import MpsAgentUnreachable, NodeError
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.mps import mps_server_name
from dra_driver.node.mps.agent_client import MpsAgentClient
from tests.agent.conftest import namespace
from tests.driver_process import DriverProcess
from tests.fakes.daemon_host import needs_mounts
from tests.waiting import eventually

GPU = GpuUuid("GPU-ee8fd3e5-3216-5b3f-99a8-7b77d545fca3")
SECONDS = 90.0  # on whatever machine; that it ends in 5 s, test_hangs of the plugin sees


@pytest.fixture
def start(mps_dir):
    """Starts agents; in the end nothing of them is left."""
    started = []

    def run(**flags):
        flags = {"sim": "h100x2-615", "mps-dir": str(mps_dir), **flags}
        process = DriverProcess(
            "mps-agent",
            *(f"--{name.replace('_', '-')}={value}" for name, value in flags.items()),
            errors=subprocess.PIPE,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait(SECONDS)
        if process.stderr is not None:
            process.stderr.close()
    for pid in daemons(mps_dir):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def daemons(mps_dir):
    """The processes of daemons in that directory."""
    pids = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            text = environ.read_bytes()
        except OSError:
            continue
        if b"DRA_DRIVER_MPS_TOKEN=" in text and os.fsencode(mps_dir) in text:
            pids.append(int(environ.parent.name))
    return pids


def when_it_answers(mps_dir):
    agent = MpsAgentClient(mps_dir / "agent.sock")

    def answers():
        with suppress(MpsAgentUnreachable):
            return agent.status()

    eventually(answers, "an answer of the agent", SECONDS)
    return agent


def ended(process):
    """Its exit code, and what it said."""
    output = process.communicate(timeout=SECONDS)[1].decode()
    return process.returncode, output


def test_daemons_outlive_an_agent_and_the_next_one_finds_them(start, mps_dir):
    first = start()
    agent = when_it_answers(mps_dir)
    served = agent.serve(namespace("c_1", GPU, percent=30, mib=1024))
    assert Path(served.pipe_directory, "control").is_socket()
    running = daemons(mps_dir)
    assert running

    first.terminate()
    assert ended(first)[0] == 0
    assert daemons(mps_dir) == running
    assert not (mps_dir / "agent.sock").exists()

    second = start()
    agent = when_it_answers(mps_dir)
    assert tuple(agent.status().namespaces()) == (served,)
    assert agent.status().incidents == ()
    second.kill()  # at any time
    second.wait(SECONDS)

    start()
    agent = when_it_answers(mps_dir)
    agent.release("c_1")
    assert daemons(mps_dir) == []
    assert not (mps_dir / mps_server_name([GPU])).exists()


def test_a_directory_that_is_too_long_for_sockets_is_refused(start, mps_dir):
    code, output = ended(start(**{"mps-dir": str(mps_dir / ("x" * 60))}))

    assert code == 2
    assert "too long for sockets" in output


def test_it_tells_how_it_is_over_http(start, mps_dir):
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    start(http_address=address)
    when_it_answers(mps_dir)

    def get(path):
        with urllib.request.urlopen(f"http://{address}/{path}", timeout=SECONDS) as answer:
            return answer.read().decode()

    def says(path, text):
        with suppress(urllib.error.HTTPError):  # until its loop runs, and has checked the servers
            return text in get(path)

    eventually(lambda: says("livez", "ok"))
    eventually(lambda: says("readyz", "[+] socket: ok"))
    assert "dra_driver_mps_restarts_total 0.0" in get("metrics")


def test_a_process_without_an_address_has_no_server_for_it():
    """What it does not need it does not import."""
    heavy = ("prometheus_client", "http.server", "kubernetes", "grpc", "pynvml", "yaml")
    check = (
        "import sys, dra_driver.__main__, dra_driver.agent.run; "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, timeout=SECONDS, check=True
    )

    assert ran.stdout == "[]\n"


def test_a_call_that_hangs_is_not_waited_for_and_others_are():
    never, second, ended = threading.Event(), threading.Event(), []

    def quick():
        time.sleep(0.02)
        ended.append("quick")

    run_concurrently([quick, quick], SECONDS)
    assert ended == ["quick", "quick"]
    run_concurrently([lambda: ended.append(str(never.wait(SECONDS))), second.set], seconds=0.05)

    assert second.wait(SECONDS)
    assert ended == ["quick", "quick"]
    never.set()


@needs_mounts
@pytest.mark.parametrize("driver", ["580.95.05", "615.71.09"])
def test_an_agent_that_is_ended_while_it_starts_a_daemon_ends_and_the_next_clears_up(
    start, mps_dir, driver
):
    node = mps_dir / "node.yaml"
    gpus = "gpus: [{product: H100-80-SXM, bus_id: '0000:1b:00.0'}]"
    cuda = "13.0" if driver.startswith("580") else "13.4"
    text = f"driver_version: '{driver}'\ncuda_version: '{cuda}'\n{gpus}\n"
    node.write_text(f"{text}mps: hangs\n")
    first = start(sim=str(node))
    agent = when_it_answers(mps_dir)

    def ask():
        with suppress(NodeError):
            agent.serve(namespace("c_1", GPU))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    eventually(lambda: daemons(mps_dir))

    first.terminate()
    assert ended(first)[0] == 0
    asking.join(SECONDS)

    node.write_text(text)
    start(sim=str(node))
    agent = when_it_answers(mps_dir)
    eventually(lambda: not agent.status().servers and not daemons(mps_dir))
    assert not (mps_dir / mps_server_name([GPU])).exists()
