"""GPUs are cut as the layout says that a label or a profile names, when nothing uses them."""

import logging

import pytest

from dra_driver.errors import ClusterError, NodeError, TimedOut, Unreachable
from dra_driver.model.devices import DeviceName
from dra_driver.model.holdings import Holding
from dra_driver.model.layouts import Book, Outcome, State
from dra_driver.model.profiles import Entry, MigRules, Profile, Rules, Selection
from tests.fakes.boards import AMPERE, HOPPER, Board, Boards, part
from tests.fakes.values import gpu, ref
from tests.plugin.mig import Scene

ONES = tuple(part(AMPERE, "1g.5gb", start) for start in range(7))
NAME = DeviceName("gpu-0-mig-3g20gb-9-4")
THREES = tuple(part(AMPERE, "3g.20gb", start) for start in (0, 4))


@pytest.fixture
def board():
    return Board(AMPERE)


@pytest.fixture
def scene(board, tmp_path):
    return Scene(Boards(board), tmp_path)


def whole(*keys):
    return dict.fromkeys(keys, True)


def states(book):
    return {uuid: outcome.state for uuid, outcome in book.outcomes.items()}


def test_the_label_names_a_layout_and_the_gpu_is_cut_so(scene, board):
    scene.label = "all-1g.5gb"

    book = scene.look()

    assert board.on
    assert board.there == whole(*ONES)
    assert book.outcomes == {board.uuid: Outcome("all-1g.5gb", State.SUCCESS)}
    assert book.made == {board.uuid: ONES}
    assert (book.before, book.failures, book.state) == ({}, 0, State.SUCCESS)


def test_that_something_begins_is_told_before_it_is_done(scene):
    scene.label = "all-1g.5gb"

    scene.look()
    scene.look()

    assert scene.told == [State.PENDING, State.SUCCESS, State.SUCCESS]


def test_what_is_as_it_should_be_is_not_touched_again(scene, board):
    scene.label = "all-1g.5gb"
    scene.look()
    scene.boards.done.clear()
    scene.claims.asked.clear()

    scene.start().look()

    assert scene.boards.done == []
    assert scene.claims.asked == []


def test_without_a_label_and_a_profile_that_names_one_nothing_is_done(scene, board):
    assert scene.look() == Book()
    assert scene.claims.asked == []
    assert scene.told == [None]


def test_the_profile_names_a_layout_where_there_is_no_label(scene, board):
    scene.change_profile(layout="all-3g.20gb")

    scene.look()
    assert board.there == whole(*THREES)

    scene.label = "all-disabled"
    scene.look()
    assert (board.on, board.there) == (False, {})


def test_another_layout_replaces_what_the_one_before_has_made(scene, board):
    scene.label = "all-1g.5gb"
    scene.look()
    scene.label = "all-balanced"

    book = scene.look()

    assert book.state is State.SUCCESS
    assert set(book.made[board.uuid]) == set(board.there)
    assert len(board.there) == 4
    assert "mode False" not in scene.boards.done


def test_a_layout_that_nobody_wants_any_more_leaves_what_it_made(scene, board):
    scene.label = "all-1g.5gb"
    scene.look()
    scene.label = ""

    book = scene.look()

    assert board.there == whole(*ONES)
    assert (book.outcomes, book.state) == ({}, None)
    assert scene.told[-1] is None


def test_what_looks_like_the_layout_already_is_taken_over_and_goes_with_the_next(scene, board):
    board.on, board.there = True, whole(*THREES)
    scene.label = "all-3g.20gb"

    assert scene.look().made == {board.uuid: THREES}
    assert scene.boards.done == []

    scene.label = "all-1g.5gb"
    scene.look()
    assert board.there == whole(*ONES)


def test_it_can_be_taken_over_once_no_claim_holds_it(scene, board):
    board.on, board.there = True, whole(*THREES)
    scene.label = "all-3g.20gb"
    scene.claims.holding = {"gpu-0"}

    assert scene.look().state is State.SUCCESS
    scene.claims.holding = set()
    assert scene.look().made == {board.uuid: THREES}
    assert scene.told == [State.SUCCESS, State.SUCCESS]


