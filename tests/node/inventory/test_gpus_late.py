"""A GPU that is late once is as it was; one that is late again is lost."""

import threading
from contextlib import contextmanager

import pytest

from dra_driver.base.errors import NodeError, TimedOut
from dra_driver.node.mig.geometry import GeometryCache
from dra_driver.node.nvml.session import NvmlSession
from dra_driver.node.nvml.threads import GpuBeingChanged
from dra_driver.sim.nvml import SimulatedNvml
from tests.fakes.simulated import Node, h100, two_gpus
from tests.waiting import eventually


class Slow(SimulatedNvml):
    """Answers one question about the first GPU only when it may."""

    question = ""

    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        self.may = threading.Event()
        self.threads: set[str] = set()  # that asked for a mode

    def nvmlDeviceGetMigMode(self, handle):  # noqa: N802
        self.threads.add(threading.current_thread().name)
        self._wait("mode", handle)
        return super().nvmlDeviceGetMigMode(handle)

    def _wait(self, question, handle):
        if question == self.question and handle.bus_id.startswith("0000:1b"):
            self.may.wait(5)

    def _wait_for_all(self, question):
        if question == self.question:
            self.may.wait(60)

    def nvmlDeviceGetCount(self):  # noqa: N802
        self._wait_for_all("count")
        return super().nvmlDeviceGetCount()

    def nvmlSystemGetDriverVersion(self):  # noqa: N802
        self._wait_for_all("driver")
        return super().nvmlSystemGetDriverVersion()

    def nvmlInit(self):  # noqa: N802
        self._wait_for_all("start")
        super().nvmlInit()

    def nvmlDeviceGetBrand(self, handle):  # noqa: N802 - NVML's name
        self._wait("brand", handle)
        return super().nvmlDeviceGetBrand(handle)

    def nvmlDeviceGetNvLinkState(self, device, link):  # noqa: N802
        self._wait("links", device)
        return super().nvmlDeviceGetNvLinkState(device, link)


@pytest.fixture
def node(tmp_path):
    """What it is not asked late it has 1.5 s for, also on a machine that does much else."""
    node = Node(tmp_path, two_gpus(), deadline_seconds=1.5)
    node.functions = Slow(node.live, mig=node.mig)
    return node


@pytest.fixture
def gpus(node):
    return node.gpus(lambda minors: None)


@contextmanager
def late(node, question):
    """The first GPU answers this too late, but before it is asked anything else."""
    node.functions.may.clear()
    node.functions.question = question
    yield
    node.functions.may.set()
    eventually(lambda: not isinstance(node.nvml.dynamic_states([0])[0], NodeError))
    node.functions.question = ""


def looked(node, gpus, question):
    """What a look finds while that is answered late: the minors of GPUs that are not lost, and how
    many are."""
    with late(node, question):
        inventory = gpus.scan()
    lost = dict(inventory.lost)
    assert inventory.unavailable == ()
    return [gpu.minor for gpu in inventory.gpus if gpu.uuid not in lost], len(lost)


def test_gpus_are_read_by_one_thread_unless_one_of_them_hangs(node, gpus):
    before = gpus.scan().gpus
    node.functions.threads.clear()
    assert gpus.scan().gpus == before
    assert node.functions.threads == {"nvml-gpus"}

    assert looked(node, gpus, "mode") == ([0, 1], 0)
    assert looked(node, gpus, "mode") == ([1], 1)

    assert node.functions.threads == {"nvml-gpus", "nvml-gpu-0", "nvml-gpu-1"}
    eventually(lambda: gpus.scan().gpus == before)


def test_one_whose_properties_come_late_is_lost_from_the_second_time_on(node, gpus):
    (gpu, _) = gpus.scan().gpus
    node.nvml.on_gpu(gpu.uuid, "turning it on", lambda nvml, it: nvml.nvmlDeviceSetMigMode(it, 1))

    assert looked(node, gpus, "brand") == ([0, 1], 0)
    for _ in range(2):
        assert looked(node, gpus, "brand") == ([1], 1)

    (gpu, _) = gpus.scan().gpus
    assert gpu.mig.on


