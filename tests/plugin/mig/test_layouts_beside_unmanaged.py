"""What somebody else cuts while a layout is being made stays, wherever that was and wherever our
process dies then: NVIDIA's MIG manager acts on the same label at the same moment."""

import contextlib
import logging
from functools import partial

import pytest

from dra_driver.base.errors import NodeError
from dra_driver.model.mig_layouts import (
    LayoutBefore,
    LayoutChange,
    LayoutInstance,
    LayoutState,
    MigState,
)
from dra_driver.node.state.mig_state import MigStateFile
from dra_driver.plugin.mig.repartition import GpuRepartitioner
from dra_driver.sim.mig.geometry import fits_on_board
from tests.fakes.boards import HOPPER, Board, Boards, part, table
from tests.plugin.mig.reconciler import Scene

ONES = tuple(part(HOPPER, "1g.10gb", start) for start in range(7))
TWO = part(HOPPER, "2g.20gb", 2)
THREES = tuple(part(HOPPER, "3g.40gb", start) for start in (0, 4))


class Killed(BaseException):
    """What a process does not live to see the end of."""


class Written(MigStateFile):
    """That something is written down is an effect, too."""

    def __init__(self, boards, path, boot):
        super().__init__(path, boot)
        self._boards = boards

    def _write(self, state):
        self._boards.step("state")
        super()._write(state)
        self._boards.step("written")


class Stranger:
    """Cuts *key* at that moment, if it can; the process is killed so many moments later."""

    def __init__(self, board, key, moment, killed_after=None):
        self.board, self.key, self.killed_after = board, key, killed_after
        self.moment, self.moments, self.came = moment, 0, None
        self.killed = False

    def __call__(self, call):
        if self.moments == self.moment and self.can():
            self.board.instances[self.key], self.came = True, self.moments
        if self.came is not None and self.moments - self.came == self.killed_after:
            self.moments, self.killed = self.moments + 1, True
            raise Killed
        self.moments += 1

    def can(self):
        others = [self.board.partition(key) for key in self.board.instances]
        partition = self.board.partition(self.key)
        is_there = self.key in self.board.instances
        return self.board.on and not is_there and fits_on_board(table(HOPPER), others, partition)


def scene_of(directory, label="few"):
    """A GPU that layouts cut into halves, and now into other parts."""
    board = Board(HOPPER, on=True)
    boards = Boards(board)
    scene = Scene(boards, directory, kept=partial(Written, boards))
    assert scene.apply("all-3g.40gb").state is LayoutState.SUCCESS
    scene.layout("few", g1_10gb=3)
    scene.label = label
    return scene, board


def moments(directory, label):
    scene, board = scene_of(directory, label)
    clock = scene.boards.step = Stranger(board, TWO, -1)
    assert scene.look().state is LayoutState.SUCCESS
    return clock.moments


def is_theirs(scene, board, key):
    return key in board.instances and key not in scene.state_file.read().keys.get(board.uuid, ())


@pytest.mark.parametrize("key", [ONES[0], ONES[1], ONES[6], TWO, THREES[0]], ids=str)
@pytest.mark.parametrize("label", ["few", "all-disabled"])
def test_what_came_at_any_moment_stays_and_is_not_taken_over(key, label, tmp_path):
    came = 0
    for moment in range(moments(tmp_path / "whole", label)):
        scene, board = scene_of(tmp_path / str(moment), label)
        stranger = scene.boards.step = Stranger(board, key, moment)

        for _ in range(3):
            scene.look()
            if stranger.came is not None:
                assert is_theirs(scene, board, key), moment
            scene.start()
        came += stranger.came is not None
        state = scene.look()
        assert state.before == {}
        if stranger.came is not None and label == "few" and key in ONES:
            assert state.state is LayoutState.SUCCESS  # what they cut counts

    assert came


