"""What is mounted for MPS is found and taken away again, however often it was mounted."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dra_driver.errors import NodeError
from dra_driver.node.commands import run
from dra_driver.node.mps import mounts, shared_memory
from dra_driver.node.mps.control import Control
from tests.fakes.daemon_host import DaemonHost

INFO = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
90 22 0:40 / /m/s1/shm rw,nosuid shared:7 - tmpfs tmpfs rw
91 22 0:41 / /m/s1/shm rw,nosuid - tmpfs tmpfs rw
92 22 0:42 / /m/with\\040blank rw - tmpfs tmpfs rw
93 22 0:43 / /m/s10 rw - tmpfs tmpfs rw

"""

needs_mounts = pytest.mark.skipif(
    subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode != 0,
    reason="mounting is not permitted here",
)


@pytest.fixture
def info(tmp_path):
    file = tmp_path / "mountinfo"
    file.write_text(INFO)
    return file


@pytest.fixture
def place():
    with tempfile.TemporaryDirectory() as made:
        yield made
        shared_memory.withdraw(made)


def test_what_is_at_or_below_a_directory_is_found_the_last_first(info):
    assert mounts.mounted_at_or_below("/m/s1", info) == ["/m/s1/shm", "/m/s1/shm"]
    assert mounts.mounted_at_or_below("/m/with blank", info) == ["/m/with blank"]


def test_a_mount_is_known_by_its_whole_path(info):
    assert mounts.is_mounted("/m/s10", info)
    assert not mounts.is_mounted("/m/s1", info)


def test_what_the_host_sees_too_is_known(info):
    assert mounts.is_shared("/m/s1/shm", info)
    assert not mounts.is_shared("/m/s10", info)


@needs_mounts
def test_shared_memory_is_mounted_once_for_everybody_to_write(place):
    shm = f"{place}/shm"
    for _ in range(2):
        shared_memory.provide(shm, in_container=False)

    assert mounts.mounted_at_or_below(shm) == [shm]
    assert os.stat(shm).st_mode & 0o7777 == 0o1777
    total = os.statvfs(shm).f_blocks * os.statvfs(shm).f_frsize
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert abs(total - memory // 2) < 1 << 20


@needs_mounts
def test_shared_memory_is_taken_away_though_somebody_uses_it_and_twice(place):
    shm = f"{place}/shm"
    shared_memory.provide(shm, in_container=False)
    mounts.tmpfs(shm, 1 << 20)  # somebody mounted it again
    with open(f"{shm}/used", "w"):
        shared_memory.withdraw(place)
        shared_memory.withdraw(place)

    assert mounts.mounted_at_or_below(place) == []
    assert os.listdir(shm) == []


@needs_mounts
def test_what_an_act_starts_has_its_own_shared_memory_and_nobody_else_has(place):
    shm = f"{place}/shm"
    shared_memory.provide(shm, in_container=False)
    name = os.path.basename(place)

    def act():
        subprocess.run(["touch", f"/dev/shm/{name}"], check=True)

    shared_memory.with_own(shm, "/", act)

    assert os.listdir(shm) == [name]
    assert not os.path.exists(f"/dev/shm/{name}")
    assert shm not in mounts.mounted_at_or_below("/dev/shm")


@needs_mounts
def test_what_stays_in_a_container_is_refused_and_taken_away(place):
    shm = f"{place}/shm"
    if mounts.is_shared("/"):
        pytest.skip("what is mounted here is seen elsewhere")
    with pytest.raises(NodeError, match="mountPropagation: Bidirectional"):
        shared_memory.provide(shm, in_container=True)

    assert not mounts.is_mounted(shm)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_where_mounting_is_not_permitted_the_error_says_what_is_missing():
    program = (
        "import os, sys; from dra_driver.node.mps import mounts\n"
        "os.setuid(65534)\n"
        "for act in (lambda: mounts.tmpfs('/tmp', 1), lambda: mounts.with_own_mounts({}, int)):\n"
        "    try: act()\n"
        "    except Exception as e: print(type(e).__name__, e)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=20
    )
    said = ran.stdout.splitlines()
    assert len(said) == 2, ran.stderr
    assert all(line.startswith("NodeError") and "privileged: true" in line for line in said)


def test_what_is_not_there_is_unmounted_already():
    mounts.unmount("/nowhere/at/all")


@needs_mounts
def test_a_driver_with_a_root_of_its_own_finds_the_directory_and_leaves_nothing_in_there(place):
    host = DaemonHost(Path(place))
    daemon = host.daemon()
    os.makedirs(daemon.pipe)
    control = Control(host.driver, run, lambda command: command)
    inside = str(host.node.root) + daemon.directory
    assert control.command().root == str(host.node.root)

    for _ in range(2):
        command = control.to(daemon, control.command("-q"))
        assert dict(command.variables)["CUDA_MPS_PIPE_DIRECTORY"] == daemon.pipe
        assert os.path.samefile(inside, daemon.directory)
    assert mounts.mounted_at_or_below(inside) == [inside]

    for _ in range(2):
        control.leave(daemon)
    assert not os.path.exists(inside)
    assert os.path.isdir(daemon.pipe)
