"""Whether a claim was allocated a GPU is asked when something is done to it, not long before."""

import pytest

from dra_driver.errors import Unreachable
from dra_driver.model.layouts import State
from dra_driver.model.profiles import Entry, MigRules, Profile, Rules, Selection
from tests.fakes.boards import AMPERE, Board, Boards
from tests.plugin.mig import Scene


@pytest.fixture
def boards():
    return Board(AMPERE, on=True), Board(AMPERE, 1)


@pytest.fixture
def scene(boards, tmp_path):
    """A layout cuts the first one, and then the second is switched for claims."""
    first, _ = boards
    found = Scene(Boards(*boards), tmp_path)
    found.layout("l", g1_5gb=2)
    cut, switched = MigRules(layout="l"), MigRules(dynamic=True)
    of_first = Entry(Selection(uuids=frozenset({first.uuid})), Rules(mig=cut), "spec.gpus[0]")
    found.profile = Profile(
        "p", (of_first, Entry(Selection(), Rules(mig=switched), "spec.gpus[1]"))
    )
    return found


def while_the_first_is_cut(scene, allocated):
    """The answer is another one then."""

    def step(what):
        if what.startswith("CI"):
            scene.allocated = allocated

    scene.boards.step = step


def test_a_claim_that_came_while_others_were_cut_keeps_its_gpu(scene, boards):
    while_the_first_is_cut(scene, frozenset({"gpu-1"}))

    book = scene.look()

    assert [one.on for one in boards] == [True, False]
    assert book.outcomes[boards[0].uuid].state is State.SUCCESS
    why = "MIG mode of gpu-1 is not turned on yet: a claim was allocated gpu-1"
    assert book.boards == {boards[1].uuid: why}
    scene.allocated = frozenset()
    assert scene.look().boards == {}
    assert boards[1].on


def test_once_nobody_tells_any_more_what_was_allocated_nothing_more_is_done(scene, boards):
    while_the_first_is_cut(scene, Unreachable("no answer"))

    why = scene.look().boards[boards[1].uuid]

    assert why.endswith("not known whether a claim was allocated a part of it: no answer")
    assert not boards[1].on


def test_what_was_answered_before_is_a_reason_to_wait(scene, boards):
    scene.allocated = frozenset({"gpu-1"})
    while_the_first_is_cut(scene, frozenset())

    scene.look()
    assert not boards[1].on

    scene.look()
    assert boards[1].on
