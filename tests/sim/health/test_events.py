"""Simulated event sets report what is added to the node file, to those who registered for it."""

import threading
import time

import pynvml
import pytest

from tests.fakes.simulated import Node, two_gpus

XID = pynvml.nvmlEventTypeXidCriticalError
DOUBLE_BIT = pynvml.nvmlEventTypeDoubleBitEccError
SINGLE_BIT = pynvml.nvmlEventTypeSingleBitEccError
RECOVERY = pynvml.nvmlEventTypeGpuRecoveryAction
UNAVAILABLE = pynvml.nvmlEventTypeGpuUnavailableError
ALL = XID | DOUBLE_BIT | SINGLE_BIT | RECOVERY | UNAVAILABLE
NO_INSTANCE = 0xFFFFFFFF


@pytest.fixture
def node(tmp_path):
    node = Node(tmp_path, two_gpus())
    node.functions.nvmlInit()
    return node


def registered(node, types=ALL, gpus=(0, 1)):
    """A set with these GPUs."""
    events = node.functions.nvmlEventSetCreate()
    for gpu in gpus:
        handle = node.functions.nvmlDeviceGetHandleByIndex(gpu)
        node.functions.nvmlDeviceRegisterEvents(handle, types, events)
    return events


def add(node, *events, gpu=0):
    """Something happens to a GPU."""
    node.change(gpu, events=[*node.document["gpus"][gpu].get("events", []), *events])


def wait(node, events, milliseconds=0):
    """The next event: GPU, type, data, and instance."""
    data = node.functions.nvmlEventSetWait_v2(events, milliseconds)
    assert isinstance(data, pynvml.c_nvmlEventData_t)
    handles = [node.functions.nvmlDeviceGetHandleByIndex(index) for index in range(2)]
    instance = (data.gpuInstanceId, data.computeInstanceId)
    return handles.index(data.device), data.eventType, data.eventData, instance


def nothing(node, events, milliseconds=0):
    with pytest.raises(pynvml.NVMLError_Timeout):
        node.functions.nvmlEventSetWait_v2(events, milliseconds)


@pytest.mark.parametrize(
    ("said", "kind", "data", "instance"),
    [
        ({"xid": 79}, XID, 79, (NO_INSTANCE, NO_INSTANCE)),
        ({"xid": 31, "gi": 1, "pid": 1234}, XID, 31, (1, NO_INSTANCE)),
        ({"xid": 31, "gi": 1, "ci": 0}, XID, 31, (1, 0)),
        ({"ecc": "uncorrectable"}, DOUBLE_BIT, 0, (NO_INSTANCE, NO_INSTANCE)),
        ({"ecc": "correctable"}, SINGLE_BIT, 0, (NO_INSTANCE, NO_INSTANCE)),
        ({"recovery_action": "GPU_RESET"}, RECOVERY, 1, (NO_INSTANCE, NO_INSTANCE)),
        ({"unavailable": True}, UNAVAILABLE, 0, (NO_INSTANCE, NO_INSTANCE)),
    ],
)
def test_what_is_added_to_the_file_is_reported_of_that_gpu(node, said, kind, data, instance):
    events = registered(node)
    add(node, said, gpu=1)
    assert wait(node, events) == (1, kind, data, instance)
    nothing(node, events)


def test_only_what_happens_after_it_was_registered_is_reported(node):
    add(node, {"xid": 13})
    events = registered(node)
    nothing(node, events)
    add(node, {"xid": 79})
    assert wait(node, events)[2] == 79
    nothing(node, events)


def test_events_come_in_order_and_as_often_as_they_happened(node):
    events = registered(node)
    add(node, {"xid": 79, "times": 2}, {"xid": 48})
    add(node, {"xid": 79})
    assert [wait(node, events)[2] for _ in range(4)] == [79, 79, 48, 79]
    nothing(node, events)


def test_a_list_that_begins_anew_is_all_new(node):
    add(node, {"xid": 79})
    events = registered(node)
    node.change(0, events=[{"xid": 31}])
    assert wait(node, events)[2] == 31


def test_every_set_has_all_events(node):
    first, second = registered(node), registered(node)
    add(node, {"xid": 79})
    assert wait(node, first) == wait(node, second)


def test_only_the_types_that_were_asked_for_are_reported(node):
    events = registered(node, types=XID)
    add(node, {"ecc": "uncorrectable"}, {"xid": 48})
    assert wait(node, events)[1] == XID
    registered_again = node.functions.nvmlDeviceGetHandleByIndex(0)
    node.functions.nvmlDeviceRegisterEvents(registered_again, DOUBLE_BIT, events)
    add(node, {"ecc": "uncorrectable"}, {"xid": 48})
    assert [wait(node, events)[1] for _ in range(2)] == [DOUBLE_BIT, XID]


