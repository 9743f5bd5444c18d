"""Daemons leave the cgroup of the container that started them, or it is said that they do not."""

from pathlib import Path

import pytest

from dra_driver.node.mps.daemon_cgroup import CGROUP_NAME, DaemonCgroup

POD = "5b6ffb0e-5d6a-4a3b-9e0b-9c1e8d7a0001"
CONTAINER = f"/kubepods/burstable/pod{POD}/{'a' * 64}"
IN_CONTAINER = f"0::{CONTAINER}\n"
PLAIN_HOST = "0::/system.slice/kubelet.service\n"
INIT = "0::/init.scope\n"
INIT_OUTSIDE = "0::/../../../../init.scope\n"  # of the cgroup namespace of this process


class Host:
    """Files as the kernel has them: what is written into a cgroup changes no process here."""

    def __init__(self, directory: Path, own: str, first: str = INIT) -> None:
        self.proc, self.cgroups = directory / "proc", directory / "cgroup"
        self.process("self", own)
        self.process("1", first)
        self.cgroups.mkdir()

    def process(self, pid: str, text: str) -> None:
        (self.proc / pid).mkdir(parents=True, exist_ok=True)
        (self.proc / pid / "cgroup").write_text(text)

    def hierarchy(self, name: str = "", **files: str) -> Path:
        root = self.cgroups / name
        root.mkdir(exist_ok=True)
        (root / "cgroup.procs").write_text("")
        for file, text in files.items():
            (root / file.replace("_", ".")).write_text(text)
        return root

    @property
    def daemon_cgroup(self) -> DaemonCgroup:
        return DaemonCgroup(self.cgroups, self.proc)


def test_on_a_plain_host_nothing_is_moved_nor_removed(tmp_path):
    host = Host(tmp_path, PLAIN_HOST)
    cgroup = host.hierarchy() / CGROUP_NAME

    assert host.daemon_cgroup.take_in([7])
    assert not cgroup.exists()
    cgroup.mkdir()
    host.daemon_cgroup.close()
    assert cgroup.exists()


def test_with_cgroup_v2_there_is_one_place_at_the_root(tmp_path):
    host = Host(tmp_path, IN_CONTAINER)
    root = host.hierarchy(cgroup_controllers="memory\n")
    host.process("7", f"0::/{CGROUP_NAME}\n")  # as it is once the kernel has moved it

    assert host.daemon_cgroup.take_in([7])
    assert (root / CGROUP_NAME / "cgroup.procs").read_text() == "7"


def test_with_cgroup_v1_there_is_one_for_each_hierarchy_and_links_are_not_followed(tmp_path):
    host = Host(tmp_path, f"3:memory:{CONTAINER}\n2:cpu,cpuacct:{CONTAINER}\n")
    for name in ("memory", "cpu,cpuacct", "unified"):
        host.hierarchy(name)
    (host.cgroups / "cpu").symlink_to("cpu,cpuacct")
    host.process("7", f"3:memory:/{CGROUP_NAME}\n2:cpu,cpuacct:/{CGROUP_NAME}\n")

    assert host.daemon_cgroup.take_in([7])
    for name in ("memory", "cpu,cpuacct", "unified"):
        assert (host.cgroups / name / CGROUP_NAME / "cgroup.procs").read_text() == "7"


def test_a_cpuset_of_cgroup_v1_gets_the_processors_of_its_parent_first(tmp_path):
    host = Host(tmp_path, f"3:cpuset:{CONTAINER}\n")
    root = host.hierarchy("cpuset", cpuset_cpus="0-7\n", cpuset_mems="0\n")
    (root / CGROUP_NAME).mkdir()
    for file in ("cpuset.cpus", "cpuset.mems"):
        (root / CGROUP_NAME / file).write_text("\n")
    host.process("7", f"3:cpuset:/{CGROUP_NAME}\n")

    assert host.daemon_cgroup.take_in([7])
    assert (root / CGROUP_NAME / "cpuset.cpus").read_text() == "0-7\n"
    assert (root / CGROUP_NAME / "cpuset.mems").read_text() == "0\n"


@pytest.mark.parametrize(
    ("own", "first", "moved", "is_outside"),
    [
        pytest.param(
            # What is taken for the host's cgroups is the container's own part of them.
            *(IN_CONTAINER, INIT, f"0::{CONTAINER}/{CGROUP_NAME}\n", False),
            id="it stays",
        ),
        pytest.param(
            *("0::/\n", INIT_OUTSIDE, f"0::/{CGROUP_NAME}\n", False),
            id="it stays in the cgroup namespace",
        ),
        pytest.param(
            *("0::/\n", INIT_OUTSIDE, f"0::/../../../../{CGROUP_NAME}\n", True),
            id="it is outside of the cgroup namespace",
        ),
        pytest.param(IN_CONTAINER, INIT, None, True, id="it has ended"),
    ],
)
def test_a_process_that_stays_in_the_container_is_warned_of(
    tmp_path, caplog, own, first, moved, is_outside
):
    host = Host(tmp_path, own, first)
    host.hierarchy()
    if moved is not None:
        host.process("7", moved)

    assert host.daemon_cgroup.in_container
    assert host.daemon_cgroup.take_in([7]) is is_outside
    assert ("MPS daemons end with this container" in caplog.text) is not is_outside


def test_cgroups_that_are_not_there_are_warned_of(tmp_path, caplog):
    host = Host(tmp_path, IN_CONTAINER)
    host.cgroups.rmdir()
    host.process("7", IN_CONTAINER)

    assert not host.daemon_cgroup.take_in([7])
    assert "cannot be moved out of its cgroup" in caplog.text


def test_the_place_is_taken_away_unless_somebody_is_in_it(tmp_path):
    host = Host(tmp_path, f"2:memory:{CONTAINER}\n1:cpu:{CONTAINER}\n")
    empty, used = host.hierarchy("memory") / CGROUP_NAME, host.hierarchy("cpu") / CGROUP_NAME
    empty.mkdir()
    used.mkdir()
    (used / "cgroup.procs").write_text("7")  # the kernel refuses to remove it then

    for _ in range(2):
        host.daemon_cgroup.close()

    assert not empty.exists()
    assert used.exists()


def test_that_nothing_can_be_moved_is_logged_once_until_it_changes(tmp_path, caplog):
    caplog.set_level("INFO")
    host = Host(tmp_path, IN_CONTAINER)
    host.hierarchy()
    host.process("7", IN_CONTAINER)
    cgroup = host.daemon_cgroup

    for _ in range(3):
        assert not cgroup.take_in([7])
    assert len(caplog.messages) == 1
    host.process("7", f"0::/{CGROUP_NAME}\n")
    for _ in range(2):
        assert cgroup.take_in([7])

    assert caplog.messages[1:] == ["MPS daemons can be moved out of this container again"]
