"""A GPU is asked by its UUID, wherever NVML lists it now."""

import threading
import time
from typing import Any

import pynvml
import pytest

from dra_driver.base.errors import NodeError, TimedOut
from dra_driver.model.gpus import GpuUuid
from dra_driver.node.memory.support import set_memory_limit
from dra_driver.node.mig.geometry import GeometryCache
from dra_driver.node.nvml import api, readers
from dra_driver.node.nvml.client import Nvml
from dra_driver.sim.nvml import SimulatedNvml
from tests.fakes.simulated import Node, two_gpus


@pytest.fixture
def node(tmp_path):
    simulated = Node(tmp_path, two_gpus(), deadline_seconds=0.5)
    yield simulated
    simulated.nvml.stop()


def uuid(node, gpu):
    return GpuUuid(str(node.live.current().gpus[gpu].uuid))


def bus(functions, handle):
    return functions.nvmlDeviceGetPciInfo(handle).busIdLegacy


def test_each_gpu_answers_for_itself(node):
    assert node.nvml.on_gpu(uuid(node, 0), "asking", bus) == "0000:1B:00.0"
    assert node.nvml.on_gpu(uuid(node, 1), "asking", bus) == "0000:43:00.0"


def test_several_are_asked_by_one_thread(node):
    gpus = [uuid(node, 0), uuid(node, 1)]
    node.nvml.on_gpu(gpus[0], "asking", bus)

    def bus_and_thread(functions, handle):
        return bus(functions, handle), threading.current_thread().name

    answers = node.nvml.on_gpus(gpus, "asking", bus_and_thread)

    buses = ("0000:1B:00.0", "0000:43:00.0")
    assert answers == {gpu: (bus_id, "nvml-gpus") for gpu, bus_id in zip(gpus, buses, strict=True)}


def test_of_several_each_answers_or_it_is_said_why_not(node):
    first, second = uuid(node, 0), uuid(node, 1)
    node.nvml.on_gpu(first, "asking", bus)
    node.change(gpu=0, hangs=True)

    for _ in range(2):  # it still hangs when it is asked again
        answers = node.nvml.on_gpus([first, GpuUuid("GPU-x"), second], "asking", bus)

        assert isinstance(answers[first], TimedOut)
        assert "GPU GPU-x, asking: NVML does not list it" in str(answers[GpuUuid("GPU-x")])
        assert answers[second] == "0000:43:00.0"
    node.change(gpu=0, hangs=False)


def test_one_of_several_that_cannot_be_asked_says_why(node):
    first, second = uuid(node, 0), uuid(node, 1)
    node.nvml.on_gpu(first, "asking", bus)

    def bus_of_one_with_power(functions, handle):
        if bus(functions, handle) == "0000:1B:00.0":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INSUFFICIENT_POWER)
        return bus(functions, handle)

    answers = node.nvml.on_gpus([first, second], "asking", bus_of_one_with_power)

    assert "asking: NVML says" in str(answers[first])
    assert "check its power cables" in str(answers[first])
    assert answers[second] == "0000:43:00.0"


def test_one_of_several_that_hangs_keeps_the_others_once_and_a_fifth_of_the_time(tmp_path):
    node = Node(tmp_path, two_gpus(), deadline_seconds=1.5)
    first, second = uuid(node, 0), uuid(node, 1)
    node.nvml.on_gpu(first, "asking", bus)
    goes_on = threading.Event()
    asked: list[tuple[str, float]] = []  # by which thread, and when

    def hangs_at_the_first(functions, handle):
        asked.append((threading.current_thread().name, time.monotonic() - begun))
        if bus(functions, handle) == "0000:1B:00.0":
            goes_on.wait(60)
        return bus(functions, handle)

    begun = time.monotonic()
    for _ in range(2):
        answers = node.nvml.on_gpus([first, second], "asking", hangs_at_the_first)

        assert isinstance(answers[first], TimedOut)
        assert answers[second] == "0000:43:00.0"

    threads = sorted(thread for thread, _ in asked)
    assert threads == ["nvml-gpu-0", "nvml-gpu-1", "nvml-gpu-1", "nvml-gpus"]
    assert 0.3 <= dict(reversed(asked))["nvml-gpu-1"] < 1.5
    goes_on.set()
    node.nvml.stop()


def test_one_that_is_not_listed_is_named(node):
    with pytest.raises(NodeError, match="GPU GPU-x, asking: NVML does not list it"):
        node.nvml.on_gpu(GpuUuid("GPU-x"), "asking", bus)


