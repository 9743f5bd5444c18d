"""NVML is started, started again when it has to be, and never waited for without end."""

import contextlib
import threading
import time

import pytest

from dra_driver.base.errors import NodeError, TimedOut
from dra_driver.model.gpus import Version
from dra_driver.node.mig.geometry import GeometryCache
from dra_driver.node.nvml.client import Nvml
from dra_driver.node.nvml.values import DynamicState, NvLinks, architecture, brand
from dra_driver.sim.nvml import SimulatedNvml
from tests.fakes.simulated import Node, h100, two_gpus
from tests.waiting import eventually


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path, two_gpus())


@pytest.fixture
def hung(tmp_path):
    """A node whose first GPU hangs since NVML was started."""
    node = Node(tmp_path, two_gpus(), deadline_seconds=0.3)
    node.nvml.system()
    node.change(gpu=0, hangs=True)
    yield node
    node.change(gpu=0, hangs=False)


def test_the_system_tells_versions_and_the_number_of_gpus(node):
    system = node.nvml.system()
    assert (system.driver_version, system.cuda_driver_version, system.gpus) == (
        Version(580, 95, 5),
        Version(13),
        2,
    )


def test_nvml_is_started_once_for_many_questions(node):
    assert node.nvml.system().session == node.nvml.system().session == 1


def test_questions_before_nvml_is_started_are_answered_with_an_error(node):
    assert "NVML is not running" in str(node.nvml.dynamic_states([0])[0])


def test_an_index_that_nvml_does_not_have_is_an_error_for_that_index_alone(node):
    node.nvml.system()
    answers = node.nvml.dynamic_states([7, 0])
    assert list(answers) == [0, 7]
    assert isinstance(answers[0], DynamicState)
    assert "Invalid Argument" in str(answers[7])


def test_a_gpu_that_hangs_does_not_keep_the_others_from_answering(hung):
    answers = hung.nvml.dynamic_states([0, 1])
    assert isinstance(answers[0], TimedOut)
    assert answers[1] == DynamicState(hung.live.current().gpus[1].uuid, mig_on=False)


def test_many_gpus_that_hang_cost_one_deadline_together(tmp_path):
    gpus = [h100(f"{bus:02x}", hangs=True) for bus in range(16, 24)]
    node = Node(tmp_path, {"gpus": gpus}, deadline_seconds=1)
    node.nvml.system()
    began = time.monotonic()
    answers = node.nvml.dynamic_states(range(8))
    assert all(isinstance(answer, TimedOut) for answer in answers.values())
    assert time.monotonic() - began < 8, "one after the other would take 20 s"
    node.document["gpus"] = [gpu | {"hangs": False} for gpu in gpus]
    node.write()


def test_a_gpu_that_hangs_is_not_waited_for_again_and_recovers_by_itself(hung):
    hung.nvml.dynamic_states([0])
    assert "has not returned since" in str(
        hung.nvml.dynamic_states([0])[0]
    )  # else: no answer within
    hung.change(gpu=0, hangs=False)
    eventually(lambda: isinstance(hung.nvml.dynamic_states([0])[0], DynamicState))


def test_a_driver_that_is_not_ready_is_asked_again_later(tmp_path):
    node = Node(tmp_path, {**two_gpus(), "driver": "not-loaded"})
    with pytest.raises(NodeError, match=r"Driver Not Loaded; load the NVIDIA kernel driver"):
        node.nvml.system()
    node.change(driver="ready")
    assert node.nvml.system().gpus == 2


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"driver_version": "590.48.01"}, id="another driver was loaded"),
        pytest.param({"driver": "not-loaded"}, id="the driver was unloaded"),
    ],
)
def test_after_a_change_of_the_driver_nvml_is_started_again(node, change):
    node.nvml.system()
    node.change(**change)
    with pytest.raises(NodeError):
        node.nvml.system()
    node.change(driver="ready")
    system = node.nvml.system()
    assert system.session == 2
    assert str(system.driver_version) == ("590.48.1" if "driver_version" in change else "580.95.5")


def test_one_gpu_that_finds_the_driver_changed_is_enough_to_start_nvml_again(node):
    node.nvml.system()
    node.change(driver_version="590.48.01")
    node.nvml.dynamic_states([0])
    assert str(node.nvml.system().driver_version) == "590.48.1"


def test_nvml_is_not_started_again_while_a_call_is_under_way(hung):
    hung.nvml.dynamic_states([0])
    assert not hung.nvml.restart()
    assert hung.nvml.system().session == 1


def test_a_restart_finds_gpus_that_came_later(node):
    assert node.nvml.system().gpus == 2
    node.document["gpus"].append(h100("9d"))
    node.write()
    assert node.nvml.system().gpus == 2
    assert node.nvml.restart()
    assert node.nvml.system().gpus == 3


