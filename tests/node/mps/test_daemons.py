"""Daemons of a simulated host are started, asked and stopped, and leave nothing behind."""

import errno
import itertools
import multiprocessing
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dra_driver.base.errors import CommandFailed, MpsStateUnknown, NodeError, TimedOut
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.mps import MpsClient, MpsLimits, MpsNamespaceName, mps_server_name
from dra_driver.node.driver.commands import run_command
from dra_driver.node.mps.control import DaemonTimeouts
from dra_driver.node.mps.daemon import ControlDaemon
from dra_driver.node.mps.daemons import MpsDaemons
from dra_driver.node.mps.processes import DaemonProcesses
from dra_driver.sim.mig.identifiers import MigUuidParts, mig_uuid, uuid_tag
from dra_driver.sim.mps.client import main as client
from tests.fakes.daemon_host import BRIEF, GIB, PATIENT, DaemonHost, needs_mounts
from tests.node.mps.conftest import both, new_host, only_2
from tests.waiting import eventually

pytestmark = needs_mounts
GONE = 4_194_303  # no process has the last number there is


@dataclass
class Shared:
    """A daemon that runs, for tests that leave it running."""

    host: DaemonHost
    daemons: MpsDaemons
    daemon: ControlDaemon
    numbers: Iterator[int]

    def namespace(self, memory=None, percent=30):
        """One that no other test has."""
        return self.host.namespace(next(self.numbers), memory, percent)

    def add(self, namespace):
        return self.daemons.add_namespace(self.daemon, namespace)

    def limits(self, namespace):
        return self.daemons.check(self.daemon).namespaces.get(namespace.name)


@pytest.fixture(scope="module")
def running():
    """One of each protocol."""
    with new_host(2) as older, new_host(3) as newer:
        by_protocol = {}
        for host in (older, newer):
            daemon, daemons = host.daemon(default_limits=MpsLimits(50, 5 * GIB)), host.daemons()
            daemons.start(daemon, [])
            by_protocol[host.protocol] = Shared(host, daemons, daemon, itertools.count(10))
        yield by_protocol


@pytest.fixture
def shared(running, protocol):
    yield running[protocol]
    running[protocol].host.end_programs()


def control(daemon) -> int:
    processes = DaemonProcesses()
    process = processes.control(processes.of(daemon.token))
    assert process is not None
    return process.pid


@both
def test_the_driver_decides_which_protocol_is_the_newest(daemons, protocol):
    assert daemons.protocol() == protocol == daemons.protocol()


def test_a_new_driver_without_all_that_is_needed_speaks_protocol_2(other_host):
    other_host.change(mps="protocol-2")
    assert other_host.daemons().protocol() == 2


def test_the_protocol_is_that_of_the_driver_that_is_installed_now(other_host):
    daemons = other_host.daemons()
    assert daemons.protocol() == 3
    other_host.change(driver_version="580.95.05", cuda_version="13.0")
    assert daemons.protocol() == 2
    other_host.change(mps="missing")
    with pytest.raises(
        NodeError, match=r"has no nvidia-cuda-mps-control: install the whole driver"
    ):
        daemons.protocol()


def test_a_driver_that_cannot_be_asked_is_not_taken_for_an_older_one(other_host):
    """Which would have everything started again with the older protocol."""
    answers = iter(["no process is to be had"])

    def seldom(command, seconds):
        for problem in answers:
            raise NodeError(problem)
        return run_command(command, seconds)

    daemons = other_host.daemons(run=seldom)
    with pytest.raises(MpsStateUnknown, match="no process is to be had"):
        daemons.protocol()
    assert daemons.protocol() == 3


def test_a_program_that_goes_while_its_driver_stays_is_missed(other_host):
    daemons = other_host.daemons()
    assert daemons.protocol() == 3
    program = other_host.node.root / "usr/bin/nvidia-cuda-mps-control"
    program.rename(program.with_name("elsewhere"))
    with pytest.raises(NodeError, match="nvidia-cuda-mps-control"):
        daemons.protocol()


