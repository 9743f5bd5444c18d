"""MIG mode is switched where nobody is harmed by it, and else left as it is."""

import logging
import threading

import pytest

from dra_driver.base.errors import NodeError
from tests.fakes.mig_node import MigNode, board

BUSY = {"processes": [{"pid": 4242, "memory_bytes": 1}]}
HOPPER, AMPERE = "H100-80-SXM", "A100-40-SXM"


@pytest.fixture
def made(tmp_path):
    def make(product=HOPPER, patience=0.0, **fields):
        return MigNode(tmp_path, board(product, **fields), patience=patience)

    return make


def mode(node):
    """Now, and after the next reset."""
    return node.dynamic.mig_on, node.dynamic.mig_pending


def test_it_is_turned_on_and_off(made):
    node = made()
    for on in (True, True, False, False):
        node.partitions.set_mode(node.gpu, on)
        assert (node.partitions.mode(node.gpu), mode(node)) == (on, (on, on))


def test_a_board_without_it_says_so(made):
    node = made("T4")
    assert node.partitions.mode(node.gpu) is None
    with pytest.raises(NodeError, match="has no MIG mode"):
        node.partitions.set_mode(node.gpu, True)


def test_who_uses_the_gpu_is_named_and_nothing_changes(made):
    node = made(**BUSY)
    with pytest.raises(NodeError, match=r"turned on: in use, held by process 4242; end"):
        node.partitions.set_mode(node.gpu, True)
    assert mode(node) == (False, False)


def test_who_ends_in_time_is_waited_for(made):
    node = made(patience=5.0, **BUSY)
    timer = threading.Timer(0.1, lambda: node.change(gpu=0, processes=[]))
    timer.start()
    node.partitions.set_mode(node.gpu, True)
    timer.join()
    assert mode(node) == (True, True)


def test_it_stays_on_while_there_are_instances(made):
    node = made(mig=True, instances=[{"profile": "3g.40gb", "start": 4}])
    with pytest.raises(NodeError, match=r"turned off, since it has 3g\.40gb at 4 \(GPU instance"):
        node.partitions.set_mode(node.gpu, False)
    assert node.instances == ["3g.40gb at 4"]


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(BUSY, id="somebody uses it"),
        pytest.param({"instances": [{"profile": "1g.10gb", "start": 0}]}, id="it has instances"),
    ],
)
def test_a_pod_can_end_although_the_mode_cannot_be_restored(made, fields, caplog):
    node = made(mig=True, **fields)
    with caplog.at_level(logging.WARNING):
        node.partitions.restore_mode(node.gpu, False)
    assert mode(node) == (True, True)
    assert "stays in its MIG mode" in caplog.text


def test_it_is_restored_where_it_can_be(made):
    node = made(mig=True)
    node.partitions.restore_mode(node.gpu, False)
    assert mode(node) == (False, False)


def test_a_failure_of_nvml_is_an_error_also_while_restoring(made):
    node = made(mig=True, fails={"nvmlDeviceSetMigMode": "UNKNOWN"})
    for change in (node.partitions.set_mode, node.partitions.restore_mode):
        with pytest.raises(NodeError, match="turning MIG mode off: NVML says Unknown"):
            change(node.gpu, False)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="its driver tells of virtual machines"),
        pytest.param(
            {"fails": {"nvmlDeviceGetVirtualizationMode": "FUNCTION_NOT_FOUND"}}, id="it cannot"
        ),
    ],
)
def test_an_idle_board_is_reset_for_it(made, fields):
    node = made(AMPERE, **fields)
    node.partitions.reset_mode(node.gpu, True)
    assert mode(node) == (True, True)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        pytest.param(BUSY, r"in use, held by process 4242", id="somebody uses it"),
        pytest.param(
            {"mig_reset": "impossible"}, "without a reset, and it was not reset", id="no reset"
        ),
    ],
)
def test_a_board_that_is_not_reset_is_to_stay_as_it_is_at_any_later_reset(made, fields, why):
    node = made(AMPERE, **fields)
    with pytest.raises(NodeError, match=why):
        node.partitions.reset_mode(node.gpu, True)
    assert mode(node) == (False, False)


