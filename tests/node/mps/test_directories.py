"""What daemons have on disk is there for their clients, and no tenant can spoil it for others."""

import errno
import os
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dra_driver.node.driver.config import DriverPrograms
from dra_driver.node.driver.root import DriverRoot
from dra_driver.node.mps import mounts
from dra_driver.node.mps.daemons import MpsDaemons
from dra_driver.node.mps.directories import KEPT_LOG_BYTES, MAX_LOG_BYTES
from dra_driver.node.mps.processes import DaemonProcesses
from dra_driver.node.selinux import SELINUX_ATTRIBUTE, SELINUX_LABEL
from dra_driver.sim.host.directory import program_path
from tests.fakes.daemon_host import BRIEF, PATIENT, needs_mounts
from tests.node.mps.conftest import both, only_2

pytestmark = needs_mounts


def deep(directory: str, target: Path) -> None:
    at = os.open(directory, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("d", dir_fd=at)
        inside = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = inside
    os.close(at)


def take_the_place(directory: str, target: Path) -> None:
    """What root in a container can do to the socket of its server."""
    os.unlink(f"{directory}/control")
    os.makedirs(f"{directory}/control/not/empty")


def lead_elsewhere(directory: str, target: Path) -> None:
    Path(directory, "below").mkdir()
    for link in ("to", "below/to"):
        Path(directory, link).symlink_to(target)


@both
@pytest.mark.parametrize("spoil", [take_the_place, deep, lead_elsewhere])
def test_whatever_a_tenant_makes_its_server_starts_where_it_was_and_leaves_nothing(
    host, daemons, spoil, tmp_path
):
    daemon, namespace = host.daemon(), host.namespace()
    (directory,) = daemons.start(daemon, [namespace]).values()
    before = os.stat(directory)
    (tmp_path / "precious").touch()
    spoil(directory, tmp_path)

    assert [*daemons.start(daemon, [namespace]).values()] == [directory]

    after = os.stat(directory)
    assert (after.st_dev, after.st_ino) == (before.st_dev, before.st_ino)
    host.attach(daemon, directory)
    spoil(directory, tmp_path)
    host.daemons(BRIEF).stop_and_remove(daemon)
    assert host.left() == []
    assert os.listdir(tmp_path) == ["precious"]


def test_a_namespace_that_is_gone_leaves_no_directory_to_a_server_that_starts_again(host, daemons):
    daemon = host.daemon()
    daemons.start(daemon, [host.namespace(0), host.namespace(1)])

    daemons.start(daemon, [host.namespace(1)])

    names = set(os.listdir(f"{daemon.pipe}/gpu"))
    assert names == {"control", "default", host.namespace(1).name}


@both
def test_clients_of_any_user_pass_whatever_the_umask_of_who_started_it(host, daemons):
    before = os.umask(0o077)
    try:
        daemon = host.daemon()
        (directory,) = daemons.start(daemon, [host.namespace()]).values()
        added = daemons.add_namespace(daemon, host.namespace(1))
    finally:
        os.umask(before)

    for passed in (daemon.pipe, directory, added):
        assert stat.S_IMODE(os.stat(passed).st_mode) & 0o755 == 0o755


@only_2
def test_what_tenants_write_beside_their_server_is_little_and_of_few_files(host, daemons):
    daemon, namespace = host.daemon(), host.namespace()
    (directory,) = daemons.start(daemon, [namespace]).values()
    with pytest.raises(OSError) as full, open(f"{directory}/big", "wb", buffering=0) as big:
        for _ in range(17):
            big.write(bytes(1 << 20))
    os.unlink(f"{directory}/big")
    with pytest.raises(OSError) as many:
        for number in range(5000):
            Path(directory, str(number)).touch()

    assert (full.value.errno, many.value.errno) == (errno.ENOSPC, errno.ENOSPC)
    daemons.start(daemon, [namespace])
    host.attach(daemon, directory)
    assert not os.path.exists(f"{directory}/0")
    daemons.stop_and_remove(daemon)
    assert host.left() == []


READ_ONLY = """
import errno, os, socket, sys
directory = sys.argv[1]
with socket.socket(socket.AF_UNIX) as one:
    one.connect(directory + "/control")
with open(directory + "/fifo", "w") as fifo:
    fifo.write("said")
try:
    os.mkdir(directory + "/made")
except OSError as e:
    print(errno.errorcode[e.errno])
"""


def test_through_a_read_only_mount_a_server_is_reached_and_nothing_is_made():
    """What the containers of a claim have of protocol 3."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        os.mkfifo(f"{directory}/fifo")
        reading = os.open(f"{directory}/fifo", os.O_RDONLY | os.O_NONBLOCK)
        inside = (
            f"mount --bind {directory} {directory} && mount -o remount,bind,ro {directory} && "
            'exec "$0" "$@"'
        )
        program = [sys.executable, "-c", READ_ONLY, directory]
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"{directory}/control")
            server.listen()
            ran = subprocess.run(
                ["unshare", "--mount", "sh", "-c", inside, *program],
                capture_output=True,
                text=True,
                check=True,
                timeout=60,
            )
        answer = os.read(reading, 100)
        os.close(reading)

    assert (ran.stdout, answer) == ("EROFS\n", b"said")


def test_the_driver_finds_its_server_program_beside_the_one_that_is_started(host, daemons):
    daemon = host.daemon()
    daemons.start(daemon, [])
    processes = DaemonProcesses()
    control = processes.control(processes.of(daemon.token))
    assert control

    environ = Path(f"/proc/{control.pid}/environ").read_text().split("\0")
    (path,) = (variable for variable in environ if variable.startswith("PATH="))
    first, _, following = path.removeprefix("PATH=").partition(":")
    assert os.path.exists(f"{first}/nvidia-cuda-mps-server")
    assert "/usr/bin" in following.split(":")


def with_selinux(host) -> MpsDaemons:
    """On a host where it is switched on: what this one's root has at the usual place."""
    enforce = host.node.root / "sys/fs/selinux/enforce"
    enforce.parent.mkdir(parents=True)
    enforce.write_text("1")
    driver = DriverPrograms(DriverRoot("/", host.node.root), placed=program_path)
    return MpsDaemons(driver, timeouts=PATIENT)


def labelled(*paths: str) -> bool:
    return all(os.getxattr(path, SELINUX_ATTRIBUTE) == SELINUX_LABEL.encode() for path in paths)


def test_where_there_is_selinux_containers_may_use_pipe_directories(other_host):
    host = other_host
    daemons, daemon = with_selinux(host), host.daemon()
    try:
        os.setxattr(host.directory, SELINUX_ATTRIBUTE, b"system_u:object_r:tmp_t:s0")
    except OSError:
        pytest.skip("labels cannot be set here")

    (directory,) = daemons.start(daemon, [host.namespace()]).values()
    added = daemons.add_namespace(daemon, host.namespace(1))

    assert labelled(daemon.pipe, directory, f"{directory}/control", added, f"{added}/control")
    daemons.stop_and_remove(daemon)


@only_2
def test_where_a_label_is_refused_the_server_starts_and_that_is_logged(other_host, caplog):
    if Path("/sys/fs/selinux/enforce").exists():
        pytest.skip("it is not refused here")
    daemons, daemon = with_selinux(other_host), other_host.daemon()

    daemons.start(daemon, [other_host.namespace()])

    assert mounts.is_mounted(daemon.pipe) and mounts.is_mounted(daemon.shm)
    records = [record for record in caplog.records if "labelled for SELinux" in record.getMessage()]
    assert sum(record.levelname == "WARNING" for record in records) == 1
    daemons.stop_and_remove(daemon)


@both
def test_logs_of_a_daemon_are_kept_small(host, daemons):
    daemon = host.daemon()
    daemons.start(daemon, [host.namespace()])
    with open(f"{daemon.log}/control.log", "ab") as log:
        log.write(b"something happened\n" * (MAX_LOG_BYTES // 10))

    daemons.trim_logs(daemon)

    assert os.path.getsize(f"{daemon.log}/control.log") <= KEPT_LOG_BYTES
    assert daemons.check(daemon).ready
