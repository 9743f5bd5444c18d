"""Events of GPUs are delivered by one thread, whatever becomes of NVML meanwhile."""

import threading
import time

import pynvml
import pytest

from dra_driver.base.errors import NodeError
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.health import Problem
from dra_driver.node.kernel_log import KernelLog
from dra_driver.node.mig.geometry import GeometryCache
from dra_driver.node.nvml import event_sets
from dra_driver.node.nvml.client import Nvml
from dra_driver.node.nvml.events import GpuEvents
from tests.fakes.nvml_events import EventNvml
from tests.fakes.simulated import Node, two_gpus
from tests.waiting import eventually

XID = pynvml.nvmlEventTypeXidCriticalError


class Watched:
    """A node whose events are read."""

    def __init__(self, directory):
        self.node = Node(directory, two_gpus())
        self.functions = EventNvml(self.node.live, mig=self.node.mig)
        self.nvml = Nvml(lambda: self.functions, GeometryCache)
        self.kernel_log = directory / "kmsg"
        self.kernel_log.touch()
        self.events = GpuEvents(self.nvml, KernelLog(self.kernel_log))
        self.batches = []
        self.first, self.second = (GpuUuid(str(gpu.uuid)) for gpu in self.node.live.current().gpus)

    def start(self):
        self.nvml.system()
        self.events.watch([self.first, self.second])
        self.events.start(self.batches.append)
        eventually(lambda: self.functions.waiting)

    @property
    def delivered(self):
        return [event for batch in self.batches for event in batch]

    def registered(self):
        return [sorted(events.registered) for events in self.functions.live_sets]

    def stop(self):
        self.events.stop()
        self.nvml.stop()
        assert self.events.join(5)


@pytest.fixture
def watched(tmp_path):
    made = Watched(tmp_path)
    yield made
    made.stop()


def test_an_xid_is_told_with_its_gpu_and_number(watched):
    watched.start()
    watched.functions.happens(watched.second, XID, 79)

    eventually(lambda: watched.delivered)

    (event,) = watched.delivered
    assert (event.gpu, event.problem, event.value) == (watched.second, Problem.XID, "79")
    assert (event.gi, event.count, event.pid) == (None, 1, None)
    assert abs(event.at - time.time()) < 10


def test_an_xid_of_an_instance_says_which(watched):
    watched.start()
    watched.functions.happens(watched.first, XID, 31, gi=0)

    eventually(lambda: watched.delivered)

    assert watched.delivered[0].gi == 0


def test_each_kind_of_event_is_a_problem(watched):
    watched.functions.supported = sum(event_sets._PROBLEMS)
    watched.start()
    watched.functions.happens(watched.first, pynvml.nvmlEventTypeSingleBitEccError)
    watched.functions.happens(watched.first, pynvml.nvmlEventTypeDoubleBitEccError)
    watched.functions.happens(watched.first, pynvml.nvmlEventTypeGpuUnavailableError)
    watched.functions.happens(watched.first, pynvml.nvmlEventTypeGpuRecoveryAction, 1)

    eventually(lambda: len(watched.delivered) == 4)

    assert {(event.problem, event.value) for event in watched.delivered} == {
        (Problem.CORRECTABLE_ECC, ""),
        (Problem.UNCORRECTABLE_ECC, ""),
        (Problem.LOST, ""),
        (Problem.RECOVERY_ACTION, "GPU_RESET"),
    }


def test_a_thousand_equal_events_are_few_that_count_them(watched):
    watched.start()
    for _ in range(1000):
        watched.functions.happens(watched.first, XID, 94)

    eventually(lambda: sum(event.count for event in watched.delivered) == 1000)

    assert len(watched.delivered) <= 10


def test_every_gpu_is_registered_again_after_nvml_was_started_again(watched):
    watched.start()
    assert watched.nvml.restart()
    watched.nvml.system()

    eventually(lambda: watched.functions.waiting and len(watched.functions.sets) == 2)
    watched.functions.happens(watched.first, XID, 79)
    eventually(lambda: watched.delivered)

    assert not watched.functions.shut_down_under_a_wait


def test_a_gpu_that_comes_back_is_registered_again(watched):
    watched.start()
    watched.events.watch([watched.second])
    watched.events.watch([watched.first, watched.second])

    eventually(lambda: len(watched.functions.sets) == 2)
    eventually(lambda: len(watched.functions.live_sets) == 1)

    assert watched.registered() == [sorted([watched.first, watched.second])]


def test_one_that_goes_disturbs_nobody(watched):
    watched.start()
    watched.events.watch([watched.second])
    watched.functions.happens(watched.second, XID, 79)

    eventually(lambda: watched.delivered)

    assert len(watched.functions.sets) == 1


def test_a_gpu_without_events_is_said_and_the_other_is_told(watched):
    watched.functions.refused[watched.first] = pynvml.NVML_ERROR_NOT_SUPPORTED
    watched.start()
    watched.functions.happens(watched.second, XID, 79)

    eventually(lambda: watched.delivered)

    assert watched.events.unmonitored == {watched.first: event_sets.NO_EVENTS}


def test_one_that_cannot_be_registered_now_is_tried_again(watched):
    watched.functions.refused[watched.first] = pynvml.NVML_ERROR_GPU_IS_LOST
    watched.start()
    assert "lost" in watched.events.unmonitored[watched.first].lower()

    del watched.functions.refused[watched.first]

    eventually(lambda: not watched.events.unmonitored)
    watched.functions.happens(watched.first, XID, 79)
    eventually(lambda: watched.delivered)


