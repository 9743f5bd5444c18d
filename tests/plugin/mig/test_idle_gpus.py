"""Whether a claim was allocated a GPU is asked when something is done to it, not long before; and
what it is like is looked at then."""

from typing import Any

import pytest

from dra_driver.base.errors import Unreachable
from dra_driver.model.mig_layouts import LayoutState
from dra_driver.model.profiles import GpuSelector, MigRules, Profile, ProfileEntry, Rules
from dra_driver.plugin.mig.idle_gpus import IdleGpus
from tests.fakes.boards import AMPERE, Board, Boards, Claims, part
from tests.plugin.mig.reconciler import Scene

UNREAD = "it cannot be looked at now, since a GPU is being changed or does not answer"


@pytest.fixture
def boards():
    return Board(AMPERE, on=True), Board(AMPERE, 1)


@pytest.fixture
def scene(boards, tmp_path):
    """A layout partitions the first one, and then the second is switched for claims."""
    first, _ = boards
    idle_scene = Scene(Boards(*boards), tmp_path)
    idle_scene.layout("l", g1_5gb=2)
    partitioned, switched = MigRules(layout="l"), MigRules(dynamic=True)
    of_first = ProfileEntry(
        GpuSelector(uuids=frozenset({first.uuid})), Rules(mig=partitioned), "spec.gpus[0]"
    )
    idle_scene.profile = Profile(
        "p", (of_first, ProfileEntry(GpuSelector(), Rules(mig=switched), "spec.gpus[1]"))
    )
    return idle_scene


def while_the_first_is_partitioned(scene, allocated):
    """The answer is another one then."""

    def step(call):
        if call.startswith("CI"):
            scene.allocated = allocated

    scene.boards.step = step


def test_a_claim_that_came_while_another_gpu_was_partitioned_keeps_its_gpu(scene, boards):
    while_the_first_is_partitioned(scene, frozenset({"gpu-1"}))

    state = scene.look()

    assert [board.on for board in boards] == [True, False]
    assert state.outcomes[boards[0].uuid].state is LayoutState.SUCCESS
    why = "MIG mode of gpu-1 is not turned on yet: a claim was allocated gpu-1"
    assert state.mode_problems == {boards[1].uuid: why}
    scene.allocated = frozenset()
    assert scene.look().mode_problems == {}
    assert boards[1].on


def test_once_nobody_tells_any_more_what_was_allocated_nothing_more_is_done(scene, boards):
    while_the_first_is_partitioned(scene, Unreachable("no answer"))

    why = scene.look().mode_problems[boards[1].uuid]

    assert why.endswith("not known whether a claim was allocated a part of it: no answer")
    assert not boards[1].on


def test_an_earlier_answer_is_a_reason_to_wait(scene, boards):
    scene.allocated = frozenset({"gpu-1"})
    while_the_first_is_partitioned(scene, frozenset())

    scene.look()
    assert not boards[1].on

    scene.look()
    assert boards[1].on


def test_all_claims_are_listed_once_for_a_change_and_not_while_claims_wait_for_the_gpu():
    boards: Any = Boards(Board(AMPERE, on=True))
    story = []

    def allocated():
        story.append("listed")
        return frozenset()

    def while_free(gpus, act):
        story.append("claims wait")
        act()
        return True

    idle = IdleGpus(boards, while_free, dict, allocated)

    for _ in range(2):
        idle.start_look()
        assert idle.change(boards.refresh().gpus[0], lambda gpu: story.append("done")) == ""

    assert story == ["listed", "claims wait", "done"] * 2


class Away(Boards):
    """The first GPU cannot be read for so many looks, and is what it was when it was seen last."""

    def __init__(self, *boards):
        super().__init__(*boards)
        self.looks = 0

    def refresh(self):
        self.looks -= 1
        self.unread = set(list(self.boards)[:1]) if self.looks >= 0 else set()
        return super().refresh()


@pytest.mark.parametrize(("looks", "is_done"), [(0, True), (1, True), (1000, False)])
def test_nothing_is_done_to_a_gpu_by_what_it_was_before(looks, is_done):
    board = Board(AMPERE, on=True)
    boards: Any = Away(board)
    gpu = boards.refresh().gpus[0]
    board.instances[part(AMPERE, "1g.5gb", 0)] = True  # and nobody can see it yet
    boards.looks, done = looks, []
    idle = IdleGpus(boards, Claims().while_free, dict, frozenset, patience=0.3)

    waits = idle.change(gpu, done.append)

    assert done == ([board.gpu] if is_done else [])
    assert idle.acted is is_done
    assert waits == ("" if is_done else UNREAD)


def test_instances_stay_recorded_while_the_gpu_cannot_be_read(tmp_path):
    board = Board(AMPERE, on=True)
    boards = Away(board)
    scene = Scene(boards, tmp_path, label="all-1g.5gb")
    boards.refresh()
    boards.step = lambda call: setattr(boards, "looks", 3)  # from now on, for three looks

    made = scene.look().keys

    boards.step = lambda call: None
    assert set(made[board.uuid]) == set(board.instances)
    boards.looks = 3
    assert scene.apply("").keys == made
    assert set(board.instances) == set(made[board.uuid])
