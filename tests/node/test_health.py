"""The node tells what happens to its GPUs, and lets go of them when it is asked to."""

import subprocess
import time
from contextlib import contextmanager

import pytest
import yaml

from dra_driver.base.errors import NodeError
from dra_driver.model.health import HealthReading, Problem
from tests.fakes.simulated import h100, open_simulated, two_gpus
from tests.waiting import eventually


class Opened:
    """A simulated node as the plugin opens it, whose events are read."""

    def __init__(self, file, document, node):
        self.file, self.document, self.node = file, document, node
        self.gpus = [gpu.uuid for gpu in node.refresh().gpus]
        self.delivered = []
        node.events.start(self.delivered.extend)
        self.happens(1, 31)  # until it is told, not all may be registered
        eventually(lambda: self._is_told("31"))
        self.delivered.clear()

    def _is_told(self, xid):
        told = any(event.value == xid for event in self.delivered)
        if not told:
            self.happens(1, int(xid))
            time.sleep(0.2)
        return told

    def change(self, gpu, **fields):
        self.document["gpus"][gpu].update(fields)
        fresh = self.file.with_suffix(".new")
        fresh.write_text(yaml.safe_dump(self.document))
        fresh.replace(self.file)

    def happens(self, gpu, xid, **more):
        events = self.document["gpus"][gpu].get("events", [])
        self.change(gpu, events=[*events, {"xid": xid, **more}])

    def xids(self):
        return {(event.gpu, event.value) for event in self.delivered}


@contextmanager
def opened(directory, document):
    file = directory / "node.yaml"
    file.write_text(yaml.safe_dump(document))
    with open_simulated(file, directory / "state") as node:
        yield Opened(file, document, node)


@pytest.fixture
def seen(tmp_path):
    with opened(tmp_path, two_gpus()) as made:
        yield made


def test_an_xid_is_told_of_its_gpu_alone(seen):
    seen.happens(0, 79)

    eventually(lambda: seen.delivered)

    (event,) = seen.delivered
    assert (event.gpu, event.problem, event.value) == (seen.gpus[0], Problem.XID, "79")


def test_an_xid_is_of_the_process_that_the_log_of_the_kernel_names(seen):
    seen.happens(0, 31, pid=1234)

    eventually(lambda: seen.delivered)

    assert [event.pid for event in seen.delivered] == [1234]


def test_a_thousand_events_in_a_second_are_few(seen):
    seen.happens(0, 94, times=1000)

    eventually(lambda: sum(event.count for event in seen.delivered) == 1000)

    assert len(seen.delivered) <= 5


def test_the_others_are_told_while_one_is_lost_and_it_is_when_it_is_back(seen):
    seen.change(0, fails="GPU_IS_LOST")
    seen.node.refresh()
    eventually(lambda: seen._is_told("43"))

    del seen.document["gpus"][0]["fails"]
    seen.change(0)
    seen.node.refresh()

    def told_again():
        seen.happens(0, 79)
        time.sleep(0.2)
        return (seen.gpus[0], "79") in seen.xids()

    eventually(told_again)


def test_readings_are_of_each_gpu(seen):
    seen.change(0, remap="failed")
    readings = seen.node.health_readings()

    first, second = (readings[gpu] for gpu in seen.gpus)
    assert isinstance(first, HealthReading) and isinstance(second, HealthReading)
    assert (first.remap_failed, second.remap_failed) == (True, False)
    assert first.recovery_action == second.recovery_action == "NONE"
    assert first.fabric == "" and first.nvlinks == 18


def test_while_released_the_node_is_what_it_was_and_nothing_asks_nvml(seen):
    before = seen.node.inventory()
    seen.node.release("until noon")

    during = seen.node.refresh()

    assert during.gpus == before.gpus
    assert during.stale == frozenset(seen.gpus)
    assert seen.node.refresh() is during  # so that what is offered is not built again
    for gpu, error in seen.node.health_readings().items():
        assert f"GPU {gpu}, reading its health: NVML is released: until noon" in str(error)
    with pytest.raises(NodeError, match="NVML is released: until noon"):
        seen.node.nvml.system()


def test_a_gpu_can_be_reset_while_it_is_released_and_not_before(seen):
    def reset():
        program = [str(seen.node.root / "usr/bin/nvidia-smi"), "--gpu-reset", "-i", "0"]
        return subprocess.run(program, capture_output=True, text=True, timeout=60, env={})

    seen.change(0, remap="pending")
    assert "In use by another client" in reset().stdout
    seen.node.release("a reset")
    assert reset().returncode == 0
    seen.node.resume()
    seen.node.refresh()

    reading = seen.node.health_readings()[seen.gpus[0]]
    assert isinstance(reading, HealthReading)
    assert reading.remap_pending is False


def test_after_a_release_all_is_read_again_and_events_are_told(seen):
    seen.node.release("until noon")
    seen.node.refresh()
    seen.node.resume()
    after = seen.node.refresh()

    assert not after.stale
    eventually(lambda: seen._is_told("13"))


def test_a_node_that_is_released_before_its_first_look_waits_for_it(tmp_path):
    file = tmp_path / "node.yaml"
    file.write_text(yaml.safe_dump({"gpus": [h100("1b")]}))
    with open_simulated(file, tmp_path / "state") as node:
        node.release("until noon")
        during = node.refresh()
        assert not during.gpus
        assert "until noon" in str(during.unavailable)
        node.resume()
        assert len(node.refresh().gpus) == 1


def test_closing_the_node_does_not_wait_for_the_next_event(tmp_path):
    with opened(tmp_path, two_gpus()) as made:
        began = time.monotonic()
    assert time.monotonic() - began < 1.5
    assert made.node.events.join(5)