def test_foreign_instances_in_the_way_are_named_and_stay(scene, board):
    foreign = part(AMPERE, "2g.10gb", 2)
    board.on, board.there = True, whole(foreign)
    scene.label = "all-1g.5gb"

    book = scene.look()

    assert board.there == whole(foreign)
    assert scene.boards.done == []
    outcome = book.outcomes[board.uuid]
    assert outcome.state is State.FAILED
    assert "2g.10gb at 2" in outcome.reason
    assert book.failures == 1


def test_once_the_foreign_instance_is_gone_it_is_tried_again_at_once(scene, board):
    board.on, board.there = True, whole(part(AMPERE, "2g.10gb", 2))
    scene.label = "all-1g.5gb"
    scene.look()
    board.there = {}
    scene.look()

    assert scene.look().state is State.SUCCESS


def test_a_layout_that_does_not_fit_changes_nothing(scene, board):
    scene.layout("too-much", g3_20gb=2, g1_5gb=1)
    scene.label = "too-much"

    book = scene.look()

    assert scene.boards.done == []
    assert book.state is State.FAILED
    assert "there is no place for all of them" in book.outcomes[board.uuid].reason
    assert scene.claims.asked == []


def test_an_unknown_layout_fails_and_says_which_there_are(scene, board, caplog):
    scene.label = "all-9g.5gb"

    book = scene.look()

    assert (book.state, book.failures) == (State.FAILED, 1)
    assert book.problem.startswith("there is no layout 'all-9g.5gb'; there are: all-1g.10gb, all-1")
    assert "the layout of this node cannot be used" in caplog.text
    assert scene.told == [State.FAILED]


def test_a_gpu_that_a_claim_holds_waits_until_it_is_given_back(scene, board):
    scene.label = "all-1g.5gb"
    scene.claims.holding = {board.uuid}

    book = scene.look()

    assert book.outcomes == {board.uuid: Outcome("all-1g.5gb", State.PENDING, "a claim holds it")}
    assert book.failures == 0
    assert scene.keeper.waiting
    scene.claims.holding = set()
    assert scene.look().state is State.SUCCESS
    assert not scene.keeper.waiting


def test_claims_are_kept_away_by_every_name_that_a_gpu_has(scene, board):
    scene.label = "all-1g.5gb"

    scene.look()

    assert scene.claims.asked == [{"gpu-0", board.uuid}]


def test_a_gpu_that_a_process_uses_waits_too(scene, board):
    scene.label = "all-1g.5gb"
    board.used = {None: 4711}

    assert scene.look().outcomes[board.uuid].reason == "processes use it: 4711"
    assert scene.boards.done == []


def test_processes_in_partitions_count(scene, board):
    scene.label = "all-1g.5gb"
    scene.look()
    scene.label = "all-3g.20gb"
    board.used = {ONES[3]: 4712}

    book = scene.look()

    assert book.outcomes[board.uuid] == Outcome(
        "all-3g.20gb", State.PENDING, "processes use it: 4712"
    )
    assert board.there == whole(*ONES)


def test_claims_that_take_long_are_waited_for(scene, board):
    def busy(gpus, act):
        raise TimedOut("a claim that is being prepared on gpu-0 did not finish in 10 s")

    scene.claims.while_free = busy
    scene.start()
    scene.label = "all-1g.5gb"

    outcome = scene.look().outcomes[board.uuid]
    assert outcome.state is State.PENDING
    assert outcome.reason.startswith("a claim that is being prepared")


def test_what_is_cut_for_claims_is_no_business_of_the_layout(scene, board):
    scene.layout("one", g1_5gb=1)
    scene.label = "one"
    scene.look()
    claimed = part(AMPERE, "3g.20gb", 4)
    board.there[claimed] = True
    scene.held = {
        NAME: (Holding(ref(), NAME, gpu=board.uuid, partition=claimed, cut=True),),
    }
    scene.claims.holding = {board.uuid}

    assert scene.look().outcomes[board.uuid].state is State.SUCCESS


def test_why_a_gpu_waits_and_what_comes_then_are_both_told(scene, board):
    board.on, board.there = True, whole(part(AMPERE, "2g.10gb", 2))
    scene.claims.holding = {board.uuid}
    scene.label = "all-1g.5gb"

    outcome = scene.look().outcomes[board.uuid]

    assert outcome.state is State.PENDING
    assert outcome.reason.startswith("a claim holds it; then: gpu-0 (A100-40-SXM) has instances")