@both
def test_a_daemon_that_could_not_be_asked_is_no_daemon_that_answers_wrongly(shared):
    def cannot(command, seconds):
        raise NodeError("cannot run it: too many open files")

    def wrong(command, seconds):
        raise CommandFailed("it refuses", "it refuses")

    with pytest.raises(MpsStateUnknown, match="too many open files"):
        shared.host.daemons(run=cannot).check(shared.daemon)
    with pytest.raises(CommandFailed):
        shared.host.daemons(run=wrong).check(shared.daemon)


@both
def test_whoever_lives_in_a_directory_is_ended_without_knowing_its_token(host, daemons):
    daemon = host.daemon()
    daemons.start(daemon, [host.namespace(0)])
    unknown = replace(daemon, token="f" * 32, gpus=(), protocol=2)

    for _ in range(2):
        host.daemons().remove_orphan(unknown)

    assert host.left() == []


@both
def test_what_is_started_runs_is_ready_and_is_stopped_without_a_trace(host, daemons):
    daemon = host.daemon()
    assert not daemons.is_running(daemon)

    directories = daemons.start(daemon, [host.namespace(0), host.namespace(1)])

    assert directories.keys() == {host.namespace(0).name, host.namespace(1).name}
    assert all(os.path.exists(f"{directory}/control") for directory in directories.values())
    assert daemons.is_running(daemon)
    assert daemons.check(daemon).ready
    daemons.stop_and_remove(daemon)
    assert not daemons.is_running(daemon)
    assert host.left() == []
    daemons.stop_and_remove(daemon)


def test_namespaces_of_protocol_3_have_their_own_directory_and_limits(host, daemons):
    daemon = host.daemon()
    limited, free = host.namespace(0, 5 * GIB, 70), host.namespace(1, percent=100)

    directories = daemons.start(daemon, [limited, free])

    assert directories[limited.name] == f"{daemon.pipe}/gpu/{limited.name}"
    assert daemons.check(daemon).namespaces == {
        limited.name: MpsLimits(70, 5 * GIB),
        free.name: MpsLimits(100),
    }


@only_2
def test_namespaces_of_protocol_2_share_a_directory_limits_and_shared_memory(host, daemons):
    daemon = host.daemon(gpus=2, default_limits=MpsLimits(50, 5 * GIB))

    directories = daemons.start(daemon, [host.namespace(0), host.namespace(1)])

    assert set(directories.values()) == {daemon.pipe}
    assert os.path.ismount(daemon.shm)
    Path(daemon.shm, "probe").touch()
    assert Path(f"/proc/{control(daemon)}/root/dev/shm/probe").exists()
    assert not Path("/dev/shm/probe").exists()
    pid = host.attach(daemon, daemon.pipe)
    questions = "get_default_device_pinned_mem_limit 1\nget_default_active_thread_percentage\n"
    limits = host.ask(daemon, stdin=questions)
    assert limits.split() == ["5G", "50.0"]
    assert daemons.check(daemon).clients == (MpsClient(pid),)


def fill(directory: str, size: int) -> OSError:
    """What stops a tenant, who is not root, from writing more files of this size there."""
    os.setegid(65534)
    os.seteuid(65534)
    try:
        for number in itertools.count():
            with open(f"{directory}/of-{size}-bytes-{number}", "wb", buffering=0) as file:
                file.write(bytes(size))
    except OSError as e:
        return e
    finally:
        os.seteuid(0)
        os.setegid(0)
    raise AssertionError("there are infinitely many numbers")


