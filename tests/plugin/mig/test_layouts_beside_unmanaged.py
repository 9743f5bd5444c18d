"""Instances that somebody else creates while a layout is applied stay, wherever that was and
wherever our process dies then: NVIDIA's MIG manager acts on the same label at the same moment."""

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
    """The process ends here."""


class WatchedStateFile(MigStateFile):
    """Each write is an effect, too."""

    def __init__(self, boards, path, boot):
        super().__init__(path, boot)
        self._boards = boards

    def _write(self, state):
        self._boards.step("state")
        super()._write(state)
        self._boards.step("written")


class Intruder:
    """Creates *key* at that moment, if it can; the process is killed so many moments later."""

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
        existing = [self.board.partition(key) for key in self.board.instances]
        partition = self.board.partition(self.key)
        is_new = self.board.on and self.key not in self.board.instances
        return is_new and fits_on_board(table(HOPPER), existing, partition)


def scene_of(directory, label="few"):
    """A GPU that a layout halved, and that another layout is to partition now."""
    board = Board(HOPPER, on=True)
    boards = Boards(board)
    scene = Scene(boards, directory, open_state=partial(WatchedStateFile, boards))
    assert scene.apply("all-3g.40gb").state is LayoutState.SUCCESS
    scene.layout("few", g1_10gb=3)
    scene.label = label
    return scene, board


@pytest.fixture
def halved(tmp_path):
    return scene_of(tmp_path)


def moments(directory, label):
    scene, board = scene_of(directory, label)
    clock = scene.boards.step = Intruder(board, TWO, -1)
    assert scene.look().state is LayoutState.SUCCESS
    return clock.moments


def is_unmanaged(scene, board, key):
    return key in board.instances and key not in scene.state_file.read().keys.get(board.uuid, ())


@pytest.mark.parametrize("key", [ONES[0], ONES[1], ONES[6], TWO, THREES[0]], ids=str)
@pytest.mark.parametrize("label", ["few", "all-disabled"])
def test_an_instance_that_came_at_any_moment_stays_and_is_not_taken_over(key, label, tmp_path):
    came = 0
    for moment in range(moments(tmp_path / "whole", label)):
        scene, board = scene_of(tmp_path / str(moment), label)
        intruder = scene.boards.step = Intruder(board, key, moment)

        for _ in range(3):
            scene.look()
            if intruder.came is not None:
                assert is_unmanaged(scene, board, key), moment
            scene.start()
        came += intruder.came is not None
        state = scene.look()
        assert state.before == {}
        if intruder.came is not None and label == "few" and key in ONES:
            assert state.state is LayoutState.SUCCESS  # their instance counts

    assert came


@pytest.mark.parametrize("key", [ONES[1], TWO], ids=str)
def test_an_instance_that_came_stays_wherever_the_process_dies_then(key, tmp_path):
    killed = 0
    for moment in range(moments(tmp_path / "whole", "few")):
        for after in (1, 3, 6, 10):
            scene, board = scene_of(tmp_path / f"{moment}-{after}")
            intruder = scene.boards.step = Intruder(board, key, moment, after)
            with contextlib.suppress(Killed):
                scene.look()
            if not intruder.killed:
                break
            killed += 1
            # That we were about to create the same is all that is known: it cannot be told.
            unknown = LayoutInstance(key) in scene.state_file.read().instances.get(board.uuid, ())

            state = scene.next_process()

            assert unknown or is_unmanaged(scene, board, key), (moment, after)
            assert state.before == {}

    assert killed > 10


def test_an_instance_that_came_while_the_layout_is_applied_counts_for_it(tmp_path):
    board = Board(HOPPER, on=True)
    scene = Scene(Boards(board), tmp_path, label="l")
    scene.layout("l", g1_10gb=2)
    scene.boards.step = intrude(board, f"CI {ONES[0]}", ONES[1])

    state = scene.look()

    outcome = state.outcomes[board.uuid]
    assert outcome.state is LayoutState.FAILED
    assert outcome.reason == f"{board.uuid}: {ONES[1]} exists already; the GPU is as it was before"
    assert (set(board.instances), state.instances) == ({ONES[1]}, {})
    assert scene.look().keys == {board.uuid: (ONES[0],)}
    assert set(board.instances) == set(ONES[:2])


@pytest.mark.parametrize("key", [ONES[0], THREES[0]], ids=str)
def test_an_instance_in_the_place_of_one_that_was_removed_is_not_restored_as_ours(halved, key):
    scene, board = halved
    scene.boards.step = intrude(board, f"no GI {THREES[0]}", key, THREES[1])

    state = scene.look()

    assert set(board.instances) == {key, THREES[1]}
    assert (state.keys, state.before) == ({board.uuid: (THREES[1],)}, {})
    reason = state.outcomes[board.uuid].reason
    assert reason.endswith(f"; the GPU is as it was before, but for {THREES[0]}")
    scene.next_process("all-disabled")
    assert key in board.instances


