"""MIG mode is switched where nobody is harmed by it, and else left as it is."""

import logging
import threading

import pytest

from dra_driver.base.errors import NodeError
from dra_driver.model.gpus import GpuUuid
from tests.fakes.mig_node import MigNode, board

BUSY = {"processes": [{"pid": 4242, "memory_bytes": 1}]}
HOPPER, AMPERE = "H100-80-SXM", "A100-40-SXM"
NO_RESET = {"mig_reset": "impossible"}


@pytest.fixture
def made(tmp_path):
    def make(product=HOPPER, patience=0.0, **fields):
        return MigNode(tmp_path, board(product, **fields), patience=patience)

    return make


def mode(node):
    """Now, and after the next reset."""
    return node.dynamic.mig_on, node.dynamic.mig_pending


def set_pending(node):
    """As somebody else leaves a board that needs a reset."""
    node.functions.nvmlInit()
    node.functions.nvmlDeviceSetMigMode(node.functions.nvmlDeviceGetHandleByIndex(0), 1)
    assert mode(node) == (False, True)


def test_it_is_turned_on_and_off(made):
    node = made()
    for on in (True, True, False, False):
        node.partitions.set_mode(node.gpu, on)
        assert (node.partitions.mode(node.gpu), mode(node)) == (on, (on, on))
    node.partitions.set_mode(node.gpu, True)
    node.partitions.restore_mode(node.gpu, False)
    assert mode(node) == (False, False)


def test_of_several_those_in_mig_mode_are_told_as_far_as_they_answer(tmp_path):
    node = MigNode(
        tmp_path,
        board(HOPPER, mig=True),
        board(HOPPER, bus="0000:43:00.0"),
        board(HOPPER, bus="0000:52:00.0", mig=True, fails={"nvmlDeviceGetMigMode": "UNKNOWN"}),
        board("T4", bus="0000:61:00.0"),
    )
    gpus = [GpuUuid(str(gpu.uuid)) for gpu in node.live.current().gpus]

    assert node.partitions.in_mig_mode(gpus) == {gpus[0]}
    assert node.partitions.in_mig_mode([]) == frozenset()


@pytest.mark.parametrize(
    ("product", "change", "fields"),
    [
        pytest.param(HOPPER, "set_mode", {"virtualization": "passthrough"}, id="virtual machine"),
        pytest.param(AMPERE, "reset_mode", {}, id="by a reset"),
        pytest.param(
            AMPERE,
            "reset_mode",
            {"fails": {"nvmlDeviceGetVirtualizationMode": "FUNCTION_NOT_FOUND"}},
            id="a driver that does not tell of virtual machines",
        ),
    ],
)
def test_an_idle_board_is_switched(made, product, change, fields):
    node = made(product, **fields)

    getattr(node.partitions, change)(node.gpu, True)

    assert mode(node) == (True, True)


@pytest.mark.parametrize(
    ("product", "change", "fields", "why"),
    [
        pytest.param(
            HOPPER,
            "set_mode",
            BUSY,
            r"turned on: in use, held by process 4242; end",
            id="somebody uses it",
        ),
        pytest.param(
            AMPERE, "reset_mode", BUSY, "in use, held by process 4242", id="or one that is reset"
        ),
        pytest.param(
            AMPERE,
            "reset_mode",
            BUSY | {"fails": {"nvmlDeviceGetPersistenceMode": "NOT_SUPPORTED"}},
            "in use, held by process 4242; end",
            id="a driver that does not tell of persistence mode",
        ),
        pytest.param(
            AMPERE,
            "reset_mode",
            NO_RESET,
            r"without a reset, and it was not reset.*nvidia-smi -i \S+ -mig 1, then: drain the "
            r"node and reboot it; or .*this driver's plugin.*nvidia-smi -i \S+ --gpu-reset",
            id="no reset",
        ),
        pytest.param(
            AMPERE,
            "reset_mode",
            {"virtualization": "passthrough"},
            "turned on: it takes a reset, which this virtual machine cannot make",
            id="passed through",
        ),
        pytest.param(
            AMPERE, "reset_mode", {"virtualization": "vgpu"}, "turned on: it is a vGPU", id="vGPU"
        ),
    ],
)
def test_a_mode_that_cannot_be_switched_stays_also_at_any_later_reset(
    made, product, change, fields, why
):
    node = made(product, **fields)

    with pytest.raises(NodeError, match=why) as refused:
        getattr(node.partitions, change)(node.gpu, True)

    assert mode(node) == (False, False)
    assert node.static.memory_bytes  # a board that needs a reset would not tell
    if "processes" in fields:
        assert "in use, held by processes that the log of" in refused.value.public


