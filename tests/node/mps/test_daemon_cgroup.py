"""Daemons leave the cgroup of the container that started them, or it is said that they do not."""

from pathlib import Path

import pytest

from dra_driver.node.mps.daemon_cgroup import CGROUP_NAME, DaemonCgroup

POD = "5b6ffb0e-5d6a-4a3b-9e0b-9c1e8d7a0001"
CONTAINER = f"/kubepods/burstable/pod{POD}/{'a' * 64}"


class Host:
    """Files as the kernel has them: what is written into a cgroup changes no process here."""

    def __init__(self, directory: Path, own: str, first: str = "0::/init.scope\n") -> None:
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
    def detach(self) -> DaemonCgroup:
        return DaemonCgroup(self.cgroups, self.proc)


def test_on_a_plain_host_nothing_is_moved(tmp_path):
    host = Host(tmp_path, "0::/system.slice/kubelet.service\n")
    root = host.hierarchy()

    assert host.detach.take_in([7])
    assert not (root / CGROUP_NAME).exists()


def test_with_cgroup_v2_there_is_one_place_at_the_root(tmp_path):
    host = Host(tmp_path, f"0::{CONTAINER}\n")
    root = host.hierarchy(cgroup_controllers="memory\n")
    host.process("7", f"0::/{CGROUP_NAME}\n")  # as it is once the kernel has moved it

    assert host.detach.take_in([7])
    assert (root / CGROUP_NAME / "cgroup.procs").read_text() == "7"


def test_with_cgroup_v1_there_is_one_for_each_hierarchy_and_links_are_not_followed(tmp_path):
    host = Host(tmp_path, f"3:memory:{CONTAINER}\n2:cpu,cpuacct:{CONTAINER}\n")
    for name in ("memory", "cpu,cpuacct", "unified"):
        host.hierarchy(name)
    (host.cgroups / "cpu").symlink_to("cpu,cpuacct")
    host.process("7", f"3:memory:/{CGROUP_NAME}\n2:cpu,cpuacct:/{CGROUP_NAME}\n")

    assert host.detach.take_in([7])
    for name in ("memory", "cpu,cpuacct", "unified"):
        assert (host.cgroups / name / CGROUP_NAME / "cgroup.procs").read_text() == "7"


def test_a_cpuset_of_cgroup_v1_gets_the_processors_of_its_parent_first(tmp_path):
    host = Host(tmp_path, f"3:cpuset:{CONTAINER}\n")
    root = host.hierarchy("cpuset", cpuset_cpus="0-7\n", cpuset_mems="0\n")
    (root / CGROUP_NAME).mkdir()
    for file in ("cpuset.cpus", "cpuset.mems"):
        (root / CGROUP_NAME / file).write_text("\n")
    host.process("7", f"3:cpuset:/{CGROUP_NAME}\n")

    assert host.detach.take_in([7])
    assert (root / CGROUP_NAME / "cpuset.cpus").read_text() == "0-7\n"
    assert (root / CGROUP_NAME / "cpuset.mems").read_text() == "0\n"


@pytest.mark.parametrize("in_namespace", [False, True])
def test_a_process_that_stays_in_the_container_is_warned_of(tmp_path, caplog, in_namespace):
    own, first = (f"0::{CONTAINER}\n", "0::/init.scope\n")
    if in_namespace:
        own, first = ("0::/\n", "0::/../../../../init.scope\n")
    host = Host(tmp_path, own, first)
    host.hierarchy()
    # What is taken for the host's cgroups is the container's own part of them.
    host.process("7", f"0::/{CGROUP_NAME}\n" if in_namespace else f"0::{CONTAINER}/{CGROUP_NAME}\n")

    assert not host.detach.take_in([7])
    assert "MPS daemons end with this container" in caplog.text


def test_a_process_outside_the_cgroup_namespace_of_this_one_is_out(tmp_path):
    host = Host(tmp_path, "0::/\n", "0::/../../../../init.scope\n")
    host.hierarchy()
    host.process("7", f"0::/../../../../{CGROUP_NAME}\n")

    assert host.detach.in_container
    assert host.detach.take_in([7])


def test_a_process_that_has_ended_needs_no_shelter(tmp_path):
    host = Host(tmp_path, f"0::{CONTAINER}\n")
    host.hierarchy()

    assert host.detach.take_in([7])


def test_cgroups_that_are_not_there_are_warned_of(tmp_path, caplog):
    host = Host(tmp_path, f"0::{CONTAINER}\n")
    host.cgroups.rmdir()
    host.process("7", f"0::{CONTAINER}\n")

    assert not host.detach.take_in([7])
    assert "cannot be moved out of its cgroup" in caplog.text


def test_the_place_is_taken_away_unless_somebody_is_in_it(tmp_path):
    host = Host(tmp_path, f"2:memory:{CONTAINER}\n1:cpu:{CONTAINER}\n")
    empty, used = host.hierarchy("memory") / CGROUP_NAME, host.hierarchy("cpu") / CGROUP_NAME
    empty.mkdir()
    used.mkdir()
    (used / "cgroup.procs").write_text("7")  # the kernel refuses to remove it then

    for _ in range(2):
        host.detach.close()

    assert not empty.exists()
    assert used.exists()


def test_on_a_plain_host_no_place_is_taken_away(tmp_path):
    host = Host(tmp_path, "0::/system.slice/kubelet.service\n")
    place = host.hierarchy() / CGROUP_NAME
    place.mkdir()

    host.detach.close()

    assert place.exists()


def test_that_nothing_can_be_moved_is_said_once_until_it_changes(tmp_path, caplog):
    caplog.set_level("INFO")
    host = Host(tmp_path, f"0::{CONTAINER}\n")
    host.hierarchy()
    host.process("7", f"0::{CONTAINER}\n")
    cgroup = host.detach

    for _ in range(3):
        assert not cgroup.take_in([7])
    assert len(caplog.messages) == 1
    host.process("7", f"0::/{CGROUP_NAME}\n")
    for _ in range(2):
        assert cgroup.take_in([7])

    assert caplog.messages[1:] == ["MPS daemons can be moved out of this container again"]