def test_a_change_that_somebody_else_has_pending_is_theirs(made):
    node = made(AMPERE, mig_reset="impossible")
    node.functions.nvmlInit()
    node.functions.nvmlDeviceSetMigMode(node.functions.nvmlDeviceGetHandleByIndex(0), 1)
    node.partitions.set_mode(node.gpu, False)
    with pytest.raises(NodeError, match="without a reset"):
        node.partitions.set_mode(node.gpu, True)
    assert mode(node) == (False, True)


def test_a_pending_change_that_is_not_wanted_is_taken_back(made):
    node = made(AMPERE, mig_reset="impossible")
    node.functions.nvmlInit()
    node.functions.nvmlDeviceSetMigMode(node.functions.nvmlDeviceGetHandleByIndex(0), 1)
    node.partitions.reset_mode(node.gpu, False)
    assert mode(node) == (False, False)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        pytest.param(
            {"virtualization": "passthrough"},
            "turned on: it takes a reset, which this virtual machine cannot make",
            id="passed through",
        ),
        pytest.param({"virtualization": "vgpu"}, "turned on: it is a vGPU", id="vGPU"),
    ],
)
def test_what_a_virtual_machine_cannot_change_is_not_tried(made, fields, why):
    node = made(AMPERE, **fields)

    with pytest.raises(NodeError, match=why):
        node.partitions.reset_mode(node.gpu, True)

    assert mode(node) == (False, False)
    assert node.static.memory_bytes  # a board that needs a reset would not tell


def test_in_a_virtual_machine_a_board_that_needs_no_reset_is_switched(made):
    node = made(virtualization="passthrough")

    node.partitions.set_mode(node.gpu, True)

    assert mode(node) == (True, True)


def test_a_board_of_a_virtual_machine_that_is_in_mig_mode_is_cut_and_stays_in_it(made):
    node = made(AMPERE, virtualization="passthrough", mig=True)

    node.partitions.create(node.gpu, node.key("3g.20gb", 4))

    assert node.instances == ["3g.20gb at 4"]
    node.partitions.remove(node.gpu, node.key("3g.20gb", 4))
    node.partitions.restore_mode(node.gpu, False)
    assert mode(node) == (True, True)


def test_a_gpu_that_is_lost_says_so_and_nothing_of_virtual_machines(made):
    node = made(AMPERE, fails={"nvmlDeviceGetVirtualizationMode": "GPU_IS_LOST"})

    with pytest.raises(NodeError, match="fell off the bus"):
        node.partitions.reset_mode(node.gpu, True)


@pytest.mark.parametrize("is_on", [True, False])
def test_persistence_mode_is_named_where_it_is_on(made, is_on):
    node = made(AMPERE, persistence=is_on, **BUSY)

    with pytest.raises(NodeError) as refused:
        node.partitions.reset_mode(node.gpu, True)

    assert (f"nvidia-smi -i {node.gpu} -pm 0" in str(refused.value)) == is_on


def test_a_driver_that_cannot_tell_of_persistence_mode_names_the_rest(made):
    node = made(AMPERE, fails={"nvmlDeviceGetPersistenceMode": "NOT_SUPPORTED"}, **BUSY)

    with pytest.raises(NodeError, match=r"in use, held by process 4242; end") as refused:
        node.partitions.reset_mode(node.gpu, True)

    assert "in use, held by processes that the log of" in refused.value.public


def test_who_resets_a_board_by_hand_is_told_that_this_driver_holds_it_too(made):
    node = made(AMPERE, mig_reset="impossible")

    with pytest.raises(NodeError) as refused:
        node.partitions.reset_mode(node.gpu, True)

    message = str(refused.value)
    assert f"nvidia-smi -i {node.gpu} -mig 1, then: drain the node and reboot it; or" in message
    assert "this driver's plugin" in message
    assert f"nvidia-smi -i {node.gpu} --gpu-reset" in message


def test_a_pending_change_is_made_once_the_board_is_idle(made):
    node = made(AMPERE, **BUSY)
    node.functions.nvmlInit()
    node.functions.nvmlDeviceSetMigMode(node.functions.nvmlDeviceGetHandleByIndex(0), 1)
    assert mode(node) == (False, True)
    node.change(gpu=0, processes=[])

    node.partitions.reset_mode(node.gpu, True)

    assert mode(node) == (True, True)
