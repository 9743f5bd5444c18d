"""A simulated node has the cgroups of the pods that a real kubelet makes."""

import contextlib
import shutil
import threading

import pytest

from dra_driver.node.cgroups.tree import Cgroups
from dra_driver.sim.cgroup_mirror import CgroupMirror, _directories_in
from dra_driver.sim.memory_limits import CgroupTree
from tests.waiting import eventually


@pytest.fixture
def mirror(tmp_path):
    """Starts one; it is stopped with the test."""
    started = []

    def start():
        tree = CgroupTree(tmp_path / "copy")
        started.append(CgroupMirror(Cgroups(tmp_path / "real"), tree))
        return tree.root

    yield start
    for running in started:
        running.stop()


@pytest.mark.parametrize("controller", ["", "pids/"], ids=["cgroup v2", "cgroup v1"])
def test_pods_and_containers_are_copied_as_they_come_and_go(tmp_path, mirror, controller):
    real = tmp_path / "real" / controller
    (real / "root/kubepods/burstable/poda/1").mkdir(parents=True)
    (real / "system.slice").mkdir()
    if not controller:
        (real / "cgroup.controllers").write_text("cpu\n")
    copy = mirror()
    assert (copy / "root/kubepods/burstable/poda/1/dmem.max").exists()
    assert not (copy / "system.slice").exists()

    (real / "root/kubepods/podb").mkdir()
    (real / "root/kubepods/podb/2").mkdir()
    eventually(lambda: (copy / "root/kubepods/podb/2/dmem.max").exists())

    shutil.rmtree(real / "root/kubepods/burstable/poda")
    eventually(lambda: not (copy / "root/kubepods/burstable/poda").exists())


def test_what_an_earlier_process_copied_and_is_gone_goes_with_the_next_one(tmp_path, mirror):
    real = tmp_path / "real/kubepods/poda/1"
    real.mkdir(parents=True)
    (tmp_path / "real/cgroup.controllers").write_text("cpu\n")
    CgroupTree(tmp_path / "copy").make("kubepods/podb/2")

    copy = mirror()

    assert (copy / "kubepods/poda/1").is_dir()
    assert not (copy / "kubepods/podb").exists()


def test_two_processes_that_copy_the_same_are_not_in_each_others_way(tmp_path, mirror):
    (tmp_path / "real/kubepods").mkdir(parents=True)
    (tmp_path / "real/cgroup.controllers").write_text("cpu\n")
    copy = mirror()
    mirror()
    names = [f"pod{n}" for n in range(50)]

    for name in names:
        (tmp_path / "real/kubepods" / name).mkdir()

    eventually(lambda: all((copy / "kubepods" / name / "dmem.max").exists() for name in names))
    eventually(lambda: not [path for path in copy.parent.iterdir() if path.name.startswith(".")])


def test_what_another_process_removes_meanwhile_is_passed_over(tmp_path, mirror):
    (tmp_path / "real/kubepods").mkdir(parents=True)
    (tmp_path / "real/cgroup.controllers").write_text("cpu\n")
    copy = mirror()
    pods = [copy / f"kubepods/pod{number}/1" for number in range(50)]
    stop = threading.Event()

    def come_and_go():
        while not stop.is_set():
            for pod in pods:
                with contextlib.suppress(FileNotFoundError):  # a mirror has removed its parent
                    pod.mkdir(parents=True, exist_ok=True)
            for pod in pods:
                shutil.rmtree(pod.parent, ignore_errors=True)

    other = threading.Thread(target=come_and_go)
    other.start()
    try:
        for _ in range(30):
            mirror()
    finally:
        stop.set()
        other.join()


def test_a_copy_in_which_another_process_put_something_stays(tmp_path, mirror, caplog):
    real = tmp_path / "real/kubepods/poda"
    real.mkdir(parents=True)
    (tmp_path / "real/cgroup.controllers").write_text("cpu\n")
    copy = mirror()
    CgroupTree(copy).make("kubepods/poda/another")

    real.rmdir()
    (tmp_path / "real/kubepods/podb").mkdir()
    (tmp_path / "real/kubepods/podc").mkdir()

    eventually(lambda: (copy / "kubepods/podc").exists())
    assert (copy / "kubepods/poda/another").exists()
    assert caplog.messages == []


def test_without_a_kubelet_there_is_nothing_to_copy(tmp_path, mirror):
    (tmp_path / "real").mkdir()
    assert [path for path in mirror().iterdir() if path.is_dir()] == []


def test_the_pods_of_two_kubelets_are_copied(tmp_path, mirror):
    for cluster in ("first", "second"):
        (tmp_path / "real/pids" / cluster / "kubepods/besteffort").mkdir(parents=True)
    copy = mirror()

    for cluster in ("first", "second"):
        (tmp_path / "real/pids" / cluster / "kubepods/besteffort/poda").mkdir()
        pod = copy / cluster / "kubepods/besteffort/poda/dmem.max"
        eventually(pod.exists)


def test_a_cgroup_that_went_since_it_was_seen_has_nothing_in_it(tmp_path):
    (tmp_path / "pod" / "container").mkdir(parents=True)

    assert _directories_in(tmp_path / "pod") == [tmp_path / "pod" / "container"]
    assert _directories_in(tmp_path / "gone") == []