@only_2
@pytest.mark.parametrize("size", [1 << 20, 0], ids=["memory", "files"])
def test_a_tenant_who_fills_the_shared_memory_of_a_server_harms_no_other_server(
    host, daemons, size
):
    full = host.daemon()
    gpus = host.gpus[1:]
    other = replace(full, name=mps_server_name(gpus), gpus=gpus, token=secrets.token_hex(16))
    other = replace(other, directory=f"{host.mps_dir}/{other.name}")
    host.tokens.append(other.token)
    for daemon in (full, other):
        daemons.start(daemon, [host.namespace()])
    before = host.attach(full, full.pipe)
    host.directory.chmod(0o755)  # a container has it mounted, and needs no right on what is above

    assert fill(full.shm, size).errno == errno.ENOSPC

    assert daemons.check(full).clients == (MpsClient(before),)  # who computes goes on
    after = host.attach(other, other.pipe)
    assert daemons.check(other).clients == (MpsClient(after),)
    Path(other.shm, "file").write_bytes(bytes(1 << 20))
    free = os.statvfs(other.shm)
    assert free.f_blocks * free.f_frsize == host.shared_memory_bytes
    daemons.stop_and_remove(full)  # and nothing of it is left
    assert not os.path.exists(full.directory)
    daemons.stop_and_remove(other)


def test_a_namespace_is_added_once_and_never_with_other_limits(shared):
    namespace = shared.namespace(3 * GIB, 20)

    directory = shared.add(namespace)

    assert directory == f"{shared.daemon.pipe}/gpu/{namespace.name}" == shared.add(namespace)
    for other in (replace(namespace, percent=31), replace(namespace, memory_bytes=(2 * GIB,))):
        with pytest.raises(NodeError, match="has other limits already"):
            shared.add(other)
    assert shared.limits(namespace) == MpsLimits(20, 3 * GIB)
    assert shared.daemons.is_there(directory)
    assert not shared.daemons.is_there(f"{directory}x")


def test_a_namespace_is_added_in_two_runs_of_the_program_and_limited_in_one(shared):
    ran = []

    def counted(command, seconds):
        ran.append(command.args[:2])
        return run_command(command, seconds)

    daemons = shared.host.daemons(run=counted)
    daemons.add_namespace(shared.daemon, shared.namespace())  # which finds out where they are
    namespace = shared.namespace()
    ran.clear()
    daemons.add_namespace(shared.daemon, namespace)

    assert ran == [("namespace", "create"), ("namespace", "set")]
    ran.clear()
    daemons.limit_namespace(shared.daemon, replace(namespace, percent=31))
    assert ran == [("namespace", "set")]


def test_limits_of_a_namespace_change_unless_a_client_is_in_there(shared):
    daemons, daemon, namespace = shared.daemons, shared.daemon, shared.namespace(3 * GIB)
    directory = shared.add(namespace)

    daemons.limit_namespace(daemon, replace(namespace, percent=20, memory_bytes=(2 * GIB,)))
    assert shared.limits(namespace) == MpsLimits(20, 2 * GIB)
    daemons.limit_namespace(daemon, replace(namespace, percent=40, memory_bytes=()))
    assert shared.limits(namespace) == MpsLimits(40, 2 * GIB)  # no command removes a memory limit
    pid = shared.host.attach(daemon, directory)
    with pytest.raises(NodeError, match="has active clients"):
        daemons.limit_namespace(daemon, namespace)

    daemons.terminate(daemon, [pid])
    daemons.limit_namespace(daemon, namespace)
    assert shared.limits(namespace) == MpsLimits(30, 3 * GIB)
    with pytest.raises(NodeError, match="does not exist"):
        daemons.limit_namespace(daemon, shared.namespace())


def test_a_namespace_that_a_crash_left_without_limits_gets_them(shared):
    namespace = shared.namespace(3 * GIB)
    shared.host.ask(shared.daemon, "namespace", "create", namespace.name, "--server=gpu")

    shared.add(namespace)

    assert shared.limits(namespace) == MpsLimits(30, 3 * GIB)


def test_a_namespace_whose_limits_are_refused_does_not_stay_without(shared):
    namespace = shared.namespace(percent=101)

    with pytest.raises(NodeError, match="namespace set"):
        shared.add(namespace)
    assert shared.limits(namespace) is None


@only_2
@pytest.mark.parametrize("other", [{"percent": 51}, {"memory": None}, {"memory": 6 * GIB}])
def test_a_daemon_of_protocol_2_takes_what_is_within_its_limits(shared, other):
    assert shared.add(shared.host.namespace(1, 5 * GIB, 50)) == shared.daemon.pipe
    with pytest.raises(NodeError, match="has other limits already"):
        shared.add(shared.host.namespace(1, **{"memory": 5 * GIB, **other}))