def test_one_whose_links_come_late_is_lost_from_the_second_time_on(node, gpus):
    before = gpus.scan().gpus[0]
    node.document["gpus"].append(h100("9d"))
    node.write()

    assert looked(node, gpus, "links") == ([0, 1, 2], 0)
    for _ in range(2):
        assert looked(node, gpus, "links") == ([1, 2], 1)

    again = gpus.scan().gpus[0]
    assert (again.uuid, again.topology.nvlink_peers) == (before.uuid, 2)


@pytest.fixture
def system_late(node):
    """From now on NVML answers this only when it may; the call is released in the end."""

    def begin(question):
        node.functions.may.clear()
        node.functions.question = question

    yield begin
    node.functions.may.set()


def in_time(node, gpus):
    """What a look finds at which all is in time."""
    node.functions.question = ""
    node.functions.may.set()
    return eventually(lambda: (inventory := gpus.scan()).gpus and not inventory.stale and inventory)


@pytest.mark.parametrize("question", ["count", "driver"])
def test_one_late_answer_of_nvml_itself_empties_no_slice_and_a_second_one_does(
    node, gpus, system_late, question
):
    before = in_time(node, gpus)
    assert [gpu.minor for gpu in before.gpus] == [0, 1]

    system_late(question)
    once = gpus.scan()
    assert (once.gpus, once.unavailable) == (before.gpus, before.unavailable)
    assert once.stale == {gpu.uuid for gpu in before.gpus}
    again = gpus.scan()
    assert again.gpus == ()
    assert "reading the driver" in again.unavailable[0].reason

    assert in_time(node, gpus).gpus == before.gpus
    system_late(question)
    assert gpus.scan().gpus == before.gpus, "it was in time in between"


def test_a_late_restart_of_nvml_is_excused_once_too(node, gpus, system_late):
    before = in_time(node, gpus).gpus
    eventually(node.nvml.restart)

    system_late("start")
    assert gpus.scan().gpus == before
    assert gpus.scan().gpus == ()

    assert in_time(node, gpus).gpus == before


def test_a_first_look_that_is_late_has_nothing_to_keep(node, system_late):
    system_late("start")

    assert node.gpus(lambda minors: None).scan().gpus == ()


def test_a_driver_that_says_in_time_that_it_is_gone_is_not_late(tmp_path):
    node = Node(tmp_path, two_gpus(), deadline_seconds=60)
    node.functions = Slow(node.live, mig=node.mig)
    gpus = node.gpus(lambda minors: None)
    in_time(node, gpus)
    node.change(driver="not-loaded")
    eventually(node.nvml.restart)

    assert gpus.scan().gpus == ()


LATE = TimedOut("no answer within 5 s")


def is_excused(late, error=LATE, known=(0,)):
    return isinstance(late.excuse(0, error, known), GpuBeingChanged)


def test_one_look_in_time_makes_a_gpu_as_good_as_any_other():
    late = NvmlSession(GeometryCache())
    late.begin_read()
    assert is_excused(late)
    assert is_excused(late)  # by another question of the same look
    late.begin_read()
    assert not is_excused(late)
    late.begin_read()
    assert not is_excused(late)
    late.begin_read()
    late.begin_read()
    assert is_excused(late)


def test_a_look_at_which_it_was_not_asked_makes_it_no_better():
    late = NvmlSession(GeometryCache())
    late.begin_read()
    assert is_excused(late)
    late.begin_read()
    changed = GpuBeingChanged("it is being changed")
    assert late.excuse(0, changed, (0,)) is changed
    late.begin_read()
    assert not is_excused(late)


@pytest.mark.parametrize(("error", "known"), [(LATE, (1,)), (NodeError("it is lost"), (0,))])
def test_a_new_gpu_and_another_error_are_not_excused(error, known):
    late = NvmlSession(GeometryCache())
    late.begin_read()
    assert late.excuse(0, error, known) is error
    late.begin_read()
    assert is_excused(late)