def test_a_type_that_is_not_supported_is_refused(node):
    handle, events = node.functions.nvmlDeviceGetHandleByIndex(0), registered(node, gpus=())
    assert node.functions.nvmlDeviceGetSupportedEventTypes(handle) & ALL == ALL
    with pytest.raises(pynvml.NVMLError_NotSupported):
        unsupported = pynvml.nvmlEventTypePowerSourceChange
        node.functions.nvmlDeviceRegisterEvents(handle, XID | unsupported, events)


def test_an_old_driver_knows_no_newer_types(tmp_path):
    node = Node(tmp_path, two_gpus() | {"driver_version": "550.54.15"})
    node.functions.nvmlInit()
    types = node.functions.nvmlDeviceGetSupportedEventTypes(
        node.functions.nvmlDeviceGetHandleByIndex(0)
    )
    assert types & ALL == XID | DOUBLE_BIT | SINGLE_BIT


def test_a_gpu_without_events_is_refused(node):
    node.change(0, events_supported=False)
    handle = node.functions.nvmlDeviceGetHandleByIndex(0)
    assert node.functions.nvmlDeviceGetSupportedEventTypes(handle) == 0
    with pytest.raises(pynvml.NVMLError_NotSupported):
        registered(node)


def test_a_freed_set_is_no_set(node):
    events = registered(node)
    node.functions.nvmlEventSetFree(events)
    for call in (
        lambda: node.functions.nvmlEventSetWait_v2(events, 0),
        lambda: node.functions.nvmlEventSetFree(events),
        lambda: node.functions.nvmlEventSetWait_v2(None, 0),
    ):
        with pytest.raises(pynvml.NVMLError_InvalidArgument):
            call()


def test_a_set_ends_with_its_session(node):
    events = registered(node)
    node.functions.nvmlShutdown()
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        node.functions.nvmlEventSetWait_v2(events, 0)
    node.functions.nvmlInit()
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        node.functions.nvmlEventSetWait_v2(events, 0)


def test_an_event_wakes_who_waits_at_once(node):
    events, seen = registered(node), []
    thread = threading.Thread(target=lambda: seen.append(wait(node, events, 30_000)))
    started = time.monotonic()
    thread.start()
    add(node, {"xid": 79})
    thread.join(20)
    assert seen == [(0, XID, 79, (NO_INSTANCE, NO_INSTANCE))]
    assert time.monotonic() - started < 20


def test_waiting_takes_no_time_of_the_processor(node):
    events = registered(node)
    before = time.thread_time()
    started = time.monotonic()
    nothing(node, events, 1000)
    assert time.monotonic() - started >= 0.9
    assert time.thread_time() - before < 0.05


@pytest.mark.parametrize("lost", [{"fails": "GPU_IS_LOST"}, {"present": False}])
def test_a_lost_gpu_is_told_after_the_events_until_it_is_registered_again(node, lost):
    events = registered(node)
    add(node, {"xid": 79})
    assert wait(node, events)[:3] == (0, XID, 79)
    add(node, {"xid": 31}, gpu=1)
    node.change(0, **lost)
    data = node.functions.nvmlEventSetWait_v2(events, 0)
    assert (data.eventData, data.device.bus_id) == (31, "0000:43:00.0")
    for _ in range(2):
        with pytest.raises(pynvml.NVMLError_GpuIsLost):
            node.functions.nvmlEventSetWait_v2(events, 0)
    node.change(0, fails={}, present=True)
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        node.functions.nvmlEventSetWait_v2(events, 0)
    handle = node.functions.nvmlDeviceGetHandleByIndex(0)
    node.functions.nvmlDeviceRegisterEvents(handle, ALL, events)
    add(node, {"xid": 48})
    assert wait(node, events)[:3] == (0, XID, 48)


def test_waiting_can_fail(node):
    events = registered(node)
    node.change(1, fails={"nvmlEventSetWait_v2": "UNKNOWN"})
    with pytest.raises(pynvml.NVMLError_Unknown):
        node.functions.nvmlEventSetWait_v2(events, 1000)
    node.change(driver="not-loaded")
    with pytest.raises(pynvml.NVMLError_DriverNotLoaded):
        node.functions.nvmlEventSetWait_v2(events, 1000)


def test_a_set_that_is_freed_under_who_waits_wakes_him(node):
    events, errors = registered(node), []

    def forever():
        try:
            node.functions.nvmlEventSetWait_v2(events, 30_000)
        except pynvml.NVMLError as error:
            errors.append(error.value)

    thread = threading.Thread(target=forever)
    thread.start()
    node.functions.nvmlEventSetFree(events)
    thread.join(20)
    assert errors == [pynvml.NVML_ERROR_INVALID_ARGUMENT]
