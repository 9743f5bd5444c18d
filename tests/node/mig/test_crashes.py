"""Wherever a change of a GPU ends too early, it is done again or undone."""

from itertools import product

import pytest

from dra_driver.base.errors import NodeError
from tests.fakes.mig_node import MigNode, board
from tests.fakes.mortal import Killed, Mortal
from tests.fakes.nvml_calls import CHANGES

UNMANAGED = {"profile": "1g.10gb", "start": 6}
EXPECTED = {"create": ["3g.40gb at 0", "1g.10gb at 6"], "remove": ["1g.10gb at 6"]}


def killed_at_each(node, prepare, change):
    """Each time that *change* can be killed before or after NVML changes something, after
    *prepare*. Whoever dies while it only reads leaves what the last such call left."""
    node.fresh()
    prepare(node.partitions)
    lives = Mortal(node.functions)
    change(node.through(lives))
    changing = [number for number, name in enumerate(lives.calls, 1) if name in CHANGES]
    assert changing
    for number, carried_out in product(changing, (False, True)):
        name = lives.calls[number - 1]
        node.fresh()
        prepare(node.partitions)
        with pytest.raises(Killed, match=f"^{name}$"):
            change(node.through(Mortal(node.functions, number, carried_out)))
        node.partitions = node.through(node.functions)
        yield f"{'after' if carried_out else 'before'} {name}, call {number}"


def nothing(partitions):
    """There is nothing to prepare."""


@pytest.mark.parametrize(
    ("existed", "change", "repairs"),
    [
        pytest.param(False, "create", ["remove"], id="what was created by half is removed"),
        pytest.param(False, "create", ["create"], id="what was created by half is completed"),
        pytest.param(True, "remove", ["create", "remove"], id="what was removed by half is both"),
    ],
)
def test_a_change_that_was_interrupted_can_be_repeated_and_undone(
    tmp_path, existed, change, repairs
):
    node = MigNode(tmp_path, board(mig=True, instances=[UNMANAGED]))
    gpu, key = node.gpu, node.key("3g.40gb")

    def prepare(partitions):
        if existed:
            partitions.create(gpu, key)

    def interrupted(partitions):
        getattr(partitions, change)(gpu, key)

    for where in killed_at_each(node, prepare, interrupted):
        for repair in repairs:
            created = getattr(node.partitions, repair)(gpu, key)
            assert created is None or node.partitions.find(gpu, key) == created, where
            assert (node.instances, node.dynamic.unusable) == (EXPECTED[repair], ()), where


def test_a_mode_that_was_switched_by_half_can_be_switched_back(tmp_path):
    node = MigNode(tmp_path, board())
    gpu = node.gpu
    modes = set()
    for where in killed_at_each(node, nothing, lambda partitions: partitions.set_mode(gpu, True)):
        modes.add(node.partitions.mode(gpu))
        node.partitions.restore_mode(gpu, False)
        assert not node.dynamic.mig_on, where
        node.partitions.set_mode(gpu, True)
        assert node.dynamic.mig_on, where
    assert modes == {False, True}


def test_a_change_that_waits_for_a_reset_since_a_crash_is_taken_back(tmp_path):
    node = MigNode(tmp_path, board("A100-40-SXM", mig_reset="impossible"))
    gpu = node.gpu

    def change(partitions):
        with pytest.raises(NodeError):
            partitions.reset_mode(gpu, True)

    pending = set()
    for where in killed_at_each(node, nothing, change):
        pending.add(node.dynamic.mig_pending)
        node.partitions.reset_mode(gpu, False)
        assert not node.dynamic.mig_pending, where
    assert pending == {False, True}
