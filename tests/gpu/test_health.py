"""What a real NVML tells of health: events can be registered, looks answer, and letting go leaves
no GPU open. Nothing is made to fail; what waiting costs is printed."""

import subprocess
import sys
import threading
import time
from functools import partial

import pytest

from dra_driver.model.health import HealthReading
from dra_driver.node.driver.config import NodeConfig
from dra_driver.node.machine import open_node
from tests.gpu.test_timings import milliseconds, spread
from tests.waiting import eventually

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

_IDLE_SECONDS = 20.0
_LOOKS = 20


@pytest.fixture
def watched(driver, tmp_path):
    """A node of its own, whose events are read."""
    with open_node(NodeConfig(), tmp_path) as node:
        if not node.refresh().gpus:
            pytest.skip(f"no GPU is offered here: {node.inventory().unavailable}")
        node.events.start(lambda events: None)
        yield node


def thread_named(name):
    """The last that began: one of an earlier test may still end."""
    threads = [thread for thread in threading.enumerate() if thread.name == name]
    return threads[-1] if threads else None


def used_by(thread):
    """Processor time in milliseconds, and how often it waited."""
    task = f"/proc/self/task/{thread.native_id}"
    with open(f"{task}/schedstat") as schedstat:
        milliseconds_run = int(schedstat.read().split()[0]) / 1e6
    with open(f"{task}/status") as status:
        (waits,) = (line for line in status if line.startswith("voluntary_ctxt_switches"))
    return milliseconds_run, int(waits.split()[1])


_LETS_GO = """
import os, sys, time
from pathlib import Path
from dra_driver.base.errors import NodeError
from dra_driver.node.driver.config import NodeConfig
from dra_driver.node.machine import open_node

def open_files():
    files = Path("/proc/self/fd")
    names = [os.readlink(files / n) for n in os.listdir(files) if os.path.lexists(files / n)]
    return [name for name in names if name.startswith("/dev/nvidia")]

with open_node(NodeConfig(), Path(sys.argv[1])) as node:
    node.refresh()
    node.events.start(lambda events: None)
    time.sleep(3)
    assert open_files(), "it is not used yet"
    node.release("a test")
    assert not open_files(), open_files()
    try:
        node.nvml.system()
    except NodeError as error:
        assert "a test" in str(error)
    else:
        raise AssertionError("NVML answers")
    node.resume()
    assert not node.refresh().stale
    time.sleep(3)
    assert not node.events.unmonitored, node.events.unmonitored
    assert open_files(), "it is not used again"
"""


def test_every_gpu_tells_its_events(watched):
    time.sleep(3)  # a wait has begun and ended

    assert watched.events.unmonitored == {}
    assert thread_named("nvml-events") is not None


def test_waiting_for_events_costs_next_to_nothing(watched, report):
    thread = eventually(lambda: thread_named("nvml-events"))
    time.sleep(3)  # the GPUs are registered
    before = used_by(thread)
    time.sleep(_IDLE_SECONDS)
    used, waits = (now - then for now, then in zip(used_by(thread), before, strict=True))

    per_minute = 60 / _IDLE_SECONDS
    report([f"idle: {used * per_minute:.2f} ms and {waits * per_minute:.0f} waits a minute"])
    assert used / (_IDLE_SECONDS * 1000) < 0.001


def test_every_gpu_has_a_reading(watched, report):
    readings = watched.health_readings()

    report([str(reading) for reading in readings.values()])
    for reading in readings.values():
        assert isinstance(reading, HealthReading), reading
        assert reading.thermal_slowdown is not None
        assert reading.pcie_replays is not None
    everybody = [gpu.uuid for gpu in watched.inventory().gpus]
    for what, energy_of in (("with its energy", everybody), ("without", ())):
        look = partial(watched.health_readings, energy_of)
        report([f"look at health, {what}: {spread([milliseconds(look) for _ in range(_LOOKS)])}"])


def test_energy_grows(watched):
    gpus = [gpu.uuid for gpu in watched.inventory().gpus]

    def energies():
        return [
            reading.energy_mj
            for reading in watched.health_readings(gpus).values()
            if isinstance(reading, HealthReading) and reading.energy_mj is not None
        ]

    before = energies()
    if not before:
        pytest.skip("this driver does not count energy")
    time.sleep(2)

    assert all(now > then for now, then in zip(energies(), before, strict=True))


def test_letting_go_leaves_no_gpu_open_until_it_is_used_again(driver, tmp_path):
    # In a process of its own: NVML stays open as long as anyone in a process uses it.
    program = [sys.executable, "-c", _LETS_GO, str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr
