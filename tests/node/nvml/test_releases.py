"""NVML is closed under nobody, and opened for nobody while it is released."""

import threading

import pytest

from dra_driver.base.errors import NodeError, TimedOut
from dra_driver.model.gpus import GpuUuid
from dra_driver.node.mig.geometry import GeometryCache
from dra_driver.node.nvml.client import Nvml
from dra_driver.node.nvml.session import OpenNvml
from tests.fakes.nvml_events import EventNvml
from tests.fakes.simulated import Node, two_gpus


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path, two_gpus())


@pytest.fixture
def functions(node):
    return EventNvml(node.live, mig=node.mig)


def test_who_uses_nvml_keeps_it_open_and_is_told_to_leave(functions):
    nvml = OpenNvml()
    nvml.open(functions)
    with nvml.use(0.0) as used:
        assert used is functions
        assert not nvml.close(0.01)
        assert not nvml.is_open
        with nvml.use(0.0) as late:
            assert late is None
    assert nvml.close(0.0)


def test_who_waits_for_nvml_has_it_as_soon_as_it_is_open(functions):
    nvml = OpenNvml()
    used = []

    def use():
        with nvml.use(30.0) as opened:
            used.append(opened)

    waits = threading.Thread(target=use)
    waits.start()
    nvml.open(functions)
    waits.join(5)
    assert used == [functions]


def test_nvml_is_used_on_while_a_call_for_events_hangs(functions):
    nvml = Nvml(lambda: functions, GeometryCache)
    nvml.system()
    with nvml.open.use(0.0):
        assert nvml.restart()
        assert nvml.system().session == 1
        assert (functions._users, nvml.open.is_open) == (1, True)
    nvml.release("a reset")
    nvml.resume()
    assert nvml.system().session == 2
    nvml.stop()


def test_a_call_under_way_is_waited_for_and_no_other_begins(node, functions):
    nvml = Nvml(lambda: functions, GeometryCache, deadline_seconds=0.3)
    gpu = GpuUuid(str(node.live.current().gpus[0].uuid))
    nvml.on_gpu(gpu, "asking", lambda functions, handle: None)
    begun, may_end = threading.Event(), threading.Event()

    def change(functions, handle):
        begun.set()
        may_end.wait(30)

    changes = threading.Thread(target=lambda: nvml.on_gpu(gpu, "changing", change, 20.0))
    changes.start()
    assert begun.wait(5)
    with pytest.raises(TimedOut, match="a call is under way"):
        nvml.release("maintenance")
    with pytest.raises(NodeError, match="NVML is released: maintenance"):
        nvml.system()
    for ask in (nvml.dynamic_states, nvml.static_infos, nvml.links):
        assert [str(answer).split(": ")[1:] for answer in ask([0, 1]).values()] == [
            ["NVML is released", "maintenance"]
        ] * 2
    with pytest.raises(NodeError, match="NVML is released: maintenance"):
        nvml.on_gpu(gpu, "asking", lambda functions, handle: None)

    may_end.set()
    changes.join(5)
    nvml.release("maintenance")

    assert functions._users == 0
    nvml.stop()


def test_what_could_not_be_released_is_started_anew(node, functions):
    nvml = Nvml(lambda: functions, GeometryCache)
    nvml.system()
    with nvml.open.use(0.0), pytest.raises(TimedOut):
        nvml.release("maintenance")
    nvml.resume()

    assert nvml.system().gpus == 2
    assert nvml.open.is_open
    nvml.stop()


def test_resuming_what_was_not_released_changes_nothing(functions):
    nvml = Nvml(lambda: functions, GeometryCache)
    nvml.system()
    nvml.resume()

    assert nvml.system().session == 1
    nvml.stop()
