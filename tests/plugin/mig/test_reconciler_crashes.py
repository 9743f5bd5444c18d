"""Killed or refused at any call, a change of how a GPU is cut ends in the layout, or in what was
there before; and what somebody else made survives."""

import contextlib

import pytest

from dra_driver.base.errors import NodeError
from dra_driver.model.mig_layouts import LayoutState
from tests.fakes.boards import AMPERE, HOPPER, Board, Boards, part
from tests.plugin.mig.reconciler import Scene

FOREIGN = part(AMPERE, "1g.5gb", 6)


class Killed(BaseException):
    """What a process does not live to see the end of."""


class Case:
    """From one layout to another."""

    def __init__(self, product, before, after, foreign=()):
        self.product, self.before, self.after, self.foreign = product, before, after, foreign

    def scene(self, directory):
        board = Board(self.product)
        scene = Scene(Boards(board), directory)
        if self.foreign:
            board.on, board.there = True, dict.fromkeys(self.foreign, True)
        scene.layout("few", g1_5gb=3, g3_20gb=1)
        if self.before:
            scene.label = self.before
            assert scene.look().state is LayoutState.SUCCESS
        scene.label = self.after
        return scene, board


CASES = {
    "one layout after another": Case(HOPPER, "all-3g.40gb", "all-2g.20gb"),
    "a layout that keeps some": Case(AMPERE, "all-balanced", "few"),
    "no layout any more": Case(AMPERE, "all-3g.20gb", "all-disabled"),
    "beside a foreign instance": Case(AMPERE, "", "few", (FOREIGN,)),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))


def look_of(board):
    return board.on, dict(board.there)


def steps_of(case, directory):
    """How often something is begun or done in between; what is there before and after."""
    scene, board = case.scene(directory)
    before, calls = look_of(board), []
    scene.boards.step = calls.append
    assert scene.look().state is LayoutState.SUCCESS
    return len(calls), before, look_of(board)


def at(number, error):
    """Raise *error* at this call; those before it go well."""
    countdown = [number]

    def step(what):
        countdown[0] -= 1
        if countdown[0] == -1:
            raise error

    return step


@each_case
def test_killed_at_any_call_the_next_process_reaches_the_layout(case, tmp_path):
    calls, _, after = steps_of(case, tmp_path / "whole")
    assert calls > 3

    for number in range(calls):
        scene, board = case.scene(tmp_path / str(number))
        scene.boards.step = at(number, Killed())
        with pytest.raises(Killed):
            scene.look()
        scene.boards.step = lambda what: None
        scene.boards.refresh()

        state = scene.start().look()

        assert (look_of(board), state.state) == (after, LayoutState.SUCCESS), number
        assert state.before == {}
        assert not set(state.keys.get(board.uuid, ())) & set(case.foreign)


@each_case
def test_refused_at_any_call_the_gpu_is_as_before(case, tmp_path):
    calls, before, _ = steps_of(case, tmp_path / "whole")

    for number in range(calls):
        scene, board = case.scene(tmp_path / str(number))
        scene.boards.step = at(number, NodeError("NVML says no"))

        state = scene.look()

        assert (look_of(board), state.state) == (before, LayoutState.FAILED), number
        assert state.before == {}
        assert not set(state.keys.get(board.uuid, ())) & set(case.foreign)


@each_case
def test_killed_at_any_call_and_refused_then_the_gpu_is_as_before_it_all(case, tmp_path):
    calls, before, after = steps_of(case, tmp_path / "whole")

    for number in range(calls):
        scene, board = case.scene(tmp_path / str(number))
        scene.boards.step = at(number, Killed())
        with pytest.raises(Killed):
            scene.look()
        scene.boards.step = at(1, NodeError("NVML says no"))
        scene.boards.refresh()

        state = scene.start().look()

        if state.state is LayoutState.SUCCESS:  # there was no more to do than one call
            assert look_of(board) == after, number
        else:
            assert look_of(board) == before, number
        assert state.before == {}


@each_case
def test_killed_at_any_call_a_layout_that_nobody_wants_any_more_is_put_back(case, tmp_path):
    calls, before, after = steps_of(case, tmp_path / "whole")

    for number in range(calls):
        scene, board = case.scene(tmp_path / str(number))
        scene.boards.step = at(number, Killed())
        with pytest.raises(Killed):
            scene.look()
        scene.boards.step = lambda what: None
        scene.label = ""
        scene.boards.refresh()

        state = scene.start().look()

        assert look_of(board) in (before, after), number
        assert (state.before, state.mode_problems) == ({}, {})


@each_case
def test_killed_at_any_call_of_putting_back_the_next_process_goes_on(case, tmp_path):
    calls, _, after = steps_of(case, tmp_path / "whole")

    for number in range(calls):
        scene, board = case.scene(tmp_path / str(number))
        scene.boards.step = failing_then_killed(number)
        with contextlib.suppress(Killed):  # of the first call nothing has to be put back
            scene.look()
        scene.boards.step = lambda what: None
        scene.boards.refresh()

        state = scene.start().look()

        assert (look_of(board), state.state) == (after, LayoutState.SUCCESS), number


def failing_then_killed(number):
    """NVML says no at this call, and the first call of putting back is the last of the process."""
    countdown = [number]

    def step(what):
        countdown[0] -= 1
        if countdown[0] == -1:
            raise NodeError("NVML says no")
        if countdown[0] == -2:
            raise Killed

    return step
