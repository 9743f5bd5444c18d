"""NVML is asked little about partitions: on a busy node each call can take tenths of a second."""

import threading
import time
from collections import Counter

import pynvml
import pytest

from dra_driver.base.errors import NodeError, TimedOut
from dra_driver.node.nvml.values import DynamicState
from dra_driver.sim.nvml import SimulatedNvml
from tests.fakes.mig_node import MigNode, board

WALK = "nvmlDeviceGetMigDeviceHandleByIndex"


class Counted:
    """NVML's functions, and how often each is called; those that are *slow* take so many seconds,
    one after the other, on whichever board."""

    def __init__(self, functions, slow=None):
        self.functions = functions
        self.slow = slow or {}
        self.calls = Counter()
        self.lock = threading.Lock()

    def __getattr__(self, name):
        function = getattr(self.functions, name)
        if not name.startswith("nvml"):
            return function

        def call(*arguments, **more):
            self.calls[name] += 1
            if name in self.slow:
                with self.lock:
                    time.sleep(self.slow[name])
            return function(*arguments, **more)

        return call

    def count(self, act):
        self.calls.clear()
        act()
        return self.calls.total()


def filled(directory, count, functions=SimulatedNvml):
    """A board with so many partitions, a process that changes them, and its calls of NVML."""
    node = MigNode(directory, board("B200", mig=True))
    counted = Counted(functions(node.live, mig=node.mig))
    partitions = node.through(counted)
    for start in range(count):
        partitions.create(node.gpu, node.key("1g.23gb", start), new=True)
    assert len(node.instances) == count  # and its profiles have been read
    return node, partitions, counted


class SaysMigDevice(SimulatedNvml):
    """A driver whose compute instances say that they are on their MIG device."""

    def nvmlComputeInstanceGetInfo_v2(self, computeInstance):  # noqa: N802, N803
        info = super().nvmlComputeInstanceGetInfo_v2(computeInstance)
        gpu = self.nvmlDeviceGetUUID(info.device)
        gi = self.nvmlGpuInstanceGetInfo(info.gpuInstance).id
        fields = {"id": info.id, "profileId": info.profileId}
        device = self.nvmlDeviceGetHandleByUUID(f"MIG-{gpu}/{gi}/{info.id}")
        return pynvml.nvmlFriendlyObject({**fields, "device": device})


class SaysNothing(SimulatedNvml):
    """A driver that knows MIG devices by their UUID and their index alone."""

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        if "/" in uuid:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return super().nvmlDeviceGetHandleByUUID(uuid)


@pytest.mark.parametrize(
    ("functions", "look", "create"), [(SimulatedNvml, 64, 40), (SaysMigDevice, 56, 39)]
)
def test_no_more_is_asked_than_is_needed_and_the_list_of_devices_not_at_all(
    tmp_path, functions, look, create
):
    """Two calls for each instance are for the proof that a name is its own."""
    node, partitions, counted = filled(tmp_path, 6, functions)
    key = node.key("1g.23gb", 6)
    assert counted.count(lambda: partitions.create(node.gpu, key, new=True)) <= create
    assert counted.count(lambda: node.dynamic) <= look
    assert counted.count(lambda: partitions.find(node.gpu, key)) <= 20
    uuid = node.dynamic.instances[6].uuid
    assert counted.count(lambda: partitions.remove(node.gpu, key, uuid)) <= 29
    partitions.create(node.gpu, key)
    partitions.keys(node.gpu)
    assert counted.calls[WALK] == 0


@pytest.mark.parametrize("functions", [SaysMigDevice, SaysNothing])
def test_whatever_a_driver_says_an_instance_has_the_same_name(tmp_path, functions):
    node, _, _ = filled(tmp_path, 3)
    before = node.dynamic.instances
    partitions = node.through(functions(node.live, mig=node.mig))
    assert node.dynamic.instances == before
    assert [partitions.find(node.gpu, partition.key) for partition in before] == list(before)


def test_where_the_list_of_devices_has_to_be_read_it_is_read_once_a_look(tmp_path):
    node, _, _ = filled(tmp_path, 7)
    counted = Counted(SaysNothing(node.live, mig=node.mig))
    node.through(counted)
    assert len(node.dynamic.instances) == 7
    assert counted.calls[WALK] == 7


def test_an_instance_that_is_not_listed_yet_has_no_uuid_and_is_unusable(tmp_path):
    class Slow(SaysNothing):
        def nvmlDeviceGetMigDeviceHandleByIndex(self, device, index):  # noqa: N802
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    node, _, _ = filled(tmp_path, 1)
    node.through(Slow(node.live, mig=node.mig))
    assert (node.dynamic.instances, len(node.dynamic.unusable)) == ((), 1)


def test_instances_of_unlisted_profiles_are_searched_for_now_and_then(tmp_path):
    node, _, counted = filled(tmp_path, 2)
    search = "nvmlDeviceGetGpuInstanceById"
    counted.calls.clear()
    for _ in range(5):
        assert len(node.dynamic.instances) == 2
    assert counted.calls[search] == 0


def boards(directory, count, deadline):
    places = [f"0000:{0x10 + index:02x}:00.0" for index in range(count)]
    gpus = [board("B200", bus=bus, mig=True) for bus in places]
    return MigNode(directory, *gpus, deadline=deadline)


def test_boards_that_the_driver_serves_one_after_the_other_have_the_time_for_it(tmp_path):
    node = boards(tmp_path, 8, deadline=0.5)
    slow = {"nvmlDeviceGetGpuInstances": 0.012}
    node.through(Counted(node.functions, slow))
    node.nvml.system()
    began = time.monotonic()
    states = node.nvml.dynamic_states(range(8)).values()
    assert time.monotonic() - began > 0.5
    assert all(isinstance(state, DynamicState) for state in states)


def test_gpus_that_the_driver_starts_one_after_the_other_have_the_time_for_it(tmp_path):
    node = boards(tmp_path, 8, deadline=0.5)
    node.through(Counted(node.functions, {"nvmlDeviceGetHandleByIndex": 0.1}))
    node.nvml.system()
    began = time.monotonic()
    states = node.nvml.dynamic_states(range(8)).values()
    assert time.monotonic() - began > 0.5
    assert all(isinstance(state, DynamicState) for state in states)

    again = node.nvml.dynamic_states(range(8)).values()
    assert any(isinstance(state, TimedOut) for state in again), "they have started"


def test_a_board_that_is_late_is_excused_once_and_one_that_is_new_is_not(tmp_path):
    node = boards(tmp_path, 2, deadline=0.1)
    counted = Counted(node.functions)
    node.through(counted)
    node.nvml.system()
    known = node.nvml.dynamic_states(range(2))
    counted.slow = {"nvmlDeviceGetGpuInstances": 0.2}
    first = node.nvml.dynamic_states([0], known)
    assert isinstance(first[0], NodeError)
    assert not isinstance(first[0], TimedOut)
    assert "late for the first time" in str(first[0])
    assert isinstance(node.nvml.dynamic_states([0], known)[0], TimedOut)
    assert isinstance(node.nvml.dynamic_states([1])[1], TimedOut)
