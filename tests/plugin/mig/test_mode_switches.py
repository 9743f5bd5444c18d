"""Boards that need a reset for it are in MIG mode as long as their profile cuts them for claims."""

import pytest

from dra_driver.base.errors import ApiServerError, NodeError, TimedOut
from dra_driver.model.gpus import GuestRestriction
from dra_driver.model.offer import ApiFeatures
from dra_driver.model.profiles import DEFAULT_PROFILE
from tests.fakes.boards import AMPERE, HOPPER, Board, Boards, part
from tests.plugin.mig.reconciler import Scene, profile

DYNAMIC = profile(dynamic=True)


@pytest.fixture
def board():
    return Board(AMPERE)


@pytest.fixture
def scene(board, tmp_path):
    return Scene(Boards(board), tmp_path, profile=DYNAMIC)


def refusing(call):
    raise NodeError("GPU-0 is used by pid 12")


def test_a_board_is_switched_at_the_first_look_and_then_left_alone(scene, board):
    state = scene.look()

    assert board.on
    assert state.switched == (board.uuid,)
    assert state.state is None
    scene.look()
    assert scene.boards.done == ["mode True"]


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
    tried = []

    def step(call):
        tried.append(call)
        raise NodeError("GPU-0 is used by pid 12")

    scene.boards.step = step
    state = scene.look()
    scene.look()
    why = "MIG mode of gpu-0 could not be turned on: GPU-0 is used by pid 12"
    assert (state.mode_problems, state.switched) == ({board.uuid: why}, ())
    assert len(tried) == 1

    scene.change_profile(dynamic=True, single=True)
    scene.look()
    scene.start().look()
    assert len(tried) == 3
    assert scene.state_file.read().mode_problems == {board.uuid: why}


def test_a_board_is_switched_back_once_its_profile_cuts_it_no_more(scene, board):
    scene.look()
    scene.profile = DEFAULT_PROFILE

    state = scene.look()

    assert not board.on
    assert state.switched == ()


def test_it_is_switched_back_after_a_restart_and_a_reboot_too(scene, board):
    scene.look()
    scene.profile = DEFAULT_PROFILE
    scene.boot = "next"

    scene.start().look()

    assert not board.on


@pytest.mark.parametrize("claims", [{"GPU-0"}, set()])
def test_it_is_not_switched_back_while_something_is_on_it(scene, board, claims):
    scene.look()
    scene.profile = DEFAULT_PROFILE
    scene.claims.holding = claims
    if not claims:
        board.instances = {part(AMPERE, "1g.5gb", 0): True}
        scene.boards.refresh()

    state = scene.look()

    assert board.on
    assert state.switched == (board.uuid,)


def test_an_instance_that_somebody_makes_just_then_keeps_it_in_mig_mode(scene, board):
    scene.look()
    scene.profile = DEFAULT_PROFILE
    board.instances = {part(AMPERE, "1g.5gb", 0): True}  # since the last look

    state = scene.look()

    assert board.on
    assert state.switched == (board.uuid,)


def test_somebody_else_may_switch_it_too(scene, board):
    board.on = True  # since the last look
    scene.boards.inventory()
    board.on = False
    scene.boards.refresh()
    board.on = True

    assert scene.look().switched == ()

    board.on = False
    scene.boards.refresh()
    scene.look()
    board.on = False
    scene.boards.refresh()
    scene.profile = DEFAULT_PROFILE
    assert scene.look().switched == ()
    assert scene.boards.done == ["mode True"]


def test_what_somebody_else_switched_stays_so(scene, board):
    board.on = True
    scene.profile = DEFAULT_PROFILE

    scene.look()

    assert board.on


def test_without_counters_nothing_is_cut_for_claims_and_the_board_is_switched_back(scene, board):
    scene.look()
    scene.features = ApiFeatures(counters=False)

    scene.look()

    assert not board.on


def test_an_api_server_that_cannot_be_asked_what_it_keeps_changes_nothing(scene, board):
    scene.features = ApiServerError("no answer")

    assert scene.look().mode_problems == {}
    assert not board.on


def test_nobody_waits_for_who_uses_a_board(scene):
    scene.look()

    assert scene.boards.patience == [0.0]


def left_on(tmp_path):
    """A board that a claim turned on and could not turn off when it went."""
    board = Board(HOPPER, on=True)
    scene = Scene(Boards(board), tmp_path, enabled_by_claims=frozenset({board.uuid}))
    scene.claims.holding = {board.uuid}
    assert scene.look().left_on == (board.uuid,)
    scene.enabled_by_claims, scene.claims.holding = frozenset(), set()
    return scene, board


def test_what_a_claim_could_not_switch_back_is_switched_back_later(tmp_path):
    scene, board = left_on(tmp_path)

    scene.start().look()

    assert not board.on
    assert scene.look().left_on == ()