@both
def test_a_namespace_is_removed_with_its_clients_and_what_is_unknown_is_fine(
    host, daemons, protocol
):
    daemon, namespace = host.daemon(), host.namespace(1)
    directory = daemons.start(daemon, [namespace])[namespace.name]
    host.attach(daemon, directory)

    for _ in range(2):
        daemons.remove_namespace(daemon, namespace.name)
    daemons.remove_namespace(daemon, MpsNamespaceName("c_never"))

    assert daemons.check(daemon).namespaces == {}
    if protocol == 3:
        assert daemons.check(daemon).clients == ()
    daemons.stop_and_remove(daemon)
    daemons.remove_namespace(daemon, namespace.name)


@both
def test_clients_are_listed_and_ended_and_those_that_are_gone_are_ignored(shared, protocol):
    host, daemons, daemon = shared.host, shared.daemons, shared.daemon
    namespace = shared.namespace(GIB)
    directory = shared.add(namespace)
    pids = sorted(host.attach(daemon, directory) for _ in range(2))
    no_client = host.program(daemon, directory)
    name = namespace.name if protocol == 3 else None
    assert daemons.check(daemon).clients == tuple(MpsClient(pid, name) for pid in pids)

    daemons.terminate(daemon, [*pids, no_client, GONE])

    assert daemons.check(daemon).clients == ()


@both
def test_a_client_that_cannot_be_ended_times_out(host, daemons):
    daemon, namespace = host.daemon(), host.namespace(1)
    directory = daemons.start(daemon, [namespace])[namespace.name]
    pid = host.attach(daemon, directory)
    assert client(["wedge", str(pid)]) == 0

    with pytest.raises(TimedOut):
        host.daemons(BRIEF).terminate(daemon, [pid])


@both
@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGSTOP, TimedOut), (signal.SIGKILL, NodeError)]
)
def test_a_daemon_that_hangs_or_was_killed_is_an_error_and_leaves_nothing_once_it_is_stopped(
    host, daemons, number, error
):
    daemon = host.daemon()
    daemons.start(daemon, [host.namespace(0)])
    os.kill(control(daemon), number)
    brief = host.daemons(BRIEF)

    is_running = number == signal.SIGSTOP
    eventually(lambda: brief.is_running(daemon) is daemons.is_running(daemon) is is_running)
    with pytest.raises(error):
        brief.check(daemon)
    brief.stop_and_remove(daemon)
    assert host.left() == []


@both
def test_another_process_finds_what_runs_and_goes_on_with_it(host, daemons, protocol):
    daemon = host.daemon()
    daemons.start(daemon, [host.namespace(0)])
    successor = host.daemons()

    assert successor.is_running(daemon)
    directory = successor.add_namespace(daemon, host.namespace(1))
    assert os.path.exists(f"{directory}/control")
    assert len(successor.check(daemon).namespaces) == (2 if protocol == 3 else 0)
    successor.stop_and_remove(daemon)
    assert not daemons.is_running(daemon)
    assert host.left() == []


def mounted(daemon, directory):
    """What tells whether containers have the same directories as before."""
    paths = [directory, daemon.directory, *([daemon.shm] if daemon.protocol == 2 else [])]
    return [(os.stat(path).st_ino, os.stat(path).st_dev) for path in paths]


@both
@pytest.mark.parametrize("how", ["killed", "deaf", "well"])
def test_a_daemon_that_is_started_again_is_where_containers_have_it(host, daemons, how):
    daemon, namespace = host.daemon(), host.namespace(0, 3 * GIB)
    (directory,) = daemons.start(daemon, [namespace]).values()
    directories, pid = mounted(daemon, directory), control(daemon)
    if how != "well":
        os.kill(pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)

    assert [*daemons.start(daemon, [namespace]).values()] == [directory]

    assert mounted(daemon, directory) == directories
    assert control(daemon) != pid
    assert daemons.check(daemon).ready
    host.attach(daemon, directory)
    host.end_programs()  # for whom it would wait a second
    daemons.stop_and_remove(daemon)
    assert host.left() == []


