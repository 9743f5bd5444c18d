"""Each change of a GPU has its time, the wait for those before it included."""

import threading
import time

import pytest

from dra_driver.base.errors import NodeError, TimedOut
from dra_driver.model.gpus import GpuUuid
from dra_driver.node.mig.gpu_locks import CHANGE_SECONDS, RETRY_SECONDS, DeviceBusy, GpuLocks
from tests.fakes.mig_node import MigNode, board

GPU, OTHER = GpuUuid("GPU-1"), GpuUuid("GPU-2")
KUBELET_SECONDS = 45.0


@pytest.fixture
def locks():
    return GpuLocks(5.0)


def test_the_changes_of_a_claim_and_their_undoing_leave_the_kubelet_time():
    in_use = 2 * RETRY_SECONDS  # its partitions are asked for at once, and then all undone
    assert in_use < KUBELET_SECONDS / 2
    assert 2 * CHANGE_SECONDS < KUBELET_SECONDS - 10


def test_a_gpu_that_is_being_changed_is_busy(locks):
    with (
        locks.hold(GPU, None),
        pytest.raises(
            DeviceBusy, match="GPU-1 is being changed for another claim or by a layout"
        ) as e,
        locks.hold(GPU, 0.01),
    ):
        pass
    assert not isinstance(e.value, TimedOut)


def test_other_gpus_do_not_wait(locks):
    with locks.hold(GPU, None), locks.hold(OTHER, 0.0) as deadline:
        assert not deadline.retry()


def test_the_wait_for_the_lock_counts_as_patience():
    locks, begun = GpuLocks(0.3), threading.Event()

    def first():
        with locks.hold(GPU, None):
            begun.set()
            time.sleep(0.9)

    thread = threading.Thread(target=first)
    thread.start()
    assert begun.wait(5)
    with locks.hold(GPU, None) as deadline:
        assert not deadline.retry()
    thread.join(5)


def test_a_change_that_is_late_has_a_moment_for_its_last_call(locks):
    with locks.hold(GPU, None, seconds=0.0) as deadline:
        assert deadline.seconds == 1.0
    with locks.hold(GPU, None, seconds=15.0) as deadline:
        assert 1.0 < deadline.seconds <= 15.0


def test_several_partitions_that_are_in_use_are_given_up_together(tmp_path):
    node = MigNode(tmp_path, patience=4.0)
    keys = [node.key("1g.10gb", start) for start in range(7)]
    for key in keys:
        node.partitions.create(node.gpu, key)
    node.change(gpu=0, fails={"nvmlComputeInstanceDestroy": "IN_USE"})
    errors = []

    def remove(key):
        try:
            node.partitions.remove(node.gpu, key)
        except NodeError as error:
            errors.append(str(error))

    began = time.monotonic()
    threads = [threading.Thread(target=remove, args=(key,)) for key in keys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert time.monotonic() - began < 26, "one after the other would take 28 s"
    assert ["in use" in error for error in errors] == [True] * 7


@pytest.mark.parametrize("product", ["H100-80-SXM", "A100-40-SXM"])
def test_a_change_that_nobody_waits_for_is_tried_once(tmp_path, product):
    busy = [{"pid": 4242, "memory_bytes": 1}]
    node = MigNode(tmp_path, board(product, processes=busy), patience=60.0)
    began = time.monotonic()
    for change in (node.partitions.set_mode, node.partitions.reset_mode):
        with pytest.raises(NodeError, match="in use, held by process"):
            change(node.gpu, True, patience=0.0)
    node.change(gpu=0, processes=[], mig=True, fails={"nvmlGpuInstanceDestroy": "IN_USE"})
    profile = node.static.mig_profiles[0]
    made = node.partitions.create(node.gpu, node.key(profile.name), patience=0.0)
    with pytest.raises(NodeError, match="in use"):
        node.partitions.remove(node.gpu, made.key, patience=0.0)
    assert time.monotonic() - began < 5
