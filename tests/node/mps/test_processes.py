"""The processes of a daemon are found by their token, and exactly those are ended."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from uuid import uuid4

import pytest

from dra_driver.base.errors import MpsStateUnknown
from dra_driver.node.mps.processes import DaemonProcess, DaemonProcesses
from tests.waiting import eventually

TOKEN = uuid4().hex  # of this run alone: the processes of the whole machine are looked at
PARENT = (
    "import subprocess, sys, time; subprocess.Popen(['sleep', '60'], env={});"
    "print(flush=True); time.sleep(60)"
)


@pytest.fixture
def directory():
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


@pytest.fixture
def started():
    """Processes with a token that are gone after the test, with what they started."""
    children = []

    def start(*argv, token=TOKEN, **variables):
        env = {"DRA_DRIVER_MPS_TOKEN": token, "PATH": os.environ["PATH"], **variables}
        child = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, start_new_session=True)
        children.append(child)
        # A moment after its program has begun it has no environment yet.
        eventually(
            lambda: Path(f"/proc/{child.pid}/environ").read_bytes() != b"", "its environment"
        )
        return child

    yield start
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


def named(directory: Path, name="nvidia-cuda-mps-control") -> str:
    """A program of that name that stays."""
    program = directory / name
    program.write_text(f"#!{sys.executable}\nimport time\nprint(flush=True)\ntime.sleep(60)\n")
    program.chmod(0o755)
    return str(program)


def test_what_a_daemon_has_started_is_its_own_whatever_its_environment(started):
    parent = started(sys.executable, "-c", PARENT)
    parent.stdout.readline()
    processes = DaemonProcesses()
    daemon_processes = processes.of(TOKEN)

    assert len(daemon_processes) == 2
    assert processes.end(daemon_processes, signal.SIGKILL, 5)


@pytest.mark.parametrize("name", ["nvidia-cuda-mps-control", "nvidia-cuda-mps-server"])
def test_the_control_daemon_is_known_by_its_program(started, directory, name):
    started("sleep", "60")
    program = started(named(directory, name), "-d")
    program.stdout.readline()
    processes = DaemonProcesses()

    control = processes.control(processes.of(TOKEN))
    assert (control and control.pid) == (program.pid if name.endswith("control") else None)


def test_exactly_those_are_ended_and_waited_for(started):
    ours = started("sleep", "60")
    others = [started("sleep", "60", token=token) for token in ("b" * 32, TOKEN + "a")]
    processes = DaemonProcesses()

    assert [process.pid for process in processes.of(TOKEN)] == [ours.pid]
    assert processes.end(processes.of(TOKEN), signal.SIGTERM, 60)
    assert ours.wait(60) == -signal.SIGTERM
    assert [other.poll() for other in others] == [None, None]


def test_a_process_that_ignores_the_signal_is_still_there(started):
    deaf = started("sh", "-c", "trap '' TERM; echo; while :; do sleep 0.05; done")
    deaf.stdout.readline()
    processes = DaemonProcesses()
    remaining = [process for process in processes.of(TOKEN) if process.pid == deaf.pid]

    assert not processes.end(remaining, signal.SIGTERM, 0.1)
    assert processes.end(remaining, signal.SIGKILL, 5)


def test_a_number_that_another_process_has_by_now_is_left_alone(started):
    child = started("sleep", "60")
    processes = DaemonProcesses()
    (process,) = processes.of(TOKEN)
    earlier = DaemonProcess(process.pid, process.started - 1)

    assert not processes.is_alive(earlier)
    assert processes.end([earlier], signal.SIGKILL, 1)
    time.sleep(0.05)
    assert child.poll() is None


def test_one_that_ended_and_was_not_waited_for_is_gone(started):
    child = started("sleep", "60")
    processes = DaemonProcesses()
    (process,) = processes.of(TOKEN)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie from here on

    assert not processes.is_alive(process)
    assert processes.of(TOKEN) == ()
    assert not processes.exists(child.pid)


def test_a_control_daemon_without_our_token_is_unmanaged(started, directory):
    program = named(directory)
    child = started(program, "-d", CUDA_MPS_PIPE_DIRECTORY="/tmp/somebody")
    usual = started(program, "-f", token="")
    asking = started(program, "namespace", "list", token="")  # no daemon
    for process in (child, usual, asking):
        process.stdout.readline()

    unmanaged = DaemonProcesses().unmanaged(frozenset())
    directories = {daemon.pid: daemon.pipe_directory for daemon in unmanaged}
    assert (directories[child.pid], directories[usual.pid]) == ("/tmp/somebody", "/tmp/nvidia-mps")
    assert asking.pid not in directories
    unmanaged = DaemonProcesses().unmanaged(frozenset({TOKEN}))
    assert child.pid not in {daemon.pid for daemon in unmanaged}


def test_who_lives_in_a_directory_has_any_token_and_its_pipe_directory_in_there(started):
    """A tenant's program has the pipe directory, too, and no token."""
    inside = [
        started("sleep", "60", token=token, CUDA_MPS_PIPE_DIRECTORY=path)
        for token, path in ((TOKEN, "/m/s1/pipe"), ("b" * 32, "/m/s1/pipe/gpu"), ("c", "/m/s1"))
    ]
    started("sleep", "60", CUDA_MPS_PIPE_DIRECTORY="/m/s10/pipe")
    started("sleep", "60", CUDA_MPS_PIPE_DIRECTORY="/n/m/s1/pipe")
    tenant = subprocess.Popen(["sleep", "60"], env={"CUDA_MPS_PIPE_DIRECTORY": "/m/s1/pipe"})
    try:
        processes = DaemonProcesses().living_in("/m/s1")
    finally:
        tenant.kill()
        tenant.wait()

    assert sorted(process.pid for process in processes) == sorted(process.pid for process in inside)


def test_processes_that_cannot_be_looked_at_are_not_taken_for_gone(started):
    child = started("sleep", "60")
    processes = DaemonProcesses()
    (running,) = processes.of(TOKEN)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        with pytest.raises(MpsStateUnknown):
            processes.is_alive(running)
        with pytest.raises(MpsStateUnknown):
            processes.of(TOKEN)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    assert child.poll() is None
    assert processes.is_alive(running)


def test_all_that_is_found_is_ended_and_what_stays_is_returned(started):
    child = started("sleep", "60")
    processes = DaemonProcesses()

    assert processes.end_all(lambda: processes.of(TOKEN), signal.SIGCONT, 0.0)
    assert child.poll() is None
    assert processes.end_all(lambda: processes.of(TOKEN), signal.SIGKILL, 5.0) == ()