@both
@pytest.mark.parametrize(
    ("how", "timeouts", "reason"),
    [
        ("fails", PATIENT, "always fails"),
        ("hangs", BRIEF, "into the background"),
        ("dies", DaemonTimeouts(settle=0.5), "always dies"),
    ],
)
def test_a_daemon_that_does_not_start_says_why_and_leaves_nothing(
    other_host, how, timeouts, reason
):
    host = other_host
    host.change(mps=how)
    with pytest.raises(NodeError, match=rf"MPS server s[0-9a-f]+ does not start: (.|\n)*{reason}"):
        host.daemons(timeouts).start(host.daemon(), [host.namespace(0)])
    assert host.left() == []


def test_clients_are_listed_whatever_one_of_them_calls_itself(other_host):
    host = other_host
    daemon, daemons = host.daemon(), host.daemons()
    namespace = host.namespace(0)
    directory = daemons.start(daemon, [namespace])[namespace.name]
    named = subprocess.Popen(
        ["x\nforged\nz,gpu,0,c_0,\npid,server,device,namespace,command\n", "-c", "echo; read end"],
        executable="/bin/sh",
        env={"CUDA_MPS_PIPE_DIRECTORY": directory},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    host.programs.append(named)
    assert named.stdout
    named.stdout.readline()
    assert client(["attach", str(named.pid)]) == 0
    other = host.attach(daemon, directory)
    assert "\nforged\n" in host.ask(daemon, "client", "list", "--format=csv,noheader")

    status = daemons.check(daemon)

    assert status.ready
    assert {client.pid for client in status.clients} == {named.pid, other}
    host.end_programs()
    daemons.stop_and_remove(daemon)


@both
def test_what_is_in_the_log_of_one_that_ran_before_is_for_the_administrator(other_host, caplog):
    """It may tell of clients of others than who has it started again."""
    host = other_host
    daemon, daemons = host.daemon(), host.daemons()
    daemons.start(daemon, [host.namespace(0)])
    daemons.kill(daemon)
    host.change(mps="fails")

    with pytest.raises(NodeError) as raised:
        daemons.start(daemon, [host.namespace(0)])

    assert "always fails" not in str(raised.value)
    assert "the log of the MPS agent has its last lines" in str(raised.value)
    (logged,) = (record.lines for record in caplog.records if hasattr(record, "lines"))
    assert any("always fails" in line for line in logged)
    daemons.stop_and_remove(daemon)


@both
def test_a_daemon_that_dies_before_it_was_asked_does_not_start_and_leaves_nothing(other_host):
    host = other_host
    host.change(mps="dies")
    daemon = host.daemon()

    processes = DaemonProcesses()

    def too_late(command, seconds):
        eventually(
            lambda: processes.control(processes.of(daemon.token)) is None, "the end of the daemon"
        )
        return run_command(command, seconds)

    with pytest.raises(NodeError, match=r"does not start: (.|\n)*always dies"):
        host.daemons(run=too_late).start(daemon, [])
    assert host.left() == []


def test_the_error_of_a_server_over_a_missing_gpu_says_so(other_host):
    host = other_host
    daemon = host.daemon()
    host.change(gpu=0, present=False)

    with pytest.raises(NodeError, match=r"it has no server: is its GPU there(.|\n)*no such device"):
        host.daemons(replace(PATIENT, appearance=0.3)).start(daemon, [host.namespace(0)])
    assert host.left() == []


def test_a_server_whose_gpu_goes_is_not_ready(other_host):
    host, daemons = other_host, other_host.daemons()
    daemon = host.daemon()
    daemons.start(daemon, [])
    host.change(gpu=0, present=False)
    servers = [pid for pid in host.processes() if pid != control(daemon)]
    for pid in servers:
        os.kill(pid, signal.SIGKILL)

    eventually(
        lambda: "is its GPU there" in daemons.check(daemon).state, "the question for its GPU"
    )
    assert not daemons.check(daemon).ready


def test_a_daemon_of_somebody_else_is_reported_and_left_alone(host, daemons):
    ours, other = host.daemon(), host.daemon(gpus=2)
    for daemon in (ours, other):
        daemons.start(daemon, [])
    lines = [line for line in daemons.unmanaged([ours.token]) if host.mps_dir in line]

    assert lines == [
        f"nvidia-cuda-mps-control (process {control(other)}, pipe directory {other.pipe})"
    ]
    daemons.stop_and_remove(ours)
    assert daemons.is_running(other)


@pytest.mark.parametrize(
    ("quits", "answer", "messages"),
    [
        pytest.param(True, "", [], id="it quits"),
        pytest.param(True, "Lost the connection to the MPS control daemon", [], id="it is gone"),
        pytest.param(False, "not now", ["an MPS daemon does not quit"], id="it does not quit"),
    ],
)
def test_a_daemon_that_is_asked_to_quit_ends_in_any_case(host, caplog, quits, answer, messages):
    """It may be gone before the program has its answer."""

    def run(command, seconds):
        is_quit = "-q" in command.args
        output = run_command(command, seconds) if quits or not is_quit else ""
        if is_quit and answer:
            raise NodeError(f"exit code 1: {answer}")
        return output

    caplog.set_level("INFO")
    daemon = host.daemon()
    host.daemons().start(daemon, [])
    host.daemons(BRIEF, run=run).stop_and_remove(daemon)

    assert host.left() == []
    assert caplog.messages == messages


def over_instance(host, gi):
    """A daemon over a 1g instance of the host's first GPU, and a namespace in it."""
    parts = MigUuidParts(minor=0, number=0, start=gi, gi=gi, ci=0, tag=uuid_tag(host.gpus[0]))
    gpus = (GpuUuid(mig_uuid(parts)),)
    name = mps_server_name(gpus)
    directory = f"{host.mps_dir}/{name}"
    daemon = host.daemon(default_limits=MpsLimits(50, 2 * GIB))
    daemon = replace(daemon, name=name, gpus=gpus, protocol=2, directory=directory)
    return daemon, replace(host.namespace(gi, memory=GIB), gpus=gpus)


@both
def test_instances_of_a_gpu_have_a_daemon_each_that_holds_nothing_once_it_is_stopped(host, daemons):
    """Of protocol 2, on a newer driver too."""
    (first, one), (second, two) = (over_instance(host, gi) for gi in (1, 2))
    host.attach(first, daemons.start(first, [one])[one.name])
    pid = host.attach(second, daemons.start(second, [two])[two.name])

    server = host.ask(second, stdin="get_server_list\n").strip()
    limit = host.ask(second, stdin=f"get_device_pinned_mem_limit {server} 0\n")
    assert limit.strip() in ("2G", "2048M", "2.00G")
    assert len(DaemonProcesses().of(first.token)) > 1  # itself, and its server
    daemons.stop_and_remove(first)  # while its client is there

    assert DaemonProcesses().of(first.token) == ()
    assert daemons.check(second).clients == (MpsClient(pid),)
    daemons.stop_and_remove(second)
    assert host.left() == []


def starts_it(host, daemon, tell):
    """What is killed in the middle of it."""
    daemons = host.daemons()
    daemons.protocol()
    os.write(tell, b"+")
    daemons.start(daemon, [host.namespace(0)])
    daemons.add_namespace(daemon, host.namespace(1))
    time.sleep(60)


@both
@pytest.mark.parametrize("after_ms", [0, 10, 40, 160])
def test_whenever_who_starts_it_is_killed_nothing_is_left_once_it_is_stopped(host, after_ms):
    daemon = host.daemon()
    reading, writing = os.pipe()
    starter = multiprocessing.get_context("fork").Process(
        target=starts_it, args=(host, daemon, writing)
    )
    starter.start()
    os.read(reading, 1)
    time.sleep(after_ms / 1000)
    starter.kill()
    starter.join()
    for end in (reading, writing):
        os.close(end)

    host.daemons().stop_and_remove(daemon)

    assert host.left() == []