def test_a_node_that_tells_no_events_has_nothing_to_wait_for(watched):
    watched.functions.supported = 0
    watched.nvml.system()
    watched.events.watch([watched.first, watched.second])
    watched.events.start(watched.batches.append)

    eventually(lambda: len(watched.events.unmonitored) == 2)

    assert [events.waits for events in watched.functions.sets] == [[]]


def test_errors_are_waited_out_and_logged_once(watched, caplog):
    watched.start()
    watched.functions.wait_error = pynvml.NVML_ERROR_UNKNOWN
    watched.functions.happens(watched.first, XID, 79)  # the wait that runs ends
    eventually(lambda: len(watched.functions.sets) == 2)
    began = len(watched.functions.sets)
    time.sleep(1.5)

    assert len(watched.functions.sets) - began <= 2
    assert caplog.text.count("events are not read now") == 1
    watched.functions.wait_error = None
    eventually(lambda: watched.functions.waiting)


def test_what_delivering_raises_keeps_no_later_event_from_being_told(watched):
    told = []

    def deliver(events):
        told.append(events)
        if len(told) == 1:
            raise RuntimeError("a defect")

    watched.events.start(deliver)
    watched.nvml.system()
    watched.events.watch([watched.first])
    eventually(lambda: watched.functions.waiting)
    watched.functions.happens(watched.first, XID, 31)
    eventually(lambda: told)
    watched.functions.happens(watched.first, XID, 79)
    eventually(lambda: len(told) == 2)


def test_an_idle_thread_wakes_every_two_seconds_at_most(watched):
    watched.start()
    time.sleep(4.5)

    assert set(watched.functions.sets[0].waits) == {2000}
    assert len(watched.functions.sets[0].waits) <= 3


def test_stopping_ends_the_thread_within_its_wait(watched):
    watched.start()
    watched.events.stop()

    assert watched.events.join(3)


def test_gpus_that_are_watched_after_the_start_are_registered_at_once(watched):
    watched.nvml.system()
    watched.events.start(watched.batches.append)
    eventually(lambda: watched.functions.live_sets)
    begun = time.monotonic()

    watched.events.watch([watched.first, watched.second])
    eventually(lambda: watched.functions.waiting)

    assert time.monotonic() - begun < 1.0


def test_one_that_hangs_at_registration_keeps_no_other_from_being_told(watched):
    watched.functions.hanging[watched.first] = threading.Event()
    watched.nvml.system()
    watched.events.watch([watched.first, watched.second])
    watched.events.start(watched.batches.append)
    eventually(lambda: watched.functions.waiting)
    watched.functions.happens(watched.second, XID, 79)

    eventually(lambda: watched.delivered)

    assert "no answer within" in watched.events.unmonitored[watched.first]
    watched.functions.hanging[watched.first].set()


def test_an_xid_is_of_the_process_that_the_kernel_names(watched):
    watched.start()
    with watched.kernel_log.open("a") as lines:
        for number, pid in ((31, 1234), (13, 99)):
            lines.write(
                f"4,7,8,-;NVRM: Xid (PCI:0000:1B:00): {number}, pid={pid}, name=python, Ch 0\n"
            )
    watched.functions.happens(watched.second, XID, 31)
    watched.functions.happens(watched.first, XID, 31)

    eventually(lambda: len(watched.delivered) == 2)

    assert {event.gpu: event.pid for event in watched.delivered} == {
        watched.first: 1234,
        watched.second: None,
    }


def test_nvml_that_is_released_is_closed_and_says_why(watched):
    watched.start()
    watched.nvml.on_gpu(watched.first, "asking", lambda functions, handle: None)
    watched.nvml.release("until noon: maintenance")

    assert not watched.functions.shut_down_under_a_wait
    assert watched.functions._users == 0
    with pytest.raises(NodeError, match="NVML is released: until noon: maintenance"):
        watched.nvml.on_gpu(watched.first, "asking", lambda functions, handle: None)
    with pytest.raises(NodeError, match="NVML is released: until noon: maintenance"):
        watched.nvml.system()


def test_after_a_release_all_is_as_it_was(watched):
    watched.start()
    watched.nvml.release("maintenance")
    watched.nvml.release("maintenance")
    watched.nvml.resume()
    assert watched.nvml.system().gpus == 2

    eventually(lambda: watched.functions.waiting)
    watched.functions.happens(watched.first, XID, 79)

    eventually(lambda: watched.delivered)


def test_the_numbers_are_those_of_nvml():
    names = {
        "SingleBitEccError": event_sets.SINGLE_BIT_ECC,
        "DoubleBitEccError": event_sets.DOUBLE_BIT_ECC,
        "XidCriticalError": event_sets.XID,
        "SingleBitEccErrorStorm": event_sets.SINGLE_BIT_ECC_STORM,
        "GpuUnavailableError": event_sets.GPU_UNAVAILABLE,
        "GpuRecoveryAction": event_sets.RECOVERY_ACTION,
    }
    assert {name: getattr(pynvml, f"nvmlEventType{name}") for name in names} == names


def test_handles_of_the_library_compare_by_where_they_lead():
    first, again = (pynvml.c_nvmlDevice_t(pynvml.struct_c_nvmlDevice_t()) for _ in range(2))
    again.contents = first.contents

    assert event_sets._key(first) == event_sets._key(again) != event_sets._key(object())
