"""Daemons of a simulated host are started, asked and stopped, and leave nothing behind."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dra_driver.errors import NodeError, TimedOut
from dra_driver.model.mps import Allowance, MpsClient, SpaceName
from dra_driver.node.commands import run
from dra_driver.node.mps.processes import DaemonProcesses
from dra_driver.node.sim.mps_client import main as client
from tests.fakes.daemon_host import BRIEF, GIB, DaemonHost

pytestmark = pytest.mark.skipif(
    subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode != 0,
    reason="mounting is not permitted here",
)
both = pytest.mark.parametrize("protocol", [2, 3])
GONE = 4_194_303  # no process has the last number there is


@pytest.fixture
def protocol():
    return 3


@pytest.fixture
def host(protocol):
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        made = DaemonHost(Path(directory), protocol)
        yield made
        made.close()


@pytest.fixture
def daemons(host):
    return host.daemons()


def eventually(condition) -> bool:
    """Whether it comes true in five seconds."""
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def control(daemon) -> int:
    processes = DaemonProcesses()
    found = processes.control(processes.of(daemon.token))
    assert found is not None
    return found.pid


@both
def test_the_newest_protocol_is_told_by_the_driver(daemons, protocol):
    assert daemons.protocol() == protocol == daemons.protocol()


def test_a_new_driver_without_all_that_is_needed_speaks_protocol_2(host, daemons):
    host.change(mps="protocol-2")
    assert daemons.protocol() == 2


def test_another_driver_is_asked_anew(host, daemons):
    assert daemons.protocol() == 3
    host.change(driver_version="580.95.05", cuda_version="13.0")
    assert daemons.protocol() == 2


def test_a_driver_without_mps_is_said_to_have_none(host, daemons):
    host.change(mps="missing")
    with pytest.raises(
        NodeError, match=r"has no nvidia-cuda-mps-control: install the whole driver"
    ):
        daemons.protocol()


@both
def test_what_is_started_runs_is_ready_and_is_stopped_without_a_trace(host, daemons):
    daemon = host.daemon()
    assert not daemons.is_running(daemon)

    found = daemons.start(daemon, [host.space(0), host.space(1)])

    assert found.keys() == {host.space(0).name, host.space(1).name}
    assert all(os.path.exists(f"{directory}/control") for directory in found.values())
    assert daemons.is_running(daemon)
    assert daemons.look(daemon).ready
    daemons.stop(daemon)
    assert not daemons.is_running(daemon)
    assert host.left() == []
    daemons.stop(daemon)


def test_spaces_of_protocol_3_have_their_own_directory_and_limits(host, daemons):
    daemon = host.daemon()
    limited, free = host.space(0, 5 * GIB, 70), host.space(1, percent=100)

    found = daemons.start(daemon, [limited, free])

    assert found[limited.name] == f"{daemon.pipe}/gpu/{limited.name}"
    assert daemons.look(daemon).spaces == {
        limited.name: Allowance(70, 5 * GIB),
        free.name: Allowance(100),
    }


@pytest.mark.parametrize("protocol", [2])
def test_spaces_of_protocol_2_share_one_place_and_its_limits(host, daemons):
    daemon = host.daemon(gpus=2, most=Allowance(50, 5 * GIB))

    found = daemons.start(daemon, [host.space(0), host.space(1)])

    assert set(found.values()) == {daemon.pipe}
    assert os.path.ismount(daemon.shm)
    pid = host.attach(daemon, daemon.pipe)
    questions = "get_default_device_pinned_mem_limit 1\nget_default_active_thread_percentage\n"
    limits = host.ask(daemon, stdin=questions)
    assert limits.split() == ["5G", "50.0"]
    assert daemons.look(daemon).clients == (MpsClient(pid),)


@pytest.mark.parametrize("protocol", [2])
def test_a_daemon_of_protocol_2_has_shared_memory_of_its_own(host, daemons):
    daemon = host.daemon()
    daemons.start(daemon, [])
    inside = Path(f"/proc/{control(daemon)}/root/dev/shm")

    Path(daemon.shm, "probe").touch()
    assert (inside / "probe").exists()
    assert not Path("/dev/shm/probe").exists()


def test_a_space_is_added_and_is_the_same_when_it_is_added_again(host, daemons):
    daemon = host.daemon()
    daemons.start(daemon, [host.space(0)])
    space = host.space(1, 3 * GIB, 20)

    directory = daemons.add(daemon, space)

    assert directory == f"{daemon.pipe}/gpu/{space.name}" == daemons.add(daemon, space)
    assert daemons.look(daemon).spaces[space.name] == Allowance(20, 3 * GIB)


def test_a_space_is_added_in_two_runs_of_the_program(host):
    ran = []

    def counted(command, seconds):
        ran.append(command.args)
        return run(command, seconds)

    daemons = host.daemons(run=counted)
    daemon = host.daemon()
    daemons.start(daemon, [])
    ran.clear()
    daemons.add(daemon, host.space(1))

    assert [args[:2] for args in ran] == [("namespace", "create"), ("namespace", "set")]


@pytest.mark.parametrize("other", [{"percent": 31}, {"memory": 2 * GIB}])
def test_a_space_with_other_limits_under_the_same_name_is_refused(host, daemons, other):
    daemon = host.daemon()
    daemons.start(daemon, [host.space(1, 3 * GIB)])

    with pytest.raises(NodeError, match="has other limits already"):
        daemons.add(daemon, host.space(1, **{"memory": 3 * GIB, **other}))
    assert daemons.look(daemon).spaces == {host.space(1).name: Allowance(30, 3 * GIB)}


def test_a_space_that_a_crash_left_without_limits_gets_them(host, daemons):
    daemon = host.daemon()
    daemons.start(daemon, [])
    space = host.space(1, 3 * GIB)
    host.ask(daemon, "namespace", "create", space.name, "--server=gpu")

    daemons.add(daemon, space)

    assert daemons.look(daemon).spaces == {space.name: Allowance(30, 3 * GIB)}


def test_a_space_whose_limits_are_refused_is_not_left_without(host, daemons):
    daemon = host.daemon()
    daemons.start(daemon, [])

    with pytest.raises(NodeError, match="namespace set"):
        daemons.add(daemon, host.space(1, percent=101))
    assert daemons.look(daemon).spaces == {}


@pytest.mark.parametrize("protocol", [2])
@pytest.mark.parametrize("other", [{"percent": 51}, {"memory": None}, {"memory": 6 * GIB}])
def test_a_daemon_of_protocol_2_takes_what_is_within_its_limits(host, daemons, other):
    daemon = host.daemon(most=Allowance(50, 5 * GIB))
    daemons.start(daemon, [])

    assert daemons.add(daemon, host.space(1, 5 * GIB, 50)) == daemon.pipe
    with pytest.raises(NodeError, match="has other limits already"):
        daemons.add(daemon, host.space(1, **{"memory": 5 * GIB, **other}))


@both
def test_a_space_is_removed_with_its_clients_and_what_is_unknown_is_fine(host, daemons, protocol):
    daemon, space = host.daemon(), host.space(1)
    directory = daemons.start(daemon, [space])[space.name]
    host.attach(daemon, directory)

    for _ in range(2):
        daemons.remove(daemon, space.name)
    daemons.remove(daemon, SpaceName("c_never"))

    assert daemons.look(daemon).spaces == {}
    if protocol == 3:
        assert daemons.look(daemon).clients == ()
    daemons.stop(daemon)
    daemons.remove(daemon, space.name)


@both
def test_clients_are_seen_and_taken_off_and_those_that_are_gone_are_fine(host, daemons, protocol):
    daemon, space = host.daemon(), host.space(1)
    directory = daemons.start(daemon, [space])[space.name]
    pids = sorted(host.attach(daemon, directory) for _ in range(2))
    stranger = host.program(daemon, directory)
    name = space.name if protocol == 3 else None
    assert daemons.look(daemon).clients == tuple(MpsClient(pid, name) for pid in pids)

    daemons.terminate(daemon, [*pids, stranger, GONE])

    assert daemons.look(daemon).clients == ()


@both
def test_a_client_that_cannot_be_taken_off_is_said_to_be_wedged(host, daemons):
    daemon, space = host.daemon(), host.space(1)
    directory = daemons.start(daemon, [space])[space.name]
    pid = host.attach(daemon, directory)
    assert client(["wedge", str(pid)]) == 0

    with pytest.raises(TimedOut):
        host.daemons(BRIEF).terminate(daemon, [pid])


@both
def test_a_daemon_that_does_not_answer_is_timed_out_and_stopped_all_the_same(host, daemons):
    daemon = host.daemon()
    daemons.start(daemon, [])
    os.kill(control(daemon), signal.SIGSTOP)
    brief = host.daemons(BRIEF)

    with pytest.raises(TimedOut):
        brief.look(daemon)
    assert brief.is_running(daemon)
    brief.stop(daemon)
    assert host.left() == []


@both
def test_another_process_finds_what_runs_and_goes_on_with_it(host, daemons, protocol):
    daemon = host.daemon()
    daemons.start(daemon, [host.space(0)])
    successor = host.daemons()

    assert successor.is_running(daemon)
    directory = successor.add(daemon, host.space(1))
    assert os.path.exists(f"{directory}/control")
    assert len(successor.look(daemon).spaces) == (2 if protocol == 3 else 0)
    successor.stop(daemon)
    assert not daemons.is_running(daemon)
    assert host.left() == []


@both
def test_a_daemon_that_was_killed_is_seen_to_be_and_what_it_left_is_cleaned_up(host, daemons):
    daemon = host.daemon()
    daemons.start(daemon, [host.space(0)])
    os.kill(control(daemon), signal.SIGKILL)

    assert eventually(lambda: not daemons.is_running(daemon))
    brief = host.daemons(BRIEF)
    with pytest.raises(NodeError):
        brief.look(daemon)
    brief.stop(daemon)
    assert host.left() == []


@both
@pytest.mark.parametrize("how", ["killed", "deaf", "well"])
def test_one_that_is_started_again_is_where_containers_have_it(host, daemons, protocol, how):
    daemon, space = host.daemon(), host.space(0, 3 * GIB)
    (directory,) = daemons.start(daemon, [space]).values()
    mounted = [os.stat(directory).st_ino, os.stat(daemon.directory).st_ino]
    mounted += [os.stat(daemon.shm).st_ino, os.stat(daemon.shm).st_dev] if protocol == 2 else []
    before = control(daemon)
    if how != "well":
        os.kill(before, signal.SIGKILL if how == "killed" else signal.SIGSTOP)

    assert [*daemons.start(daemon, [space]).values()] == [directory]

    again = [os.stat(directory).st_ino, os.stat(daemon.directory).st_ino]
    again += [os.stat(daemon.shm).st_ino, os.stat(daemon.shm).st_dev] if protocol == 2 else []
    assert mounted == again
    assert control(daemon) != before
    assert daemons.look(daemon).ready
    host.attach(daemon, directory)
    daemons.stop(daemon)
    assert host.left() == []


@both
@pytest.mark.parametrize(
    ("how", "said"), [("fails", "always fails"), ("hangs", "into the background")]
)
def test_a_daemon_that_does_not_start_says_why_and_leaves_nothing(host, how, said):
    host.change(mps=how)
    with pytest.raises(NodeError, match=rf"MPS server s[0-9a-f]+ does not start: (.|\n)*{said}"):
        host.daemons(BRIEF).start(host.daemon(), [host.space(0)])
    assert host.left() == []


@both
def test_a_daemon_that_dies_once_it_is_up_does_not_start_or_is_seen_to_be_dead(host, daemons):
    host.change(mps="dies")
    daemon = host.daemon()
    try:
        daemons.start(daemon, [])
    except NodeError as error:
        assert "always dies" in str(error)
    else:
        assert eventually(lambda: not daemons.is_running(daemon))
        daemons.stop(daemon)
    assert host.left() == []


def test_a_server_over_a_gpu_that_is_gone_is_said_to_be(host):
    daemon = host.daemon()
    host.change(gpu=0, present=False)

    with pytest.raises(NodeError, match=r"it has no server: is its GPU there(.|\n)*no such device"):
        host.daemons(replace(BRIEF, start=5.0, ask=3.0)).start(daemon, [host.space(0)])
    assert host.left() == []


def test_a_server_whose_gpu_goes_is_not_ready(host, daemons):
    daemon = host.daemon()
    daemons.start(daemon, [])
    host.change(gpu=0, present=False)
    servers = [pid for pid in host.processes() if pid != control(daemon)]
    for pid in servers:
        os.kill(pid, signal.SIGKILL)

    assert eventually(lambda: not daemons.look(daemon).ready)
    assert "is its GPU there" in daemons.look(daemon).state


def test_a_daemon_of_somebody_else_is_told_of_and_left_alone(host, daemons):
    ours, other = host.daemon(), host.daemon(gpus=2)
    for daemon in (ours, other):
        daemons.start(daemon, [])
    found = [one for one in daemons.foreign([ours.token]) if host.mps_dir in one]

    assert found == [
        f"nvidia-cuda-mps-control (process {control(other)}, pipe directory {other.pipe})"
    ]
    daemons.stop(ours)
    assert daemons.is_running(other)


PROGRAM = """
import sys
from pathlib import Path
from dra_driver.node.mps.daemons import Daemon
from tests.fakes.daemon_host import DaemonHost
host = DaemonHost(Path(sys.argv[1]), int(sys.argv[2]))
daemon = Daemon(sys.argv[3], host.gpus[:1], host.protocol, sys.argv[4], sys.argv[5])
daemons = host.daemons()
daemons.protocol()
print(flush=True)
daemons.start(daemon, [host.space(0)])
daemons.add(daemon, host.space(1))
print("started", flush=True)
"""


@both
@pytest.mark.parametrize("after_ms", [0, 10, 40, 160])
def test_whenever_who_starts_it_is_killed_nothing_is_left_once_it_is_stopped(
    host, protocol, after_ms
):
    daemon = host.daemon()
    arguments = [host.directory, protocol, daemon.name, daemon.directory, daemon.token]
    starter = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)], stdout=subprocess.PIPE
    )
    assert starter.stdout
    starter.stdout.readline()
    time.sleep(after_ms / 1000)
    starter.kill()
    starter.communicate()

    host.daemons().stop(daemon)

    assert host.left() == []
