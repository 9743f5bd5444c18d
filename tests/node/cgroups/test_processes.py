"""A process is known from all others, and a signal reaches that one or none."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dra_driver.base.errors import NodeError
from dra_driver.k8s.claims import PodUid
from dra_driver.node.cgroups.processes import ContainerProcesses
from tests.fakes.open_files import no_more_files
from tests.fakes.processes import CONTAINER, Proc

POD = PodUid("5b6ffb0e-5d6a-4a3b-9e0b-9c1e8d7a0001")


@pytest.fixture
def proc(tmp_path):
    return Proc(tmp_path / "proc")


@pytest.fixture
def processes(proc):
    return ContainerProcesses(proc.path)


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that everybody can read."""
    with tempfile.TemporaryDirectory() as made:
        os.chmod(made, 0o755)
        yield Path(made)


@pytest.fixture
def child():
    """A process that sleeps until it is ended."""
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield started
    started.kill()
    started.wait(10)


def find(processes, pid):
    """The process, which is there."""
    process = processes.find(pid)
    assert process is not None
    return process


def test_a_process_is_known_by_its_number_its_start_and_its_container(proc, processes, child):
    proc.put(child.pid, POD)
    process = find(processes, child.pid)

    assert (process.pid, process.pod, process.container) == (child.pid, POD, CONTAINER)


def test_when_it_started_is_told_in_ticks_since_boot(proc, processes, child):
    proc.put(child.pid, POD)

    assert find(processes, child.pid).started <= processes.now()
    assert processes.now() - find(processes, child.pid).started < 100 * 60


def test_the_name_of_a_program_can_hold_anything(proc, processes):
    proc.write(4242, POD, name="a) R 1 (b", started=77)

    assert find(processes, 4242).started == 77


@pytest.mark.parametrize(
    "cgroup",
    [
        pytest.param("0::/system.slice/cron.service\n", id="a process of the host"),
        pytest.param("0::/\n", id="a thread of the kernel"),
        pytest.param(f"0::/kubepods.slice/kubepods-pod{POD}.slice\n", id="in no container"),
    ],
)
def test_what_is_in_no_container_of_a_pod_is_nobody(proc, processes, cgroup):
    assert processes.find(4242) is None, "it is not there yet"
    proc.write(4242, POD, cgroup=cgroup)
    assert processes.find(4242) is None


def test_a_process_that_cannot_be_looked_at_now_is_an_error_and_not_gone(proc, processes, child):
    """So the guard knows that it saw nothing of a GPU, and its clocks go on."""
    proc.put(child.pid, POD)
    process = find(processes, child.pid)
    (proc.path / str(child.pid) / "cgroup").unlink()
    (proc.path / str(child.pid) / "cgroup").mkdir()  # reading it is an error

    with pytest.raises(NodeError, match="cannot be looked at now"):
        processes.find(child.pid)
    with pytest.raises(NodeError, match="cannot be looked at now"):
        processes.signal(process, signal.SIGKILL)
    with no_more_files(), pytest.raises(NodeError, match="Too many open files"):
        processes.find(child.pid)
    assert child.poll() is None


def test_neither_the_first_process_nor_this_one_is_ever_found(proc, processes):
    for pid in (1, os.getpid()):
        proc.write(pid, POD)

    assert [processes.find(pid) for pid in (1, os.getpid(), 0)] == [None] * 3


def test_a_signal_reaches_the_process(proc, processes, child):
    proc.put(child.pid, POD)

    assert processes.signal(find(processes, child.pid), signal.SIGTERM)
    assert child.wait(10) == -signal.SIGTERM


@pytest.mark.parametrize("changed", [{"started": 1}, {"container": "0" * 64}, {"pod": "other"}])
def test_a_process_that_is_another_one_by_now_is_not_signalled(proc, processes, child, changed):
    proc.put(child.pid, POD)
    looked_at = replace(find(processes, child.pid), **changed)

    assert not processes.signal(looked_at, signal.SIGKILL)
    time.sleep(0.05)
    assert child.poll() is None


def test_a_process_that_ended_meanwhile_is_not_signalled(proc, processes, child):
    proc.put(child.pid, POD)
    process = find(processes, child.pid)
    child.kill()
    child.wait(10)

    assert not processes.signal(process, signal.SIGKILL)


def test_a_number_that_was_given_to_another_process_is_not_signalled(proc, processes, child):
    """A real one: the kernel is asked to give the number of a process that ended once more."""
    proc.put(child.pid, POD)
    ended = find(processes, child.pid)
    child.kill()
    child.wait(10)
    time.sleep(2 / os.sysconf("SC_CLK_TCK"))  # a start time is told in ticks
    heir = started_as(child.pid)
    try:
        assert find(processes, heir.pid).pid == ended.pid

        assert not processes.signal(ended, signal.SIGKILL)
        time.sleep(0.05)
        assert heir.poll() is None
        assert processes.signal(find(processes, heir.pid), signal.SIGKILL)
    finally:
        heir.kill()
        heir.wait(10)


def started_as(pid: int) -> subprocess.Popen[bytes]:
    """A process that sleeps, with that number."""
    last = Path("/proc/sys/kernel/ns_last_pid")
    for _ in range(50):
        try:
            last.write_text(str(pid - 1))
        except OSError as error:
            pytest.skip(f"the number of the next process cannot be chosen here: {error}")
        started = subprocess.Popen(["sleep", "60"])
        if started.pid == pid:
            return started
        started.kill()
        started.wait(10)
    pytest.skip("others took the number of the next process, again and again")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_process_that_may_not_be_signalled_is_an_error_that_says_so(public):
    proc = Proc(public / "proc")
    foreign = subprocess.Popen(["sleep", "60"])
    proc.put(foreign.pid, POD)
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from dra_driver.node.cgroups.processes import ContainerProcesses\n"
        "processes = ContainerProcesses(Path(sys.argv[1]))\n"
        "process = processes.find(int(sys.argv[2]))\n"
        "os.setuid(65534)\n"
        "processes.signal(process, signal.SIGTERM)\n"
    )
    try:
        ran = subprocess.run(
            [sys.executable, "-c", program, proc.path, str(foreign.pid)],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        assert "NodeError" in ran.stderr
        assert "CAP_KILL" in ran.stderr
        assert foreign.poll() is None
    finally:
        foreign.kill()
        foreign.wait(10)


def test_a_number_that_is_no_process_is_an_error_not_a_signal(proc, processes):
    """The thread of a process has a number too."""
    with pytest.raises(NodeError, match="cannot be signalled"):
        processes.signal(proc.process(-5, POD), signal.SIGKILL)


@pytest.mark.parametrize(
    ("name", "own_pid", "sees"),
    [
        pytest.param("pause", 2, False, id="in the process namespace of a pod"),
        pytest.param("systemd", 2, True, id="in that of the host"),
        pytest.param("dra-driver", 1, False, id="as the first process of a container"),
        pytest.param("dra-driver", 2, True, id="beside a first process of that name"),
    ],
)
def test_other_pods_are_seen_from_the_namespace_of_the_host_alone(proc, name, own_pid, sees):
    proc.write(1, POD, name=name)
    assert ContainerProcesses(proc.path, own_pid=lambda: own_pid).sees_pods() is sees
