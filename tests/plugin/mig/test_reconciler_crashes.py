"""Killed or refused at any call, a change of partitions ends in the layout, or in what was there
before; and instances that somebody else created survive."""

import contextlib

import pytest

from dra_driver.base.errors import NodeError
from dra_driver.model.mig_layouts import LayoutState
from tests.fakes.boards import AMPERE, HOPPER, Board, Boards, part
from tests.plugin.mig.reconciler import Scene

UNMANAGED = part(AMPERE, "1g.5gb", 6)


class Killed(BaseException):
    """The process ends here."""


KILLED, REFUSED = Killed(), NodeError("NVML says no")


class Case:
    """From one layout to another."""

    def __init__(self, product, before, after, *unmanaged):
        self.product, self.before, self.after, self.unmanaged = product, before, after, unmanaged

    def scene(self, directory):
        board = Board(self.product)
        scene = Scene(Boards(board), directory)
        if self.unmanaged:
            board.on, board.instances = True, dict.fromkeys(self.unmanaged, True)
        scene.layout("few", g1_5gb=3, g3_20gb=1)
        if self.before:
            assert scene.apply(self.before).state is LayoutState.SUCCESS
        scene.label = self.after
        return scene, board


@pytest.fixture(
    params=[
        pytest.param(Case(HOPPER, "all-3g.40gb", "all-2g.20gb"), id="one layout after another"),
        pytest.param(Case(AMPERE, "all-balanced", "few"), id="a layout that keeps some"),
        pytest.param(Case(AMPERE, "all-3g.20gb", "all-disabled"), id="no layout any more"),
        pytest.param(Case(AMPERE, "", "few"), id="out of the MIG mode"),
        pytest.param(Case(AMPERE, "", "few", UNMANAGED), id="beside an unmanaged instance"),
    ]
)
def case(request):
    return request.param


def look_of(board):
    return board.on, dict(board.instances)


def steps_of(case, directory):
    """How often something is begun or done in between; what is there before and after."""
    scene, board = case.scene(directory)
    before, calls = look_of(board), []
    scene.boards.step = calls.append
    assert scene.look().state is LayoutState.SUCCESS
    assert len(calls) > 3
    return len(calls), before, look_of(board)


def raising(number, *errors):
    """Raise these *errors* from this call on, one at a call; all other calls go well."""
    errors_by_call = dict(enumerate(errors, number))
    calls = iter(range(1000))

    def step(call):
        if error := errors_by_call.get(next(calls)):
            raise error

    return step


SUCCESS, FAILED = LayoutState.SUCCESS, LayoutState.FAILED


@pytest.mark.parametrize(
    ("errors", "next_errors", "label", "ends"),
    [
        pytest.param([KILLED], [], None, {SUCCESS}, id="killed"),
        pytest.param([KILLED], [REFUSED], None, {SUCCESS, FAILED}, id="killed, and refused then"),
        pytest.param([KILLED], [], "", {None}, id="killed, and no layout then"),
        pytest.param([REFUSED, KILLED], [], None, {SUCCESS}, id="refused, and killed restoring"),
    ],
)
def test_interrupted_at_any_call_the_next_process_ends_the_change(
    case, errors, next_errors, label, ends, tmp_path
):
    calls, before, after = steps_of(case, tmp_path / "whole")

    for number in range(calls):
        scene, board = case.scene(tmp_path / str(number))
        scene.boards.step = raising(number, *errors)
        with contextlib.suppress(Killed):  # of the first call nothing has to be restored
            scene.look()
            assert (len(errors), number) == (2, 0)
        scene.boards.step = raising(1, *next_errors)
        scene.label = scene.label if label is None else label
        scene.boards.refresh()

        state = scene.start().look()

        looks = {SUCCESS: [after], FAILED: [before], None: [before, after]}
        assert state.state in ends, number
        assert look_of(board) in looks[state.state], number
        assert (state.before, state.mode_problems) == ({}, {})
        assert not set(state.keys.get(board.uuid, ())) & set(case.unmanaged)


def test_refused_at_any_call_the_gpu_is_as_before(case, tmp_path):
    calls, before, _ = steps_of(case, tmp_path / "whole")

    for number in range(calls):
        scene, board = case.scene(tmp_path / str(number))
        keys = scene.state_file.read().keys
        scene.boards.step = raising(number, REFUSED)

        state = scene.look()

        assert (look_of(board), state.state) == (before, LayoutState.FAILED), number
        assert (state.keys, state.before) == (keys, {})