def test_after_stop_it_can_be_started_again(node):
    node.nvml.system()
    node.nvml.stop()
    assert "not running" in str(node.nvml.dynamic_states([0])[0])
    assert node.nvml.system().gpus == 2


def test_a_stop_that_hangs_holds_up_nobody(node):
    class Stuck(SimulatedNvml):
        gate = threading.Event()

        def nvmlShutdown(self):  # noqa: N802
            self.gate.wait()

    functions = Stuck(node.live)
    nvml = Nvml(lambda: functions, GeometryCache)
    nvml.system()
    begun = time.monotonic()

    nvml.stop()

    assert time.monotonic() - begun < 30
    functions.gate.set()


def test_a_start_that_hangs_is_bounded_and_its_late_end_does_no_harm(node):
    class Slow(SimulatedNvml):
        gate = threading.Event()

        def nvmlInit(self):  # noqa: N802
            self.gate.wait()
            super().nvmlInit()

    functions = Slow(node.live)
    nvml = Nvml(lambda: functions, GeometryCache, deadline_seconds=0.05)
    with pytest.raises(TimedOut, match=r"starting NVML: no answer within 0.05 s"):
        nvml.system()
    with pytest.raises(TimedOut, match=r"an earlier call \(starting NVML\) has not returned"):
        nvml.system()
    functions.gate.set()

    def gpus() -> int:
        with contextlib.suppress(TimedOut):
            return nvml.system().gpus
        return 0

    assert eventually(gpus) == 2
    nvml.stop()
    with pytest.raises(Exception, match="Uninitialized"):
        functions.nvmlDeviceGetCount()  # every nvmlInit was undone


def test_a_library_that_is_not_found_yet_is_looked_for_each_time(node):
    tries = []

    def load():
        tries.append(1)
        if len(tries) < 3:
            raise NodeError("no driver root yet")
        return node.functions

    nvml = Nvml(load, GeometryCache)
    for _ in range(2):
        with pytest.raises(NodeError, match="no driver root yet"):
            nvml.system()
    assert nvml.system().gpus == 2


def test_facts_are_told_in_the_published_words(node):
    node.nvml.system()
    static = node.nvml.static_infos([0])[0]
    assert (static.pci_bus_id, static.product_name) == ("0000:1b:00.0", "NVIDIA H100 80GB HBM3")
    assert (static.brand, static.architecture) == ("Nvidia", "Hopper")
    assert static.compute_capability == Version(9)
    assert (static.memory_bytes, static.addressing_mode) == (81559 << 20, "HMM")


@pytest.mark.parametrize(
    ("function", "field"),
    [
        ("nvmlDeviceGetMemoryInfo", "memory_bytes"),
        ("nvmlDeviceGetAddressingMode", "addressing_mode"),
    ],
)
def test_what_nvml_does_not_support_is_absent(node, function, field):
    node.change(gpu=0, fails={function: "NOT_SUPPORTED"})
    node.nvml.system()
    assert getattr(node.nvml.static_infos([0])[0], field) is None


def test_a_driver_older_than_a_question_leaves_its_answer_out(node):
    functions = {"nvmlDeviceGetAddressingMode": "FUNCTION_NOT_FOUND"}
    node.change(gpu=0, fails=functions | {"nvmlDeviceGetMigMode": "NVML_ERROR_FUNCTION_NOT_FOUND"})
    node.nvml.system()
    assert node.nvml.static_infos([0])[0].addressing_mode is None
    assert node.nvml.dynamic_states([0])[0].mig_on is None


def test_numbers_that_we_have_no_word_for_are_unknown():
    assert (brand(0), brand(999), architecture(4711)) == ("Unknown", "Unknown", "Unknown")
    assert (brand(2), architecture(8)) == ("Tesla", "Ada Lovelace")


@pytest.mark.parametrize(
    ("product", "nvlink", "expected"),
    [
        pytest.param("H100-80-SXM", "nvswitch", NvLinks(switch=True), id="switches"),
        pytest.param(
            "A100-80-PCIE", [[0, 1]], NvLinks(peers=frozenset({"0000:43:00.0"})), id="a bridge"
        ),
        pytest.param("A100-80-PCIE", "none", NvLinks(), id="inactive links"),
        pytest.param("T4", "none", NvLinks(), id="a board without NVLink"),
    ],
)
def test_links_tell_where_they_lead(tmp_path, product, nvlink, expected):
    gpus = [{"product": product, "bus_id": f"0000:{bus}:00.0"} for bus in ("1b", "43")]
    node = Node(tmp_path, {"nvlink": nvlink, "gpus": gpus})
    node.nvml.system()
    assert node.nvml.links([0])[0] == expected
