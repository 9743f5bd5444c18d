"""Boards that need a reset for it are in MIG mode as long as their profile has partitions created
for claims."""

import pytest

from dra_driver.base.errors import ApiServerError, NodeError, TimedOut
from dra_driver.model.gpus import GuestRestriction
from dra_driver.model.offer import ApiFeatures
from dra_driver.model.profiles import DEFAULT_PROFILE
from tests.fakes.boards import AMPERE, HOPPER, Board, Boards, part
from tests.plugin.mig.reconciler import Scene, profile

DYNAMIC = profile(dynamic=True)
UNMANAGED = {part(AMPERE, "1g.5gb", 0): True}


@pytest.fixture
def scene(board, tmp_path):
    return Scene(Boards(board), tmp_path, profile=DYNAMIC)


@pytest.fixture
def switched(scene):
    """The board was switched on, and its profile creates no partitions any more."""
    scene.look()
    scene.profile = DEFAULT_PROFILE
    return scene


def look_finds(scene, board, on):
    """The last look at the board found it so."""
    board.on = on
    scene.boards.refresh()


def test_a_board_is_switched_at_the_first_look_and_then_left_alone(scene, board):
    state = scene.look()

    assert board.on
    assert (state.switched, state.state) == ((board.uuid,), None)
    scene.look()
    assert scene.boards.done == ["mode True"]
    assert scene.boards.patience == [0.0], "it waits for no user of the board"


def test_a_board_that_needs_no_reset_is_not_switched_before_a_claim_needs_it(tmp_path):
    board = Board(HOPPER)

    assert Scene(Boards(board), tmp_path, profile=DYNAMIC).look().switched == ()
    assert not board.on


def test_a_board_that_somebody_uses_is_not_reset_and_that_is_told(scene, board, caplog):
    board.used = {None: 4711}

    state = scene.look()

    why = "MIG mode of gpu-0 is not turned on yet: processes use it: process 4711"
    assert state.mode_problems == {board.uuid: why}
    assert state.failures == 1
    assert why in caplog.text
    board.used = {}
    assert scene.look().mode_problems == {}
    assert board.on


def test_a_reset_that_failed_is_not_tried_again_until_the_profile_or_the_process_is_another(
    scene, board
):
    attempts = []

    def step(call):
        attempts.append(call)
        raise NodeError("GPU-0 is used by pid 12")

    scene.boards.step = step
    state = scene.look()
    scene.look()
    why = "MIG mode of gpu-0 could not be turned on: GPU-0 is used by pid 12"
    assert (state.mode_problems, state.switched) == ({board.uuid: why}, ())
    assert len(attempts) == 1

    scene.change_profile(dynamic=True, single=True)
    scene.look()
    scene.start().look()
    assert len(attempts) == 3
    assert scene.state_file.read().mode_problems == {board.uuid: why}


@pytest.mark.parametrize("boot", ["boot", "next"])
def test_a_board_is_switched_back_once_its_profile_creates_no_partitions(switched, board, boot):
    """Also by the next process, and after a reboot."""
    switched.boot = boot

    state = switched.start().look() if boot == "next" else switched.look()

    assert (board.on, state.switched) == (False, ())


@pytest.mark.parametrize("reason", ["a claim", "an instance", "an instance since the last look"])
def test_it_is_not_switched_back_while_something_is_on_it(switched, board, reason):
    if reason == "a claim":
        switched.claims.holding = {board.uuid}
    else:
        board.instances = dict(UNMANAGED)
    if reason == "an instance":
        switched.boards.refresh()

    state = switched.look()

    assert (board.on, state.switched) == (True, (board.uuid,))


def test_somebody_else_may_switch_it_too(scene, board):
    look_finds(scene, board, on=False)
    board.on = True  # since the last look

    assert scene.look().switched == ()

    look_finds(scene, board, on=False)
    scene.look()
    look_finds(scene, board, on=False)
    scene.profile = DEFAULT_PROFILE
    assert scene.look().switched == ()
    assert scene.boards.done == ["mode True"]


@pytest.mark.parametrize("product", [AMPERE, HOPPER])
def test_a_mode_that_somebody_else_turned_on_stays_on(tmp_path, product):
    board = Board(product, on=True)

    Scene(Boards(board), tmp_path).look()

    assert board.on


def test_without_counters_no_partitions_are_created_and_the_board_is_switched_back(scene, board):
    scene.look()
    scene.features = ApiFeatures(counters=False)

    scene.look()

    assert not board.on


def test_while_the_features_of_the_api_server_are_not_known_nothing_changes(scene, board):
    scene.features = ApiServerError("no answer")

    assert scene.look().mode_problems == {}
    assert not board.on


