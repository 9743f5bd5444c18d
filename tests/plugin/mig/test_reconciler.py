"""GPUs are partitioned as the layout of a label or a profile says, when nothing uses them."""

import logging
import threading

import pytest

from dra_driver.base.errors import ApiServerError, NodeError, SettingsError, TimedOut, Unreachable
from dra_driver.model.gpus import DeviceName, GpuUuid
from dra_driver.model.mig_layouts import (
    LayoutOutcome,
    LayoutState,
    MigLayout,
    MigLayoutEntry,
    MigState,
)
from dra_driver.model.offer import ApiFeatures
from dra_driver.model.profiles import GpuSelector, MigRules, Profile, ProfileEntry, Rules
from dra_driver.model.records import Holding
from dra_driver.plan.mig.manager.state import layout_instance
from dra_driver.plan.profiles.rules import rules_by_gpu
from tests.builders import gpu, holding, ref
from tests.fakes.boards import AMPERE, HOPPER, Board, Boards, part
from tests.plugin.mig.reconciler import Scene, profile

ONES = tuple(part(AMPERE, "1g.5gb", start) for start in range(7))
THREES = tuple(part(AMPERE, "3g.20gb", start) for start in (0, 4))
NAME = DeviceName("gpu-0-mig-3g20gb-9-4")
UUID = GpuUuid("GPU-0")  # of the board


def whole(*keys):
    return dict.fromkeys(keys, True)


def states(state):
    return {uuid: outcome.state for uuid, outcome in state.outcomes.items()}


def test_the_layout_that_the_label_names_is_applied_once(scene, board, caplog):
    caplog.set_level(logging.INFO)

    state = scene.apply("all-1g.5gb")

    assert board.on
    assert board.instances == whole(*ONES)
    assert state.outcomes == {board.uuid: LayoutOutcome("all-1g.5gb", LayoutState.SUCCESS)}
    assert state.keys == {board.uuid: ONES}
    assert (state.before, state.failures, state.state) == ({}, 0, LayoutState.SUCCESS)
    done = list(scene.boards.done)
    for process in (scene, scene.start()):
        process.look()
    assert (scene.boards.done, scene.changes) == (done, 1)
    assert scene.claims.asked == [board.uuid], "claims were kept away from it once"
    assert scene.states == [LayoutState.PENDING, *[LayoutState.SUCCESS] * 2]
    assert caplog.text.count("layout of a GPU") == 1
    assert scene.new_events() == [
        ("MIGLayoutApplied", "partitioned as layout 'all-1g.5gb' says: gpu-0")
    ]