@pytest.mark.parametrize("why", ["dynamic", "cut", "claimed", "held"])
def test_it_stays_on_while_there_is_a_reason(tmp_path, why):
    scene, board = left_on(tmp_path)
    if why == "dynamic":
        scene.profile = DYNAMIC
    elif why == "cut":
        board.instances = {part(HOPPER, "1g.10gb", 0): True}
    elif why == "claimed":
        scene.claims.holding = {board.uuid}
    else:
        board.used = {None: 12}
    scene.boards.refresh()

    assert scene.look().left_on == (board.uuid,)
    assert board.on


def test_mig_mode_that_somebody_else_turned_on_without_a_reset_stays_so(tmp_path):
    board = Board(HOPPER, on=True)

    Scene(Boards(board), tmp_path).look()

    assert board.on


def test_what_somebody_else_turned_off_and_on_again_is_his(tmp_path):
    scene, board = left_on(tmp_path)
    scene.is_newest = True
    board.on = False
    scene.boards.refresh()
    assert scene.look().left_on == ()
    board.on = True
    scene.boards.refresh()

    scene.look()

    assert board.on


def test_a_layout_says_more_than_the_profile(scene, board):
    scene.apply("all-disabled")
    assert not board.on

    scene.apply("all-1g.5gb")
    assert len(board.instances) == 7
    assert scene.state_file.read().switched == ()


def test_while_it_is_not_known_what_a_layout_says_the_board_stays_as_it_is(scene, board):
    scene.apply("no such layout")

    assert not board.on


def test_a_board_that_cannot_be_switched_back_is_told(scene, board):
    scene.look()
    scene.profile = DEFAULT_PROFILE
    scene.boards.step = refusing

    state = scene.look()

    assert state.switched == (board.uuid,)
    assert state.mode_problems[board.uuid].startswith("MIG mode of gpu-0 could not be turned off: ")


def late(board):
    """A call of NVML that changes the mode some day, and is not waited for."""

    def step(call):
        board.pending = True
        raise TimedOut("turning MIG mode on: no answer")

    return step


def test_a_change_that_others_left_pending_is_made_where_the_profile_wants_it(scene, board):
    board.pending = True
    scene.boards.refresh()

    assert scene.look().switched == (board.uuid,)

    assert (board.on, board.gpu.mig.pending) == (True, True)


def test_a_change_that_others_left_pending_is_theirs_where_nobody_wants_it(scene, board):
    board.pending = True
    scene.boards.refresh()
    scene.profile = DEFAULT_PROFILE

    scene.look()

    assert (board.on, board.gpu.mig.pending) == (False, True)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_change_that_a_call_left_pending_is_taken_back_once_nobody_wants_it(
    scene, board, restarted
):
    scene.boards.step = late(board)
    assert scene.look().switched == (board.uuid,)
    scene.boards.step = lambda call: None
    scene.profile = DEFAULT_PROFILE
    if restarted:
        scene.start()

    state = scene.look()

    assert (board.on, board.gpu.mig.pending) == (False, False)
    assert state.switched == ()


def test_a_change_that_a_call_left_pending_is_made_where_it_is_still_wanted(scene, board):
    scene.boards.step = late(board)
    scene.look()
    scene.boards.step = lambda call: None

    assert scene.start().look().switched == (board.uuid,)

    assert board.on


def test_a_call_that_did_it_after_all_is_ours_to_undo(scene, board):
    scene.boards.step = late(board)
    scene.look()
    scene.boards.step = lambda call: None
    board.on, board.pending = True, None
    scene.boards.refresh()
    scene.profile = DEFAULT_PROFILE

    assert scene.look().switched == ()

    assert not board.on


@pytest.mark.parametrize("fixed", [GuestRestriction.MODE, GuestRestriction.ALL])
def test_what_a_virtual_machine_cannot_switch_is_left_alone_and_is_no_failure(scene, board, fixed):
    board.fixed = fixed

    state = scene.look()

    assert (scene.boards.patience, state.mode_problems, state.switched) == ([], {}, ())


def test_a_change_that_is_pending_in_a_virtual_machine_can_be_taken_back(scene, board):
    scene.boards.step = late(board)
    scene.look()
    scene.boards.step = lambda call: None
    board.fixed = GuestRestriction.MODE
    scene.profile = DEFAULT_PROFILE
    scene.boards.refresh()

    assert scene.look().switched == ()

    assert (board.on, board.gpu.mig.pending) == (False, False)


def test_a_board_that_was_switched_and_cannot_be_switched_back_here_is_told(scene, board):
    scene.look()
    board.fixed = GuestRestriction.MODE
    scene.profile = DEFAULT_PROFILE
    scene.boards.refresh()

    state = scene.look()

    assert (board.on, state.switched) == (True, (board.uuid,))
    assert "this virtual machine cannot" in state.mode_problems[board.uuid]