@pytest.mark.parametrize("key", [ONES[1], TWO], ids=str)
def test_what_came_stays_wherever_the_process_dies_then(key, tmp_path):
    killed = 0
    for moment in range(moments(tmp_path / "whole", "few")):
        for after in (1, 3, 6, 10):
            scene, board = scene_of(tmp_path / f"{moment}-{after}")
            stranger = scene.boards.step = Stranger(board, key, moment, after)
            with contextlib.suppress(Killed):
                scene.look()
            if not stranger.killed:
                break
            killed += 1
            scene.boards.step = lambda call: None
            scene.boards.refresh()
            # That we were about to cut the same is all that is known: it cannot be told.
            unknown = LayoutInstance(key) in scene.state_file.read().instances.get(board.uuid, ())

            state = scene.start().look()

            assert unknown or is_theirs(scene, board, key), (moment, after)
            assert state.before == {}

    assert killed > 10


def test_what_came_while_it_cut_is_left_and_counts_for_the_layout(tmp_path):
    board = Board(HOPPER, on=True)
    scene = Scene(Boards(board), tmp_path, label="l")
    scene.layout("l", g1_10gb=2)
    scene.boards.step = came(board, f"CI {ONES[0]}", ONES[1])

    state = scene.look()

    outcome = state.outcomes[board.uuid]
    assert outcome.state is LayoutState.FAILED
    assert outcome.reason == f"{board.uuid}: {ONES[1]} exists already; the GPU is as it was before"
    assert (set(board.instances), state.instances) == ({ONES[1]}, {})
    assert scene.look().keys == {board.uuid: (ONES[0],)}
    assert set(board.instances) == set(ONES[:2])


def test_what_came_in_the_place_of_what_was_there_before_is_not_cut_again(tmp_path):
    scene, board = scene_of(tmp_path)
    scene.boards.step = came(board, f"no GI {THREES[0]}", ONES[0], THREES[1])

    state = scene.look()

    reason = state.outcomes[board.uuid].reason
    assert reason.endswith(f"; the GPU is as it was before, but for {THREES[0]}")
    assert set(board.instances) == {ONES[0], THREES[1]}
    assert state.keys == {board.uuid: (THREES[1],)}
    assert state.before == {}


def test_what_others_made_in_the_place_of_what_was_removed_is_not_put_back_as_ours(tmp_path):
    scene, board = scene_of(tmp_path)
    scene.boards.step = came(board, f"no GI {THREES[0]}", THREES[0], THREES[1])

    state = scene.look()

    assert set(board.instances) == set(THREES)
    assert state.keys == {board.uuid: (THREES[1],)}
    scene.boards.step = lambda call: None
    scene.apply("all-disabled")
    assert THREES[0] in board.instances


def test_half_a_change_that_nobody_wants_takes_nothing_that_came_when_it_was_seen_gone(tmp_path):
    scene, board = scene_of(tmp_path)

    def killed(call):
        if call == f"no GI {THREES[0]}" and THREES[0] not in board.instances:
            raise Killed

    scene.boards.step = killed
    with pytest.raises(Killed):
        scene.look()
    scene.boards.step = lambda call: None
    scene.label, scene.claims.holding = "", {board.uuid}
    scene.boards.refresh()
    assert scene.start().look().keys == {board.uuid: (THREES[1],)}  # that it is gone was seen
    board.instances[THREES[0]] = True  # the same again, by somebody else
    scene.boards.refresh()
    scene.claims.holding = set()

    state = scene.look()

    assert (state.keys, state.before) == ({board.uuid: (THREES[1],)}, {})
    assert set(board.instances) == set(THREES)


def test_what_could_not_be_put_back_beside_it_is_put_back_later(tmp_path):
    scene, board = scene_of(tmp_path)
    others = came(board, f"no GI {THREES[1]}", THREES[0])

    def step(call):
        others(call)
        if call == f"GI {THREES[1]}":
            raise NodeError("NVML says no")

    scene.boards.step = step
    state = scene.look()
    assert "could not be restored: NVML says no" in state.outcomes[board.uuid].reason
    assert set(board.instances) == {THREES[0]}
    assert THREES[0] not in state.keys[board.uuid]
    scene.boards.step = lambda call: None
    scene.label = ""

    state = scene.start().look()

    assert (state.keys, state.before) == ({board.uuid: (THREES[1],)}, {})
    assert set(board.instances) == set(THREES)