def test_each_gpu_is_cut_for_itself(tmp_path):
    ampere, hopper, plain = Board(AMPERE), Board(HOPPER, 1), gpu(2)
    scene = Scene(Boards(ampere, hopper, plain=(plain,)), tmp_path, label="all-balanced")
    ampere.used = {None: 1}

    book = scene.look()

    assert states(book) == {ampere.uuid: State.PENDING, hopper.uuid: State.SUCCESS}
    assert book.state is State.PENDING
    assert len(hopper.there) == 4


def test_one_gpu_that_fails_makes_the_whole_node_fail(tmp_path):
    ampere, hopper = Board(AMPERE), Board(HOPPER, 1)
    scene = Scene(Boards(ampere, hopper), tmp_path, label="x")
    scene.layout("x", g1_5gb=7)

    book = scene.look()

    assert states(book) == {ampere.uuid: State.SUCCESS, hopper.uuid: State.FAILED}
    assert book.state is State.FAILED
    assert "has no profile 1g.5gb" in book.outcomes[hopper.uuid].reason


def test_a_layout_of_which_no_gpu_has_anything_is_a_success(tmp_path):
    scene = Scene(Boards(plain=(gpu(0),)), tmp_path, label="all-disabled")

    assert scene.look().state is State.SUCCESS


def test_gpus_that_the_profile_leaves_alone_are_left_alone(scene, board):
    left = Rules(include=False, mig=MigRules(layout="all-1g.5gb"))
    scene.profile = Profile("p", (Entry(Selection(), left, "spec.gpus[0]"),))
    scene.label = "all-1g.5gb"

    assert scene.look().outcomes == {}
    assert scene.boards.done == []


def test_profiles_name_a_layout_for_each_gpu(tmp_path):
    first, second = Board(AMPERE), Board(AMPERE, 1)
    scene = Scene(Boards(first, second), tmp_path)
    scene.profile = Profile(
        "p",
        (
            Entry(Selection(frozenset({0})), Rules(mig=MigRules(layout="all-1g.5gb")), "a"),
            Entry(Selection(), Rules(mig=MigRules(layout="nothing")), "b"),
        ),
    )

    book = scene.look()

    assert states(book) == {first.uuid: State.SUCCESS}
    assert "'nothing'" in book.problem
    assert book.state is State.FAILED


def test_an_error_puts_back_what_was_there(scene, board):
    scene.label = "all-3g.20gb"
    scene.look()
    scene.label = "all-1g.5gb"
    scene.boards.step = failing_once(f"CI {ONES[2]}")

    book = scene.look()

    assert board.there == whole(*THREES)
    assert book.made == {board.uuid: THREES}
    assert book.before == {}
    outcome = book.outcomes[board.uuid]
    assert outcome.state is State.FAILED
    assert outcome.reason == "GPU-0: NVML says no; the GPU is as it was before"


def test_mig_mode_is_put_back_too(scene, board):
    scene.label = "all-1g.5gb"
    scene.boards.step = failing_once(f"GI {ONES[3]}")

    scene.look()

    assert (board.on, board.there) == (False, {})


def test_what_failed_is_not_tried_again_at_once(scene, board):
    scene.label = "all-1g.5gb"
    scene.boards.step = failing_once("mode True")
    first = scene.look()

    again = scene.look()
    assert again == first
    assert scene.told[-1] is State.FAILED
    assert scene.boards.done == []

    scene.label = "all-3g.20gb"
    assert scene.look().state is State.SUCCESS


def test_what_could_not_be_put_back_is_told_and_tried_again_by_the_next_process(scene, board):
    scene.label = "all-3g.20gb"
    scene.look()
    scene.label = "all-1g.5gb"
    scene.boards.step = failing_from(f"CI {ONES[2]}")

    book = scene.look()

    reason = book.outcomes[board.uuid].reason
    assert "what was there before could not be put back" in reason
    assert book.before[board.uuid].keys == THREES
    scene.boards.step = lambda what: None
    scene.label = ""
    assert scene.start().look().before == {}
    assert board.there == whole(*THREES)


