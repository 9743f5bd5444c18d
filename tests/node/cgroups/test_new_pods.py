"""Somebody is told as soon as a pod comes to this node."""

import queue
import time

import pytest

from dra_driver.node.cgroups.tree import Cgroups
from dra_driver.node.cgroups.watch import NewPodWatcher

SECONDS = 60.0


class Signal(queue.SimpleQueue):
    def __call__(self):
        self.put(1)

    def wait(self):
        self.get(timeout=SECONDS)


@pytest.fixture
def signal():
    return Signal()


@pytest.fixture
def root(tmp_path):
    (tmp_path / "cgroup.controllers").write_text("cpu\n")
    (tmp_path / "kubepods/burstable").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def pods(root):
    made = NewPodWatcher(Cgroups(root))
    yield made
    made.stop()


@pytest.mark.parametrize("level", ["kubepods", "kubepods/burstable"])
def test_a_pod_of_every_class_is_told_of(root, pods, signal, level):
    assert pods.report(signal)
    assert pods.report(signal)
    (root / level / "podone").mkdir()
    signal.wait()
    (root / level / "podtwo").mkdir()
    signal.wait()
    assert signal.empty()


def test_what_is_no_pod_is_not_told_of(root, pods, signal):
    assert pods.report(signal)
    (root / "kubepods/besteffort").mkdir()
    (root / "kubepods/burstable/other").mkdir()
    (root / "kubepods/burstable/podlast").mkdir()
    signal.wait()
    assert signal.empty()


def test_a_class_that_came_later_counts_once_it_is_asked_for_again(root, pods, signal):
    assert pods.report(signal)
    (root / "kubepods/besteffort").mkdir()
    assert pods.report(signal)
    (root / "kubepods/besteffort/podone").mkdir()
    signal.wait()


def test_nobody_is_told_any_more_when_nobody_wants_to_be(root, pods, signal):
    assert pods.report(signal)
    assert not pods.report(None)
    (root / "kubepods/podone").mkdir()
    time.sleep(0.05)
    assert signal.empty()
    assert pods.report(signal)
    (root / "kubepods/podtwo").mkdir()
    signal.wait()


def test_without_a_kubelet_nobody_can_be_told(tmp_path, signal):
    pods = NewPodWatcher(Cgroups(tmp_path))
    assert not pods.report(signal)
    pods.stop()