def test_what_was_removed_and_cut_again_is_ours_also_where_the_rest_fails(tmp_path):
    scene, board = scene_of(tmp_path)
    work = GpuRepartitioner(scene.boards, scene.state_file)
    there = dict(board.instances)

    with pytest.raises(NodeError, match=r"NVML says no; the GPU is as it was before$"):
        scene.boards.step = came(board, "", None, ONES[0])
        work.change(board.gpu, LayoutChange(board.uuid, THREES, create=(THREES[1], ONES[0])))

    assert board.instances == there
    assert scene.state_file.read().keys == {board.uuid: THREES}


@pytest.mark.parametrize("was_there", [True, False])
def test_what_others_divided_is_neither_removed_nor_made_whole(was_there, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    scene, board = scene_of(tmp_path)
    made = scene.state_file.read().instances
    before = THREES if was_there else THREES[1:]
    scene.state_file.write(
        MigState(instances=made, before={board.uuid: LayoutBefore(True, before)})
    )
    board.instances[THREES[0]] = False
    board.divided = {THREES[0]}

    GpuRepartitioner(scene.boards, scene.state_file).restore(board.gpu)

    assert board.instances == {THREES[0]: False, THREES[1]: True}
    state = scene.state_file.read()
    assert (state.keys, state.before) == ({board.uuid: (THREES[1],)}, {})
    (log_record,) = (
        record
        for record in caplog.records
        if record.message == "a GPU has its partitions of before"
    )
    assert log_record.without == str(THREES[0])  # once: it is not tried


def test_what_others_divided_keeps_mig_mode_on_and_what_was_begun_in_the_book(tmp_path):
    scene, board = scene_of(tmp_path)
    made = scene.state_file.read().instances
    scene.state_file.write(MigState(instances=made, before={board.uuid: LayoutBefore(False)}))
    board.instances[THREES[0]] = False
    board.divided = {THREES[0]}
    work = GpuRepartitioner(scene.boards, scene.state_file)

    with pytest.raises(NodeError, match="in use"):
        work.restore(board.gpu)

    assert (board.on, board.instances) == (True, {THREES[0]: False})
    assert scene.state_file.read().before
    del board.instances[THREES[0]]
    work.restore(board.gpu)
    assert (board.on, scene.state_file.read()) == (False, MigState())


class Careful(Boards):
    """Removes nothing that has no name where one is said."""

    def remove(self, gpu, key, uuid=None, patience=None):
        if uuid is None or self.boards[gpu].instances.get(key):
            super().remove(gpu, key, uuid, patience)


def test_what_a_crash_left_half_removed_has_no_name_any_more_and_goes(tmp_path):
    board = Board(HOPPER, on=True)
    scene = Scene(Careful(board), tmp_path, label="all-3g.40gb")
    scene.look()

    def killed(call):
        if call == f"no GI {THREES[0]}":
            raise Killed

    scene.boards.step, scene.label = killed, "all-1g.10gb"
    with pytest.raises(Killed):
        scene.look()
    assert not board.instances[THREES[0]]
    scene.boards.step = lambda call: None
    scene.boards.refresh()

    assert scene.start().look().state is LayoutState.SUCCESS
    assert set(board.instances) == set(ONES)


def came(board, when, key, refused=None):
    """Somebody cuts *key* then, once; and NVML neither cuts nor removes *refused*, once."""
    there = [] if when else [key]

    def step(call):
        if refused and call in (f"no CI {refused}", f"GI {refused}") and there == [key]:
            there.append(refused)
            raise NodeError("NVML says no")
        if call == when and not there:
            if call.startswith("no GI") and board.instances.get(part_of(board, call)) is not None:
                return  # it is only about to go
            there.append(key)
            board.instances[key] = True

    return step


def part_of(board, call):
    return next((key for key in board.instances if str(key) in call), None)