@pytest.fixture
def left_on(tmp_path):
    """A board that a claim turned on and could not turn off when it went."""
    board = Board(HOPPER, on=True)
    scene = Scene(Boards(board), tmp_path, enabled_by_claims=frozenset({board.uuid}))
    scene.claims.holding = {board.uuid}
    assert scene.look().left_on == (board.uuid,)
    scene.enabled_by_claims, scene.claims.holding = frozenset(), set()
    return scene, board


def test_a_mode_that_a_claim_could_not_switch_back_is_switched_back_later(left_on):
    scene, board = left_on

    scene.start().look()

    assert not board.on
    assert scene.look().left_on == ()


@pytest.mark.parametrize("why", ["dynamic", "partitioned", "claimed", "used"])
def test_it_stays_on_while_there_is_a_reason(left_on, why):
    scene, board = left_on
    if why == "dynamic":
        scene.profile = DYNAMIC
    elif why == "partitioned":
        board.instances = {part(HOPPER, "1g.10gb", 0): True}
    elif why == "claimed":
        scene.claims.holding = {board.uuid}
    else:
        board.used = {None: 12}
    scene.boards.refresh()

    assert scene.look().left_on == (board.uuid,)
    assert board.on


def test_a_mode_that_somebody_else_turned_off_and_on_again_is_not_ours(left_on):
    scene, board = left_on
    look_finds(scene, board, on=False)
    assert scene.look().left_on == ()
    look_finds(scene, board, on=True)

    scene.look()

    assert board.on


def test_a_layout_says_more_than_the_profile(scene, board):
    scene.apply("all-disabled")
    assert not board.on

    scene.apply("all-1g.5gb")
    assert len(board.instances) == 7
    assert scene.state_file.read().switched == ()


def test_while_a_layout_is_not_known_the_board_stays_as_it_is(scene, board):
    scene.apply("no such layout")

    assert not board.on


def test_a_board_that_cannot_be_switched_back_is_told(switched, board):
    def refusing(call):
        raise NodeError("GPU-0 is used by pid 12")

    switched.boards.step = refusing

    state = switched.look()

    assert state.switched == (board.uuid,)
    assert state.mode_problems[board.uuid].startswith("MIG mode of gpu-0 could not be turned off: ")


@pytest.mark.parametrize("desired", [True, False])
def test_a_change_that_others_left_pending_is_made_only_where_the_profile_wants_it(
    scene, board, desired
):
    board.pending = True
    scene.boards.refresh()
    scene.profile = DYNAMIC if desired else DEFAULT_PROFILE

    assert scene.look().switched == ((board.uuid,) if desired else ())

    assert (board.on, board.gpu.mig.pending) == (desired, True)


@pytest.fixture
def pending(scene, board):
    """A call of NVML did not answer in time, and changes the mode some day."""

    def late(call):
        board.pending = True
        raise TimedOut("turning MIG mode on: no answer")

    scene.boards.step = late
    assert scene.look().switched == (board.uuid,)
    scene.boards.step = lambda call: None
    return scene


@pytest.mark.parametrize("why", ["same process", "next process", "virtual machine"])
def test_a_change_that_a_call_left_pending_is_taken_back_once_nobody_wants_it(pending, board, why):
    """Also where a virtual machine can make no such change."""
    pending.profile = DEFAULT_PROFILE
    if why == "next process":
        pending.start()
    if why == "virtual machine":
        board.fixed = GuestRestriction.MODE
        pending.boards.refresh()

    state = pending.look()

    assert (board.on, board.gpu.mig.pending, state.switched) == (False, False, ())


def test_a_change_that_a_call_left_pending_is_made_where_it_is_still_desired(pending, board):
    assert pending.start().look().switched == (board.uuid,)

    assert board.on


def test_a_call_that_did_it_after_all_is_ours_to_undo(pending, board):
    board.pending = None
    look_finds(pending, board, on=True)
    pending.profile = DEFAULT_PROFILE

    assert pending.look().switched == ()

    assert not board.on


@pytest.mark.parametrize("fixed", [GuestRestriction.MODE, GuestRestriction.ALL])
def test_a_mode_that_a_virtual_machine_cannot_switch_is_left_alone_and_no_failure(
    scene, board, fixed
):
    board.fixed = fixed

    state = scene.look()

    assert (scene.boards.patience, state.mode_problems, state.switched) == ([], {}, ())


def test_a_board_that_was_switched_and_cannot_be_switched_back_here_is_told(switched, board):
    board.fixed = GuestRestriction.MODE
    switched.boards.refresh()

    state = switched.look()

    assert (board.on, state.switched) == (True, (board.uuid,))
    assert "this virtual machine cannot" in state.mode_problems[board.uuid]
