"""While a GPU is changed nobody is late by it, and what is known of GPUs holds."""

import threading
import time
from dataclasses import replace

import pytest

from dra_driver.base.errors import NodeError, TimedOut
from dra_driver.model.gpus import GpuUuid
from dra_driver.node.nvml.threads import CallThread, GpuChanges
from dra_driver.sim.nvml import SimulatedNvml
from tests.fakes.simulated import Node, two_gpus
from tests.waiting import eventually


class OneByOne(SimulatedNvml):
    """A driver that serves one call after another, whichever GPU it is for."""

    def __init__(self, live, mig):
        super().__init__(live, mig=mig)
        self.serving = threading.Lock()

    def nvmlDeviceGetUUID(self, handle):  # noqa: N802
        with self.serving:
            return super().nvmlDeviceGetUUID(handle)

    def nvmlSystemGetDriverVersion(self):  # noqa: N802
        with self.serving:
            return super().nvmlSystemGetDriverVersion()


@pytest.fixture
def node(tmp_path):
    simulated = Node(tmp_path, two_gpus(), deadline_seconds=0.3)
    simulated.functions = OneByOne(simulated.live, simulated.mig)
    yield simulated
    simulated.nvml.stop()


@pytest.fixture
def gpus(node):
    return node.gpus(lambda minors: None)


class Change:
    """A change of a GPU that lasts until it is told to end."""

    def __init__(self, node, gpu, seconds=20.0):
        self.begun, self.end = threading.Event(), threading.Event()
        self._node, self._gpu, self._seconds = node, gpu, seconds
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        assert self.begun.wait(5)
        return self

    def __exit__(self, *error):
        self.end.set()
        self._thread.join(10)

    def _run(self):
        uuid = GpuUuid(str(self._node.live.current().gpus[self._gpu].uuid))
        try:
            self._node.nvml.on_gpu(uuid, "changing it", self._call, self._seconds)
        except TimedOut:
            self.end.wait(10)

    def _call(self, functions, handle):
        with functions.serving:
            self.begun.set()
            self.end.wait(30)


def test_a_look_while_a_gpu_is_changed_sees_what_was_known_and_is_short(node, gpus):
    before = gpus.scan()
    with Change(node, 0):
        began = time.monotonic()
        inventory = gpus.scan()
        assert time.monotonic() - began < 25
        assert (inventory.gpus, inventory.unavailable) == (before.gpus, before.unavailable)
        assert inventory.stale == {gpu.uuid for gpu in before.gpus}  # and nothing else is said
    assert gpus.scan() == before
    node.change(gpu=0, mig=True)
    assert gpus.scan().gpus[0].mig.on


def test_a_gpu_that_could_not_be_read_is_no_better_for_the_change_of_another(node, gpus):
    gpus.scan()
    node.change(gpu=1, fails="GPU_IS_LOST")
    before = gpus.scan()
    assert [uuid for uuid, _ in before.lost] == [before.gpus[1].uuid]
    node.change(gpu=1, fails={})
    with Change(node, 0):
        assert gpus.scan() == replace(before, stale=frozenset(gpu.uuid for gpu in before.gpus))
    assert gpus.scan().lost == ()


def test_a_gpu_that_hangs_is_not_waited_for_longer_because_another_is_changed(node, gpus):
    gpus.scan()
    node.change(gpu=1, hangs=True)
    gpus.scan()
    assert [uuid[:4] for uuid, _ in gpus.scan().lost] == ["GPU-"]
    with Change(node, 0):
        ((_, reason),) = gpus.scan().lost
        assert "has not returned since" in reason
    node.change(gpu=1, hangs=False)


def test_what_is_asked_behind_a_change_is_answered_when_that_ends(node):
    node.nvml.system()
    node.nvml.dynamic_states([0, 1])
    second = GpuUuid(str(node.live.current().gpus[1].uuid))
    with Change(node, 0) as change:
        timer = threading.Timer(0.8, change.end.set)
        timer.start()
        answer = node.nvml.on_gpu(
            second, "asking", lambda functions, handle: functions.nvmlDeviceGetUUID(handle)
        )
        timer.join()
    assert answer == second


def test_a_change_that_hangs_keeps_the_others_no_longer_than_its_time(node):
    node.nvml.system()
    node.nvml.dynamic_states([0, 1])
    with Change(node, 0, seconds=0.4):
        began = time.monotonic()
        answers = node.nvml.dynamic_states([1])
        assert isinstance(answers[1], TimedOut)
        assert time.monotonic() - began >= 0.4


def test_who_is_not_known_yet_is_waited_for(node):
    node.nvml.system()
    node.nvml.dynamic_states([0])
    with Change(node, 0) as change:
        timer = threading.Timer(0.5, change.end.set)
        timer.start()
        assert not isinstance(node.nvml.dynamic_states([1])[1], NodeError)
        timer.join()


def test_the_clock_stands_still_while_there_are_changes_and_goes_on_when_they_are_late():
    changes, worker, end = GpuChanges(), CallThread("test"), threading.Event()
    began, start = changes.clock(), time.monotonic()

    def stood():
        return (time.monotonic() - start) - (changes.clock() - began)

    change = worker.submit("changing", end.wait, 2.0)
    changes.begins(3, change)
    assert (changes.under_way(), changes.under_way(3), changes.under_way(0)) == (True, True, False)
    time.sleep(1.0)
    assert stood() == pytest.approx(min(time.monotonic() - start, 2.0), abs=0.5)
    time.sleep(1.5)
    assert stood() == pytest.approx(2.0, abs=0.5)
    assert not changes.under_way()
    end.set()
    eventually(lambda: change.done)
    worker.stop()