def test_a_board_without_mig_has_no_mode(made):
    node = made("T4")
    assert node.partitions.mode(node.gpu) is None
    with pytest.raises(NodeError, match="has no MIG mode"):
        node.partitions.set_mode(node.gpu, True)


def test_a_mode_stays_on_while_there_are_instances(made):
    node = made(mig=True, instances=[{"profile": "3g.40gb", "start": 4}])
    with pytest.raises(NodeError, match=r"turned off, since it has 3g\.40gb at 4 \(GPU instance"):
        node.partitions.set_mode(node.gpu, False)
    assert node.instances == ["3g.40gb at 4"]


def test_a_process_that_ends_in_time_is_waited_for(made):
    node = made(patience=5.0, **BUSY)
    timer = threading.Timer(0.1, lambda: node.change(gpu=0, processes=[]))
    timer.start()
    node.partitions.set_mode(node.gpu, True)
    timer.join()
    assert mode(node) == (True, True)


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


@pytest.mark.parametrize(
    ("product", "fields", "changes", "why"),
    [
        pytest.param(
            HOPPER,
            {"mig": True, "fails": {"nvmlDeviceSetMigMode": "UNKNOWN"}},
            ["set_mode", "restore_mode"],
            "turning MIG mode off: NVML says Unknown",
            id="NVML fails",
        ),
        pytest.param(
            AMPERE,
            {"mig": True, "fails": {"nvmlDeviceGetVirtualizationMode": "GPU_IS_LOST"}},
            ["reset_mode"],
            "fell off the bus",
            id="the GPU is lost, whatever virtual machines there are",
        ),
    ],
)
def test_a_failure_of_nvml_is_an_error_also_while_restoring(made, product, fields, changes, why):
    node = made(product, **fields)
    for change in changes:
        with pytest.raises(NodeError, match=why):
            getattr(node.partitions, change)(node.gpu, False)


def test_a_change_that_somebody_else_has_pending_is_theirs(made):
    node = made(AMPERE, **NO_RESET)
    set_pending(node)
    node.partitions.set_mode(node.gpu, False)
    with pytest.raises(NodeError, match="without a reset"):
        node.partitions.set_mode(node.gpu, True)
    assert mode(node) == (False, True)


def test_a_pending_change_that_is_not_wanted_is_taken_back(made):
    node = made(AMPERE, **NO_RESET)
    set_pending(node)
    node.partitions.reset_mode(node.gpu, False)
    assert mode(node) == (False, False)


def test_a_pending_change_is_made_once_the_board_is_idle(made):
    node = made(AMPERE, **BUSY)
    set_pending(node)
    node.change(gpu=0, processes=[])

    node.partitions.reset_mode(node.gpu, True)

    assert mode(node) == (True, True)


def test_a_board_of_a_virtual_machine_that_is_in_mig_mode_is_partitioned_and_stays_in_it(made):
    node = made(AMPERE, virtualization="passthrough", mig=True)

    node.partitions.create(node.gpu, node.key("3g.20gb", 4))

    assert node.instances == ["3g.20gb at 4"]
    node.partitions.remove(node.gpu, node.key("3g.20gb", 4))
    node.partitions.restore_mode(node.gpu, False)
    assert mode(node) == (True, True)


@pytest.mark.parametrize("is_on", [True, False])
def test_persistence_mode_is_named_where_it_is_on(made, is_on):
    node = made(AMPERE, persistence=is_on, **BUSY)

    with pytest.raises(NodeError) as refused:
        node.partitions.reset_mode(node.gpu, True)

    assert (f"nvidia-smi -i {node.gpu} -pm 0" in str(refused.value)) == is_on