def test_an_abandoned_change_takes_no_instance_that_came_when_ours_was_seen_gone(halved):
    scene, board = halved

    def killed(call):
        if call == f"no GI {THREES[0]}" and THREES[0] not in board.instances:
            raise Killed

    scene.boards.step = killed
    with pytest.raises(Killed):
        scene.look()
    scene.claims.holding = {board.uuid}
    assert scene.next_process("").keys == {board.uuid: (THREES[1],)}  # that it is gone was seen
    board.instances[THREES[0]] = True  # the same again, by somebody else
    scene.boards.refresh()
    scene.claims.holding = set()

    state = scene.look()

    assert (state.keys, state.before) == ({board.uuid: (THREES[1],)}, {})
    assert set(board.instances) == set(THREES)


def test_a_partition_that_could_not_be_restored_beside_it_is_restored_later(halved):
    scene, board = halved
    others = intrude(board, f"no GI {THREES[1]}", THREES[0])

    def step(call):
        others(call)
        if call == f"GI {THREES[1]}":
            raise NodeError("NVML says no")

    scene.boards.step = step
    state = scene.look()
    assert "could not be restored: NVML says no" in state.outcomes[board.uuid].reason
    assert set(board.instances) == {THREES[0]}
    assert THREES[0] not in state.keys[board.uuid]

    state = scene.next_process("")

    assert (state.keys, state.before) == ({board.uuid: (THREES[1],)}, {})
    assert set(board.instances) == set(THREES)


def test_a_partition_that_was_removed_and_created_again_is_ours_also_where_the_rest_fails(halved):
    scene, board = halved
    before = dict(board.instances)
    change = LayoutChange(board.uuid, THREES, create=(THREES[1], ONES[0]))
    scene.boards.step = intrude(board, "", None, ONES[0])

    with pytest.raises(NodeError, match=r"NVML says no; the GPU is as it was before$"):
        GpuRepartitioner(scene.boards, scene.state_file).change(board.gpu, change)

    assert board.instances == before
    assert scene.state_file.read().keys == {board.uuid: THREES}


def divided(scene, board, before):
    """Others divided the first half of the GPU during a change; what restores it."""
    instances = scene.state_file.read().instances
    scene.state_file.write(MigState(instances=instances, before={board.uuid: before}))
    board.instances[THREES[0]] = False
    board.divided = {THREES[0]}
    return GpuRepartitioner(scene.boards, scene.state_file)


@pytest.mark.parametrize("before", [THREES, THREES[1:]])
def test_an_instance_that_others_divided_is_neither_removed_nor_made_whole(halved, before, caplog):
    caplog.set_level(logging.INFO)
    scene, board = halved

    divided(scene, board, LayoutBefore(True, before)).restore(board.gpu)

    assert board.instances == {THREES[0]: False, THREES[1]: True}
    state = scene.state_file.read()
    assert (state.keys, state.before) == ({board.uuid: (THREES[1],)}, {})
    message = "a GPU has its partitions of before"
    (record,) = (record for record in caplog.records if record.message == message)
    assert record.without == str(THREES[0])  # once: it is not tried


def test_an_instance_that_others_divided_keeps_mig_mode_on_and_the_change_recorded(halved):
    scene, board = halved
    repartitioner = divided(scene, board, LayoutBefore(False))

    with pytest.raises(NodeError, match="in use"):
        repartitioner.restore(board.gpu)

    assert (board.on, board.instances) == (True, {THREES[0]: False})
    assert scene.state_file.read().before
    del board.instances[THREES[0]]
    repartitioner.restore(board.gpu)
    assert (board.on, scene.state_file.read()) == (False, MigState())


class Careful(Boards):
    """Removes by UUID only what has one."""

    def remove(self, gpu, key, uuid=None, patience=None):
        if uuid is None or self.boards[gpu].instances.get(key):
            super().remove(gpu, key, uuid, patience)


def test_an_instance_that_a_crash_left_half_removed_has_no_uuid_any_more_and_goes(tmp_path):
    board = Board(HOPPER, on=True)
    scene = Scene(Careful(board), tmp_path, label="all-3g.40gb")
    scene.look()

    def killed(call):
        if call == f"no GI {THREES[0]}":
            raise Killed

    scene.boards.step = killed
    with pytest.raises(Killed):
        scene.apply("all-1g.10gb")
    assert not board.instances[THREES[0]]

    assert scene.next_process().state is LayoutState.SUCCESS
    assert set(board.instances) == set(ONES)


def intrude(board, when, key, refused=None):
    """Somebody creates *key* after that call, once; and NVML neither creates nor removes *refused*,
    once."""
    came = [] if when else [key]

    def step(call):
        if refused and call in (f"no CI {refused}", f"GI {refused}") and came == [key]:
            came.append(refused)
            raise NodeError("NVML says no")
        is_about_to_go = call.startswith("no GI") and any(
            str(existing) in call for existing in board.instances
        )
        if call == when and not came and not is_about_to_go:
            came.append(key)
            board.instances[key] = True

    return step
