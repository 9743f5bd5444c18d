"""The stand-in of MPS runs as the real one does: processes, files, clients, faults."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from dra_driver.node.mps.mounts import is_mounted, with_own_mounts
from dra_driver.sim.mps.client import NO_ANSWER, REFUSED, WITHOUT_MPS, read_program
from dra_driver.sim.mps.client import main as mps_client
from tests.fakes.mps import mps_host, run_client, shown
from tests.fakes.simulated import h100
from tests.waiting import eventually

NOBODY = 65534
CONFIG = """
schema_version = "1.0"
[servers.gpu]
allowed_devices = "{gpu}"
[servers.gpu.namespaces.default]
active_thread_percentage = "1"
[servers.gpu.namespaces.c_1]
active_thread_percentage = "30"
pinned_memory_limit = "20G"
[features.context-share]
enabled = false
"""


def document(**more):
    return {"driver_version": "615.71.09", "cuda_version": "13.4", "gpus": [h100("1b")], **more}


@pytest.fixture
def host():
    with mps_host(document()) as made:
        yield made


@pytest.fixture
def old():
    with mps_host(document(driver_version="580.95.05", cuda_version="13.0")) as made:
        yield made


@pytest.fixture
def three(host):
    """A daemon of protocol 3, with a namespace c_1 in its server."""
    host.start3()
    host.output("namespace", "create", "c_1", "--server=gpu")
    return host


def attach(pid, *more):
    return mps_client(["attach", str(pid), *more])


def rows(host, *command):
    return [line.split(",") for line in host.output(*command, "--format=csv,noheader")]


def test_a_daemon_of_protocol_3_starts_with_what_its_file_says(host):
    config = host.directory / "c.toml"
    config.write_text(CONFIG.format(gpu=host.gpus[0]))
    assert host.run("-p", "3", "-m", "-d", "-a", str(config)).returncode == 0
    host.wait_until_ready("gpu")

    where = f"{host.pipe}/gpu"
    assert rows(host, "namespace", "list", "--server=gpu") == [
        ["c_1", "gpu", "Ready", "20G", "30.00", "0", f"{where}/c_1"],
        ["default", "gpu", "Ready", "unlimited", "1.00", "0", f"{where}/default"],
    ]
    [[name, uid, pid, *columns]] = rows(host, "server", "list")
    assert (name, uid, columns) == ("gpu", "0", ["Ready", where, host.gpus[0], "-"])
    sockets = sorted(str(path.relative_to(host.pipe)) for path in host.pipe.rglob("control"))
    assert sockets == ["control", "gpu/c_1/control", "gpu/control", "gpu/default/control"]
    assert host.processes()[int(pid)] == "nvidia-cuda-mps-server"
    assert sorted(host.processes().values()) == [
        "nvidia-cuda-mps-control",
        "nvidia-cuda-mps-server",
    ]


def test_to_quit_leaves_nothing_running_and_forgets_everything(three):
    three.output("-q")
    eventually(lambda: not three.processes(), "the daemon is gone")
    assert list(three.pipe.iterdir()) == []
    assert three.refused("server", "list") == "Cannot find MPS control daemon process"
    assert three.run("-p", "3", "-m", "-d").returncode == 0
    assert three.output("server", "list", "--format=csv,noheader") == []


def test_a_daemon_that_is_ended_by_a_signal_tidies_up_and_a_killed_one_leaves_its_server(host):
    host.start3()
    [daemon] = [pid for pid, name in host.processes().items() if name.endswith("control")]
    os.kill(daemon, signal.SIGKILL)
    eventually(lambda: daemon not in host.processes(), "the daemon is gone")
    assert list(host.processes().values()) == ["nvidia-cuda-mps-server"]
    assert (host.pipe / "gpu/control").is_socket()
    assert attach(host.client(host.pipe / "gpu/default")) == WITHOUT_MPS

    host.start3()
    [daemon] = [pid for pid, name in host.processes().items() if name.endswith("control")]
    os.kill(daemon, signal.SIGTERM)
    eventually(lambda: daemon not in host.processes(), "the second daemon is gone")
    assert list(host.pipe.iterdir()) == []


def test_a_daemon_stays_in_the_foreground_if_that_is_asked_for(host):
    started = host.begin("-p", "3", "-m", "-f", stderr=subprocess.PIPE)
    eventually(lambda: host.run("server", "list").returncode == 0, "it answers")
    assert started.poll() is None
    assert [*host.processes()] == [started.pid]

    host.output("-q")

    assert started.communicate(timeout=10) == (None, "")
    assert started.returncode == 0
    assert "Error" not in (host.log / "control.log").read_text()


def test_a_second_daemon_in_the_same_directory_says_so_in_its_log(host):
    host.start3()
    assert host.run("-p", "3", "-m", "-d").returncode == 1
    assert "An instance of this daemon is already running" in (host.log / "control.log").read_text()
    assert rows(host, "server", "list")


def test_a_client_has_the_lower_of_its_namespace_and_its_environment(three, capsys):
    limits = ("--pinned-memory-limit=20G", "--active-thread-percentage=30", "--client-priority=1")
    three.output("namespace", "set", "c_1", "--server=gpu", *limits)
    pid = three.client(
        three.pipe / "gpu/c_1",
        CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="0=5G",
        CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="50",
    )
    assert attach(pid, "--memory", "5Gi") == 0

    assert shown(capsys, "show", pid) == {
        "pid": pid,
        "server": "gpu",
        "namespace": "c_1",
        "percent": 30,
        "priority": 1,
        "memory_bytes": 5 << 30,
        "memory_bytes_by_gpu": {three.gpus[0]: 5 << 30},
    }
    assert rows(three, "client", "list") == [[str(pid), "gpu", three.gpus[0], "c_1", "sleep"]]
    assert run_client(capsys, "attach", pid, "--memory", "6Gi") == (
        REFUSED,
        "CUDA_ERROR_OUT_OF_MEMORY\n",
    )


def test_while_a_namespace_has_clients_it_is_neither_changed_nor_deleted_unless_forced(three):
    pid = three.client(three.pipe / "gpu/c_1")
    assert attach(pid) == 0
    for command in (
        ("namespace", "set", "c_1", "--server=gpu", "--active-thread-percentage=9"),
        ("namespace", "delete", "c_1", "--server=gpu"),
        ("server", "delete", "gpu"),
    ):
        assert "has active clients" in three.refused(*command)
    three.output("namespace", "delete", "c_1", "--server=gpu", "--force")
    assert three.output("client", "list", "--format=csv,noheader") == []
    assert not (three.pipe / "gpu/c_1").exists()
    assert attach(pid) == WITHOUT_MPS


def test_a_client_is_gone_with_its_process_or_when_it_leaves_or_is_terminated(host):
    host.start3()
    leaf = host.pipe / "gpu/default"
    ending, leaving, terminated = (host.client(leaf) for _ in range(3))
    for pid in (ending, leaving, terminated):
        assert attach(pid) == 0
    assert mps_client(["detach", str(leaving)]) == 0
    host.output("client", "terminate", str(terminated))
    assert [row[0] for row in rows(host, "client", "list")] == [str(ending)]
    host.end_client(ending)
    eventually(lambda: rows(host, "client", "list") == [], "the client is gone")
    assert host.refused("client", "terminate", str(ending)) == f"Client {ending} does not exist"


def test_to_terminate_a_wedged_client_takes_for_ever_and_lets_nobody_in(host, capsys):
    host.start3()
    leaf = host.pipe / "gpu/default"
    wedged, other = host.client(leaf), host.client(leaf)
    assert attach(wedged) == 0
    assert mps_client(["wedge", str(wedged)]) == 0
    waiting = host.begin("client", "terminate", str(wedged))
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(0.1)
        assert rows(host, "server", "list")[0][3] == "Ready"
        assert run_client(capsys, "attach", other) == (REFUSED, "CUDA_ERROR_MPS_SERVER_NOT_READY\n")
    finally:
        waiting.kill()
        waiting.wait()


def test_a_wedged_daemon_answers_nobody_and_ends_only_when_killed(host):
    host.start3()
    assert mps_client(["wedge-server", "--pipe-directory", str(host.pipe)]) == 0
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run([host.program, "server", "list"], env=host.environment, timeout=0.2)
    for pid, name in host.processes().items():
        if name == "nvidia-cuda-mps-control":
            os.kill(pid, signal.SIGTERM)
    time.sleep(0.05)
    assert "nvidia-cuda-mps-control" in host.processes().values()


def test_a_server_that_is_killed_starts_again_without_its_clients(host):
    host.start3()
    pid = host.client(host.pipe / "gpu/default")
    assert attach(pid) == 0
    [before] = rows(host, "server", "list")
    assert mps_client(["kill-server", str(pid)]) == 0

    def another() -> bool:
        [now] = rows(host, "server", "list")
        return now[3] == "Ready" and now[2] != before[2]

    eventually(another, "another server is ready")
    assert rows(host, "client", "list") == []


def test_a_server_over_a_gpu_that_is_not_there_is_accepted_and_vanishes(host):
    host.start3()
    host.output("server", "create", "gone", "--allowed-devices=GPU-gone")
    eventually(lambda: [row[0] for row in rows(host, "server", "list")] == ["gpu"], "it is gone")
    assert not (host.pipe / "gone").exists()
    assert "no such device" in (host.log / "gone/server.log").read_text()


def test_a_server_whose_gpu_is_lost_is_faulty(host):
    host.start3()
    host.node.change(gpu=0, present=False)
    host.node.live.current()
    assert rows(host, "server", "list")[0][3] == "Fault"


def test_other_users_change_nothing_and_see_everything(host):
    host.start3()
    message = host.refused("namespace", "create", "c_1", "--server=gpu", user=NOBODY)
    assert message == "Insufficient privileges for UID 65534 to run namespace create"
    assert host.run("namespace", "list", user=NOBODY).returncode == 0


def test_a_daemon_for_one_user_lets_no_other_in(host, capsys):
    assert host.run("-p", "3", "-d").returncode == 0
    host.output("server", "create", "gpu")
    host.wait_until_ready("gpu")
    own, other = (host.client(host.pipe / "gpu/default", user=user) for user in (None, NOBODY))
    assert attach(own) == 0
    assert run_client(capsys, "attach", other) == (REFUSED, "CUDA_ERROR_NOT_PERMITTED\n")


def test_a_client_in_the_daemons_own_directory_gets_a_server_without_limits(host, capsys):
    host.start3()
    pid = host.client()
    assert attach(pid) == 0
    answer = shown(capsys, "show", pid)
    assert (answer["server"], answer["percent"], answer["memory_bytes"]) == ("uid_0", 100, None)


HIDING = {
    "leaf": ("gpu/c_1", 0o700),
    "server": ("gpu", 0o700),
    "socket": ("gpu/c_1/control", 0o600),
}


@pytest.mark.parametrize("hidden", HIDING)
def test_a_client_whose_user_may_not_go_there_runs_without_mps(three, capsys, hidden):
    leaf = three.pipe / "gpu/c_1"
    own, other = three.client(leaf), three.client(leaf, user=NOBODY)
    assert attach(other) == 0
    assert mps_client(["detach", str(other)]) == 0

    place, mode = HIDING[hidden]
    (three.pipe / place).chmod(mode)
    assert run_client(capsys, "attach", other) == (
        WITHOUT_MPS,
        f"no MPS: {leaf}/control: Permission denied\n",
    )
    assert attach(own) == 0


@contextmanager
def umask(mask):
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize(("mask", "mode", "code"), [(0o022, 0o755, 0), (0o077, 0o700, WITHOUT_MPS)])
def test_a_daemon_makes_its_directories_as_the_umask_has_it_and_its_sockets_for_all(
    host, mask, mode, code
):
    with umask(mask):
        host.start3()
    directories = {path.parent for path in host.pipe.rglob("control")}
    assert {oct(path.stat().st_mode & 0o7777) for path in directories} == {oct(mode)}
    sockets = host.pipe.rglob("control")
    assert {oct(path.stat().st_mode & 0o7777) for path in sockets} == {oct(0o666)}
    other = host.client(host.pipe / "gpu/default", user=NOBODY)
    assert attach(other) == code


def test_a_daemon_leaves_the_mode_of_a_directory_that_is_there(host):
    host.pipe.mkdir(mode=0o700)
    host.start3()
    assert host.pipe.stat().st_mode & 0o7777 == 0o700


def test_the_groups_of_a_process_count(host):
    host.start3()
    leaf = host.pipe / "gpu/default"
    os.chown(leaf, 0, 4711)
    leaf.chmod(0o750)
    script = (
        "import os, time; os.setgroups({}); os.setuid(65534); print(flush=True); time.sleep(60)"
    )
    for groups, code in (([], WITHOUT_MPS), ([4711], 0)):
        with subprocess.Popen(
            [sys.executable, "-S", "-c", script.format(groups)],
            env={"CUDA_MPS_PIPE_DIRECTORY": str(leaf)},
            stdout=subprocess.PIPE,
        ) as started:
            assert started.stdout
            started.stdout.readline()
            came = mps_client(["attach", str(started.pid)])
            started.kill()
        assert came == code


mounting = pytest.mark.skipif(
    subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode != 0,
    reason="mounting is not permitted here",
)


def behind_mounts(host, binds, *commands):
    """A client with mounts of its own: *binds*, and what *commands* make of them."""

    def start():
        for command in commands:
            subprocess.run(command, check=True)
        return host.client(host.pipe / "gpu/default", user=NOBODY)

    return with_own_mounts({str(at): str(source) for at, source in binds.items()}, start)


@mounting
def test_a_client_comes_through_a_directory_that_is_mounted_for_reading_alone(host):
    host.start3()
    leaf = host.pipe / "gpu/default"
    pid = behind_mounts(host, {leaf: leaf}, ["mount", "-o", "remount,bind,ro", leaf])
    mounts = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
    [mounted] = [line.split() for line in mounts if line.split()[4] == str(leaf)]
    assert mounted[5].split(",")[0] == "ro"
    assert not is_mounted(str(leaf))
    assert attach(pid) == 0
    assert rows(host, "client", "list")[0][3] == "default"


@mounting
def test_the_mounts_of_the_client_count_and_not_those_of_the_host(three, capsys):
    (empty := three.directory / "empty").mkdir()
    leaf = three.pipe / "gpu/default"
    assert mps_client(["attach", str(behind_mounts(three, {leaf: empty}))]) == WITHOUT_MPS
    assert "No such file or directory" in capsys.readouterr().err
    other = behind_mounts(three, {leaf: three.pipe / "gpu/c_1"})
    assert attach(other) == 0
    assert rows(three, "client", "list")[0][3] == "c_1"


def test_a_client_with_a_path_that_is_too_long_runs_without_mps(host, capsys):
    host.start3()
    (longer := host.directory / ("x" * 80)).symlink_to(host.pipe / "gpu/default")
    assert len(f"{longer}/control") < 108
    assert attach(host.client(longer)) == 0
    far = longer.with_name("x" * 100)
    far.symlink_to(host.pipe / "gpu/default")
    code, message = run_client(capsys, "attach", host.client(far))
    assert (code, "path too long" in message) == (WITHOUT_MPS, True)


def test_nobody_is_let_in_for_a_process_of_somebody_else(host):
    host.start3()
    script = (
        "import os, socket, sys; os.setuid(65534); made = socket.socket(socket.AF_UNIX);"
        "made.connect(sys.argv[1]);"
        "made.sendall(sys.argv[2].encode()); print(made.recv(9999).decode())"
    )
    leaf = host.pipe / "gpu/default"
    pids = [host.client(leaf), host.client(leaf, user=NOBODY), 4_194_303, 0]
    answers = []
    for pid in pids:
        ask = {"call": "attach", "pid": pid, "shm": None, "minors": None, "memory": 0}
        words = json.dumps({**ask, "command": "c", "environ": {}}) + "\n"
        command = [sys.executable, "-S", "-c", script, f"{leaf}/control", words]
        done = subprocess.run(command, capture_output=True, check=True, text=True)
        answers.append(json.loads(done.stdout))
    assert [list(answer) for answer in answers] == [["refused"], ["done"], ["refused"], ["refused"]]
    assert answers[0] == {"refused": "CUDA_ERROR_NOT_PERMITTED"}


def test_a_tenant_who_is_root_raises_its_own_share_and_no_other_does(three, capsys):
    three.output("namespace", "set", "c_1", "--server=gpu", "--active-thread-percentage=30")
    root, other = (three.client(three.pipe / "gpu/c_1", user=user) for user in (None, NOBODY))
    assert mps_client(["raise", str(other), "--percent", "90"]) == REFUSED
    message = capsys.readouterr().err
    assert message == "Insufficient privileges for UID 65534 to run namespace set\n"
    assert rows(three, "namespace", "list", "c_1")[0][4] == "30.00"
    assert mps_client(["raise", str(root), "--percent", "101"]) == REFUSED
    assert mps_client(["raise", str(root)]) == 0
    assert rows(three, "namespace", "list", "c_1")[0][4] == "100.00"
    assert rows(three, "namespace", "list", "default")[0][4] == "100.00"

    assert attach(root) == 0
    assert run_client(capsys, "raise", root, "--percent", "50") == (
        REFUSED,
        "Namespace 'c_1' has active clients\n",
    )


def test_in_protocol_2_a_tenant_who_is_root_raises_the_share_of_all(old, capsys):
    old.start2()
    old.output(stdin="set_default_active_thread_percentage 40\n")
    root, other = (old.client(user=user) for user in (None, NOBODY))
    assert run_client(capsys, "raise", other) == (
        REFUSED,
        "Insufficient privileges for UID 65534\n",
    )
    assert mps_client(["raise", str(root), "--percent", "80"]) == 0
    assert old.output(stdin="get_default_active_thread_percentage\n") == ["80.0"]


def test_a_daemon_of_which_nothing_comes_is_told_from_one_that_is_not_there(host, capsys):
    host.pipe.mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{host.pipe}/control")
        listening.listen()
        listening.settimeout(5.0)
        hangs_up = threading.Thread(target=lambda: listening.accept()[0].close())
        hangs_up.start()
        assert attach(host.client()) == NO_ANSWER
        hangs_up.join()
    assert capsys.readouterr().err == "the daemon does not answer\n"
    code, message = run_client(capsys, "attach", host.client())
    assert (code, "Connection refused" in message) == (WITHOUT_MPS, True)


def test_a_process_that_has_ended_is_no_client(host, capsys):
    host.start3()
    with subprocess.Popen(["true"]) as ended:
        eventually(lambda: "Z" in Path(f"/proc/{ended.pid}/stat").read_text(), "it has ended")
        where = ["--pipe-directory", str(host.pipe / "gpu/default")]
        assert mps_client(["attach", str(ended.pid), *where]) == REFUSED
    assert "No such process" in capsys.readouterr().err


def test_a_process_that_ends_meanwhile_cannot_be_entered(host):
    host.start3()
    program = read_program(host.client(host.pipe / "gpu/default"))
    host.end_client(program.pid)
    with pytest.raises(OSError, match="it cannot be entered: No such file or directory"):
        program.connect(program.pipe, 1.0)


def test_without_a_daemon_a_process_runs_without_mps_and_without_a_word(host, capsys):
    assert attach(host.client()) == WITHOUT_MPS
    assert capsys.readouterr().err.startswith("no MPS: ")
    assert mps_client(["attach", "4194305"]) == REFUSED


def test_a_path_that_is_too_long_ends_the_daemon_without_a_log(host):
    host.pipe = host.directory / ("x" * (100 - len(str(host.directory))))
    assert len(str(host.pipe / "control")) == 109
    done = host.run("-p", "3", "-m", "-d")
    assert (done.returncode, done.stderr) == (1, "")
    assert not host.log.exists()
    assert not host.processes()


def test_a_namespace_whose_path_is_too_long_ends_a_running_daemon(host):
    host.start3()
    done = host.run("namespace", "create", "c" * 64, "--server=gpu")
    assert done.returncode == 0  # it fits
    host.output("server", "create", "s" * 40)
    done = host.run("namespace", "create", "c" * 64, f"--server={'s' * 40}")
    assert done.returncode == 1
    assert "nvidia-cuda-mps-control" not in host.processes().values()


@pytest.mark.parametrize(("behaviour", "code"), [("fails", 1), ("dies", 0)])
def test_a_daemon_that_does_not_work_says_why_in_its_log(behaviour, code):
    with mps_host(document(mps=behaviour)) as host:
        assert host.run("-p", "3", "-m", "-d").returncode == code
        eventually(lambda: not host.processes(), "it is gone")
        assert f"always {behaviour}" in (host.log / "control.log").read_text()


def test_a_driver_can_lack_the_programs_or_namespaces_and_a_start_can_hang():
    with mps_host(document(mps="missing")) as host:
        assert not list((host.node.root / "usr/bin").glob("nvidia-cuda-mps*"))
    with mps_host(document(mps="protocol-2")) as host:
        assert host.refused("-p", "3", "namespace", "--help") == "Unknown option '-p'"
    with mps_host(document(mps="hangs")) as host, pytest.raises(subprocess.TimeoutExpired):
        subprocess.run([host.program, "-d"], env=host.environment, timeout=0.2)


def test_help_tells_what_a_driver_knows(host, old):
    lines = host.output("-p", "3", "namespace", "--help")
    assert [line.strip() for line in lines[2:]] == ["create", "delete", "list", "set", "get"]
    assert old.refused("-p", "3", "namespace", "--help") == "Unknown option '-p'"
    assert "standard input" in old.output("--help")[0]


def test_the_protocol_can_be_chosen_by_the_environment(host):
    assert host.run("-m", "-d", CUDA_MPS_PROTOCOL_VERSION="3").returncode == 0
    assert host.output("server", "list", "--format=csv,noheader") == []
    assert host.refused(stdin="get_server_list\n").startswith("This daemon speaks protocol 3")


@pytest.mark.parametrize(
    "words",
    [("-d", "-x"), ("-d", "-p", "4"), ("-p", "3", "-d", "-M"), ("-d", "-m"), ("-d", "-a", "x")],
)
def test_options_that_do_not_go_together_are_refused_at_once(host, words):
    done = host.run(*words)
    assert done.returncode == 1
    assert "'" in done.stderr or "protocol" in done.stderr
    assert not host.processes()


def test_a_daemon_of_protocol_2_serves_clients_that_share_its_memory(old, capsys):
    old.start2()
    old.output(stdin="set_default_device_pinned_mem_limit 0 10G\n")
    old.output(stdin="set_default_active_thread_percentage 40\n")
    assert old.output(stdin="get_server_list\n") == []
    pid = old.client(CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="0=4096M")
    assert attach(pid) == 0
    answer = shown(capsys, "show", pid)
    assert (answer["percent"], answer["memory_bytes"]) == (40, 4 << 30)

    [server] = old.output(stdin="get_server_list\n")
    assert old.processes()[int(server)] == "nvidia-cuda-mps-server"
    assert old.output(stdin=f"get_client_list {server}\n") == [str(pid)]
    assert old.output(stdin=f"terminate_client {server} {pid}\nget_client_list {server}\n") == []
    assert old.refused("server", "list").startswith("Unknown option 'server list'")


def test_a_client_that_does_not_share_the_memory_cannot_connect(old, capsys):
    old.start2()
    [marker] = [
        path
        for path in Path("/dev/shm").glob("cuda.shm.*")
        if int(path.name.split(".")[3], 16) in old.processes()
    ]
    marker.unlink()
    assert attach(old.client()) == REFUSED
    assert capsys.readouterr().err.startswith("CUDA_ERROR_MPS_CONNECTION_FAILED")


def test_quit_waits_for_clients_unless_told_how_long(old):
    old.start2()
    pid = old.client()
    assert attach(pid) == 0
    waiting = old.begin(stdin=subprocess.PIPE)
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.communicate("quit\n", timeout=0.1)
    old.end_client(pid)
    assert waiting.wait(10) == 0
    eventually(lambda: not old.processes(), "the daemon is gone")

    old.start2()
    assert attach(old.client()) == 0
    old.output(stdin="quit -t 0\n")
    eventually(lambda: not old.processes(), "the second daemon is gone")


def test_a_gpu_for_one_process_has_one_server_and_a_prohibited_one_none(old):
    smi = str(old.node.root / "usr/bin/nvidia-smi")
    subprocess.run([smi, "-c", "EXCLUSIVE_PROCESS"], check=True, capture_output=True, env={})
    old.start2()
    old.output(stdin="start_server -uid 0\n")
    old.pipe = old.directory / "p2"
    old.start2()
    assert old.refused(stdin="start_server -uid 0\n") == "The server could not be started"
    assert "busy or unavailable" in (old.log / "uid_0/server.log").read_text()

    subprocess.run([smi, "-c", "2"], check=True, capture_output=True, env={})
    old.pipe = old.directory / "p3"
    old.start2()
    assert old.refused(stdin="start_server -uid 0\n") == "The server could not be started"


def test_the_client_is_a_program_too(host):
    done = subprocess.run(
        [sys.executable, "-m", "dra_driver.sim.mps.client", "attach", str(host.client())],
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode == WITHOUT_MPS, done


@pytest.mark.parametrize(
    "words", [("attach",), ("wedge", "--pipe-directory", "/x"), ("attach", "1", "--memory", "5Z")]
)
def test_the_client_program_refuses_what_it_does_not_understand(words, capsys):
    with pytest.raises(SystemExit):
        mps_client(words)
    assert "usage" in capsys.readouterr().err