CHANGES = {
    "the label": lambda scene: setattr(scene, "label", "all-3g.20gb"),
    "the profile": lambda scene: scene.change_profile(layout="all-3g.20gb"),
    "a file of layouts": lambda scene: scene.layout("mine", g1_5gb=1),
    "what the API server keeps": lambda scene: setattr(scene, "features", ApiFeatures(False)),
    "a claim": lambda scene: setattr(scene, "holdings", {UUID: (holding(gpu=UUID),)}),
    "a mode that a claim set": lambda scene: setattr(scene, "enabled_by_claims", {UUID}),
    "the state file": lambda scene: (scene.directory / "mig.json").unlink(),
    "the GPUs": lambda scene: scene.boards.gone.add(UUID) or scene.boards.refresh(),
    "our label on the Node": lambda scene: setattr(scene, "labelled", True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_look_ends_at_once_until_something_changed(scene, change):
    for _ in range(2):
        scene.apply("all-1g.5gb")
    looks = len(scene.states)
    scene.look()
    assert len(scene.states) == looks

    change(scene)
    scene.look()

    assert len(scene.states) > looks


def test_without_a_label_and_a_profile_that_names_one_nothing_is_done(scene):
    assert scene.look() == MigState(label="")
    assert (scene.claims.asked, scene.states, scene.changes) == ([], [None], 0)


def test_the_profile_names_a_layout_where_there_is_no_label(scene, board):
    scene.change_profile(layout="all-3g.20gb")

    scene.look()
    assert board.instances == whole(*THREES)

    scene.apply("all-disabled")
    assert (board.on, board.instances) == (False, {})


def test_another_layout_replaces_the_instances_of_the_one_before(scene, board):
    scene.apply("all-1g.5gb")
    state = scene.apply("all-balanced")

    assert state.state is LayoutState.SUCCESS
    assert set(state.keys[board.uuid]) == set(board.instances)
    assert len(board.instances) == 4
    assert "mode False" not in scene.boards.done


def test_without_a_layout_the_instances_of_the_last_one_stay(scene, board):
    scene.apply("all-1g.5gb")
    state = scene.apply("")

    assert board.instances == whole(*ONES)
    assert (state.outcomes, state.state, scene.states[-1]) == ({}, None, None)


def test_instances_that_match_the_layout_already_are_taken_over_and_go_with_the_next(scene, board):
    board.on, board.instances = True, whole(*THREES)

    assert scene.apply("all-3g.20gb").keys == {board.uuid: THREES}
    assert scene.boards.done == []

    scene.apply("all-1g.5gb")
    assert board.instances == whole(*ONES)


def test_instances_that_match_are_taken_over_once_no_claim_holds_the_gpu(scene, board):
    board.on, board.instances = True, whole(*THREES)
    scene.claims.holding = {"gpu-0"}

    assert scene.apply("all-3g.20gb").state is LayoutState.SUCCESS
    scene.claims.holding = set()
    assert scene.look().keys == {board.uuid: THREES}
    assert scene.states == [LayoutState.SUCCESS, LayoutState.SUCCESS]


def test_an_instance_of_others_in_the_place_of_one_of_a_layout_is_never_removed(scene, board):
    created = scene.apply("all-1g.5gb").instances[board.uuid][3]
    board.instances, scene.claims.holding = {}, {board.uuid}  # all of them removed by hand
    scene.boards.refresh()
    scene.look()
    board.instances, scene.claims.holding = whole(ONES[3]), set()  # and one created by hand
    scene.boards.refresh()
    assert layout_instance(board.instance(ONES[3])) == created  # nobody can tell it from ours

    state = scene.apply("all-disabled")

    assert board.instances == whole(ONES[3])
    assert "1g.5gb at 3" in state.outcomes[board.uuid].reason
    assert state.instances == {}


def test_instances_that_are_gone_are_forgotten_also_without_a_layout(scene, board):
    scene.apply("all-7g.40gb")
    (key,) = board.instances
    scene.label, board.instances = "", {}
    scene.boards.refresh()
    assert scene.look().instances == {}

    board.instances = whole(key)  # just like it
    scene.boards.refresh()
    scene.look()
    state = scene.apply("all-1g.5gb")

    assert board.instances == whole(key)
    assert state.state is LayoutState.FAILED


def test_instances_that_another_process_creates_just_now_are_not_forgotten(scene, board):
    scene.boards.inventory()
    newer = Scene(scene.boards, scene.directory, label="all-1g.5gb")
    stale = scene.boards.inventory()
    newer.reconciler.look()
    scene.boards.see(stale)

    assert scene.look().keys == {board.uuid: ONES}


def test_the_state_file_is_changed_only_under_the_lease(scene):
    for _ in range(2):
        scene.look()
        assert scene.leases == 1  # that no layout is desired
    scene.apply("all-9g.5gb")
    assert scene.leases == 3  # which one is, and what came of it


def test_an_unmanaged_instance_in_the_way_is_named_and_stays_until_somebody_removes_it(
    scene, board
):
    board.on, board.instances = True, whole(part(AMPERE, "2g.10gb", 2))

    state = scene.apply("all-1g.5gb")

    assert (len(board.instances), scene.boards.done) == (1, [])
    outcome = state.outcomes[board.uuid]
    assert (outcome.state, state.failures) == (LayoutState.FAILED, 1)
    assert "2g.10gb at 2" in outcome.reason
    ((_, message),) = scene.new_events()
    assert "instances that this driver did not make" in message
    board.instances = {}
    scene.look()
    assert scene.look().state is LayoutState.SUCCESS


def test_a_layout_that_does_not_fit_changes_nothing(scene, board):
    scene.layout("too-much", g3_20gb=2, g1_5gb=1)

    state = scene.apply("too-much")

    assert (scene.boards.done, scene.claims.asked) == ([], [])
    assert state.state is LayoutState.FAILED
    reason = state.outcomes[board.uuid].reason
    assert "there is no place for all of them" in reason
    scene.look()
    message = f"gpu-0 is not partitioned as layout 'too-much' says: {reason}"
    assert scene.new_events() == [("MIGLayoutFailed", message)]


def test_an_unknown_layout_fails_and_says_which_there_are(scene, caplog):
    state = scene.apply("all-9g.5gb")

    assert (state.state, state.failures) == (LayoutState.FAILED, 1)
    assert state.problem.startswith(
        "there is no layout 'all-9g.5gb'; there are: all-1g.10gb, all-1"
    )
    assert "the layout of this node cannot be used" in caplog.text
    assert scene.states == [LayoutState.FAILED]
    scene.look()
    message = f"the layout of this node cannot be used: {state.problem}"
    assert scene.new_events() == [("MIGLayoutFailed", message)]
    scene.apply("rubbish")
    ((_, message),) = scene.new_events()
    assert "there is no layout 'rubbish'" in message


BUSY = "a claim that is being prepared on gpu-0 did not finish in 10 s"
NIGHTLY = Holding(ref("nightly"), NAME, gpu=UUID)


@pytest.mark.parametrize(
    ("owner", "field", "value", "reason"),
    [
        ("claims", "holding", {UUID}, "a claim holds it"),
        ("claims", "busy", TimedOut(BUSY), BUSY),
        ("board", "used", {None: 4711}, "processes use it: process 4711"),
        (
            "scene",
            "holdings",
            {UUID: (NIGHTLY,)},
            f"claims hold it until their pods end: {ref('nightly')} ({NAME})",
        ),
        ("scene", "allocated", frozenset({"gpu-0", "gpu-10"}), "a claim was allocated gpu-0"),
        (
            "scene",
            "allocated",
            Unreachable("no answer"),
            "it is not known whether a claim was allocated a part of it: no answer",
        ),
    ],
)
def test_a_gpu_waits_until_nothing_uses_it(scene, board, owner, field, value, reason):
    user = {"scene": scene, "board": board, "claims": scene.claims}[owner]
    before = getattr(user, field)
    setattr(user, field, value)

    state = scene.apply("all-1g.5gb")

    assert state.outcomes == {UUID: LayoutOutcome("all-1g.5gb", LayoutState.PENDING, reason)}
    assert (state.failures, scene.boards.done, scene.reconciler.waiting) == (0, [], True)
    assert scene.claims.asked == ([UUID] if owner == "claims" else []), "others do not wait"
    setattr(user, field, before)
    assert scene.look().state is LayoutState.SUCCESS
    assert not scene.reconciler.waiting


def test_admin_access_is_no_reason_to_wait(scene, board):
    scene.holdings = {board.uuid: (Holding(ref(), NAME, gpu=board.uuid, admin=True),)}

    assert scene.apply("all-1g.5gb").state is LayoutState.SUCCESS


def test_a_layout_governs_whatever_the_profile_says_and_that_is_told(tmp_path):
    hopper, ungoverned = Board(HOPPER), Board(HOPPER, 1)
    scene = Scene(Boards(hopper, ungoverned), tmp_path)
    scene.change_profile(dynamic=True)
    entry = MigLayoutEntry(False, gpus=frozenset({hopper.uuid}))
    scene.layouts["x"] = MigLayout("x", (entry,))

    outcome = scene.apply("x").outcomes[hopper.uuid]

    assert outcome.state is LayoutState.SUCCESS
    assert (
        "no partitions of it are created for claims, as long as layout 'x' is chosen"
        in outcome.reason
    )
    rules, _ = rules_by_gpu(scene.governed.profile(), scene.boards.inventory().gpus)
    assert [rules[uuid].mig.dynamic for uuid in (hopper.uuid, ungoverned.uuid)] == [False, True]

    scene.apply("")
    assert scene.governed.profile() is scene.profile


def test_a_change_that_fails_again_is_not_pending_again(tmp_path):
    scene = Scene(Boards(Board(HOPPER)), tmp_path, label="all-1g.10gb")

    def refused(call):
        raise NodeError("no permission")

    scene.boards.step = refused
    for _ in range(3):
        scene.start().look()  # a new process tries at once

    assert scene.states == [LayoutState.PENDING, *[LayoutState.FAILED] * 3]


def test_a_node_that_failed_is_not_pending_while_another_gpu_waits(tmp_path):
    ampere, hopper = Board(AMPERE), Board(HOPPER, 1)
    scene = Scene(Boards(ampere, hopper), tmp_path, label="x")
    scene.layout("x", g1_5gb=7)  # the second can never look like this
    ampere.used = {None: 7}

    for _ in range(3):
        scene.look()

    assert scene.states == [LayoutState.FAILED] * 3


def test_gpus_are_partitioned_side_by_side(tmp_path):
    boards = [Board(HOPPER, minor) for minor in range(4)]
    scene = Scene(Boards(*boards), tmp_path, label="all-7g.80gb")
    meeting = threading.Barrier(4)

    def all_at_once(call):
        if call == "mode True" and len(scene.boards.done) == 0:
            meeting.wait(10)

    scene.boards.step = all_at_once

    assert scene.look().state is LayoutState.SUCCESS


def test_that_the_state_was_written_on_the_node_is_remembered_until_it_is_gone(scene):
    assert not scene.look().labelled
    scene.label, scene.labelled = "all-1g.5gb", True
    assert scene.look().labelled
    scene.label = ""
    assert scene.start().look().labelled
    scene.labelled = False
    assert not scene.look().labelled


def test_processes_in_partitions_count(scene, board):
    scene.apply("all-1g.5gb")
    board.used = {ONES[3]: 4712, ONES[0]: 4713}
    scene.boards.commands = {4712: "dcgm"}

    state = scene.apply("all-3g.20gb")

    assert state.outcomes[board.uuid] == LayoutOutcome(
        "all-3g.20gb", LayoutState.PENDING, "processes use it: dcgm (4712), process 4713"
    )
    assert board.instances == whole(*ONES)


def test_partitions_that_were_created_for_claims_are_no_business_of_the_layout(scene, board):
    scene.layout("one", g1_5gb=1)
    scene.apply("one")
    claimed = part(AMPERE, "3g.20gb", 4)
    board.instances[claimed] = True
    scene.holdings = {
        board.uuid: (Holding(ref(), NAME, board.uuid, partition=claimed, created_for_claims=True),)
    }
    scene.claims.holding = {board.uuid}

    assert scene.look().outcomes[board.uuid].state is LayoutState.SUCCESS


def test_why_a_gpu_waits_and_what_comes_then_are_both_told(scene, board):
    board.on, board.instances = True, whole(part(AMPERE, "2g.10gb", 2))
    scene.claims.holding = {board.uuid}

    outcome = scene.apply("all-1g.5gb").outcomes[board.uuid]

    assert outcome.state is LayoutState.PENDING
    assert outcome.reason.startswith("a claim holds it; then: gpu-0 (A100-40-SXM) has instances")


def test_each_gpu_is_partitioned_for_itself(tmp_path):
    ampere, hopper, plain = Board(AMPERE), Board(HOPPER, 1), gpu(2)
    scene = Scene(Boards(ampere, hopper, plain=(plain,)), tmp_path, label="all-balanced")
    ampere.used = {None: 1}

    state = scene.look()

    assert states(state) == {ampere.uuid: LayoutState.PENDING, hopper.uuid: LayoutState.SUCCESS}
    assert state.state is LayoutState.PENDING
    assert len(hopper.instances) == 4


def test_one_gpu_that_fails_makes_the_whole_node_fail(tmp_path):
    ampere, hopper = Board(AMPERE), Board(HOPPER, 1)
    scene = Scene(Boards(ampere, hopper), tmp_path, label="x")
    scene.layout("x", g1_5gb=7)

    state = scene.look()

    assert states(state) == {ampere.uuid: LayoutState.SUCCESS, hopper.uuid: LayoutState.FAILED}
    assert state.state is LayoutState.FAILED
    assert "has no profile 1g.5gb" in state.outcomes[hopper.uuid].reason


@pytest.mark.parametrize("label", ["all-disabled", "all-balanced", "all-enabled"])
def test_a_layout_that_says_nothing_of_any_gpu_has_failed(tmp_path, label):
    scene = Scene(Boards(plain=(gpu(0),)), tmp_path, label=label)

    state = scene.look()

    assert (state.state, state.failures) == (LayoutState.FAILED, 1)
    assert f"layout '{label}' (built in) says nothing of any GPU of this node" in state.problem
    assert gpu(0).product_name in state.problem


@pytest.mark.parametrize("layout", [{"label": "all-9g.5gb"}, {"profile": profile(layout="all-9g")}])
def test_before_a_gpu_can_be_seen_no_layout_is_judged(tmp_path, layout):
    boards = Boards(Board(AMPERE))
    boards.gone = set(boards.boards)  # its driver is starting
    scene = Scene(boards, tmp_path, **layout)

    state = scene.look()

    assert (state.state, state.failures, scene.new_events()) == (LayoutState.PENDING, 0, [])
    boards.gone = set()
    boards.refresh()
    assert scene.look().state is LayoutState.FAILED
    assert [reason for reason, _ in scene.new_events()] == ["MIGLayoutFailed"]


def test_a_node_without_gpus_has_no_state_but_where_its_label_names_a_layout(tmp_path):
    scene = Scene(Boards(), tmp_path, profile=profile(layout="all-1g.5gb"))
    assert scene.look().state is None

    assert scene.apply("all-1g.5gb").state is LayoutState.PENDING


def test_gpus_that_the_profile_leaves_alone_are_left_alone(scene, board):
    excluded = Rules(include=False, mig=MigRules(layout="all-1g.5gb"))
    scene.profile = Profile("p", (ProfileEntry(GpuSelector(), excluded, "spec.gpus[0]"),))

    assert scene.apply("all-1g.5gb").outcomes == {}
    assert scene.boards.done == []


def test_profiles_name_a_layout_for_each_gpu(tmp_path):
    first, second = Board(AMPERE), Board(AMPERE, 1)
    scene = Scene(Boards(first, second), tmp_path)
    scene.profile = Profile(
        "p",
        (
            ProfileEntry(
                GpuSelector(frozenset({0})), Rules(mig=MigRules(layout="all-1g.5gb")), "a"
            ),
            ProfileEntry(GpuSelector(), Rules(mig=MigRules(layout="nothing")), "b"),
        ),
    )

    state = scene.look()

    assert states(state) == {first.uuid: LayoutState.SUCCESS}
    assert "'nothing'" in state.problem
    assert state.state is LayoutState.FAILED


def test_a_failed_change_is_not_tried_again_at_once(scene, board):
    scene.boards.step = failing("mode True", forever=False)
    first = scene.apply("all-1g.5gb")

    again = scene.look()
    assert again == first
    assert scene.states[-1] is LayoutState.FAILED
    assert scene.boards.done == []

    assert scene.apply("all-3g.20gb").state is LayoutState.SUCCESS


def test_a_failed_restore_is_told_and_tried_again_by_the_next_process(scene, board):
    scene.apply("all-3g.20gb")
    scene.boards.step = failing(f"CI {ONES[2]}", forever=True)

    state = scene.apply("all-1g.5gb")

    reason = state.outcomes[board.uuid].reason
    assert "what was there before could not be restored" in reason
    assert state.before[board.uuid].keys == THREES
    assert scene.next_process("").before == {}
    assert board.instances == whole(*THREES)


def test_a_change_that_is_no_longer_desired_waits_to_be_undone(scene, board):
    scene.boards.step = failing(f"CI {ONES[2]}", forever=True)
    scene.apply("all-1g.5gb")
    scene.label = ""
    scene.claims.holding = {board.uuid}

    state = scene.start().look()

    assert state.mode_problems == {board.uuid: "gpu-0 is half partitioned: a claim holds it"}
    assert scene.reconciler.waiting
    scene.claims.holding = set()
    state = scene.look()
    assert "NVML says no" in state.mode_problems[board.uuid]


def test_before_a_layout_is_refused_a_half_done_change_is_undone(scene, board):
    scene.apply("all-3g.20gb")
    scene.boards.step = failing(f"CI {ONES[2]}", forever=True)
    scene.apply("all-1g.5gb")
    scene.layout("never", g9_5gb=1)

    state = scene.next_process("never")

    assert state.state is LayoutState.FAILED
    assert "has no profile 9g.5gb" in state.outcomes[board.uuid].reason
    assert board.instances == whole(*THREES)
    assert state.before == {}


def test_a_gpu_that_does_not_answer_in_time_fails(scene, board):
    def slow(call):
        raise TimedOut("GPU-0 did not answer in 20 s")

    scene.label = "all-1g.5gb"
    scene.boards.processes = slow

    outcome = scene.look().outcomes[board.uuid]
    assert outcome == LayoutOutcome(
        "all-1g.5gb", LayoutState.FAILED, "GPU-0 did not answer in 20 s"
    )


def test_a_gpu_that_cannot_be_seen_any_more_fails(scene, board):
    board.used = {None: 7}
    scene.apply("all-1g.5gb")
    board.used = {}
    scene.boards.gone.add(board.uuid)

    scene.reconciler.look()

    outcome = scene.state_file.read().outcomes[board.uuid]
    assert outcome.reason == "gpu-0 (GPU-0) cannot be seen any more"


def test_instances_that_are_gone_with_a_reset_are_created_again(scene, board):
    scene.apply("all-1g.5gb")
    board.instances = {}
    scene.boards.refresh()

    scene.look()

    assert board.instances == whole(*ONES)


def test_after_a_reboot_every_instance_is_somebody_elses(scene, board):
    scene.apply("all-1g.5gb")
    scene.boot = "next"
    board.instances = whole(ONES[0])

    state = scene.next_process("all-3g.20gb")

    assert board.instances == whole(ONES[0])
    assert "1g.5gb at 0" in state.outcomes[board.uuid].reason


def test_only_the_newest_process_changes_anything(scene, board):
    scene.is_newest = False

    scene.apply("all-1g.5gb")

    assert scene.boards.done == []
    assert scene.states == []


@pytest.mark.parametrize("error", [ApiServerError("no labels"), Unreachable("no answer")])
def test_nothing_is_done_while_the_label_is_not_known_and_that_is_told_once(scene, error, caplog):
    scene.change_profile(layout="all-1g.5gb")
    scene.label = error

    scene.look()
    scene.look()

    assert scene.boards.done == []
    assert caplog.text.count("cannot tell how GPUs are to be partitioned") == 1


@pytest.mark.parametrize("text", ["", "{"])
def test_a_damaged_state_file_is_set_aside_and_all_goes_on(scene, board, text, caplog):
    scene.apply("all-1g.5gb")
    (scene.directory / "mig.json").write_text(text)
    scene.states.clear()

    state = scene.start().look()

    assert state.state is LayoutState.SUCCESS
    assert state.keys == {board.uuid: ONES}  # it looks as the layout says, and is taken over
    assert scene.states == [LayoutState.SUCCESS]
    assert "counts as somebody else's from now on" in caplog.text


def test_without_a_record_nothing_is_changed_and_that_is_a_failure(scene, board):
    scene.label = "all-1g.5gb"
    in_the_way = scene.directory / ".mig.json.tmp"
    in_the_way.mkdir()

    for _ in range(2):
        scene.reconciler.look()

    assert scene.boards.done == []
    assert scene.states[-1] is LayoutState.FAILED
    assert "cannot write" in scene.problems[-1]
    ((_, message),) = scene.new_events()
    assert "cannot write" in message
    in_the_way.rmdir()
    scene.apply("nonsense")
    ((_, message),) = scene.new_events()
    assert "there is no layout 'nonsense'" in message


@pytest.mark.parametrize("error", [None, ApiServerError("away"), SettingsError("no such file")])
def test_a_look_that_fails_is_no_failure_where_no_layout_is_known_to_be_desired(scene, error):
    if error is None:
        (scene.directory / "mig.json").symlink_to("mig.json")  # to itself
    else:
        scene.profile = error

    scene.reconciler.look()

    assert scene.new_events() == []
    assert LayoutState.FAILED not in scene.states
    if error is None:
        assert (scene.states, "cannot read" in scene.problems[-1]) == ([None], True)


def test_a_profile_that_cannot_be_used_is_a_failure_of_the_desired_layout(scene):
    scene.label, scene.profile = "all-1g.5gb", SettingsError("no such profile")

    for _ in range(2):
        scene.reconciler.look()

    assert (scene.states, scene.problems) == ([LayoutState.FAILED] * 2, ["no such profile"] * 2)
    message = "cannot tell how GPUs are to be partitioned: no such profile"
    assert scene.new_events() == [("MIGLayoutFailed", message)]


def failing(where, *, forever):
    """NVML says no at that call, and to everything after it if *forever*."""
    failed = []

    def step(call):
        if (forever and failed) or (call == where and not failed):
            failed.append(call)
            raise NodeError("GPU-0: NVML says no")

    return step