def test_a_change_that_nobody_wants_any_more_waits_to_be_put_back(scene, board):
    scene.label = "all-1g.5gb"
    scene.boards.step = failing_from(f"CI {ONES[2]}")
    scene.look()
    scene.label = ""
    scene.claims.holding = {board.uuid}

    book = scene.start().look()

    assert book.boards == {board.uuid: "it is half cut: a claim holds it"}
    assert scene.keeper.waiting
    scene.claims.holding = set()
    book = scene.look()
    assert "NVML says no" in book.boards[board.uuid]


def test_before_a_layout_is_refused_a_half_done_change_is_put_back(scene, board):
    scene.label = "all-3g.20gb"
    scene.look()
    scene.label = "all-1g.5gb"
    scene.boards.step = failing_from(f"CI {ONES[2]}")
    scene.look()
    scene.boards.step = lambda what: None
    scene.layout("never", g9_5gb=1)
    scene.label = "never"

    book = scene.start().look()

    assert book.state is State.FAILED
    assert "has no profile 9g.5gb" in book.outcomes[board.uuid].reason
    assert board.there == whole(*THREES)
    assert book.before == {}


def test_a_gpu_that_does_not_answer_in_time_fails(scene, board):
    def slow(what):
        raise TimedOut("GPU-0 did not answer in 20 s")

    scene.label = "all-1g.5gb"
    scene.boards.processes = slow

    outcome = scene.look().outcomes[board.uuid]
    assert outcome == Outcome("all-1g.5gb", State.FAILED, "GPU-0 did not answer in 20 s")


def test_a_gpu_that_cannot_be_seen_any_more_fails(scene, board):
    scene.label = "all-1g.5gb"
    scene.boards.inventory()
    scene.boards.gone.add(board.uuid)

    scene.keeper.look()

    outcome = scene.book.read().outcomes[board.uuid]
    assert outcome.reason == "gpu-0 (GPU-0) cannot be seen any more"


def test_instances_that_are_gone_with_a_reset_are_cut_again(scene, board):
    scene.label = "all-1g.5gb"
    scene.look()
    board.there = {}
    scene.boards.refresh()

    scene.look()

    assert board.there == whole(*ONES)


def test_after_a_reboot_what_is_there_is_somebody_elses(scene, board):
    scene.label = "all-1g.5gb"
    scene.look()
    scene.boot = "next"
    board.there = whole(ONES[0])
    scene.label = "all-3g.20gb"
    scene.boards.refresh()

    book = scene.start().look()

    assert board.there == whole(ONES[0])
    assert "1g.5gb at 0" in book.outcomes[board.uuid].reason


def test_only_the_newest_process_changes_anything(scene, board):
    scene.label = "all-1g.5gb"
    scene.in_charge = False

    scene.look()

    assert scene.boards.done == []
    assert scene.told == []


@pytest.mark.parametrize("error", [ClusterError("no labels"), Unreachable("no answer")])
def test_nothing_is_done_while_the_label_is_not_known_and_that_is_told_once(scene, error, caplog):
    scene.change_profile(layout="all-1g.5gb")
    scene.label = error

    scene.look()
    scene.look()

    assert scene.boards.done == []
    assert caplog.text.count("cannot tell how GPUs are to be cut") == 1


def test_a_book_that_cannot_be_read_stops_everything(scene, caplog):
    scene.label = "all-1g.5gb"
    (scene.directory / "mig.json").write_text("{")

    scene.keeper.look()

    assert scene.boards.done == []
    assert "cannot be understood" in caplog.records[-1].__dict__["error"]


def test_nothing_is_changed_that_cannot_be_written_down(scene, board):
    scene.label = "all-1g.5gb"
    (scene.directory / "mig.tmp").mkdir()

    scene.keeper.look()

    assert scene.boards.done == []


def test_what_came_of_a_layout_is_logged_when_it_changes(scene, caplog):
    caplog.set_level(logging.INFO)
    scene.label = "all-1g.5gb"

    scene.look()
    scene.look()

    assert caplog.text.count("layout of a GPU") == 1


def failing_once(where):
    """NVML says no there, the first time."""
    left = [where]

    def step(what):
        if left and what == left[0]:
            left.clear()
            raise NodeError("GPU-0: NVML says no")

    return step


def failing_from(where):
    """NVML says no there, and to everything after it."""
    broken = []

    def step(what):
        if what == where or broken:
            broken.append(what)
            raise NodeError("GPU-0: NVML says no")

    return step