def test_it_is_found_where_it_is_after_another_start_of_nvml(node):
    second = uuid(node, 1)
    node.nvml.on_gpu(second, "asking", bus)
    node.change(gpu=0, present=False)
    assert node.nvml.restart()
    assert node.nvml.system().gpus == 1
    assert node.nvml.on_gpu(second, "asking", bus) == "0000:43:00.0"


def test_one_that_hangs_is_waited_for_no_longer_than_the_others(node):
    first, second = uuid(node, 0), uuid(node, 1)
    node.nvml.on_gpu(first, "asking", bus)
    node.change(gpu=0, hangs=True)
    with pytest.raises(TimedOut, match=f"GPU {first}, asking"):
        node.nvml.on_gpu(first, "asking", bus)
    assert node.nvml.on_gpu(second, "asking", bus) == "0000:43:00.0"
    node.change(gpu=0, hangs=False)


def test_one_that_finds_the_driver_changed_is_enough_to_start_nvml_again(node):
    first = uuid(node, 0)
    node.nvml.on_gpu(first, "asking", bus)
    node.change(driver_version="590.48.01")
    with pytest.raises(NodeError, match="reboot the node"):
        node.nvml.on_gpu(first, "asking", bus)
    assert str(node.nvml.system().driver_version) == "590.48.1"


def test_one_that_is_asked_while_nvml_is_started_again_answers(tmp_path):
    class Slow(SimulatedNvml):
        started, go = threading.Event(), threading.Event()

        def nvmlInit(self):  # noqa: N802
            super().nvmlInit()
            self.started.set()
            self.go.wait()

    node = Node(tmp_path, two_gpus())
    functions = Slow(node.live)
    functions.go.set()
    nvml = Nvml(lambda: functions, GeometryCache)
    first = uuid(node, 0)
    nvml.on_gpu(first, "asking", bus)
    functions.started.clear()
    functions.go.clear()
    assert nvml.restart()
    answers = []
    starts = threading.Thread(target=nvml.system)
    asks = threading.Thread(target=lambda: answers.append(nvml.on_gpu(first, "asking", bus)))
    starts.start()
    assert functions.started.wait(5)
    asks.start()
    asks.join(0.1)  # it is known where the GPU was, and is not to be asked there any more
    functions.go.set()
    asks.join(5)
    starts.join(5)
    assert answers == ["0000:1B:00.0"]
    nvml.stop()


def test_where_gpus_were_listed_in_an_earlier_session_is_not_remembered(node):
    class Awkward(pynvml.NVMLError):  # type: ignore[misc]
        """While the caller judges it, somebody starts NVML again, without the second GPU."""

        def __getattribute__(self, name: str) -> Any:
            if name == "value" and threading.current_thread() is threading.main_thread():
                functions.fails = False
                node.change(gpu=1, present=False)
                while not nvml.restart():
                    time.sleep(0.001)
                nvml.system()
            return super().__getattribute__(name)

    class Failing(SimulatedNvml):
        fails = True

        def nvmlDeviceGetMigMode(self, handle):  # noqa: N802
            if self.fails and bus(self, handle) == "0000:1B:00.0":
                raise Awkward(pynvml.NVML_ERROR_UNKNOWN)
            return super().nvmlDeviceGetMigMode(handle)

    second = uuid(node, 1)
    functions = Failing(node.live)
    nvml = Nvml(lambda: functions, GeometryCache)
    nvml.system()
    nvml.dynamic_states([0, 1])
    assert nvml.system().session == 2
    with pytest.raises(NodeError, match="NVML does not list it"):
        nvml.on_gpu(second, "asking", bus)
    nvml.stop()


def test_the_numbers_are_those_of_nvml():
    assert readers.MAX_NVLINKS >= pynvml.NVML_NVLINK_MAX_LINKS
    assert readers.NVLINK_TO_SWITCH == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
    assert readers.MIG_ENABLED == pynvml.NVML_DEVICE_MIG_ENABLE
    assert api.INVALID_ARGUMENT == pynvml.NVML_ERROR_INVALID_ARGUMENT


def test_with_a_pynvml_that_is_too_old_it_is_said_what_is_needed(node, tmp_path):
    class Old:
        """pynvml without the two structures."""

        def __getattr__(self, name: str) -> Any:
            if name.startswith("c_nvml"):
                raise AttributeError(name)
            return getattr(node.functions, name)

    old: Any = Old()
    nvml = Nvml(lambda: old, GeometryCache)
    with pytest.raises(NodeError, match=r"nvidia-ml-py 13\.615 or newer is needed"):
        set_memory_limit(nvml, uuid(node, 0), tmp_path, 1)
    nvml.stop()
