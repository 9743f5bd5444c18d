"""What is mounted for MPS is found and taken away again, however often it was mounted."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dra_driver.node.driver.commands import run_command
from dra_driver.node.mps import directories, mounts
from dra_driver.node.mps.control import ControlProgram
from dra_driver.node.selinux import SelinuxLabels
from tests.fakes.daemon_host import DaemonHost, needs_mounts
from tests.fakes.driver import make_system

INFO = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
90 22 0:40 / /m/s1/shm rw,nosuid shared:7 - tmpfs tmpfs rw
91 22 0:41 / /m/s1/shm rw,nosuid - tmpfs tmpfs rw
92 22 0:42 / /m/with\\040blank rw - tmpfs tmpfs rw
93 22 0:43 / /m/s10 rw - tmpfs tmpfs rw

"""

NO_SELINUX = SelinuxLabels(Path("/nowhere/enforce"))
OPTIONS = directories.shared_memory_options(1 << 20)


@pytest.fixture
def place():
    with tempfile.TemporaryDirectory(dir="/var/tmp") as made:  # never in shared memory itself
        yield made
        directories.unmount_shared_memory(made)


def test_mounts_are_found_by_their_path_the_last_first(tmp_path):
    info = tmp_path / "mountinfo"
    info.write_text(INFO)

    assert mounts.mounted_at_or_below("/m/s1", info) == ["/m/s1/shm", "/m/s1/shm"]
    assert mounts.mounted_at_or_below("/m/with blank", info) == ["/m/with blank"]
    paths = ("/m/s1", "/m/s10", "/m/s1/shm")
    assert [mounts.is_mounted(path, info) for path in paths] == [False, True, True]
    assert [mounts.is_shared(path, info) for path in paths] == [False, False, True]  # with the host


@needs_mounts
def test_shared_memory_is_mounted_once_for_everybody_to_write(place):
    shm = f"{place}/shm"
    for _ in range(2):
        directories.mount_shared_memory(shm, False, NO_SELINUX, OPTIONS)

    assert mounts.mounted_at_or_below(shm) == [shm]
    assert os.stat(shm).st_mode & 0o7777 == 0o1777
    assert os.statvfs(shm).f_blocks * os.statvfs(shm).f_frsize == 1 << 20


def test_shared_memory_takes_half_of_the_machine_at_most():
    half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2

    assert f"size={half}," in directories.shared_memory_options(1 << 60)


@needs_mounts
def test_shared_memory_is_taken_away_though_somebody_uses_it_and_twice(place):
    shm = f"{place}/shm"
    directories.mount_shared_memory(shm, False, NO_SELINUX, OPTIONS)
    mounts.tmpfs(shm, "size=1048576")  # somebody mounted it again
    with open(f"{shm}/used", "w"):
        directories.unmount_shared_memory(place)
        directories.unmount_shared_memory(place)
        mounts.unmount(shm)

    assert mounts.mounted_at_or_below(place) == []
    assert os.listdir(shm) == []


@needs_mounts
def test_what_an_act_starts_has_its_own_shared_memory_and_nobody_else_has(place):
    shm = f"{place}/shm"
    directories.mount_shared_memory(shm, False, NO_SELINUX, OPTIONS)
    name = os.path.basename(place)

    def act():
        subprocess.run(["touch", f"/dev/shm/{name}"], check=True)

    directories.with_own_shared_memory(shm, "/", act)

    assert os.listdir(shm) == [name]
    assert not os.path.exists(f"/dev/shm/{name}")
    assert shm not in mounts.mounted_at_or_below("/dev/shm")


def in_container(place, propagation: str) -> str:
    """What comes of mounting there in a container whose mounts are seen outside (shared) or not."""
    program = (
        "from pathlib import Path; from dra_driver.node.mps import mounts\n"
        "from dra_driver.node.mps.directories import mount_shared_memory\n"
        "from dra_driver.node.selinux import SelinuxLabels\n"
        "labels = SelinuxLabels(Path('/nowhere'))\n"
        f"try: mount_shared_memory('{place}/shm', True, labels, 'size=1m')\n"
        "except Exception as e: print(type(e).__name__, e)\n"
        f"print(mounts.mounted_at_or_below('{place}'))\n"
    )
    return subprocess.run(
        ["unshare", "--mount", "--propagation", propagation, sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    ).stdout


@needs_mounts
def test_what_stays_in_a_container_is_refused_and_taken_away(place):
    error, remaining = in_container(place, "private").splitlines()

    assert error.startswith("NodeError")
    assert "mountPropagation: Bidirectional" in error
    assert remaining == "[]"
    assert in_container(place, "shared").splitlines() == [f"['{place}/shm']"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_where_mounting_is_not_permitted_the_error_says_what_is_missing():
    program = (
        "import os, sys; from dra_driver.node.mps import mounts\n"
        "os.setuid(65534)\n"
        "own = lambda: mounts.with_own_mounts({}, int)\n"
        "for act in (lambda: mounts.tmpfs('/tmp', 'size=1'), own):\n"
        "    try: act()\n"
        "    except Exception as e: print(type(e).__name__, e)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=20
    )
    lines = ran.stdout.splitlines()
    assert len(lines) == 2, ran.stderr
    assert all(line.startswith("NodeError") and "privileged: true" in line for line in lines)


@needs_mounts
def test_a_driver_with_a_root_of_its_own_finds_the_directory_and_leaves_nothing_in_there(place):
    host = DaemonHost(Path(place))
    make_system(host.node.root)
    daemon = host.daemon()
    os.makedirs(daemon.pipe)
    control = ControlProgram(host.driver, run_command, lambda command: command)
    inside = str(host.node.root) + daemon.directory
    assert control.command().root == str(host.node.root)

    for _ in range(2):
        command = control.prepare_for(daemon, control.command("-q"))
        assert dict(command.variables)["CUDA_MPS_PIPE_DIRECTORY"] == daemon.pipe
        assert os.path.samefile(inside, daemon.directory)
    assert mounts.mounted_at_or_below(inside) == [inside]

    for _ in range(2):
        control.unmount_from_driver(daemon)
    assert not os.path.exists(inside)
    assert os.path.isdir(daemon.pipe)


@needs_mounts
def test_a_process_that_ends_does_not_wait_for_what_is_done_with_own_mounts():
    program = (
        "import os, threading, time; from dra_driver.node.mps import mounts\n"
        "begun = threading.Event()\n"
        "def hangs(): begun.set(); time.sleep(60)\n"
        "work = lambda: mounts.with_own_mounts({}, hangs)\n"
        "threading.Thread(target=work, daemon=True).start()\n"
        "assert begun.wait(10)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=20)


@needs_mounts
def test_what_fails_with_own_mounts_fails_for_who_waits():
    with pytest.raises(KeyError):
        mounts.with_own_mounts({}, lambda: os.environ["NO_SUCH_VARIABLE"])
