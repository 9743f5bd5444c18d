"""What may be the business of a layout is not cut for claims, from the first moment on and
whatever fails; where none is wanted, no outage keeps partitions back."""

import pytest

from dra_driver.base.errors import Forbidden, NodeError, SettingsError, Unreachable
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.mig_layouts import LayoutState, MigLayout, MigLayoutEntry, MigState
from dra_driver.model.offer import EXCLUSIVE, ApiFeatures
from dra_driver.model.profiles import DEFAULT_PROFILE
from dra_driver.model.records import Holding
from dra_driver.node.state.mig_state import MigStateFile
from dra_driver.plan.offer.devices import build_offer
from dra_driver.plugin.mig.start import last_layout_label
from dra_driver.plugin.publish.profiles import EffectiveProfile, is_layout_expected
from tests.builders import ref
from tests.fakes.boards import HOPPER, Board, Boards, part
from tests.plugin.mig.reconciler import Scene, profile

AWAY = Unreachable("no answer")


@pytest.fixture
def board():
    return Board(HOPPER)


@pytest.fixture
def scene(board, tmp_path):
    """A label names a layout, where the profile has GPUs cut for claims."""
    labelled = Scene(Boards(board), tmp_path, profile=profile(dynamic=True), label="mine")
    labelled.layouts["mine"] = MigLayout("mine", (MigLayoutEntry(False),))
    return labelled


def offered(scene, held=None):
    return build_offer(scene.boards.refresh(), scene.governed.profile(), ApiFeatures(), held or {})


def is_cut_for_claims(scene):
    return any(device.created_for_claims for device in offered(scene).devices)


def test_a_layout_that_is_not_known_governs_all_gpus_that_it_may_be_meant_for(scene):
    scene.look()
    del scene.layouts["mine"]  # a typing error, or its file cannot be read for a moment

    state = scene.look()

    assert not is_cut_for_claims(scene)
    assert state.state is LayoutState.FAILED
    assert state.problem.endswith(
        "; no partitions are created for claims meanwhile on the GPUs that it may be meant for"
    )


def test_a_layout_that_is_unknown_from_the_start_governs_too(scene):
    scene.apply("al-balanced")

    assert not is_cut_for_claims(scene)


def test_before_anything_is_looked_at_the_label_alone_counts(scene):
    assert not is_cut_for_claims(scene)

    scene.label = ""
    assert is_cut_for_claims(scene)
    scene.look()
    assert is_cut_for_claims(scene)


def test_a_label_that_was_never_read_may_name_a_layout(scene):
    scene.label = AWAY
    scene.look()

    assert not is_cut_for_claims(scene)
    assert "once it is known whether the node's label nvidia.com/mig.config names a layout" in str(
        offered(scene).warnings
    )
    scene.label = ""
    assert is_cut_for_claims(scene)


@pytest.mark.parametrize("boot", ["boot", "next"])
def test_while_the_label_cannot_be_read_it_is_as_it_was_last(scene, boot):
    scene.look()
    scene.label, scene.boot = AWAY, boot
    scene.start().look()
    assert not is_cut_for_claims(scene)

    scene.apply("")
    scene.label = Forbidden("nodes cannot be watched")
    for _ in range(2):
        scene.start().look()
        assert is_cut_for_claims(scene)


def test_a_label_that_was_read_is_remembered_before_anything_is_cut(scene, board):
    scene.apply("")
    scene.label = "all-1g.10gb"
    known = []
    scene.boards.step = lambda call: known.append(last_layout_label(scene.state_file))

    scene.look()

    assert set(known) == {"all-1g.10gb"}


def test_a_book_that_cannot_be_read_changes_nothing_of_it(scene, tmp_path):
    (tmp_path / "mig.json").mkdir()
    scene.reconciler.look()
    assert not is_cut_for_claims(scene)
    assert scene.states == [LayoutState.FAILED]

    scene.label = AWAY
    scene.start().reconciler.look()
    assert not is_cut_for_claims(scene)


@pytest.mark.parametrize("label", ["mine", "all-1g.10gb"])
def test_gpus_whose_driver_was_not_ready_at_the_first_look_are_not_cut(tmp_path, label):
    boards = Boards(Board(HOPPER), Board(HOPPER, 1))
    boards.gone = set(boards.boards)
    scene = Scene(boards, tmp_path, profile=profile(dynamic=True), label=label)
    scene.layouts["mine"] = MigLayout("mine", (MigLayoutEntry(False),))
    scene.look()

    boards.gone = set()

    assert {device.gpu.name for device in offered(scene).devices} == {"gpu-0", "gpu-1"}
    assert not is_cut_for_claims(scene)


def test_a_gpu_that_was_away_at_the_last_look_is_not_cut_until_the_next(tmp_path):
    board, other = Board(HOPPER), Board(HOPPER, 1)
    boards = Boards(board, other)
    scene = Scene(boards, tmp_path, profile=profile(dynamic=True), label="mine")
    scene.layouts["mine"] = MigLayout(
        "mine", (MigLayoutEntry(False, gpus=frozenset({board.uuid})),)
    )

    def cut():
        return {device.gpu.name for device in offered(scene).devices if device.created_for_claims}

    for away in (board, other):
        boards.gone = {away.uuid}
        boards.refresh()
        scene.look()
        boards.gone = set()
        assert cut() <= {"gpu-1"} - {away.gpu.name}
        boards.refresh()
        scene.look()
        assert cut() == {"gpu-1"}
        assert offered(scene).warnings == ()


def test_where_no_layout_is_wanted_gpus_that_come_are_cut_at_once(scene, board):
    scene.boards.gone = {board.uuid}
    scene.apply("")

    scene.boards.gone = set()

    assert is_cut_for_claims(scene)


def test_a_gpu_that_the_profile_has_a_layout_for_is_not_cut_when_it_comes(tmp_path):
    boards = Boards(Board(HOPPER), Board(HOPPER, 1))
    scene = Scene(boards, tmp_path, profile=profile(dynamic=True, layout="all-disabled"))
    boards.gone = {GpuUuid("GPU-0")}
    scene.look()

    boards.gone = set()

    assert not is_cut_for_claims(scene)


def test_a_process_that_does_not_get_its_turn_knows_it_too(scene):
    scene.others = True
    scene.look()

    assert scene.state_file.read() == MigState()
    assert not is_cut_for_claims(scene)


def test_it_is_told_before_a_look_cuts_anything(tmp_path):
    boards = Boards(Board(HOPPER), Board(HOPPER, 1))
    scene = Scene(boards, tmp_path, profile=profile(dynamic=True), label="all-1g.10gb")
    seen = []
    boards.step = lambda call: seen.append(scene.governed.profile().entries[0].rules.mig.dynamic)

    scene.look()

    assert set(seen) == {False}


def test_what_a_claim_holds_stays_offered_as_it_was(scene, board):
    scene.label, key = "", part(HOPPER, "1g.10gb", 0)
    before = offered(scene)
    held = next(device for device in before.devices if device.key == key)
    holding = Holding(
        ref(),
        held.name,
        gpu=board.uuid,
        partition=key,
        created_for_claims=True,
        offered=held.offered,
    )
    board.on, board.instances = True, {key: True}
    scene.label = AWAY
    scene.start()

    after = offered(scene, {held.name: (holding,)})

    assert [device.name for device in after.devices] == [device.name for device in before.devices]
    assert before.by_name["gpu-0"].shape is not EXCLUSIVE


def test_that_it_is_known_now_is_told():
    changes, governed = [], EffectiveProfile(lambda: DEFAULT_PROFILE)
    governed.on_change = lambda: changes.append(True)

    for _ in range(2):
        governed.set_governed((), frozenset())
    assert changes == [True]
    governed.set_governed((), frozenset({Board(HOPPER).uuid}))
    assert changes == [True, True]
    for on in (False, True):
        governed.set_governed((Board(HOPPER, on=on).gpu,), frozenset({Board(HOPPER).uuid}))
    assert changes == [True, True, True]


def test_the_profile_is_the_same_one_as_long_as_nothing_changed(scene):
    scene.label = AWAY
    first = scene.governed.profile()
    assert scene.governed.profile() is first
    assert first is not scene.profile

    scene.apply("mine")
    second = scene.governed.profile()
    scene.look()
    assert scene.governed.profile() is second


def test_a_profile_that_cannot_be_used_is_no_reason_to_cut():
    def unusable():
        raise SettingsError("no such profile")

    with pytest.raises(SettingsError):
        EffectiveProfile(unusable).profile()


@pytest.mark.parametrize(
    ("label", "last", "expected"),
    [
        ("", None, False),
        ("", "mine", False),
        ("mine", "", True),
        (AWAY, "", False),
        (AWAY, "mine", True),
        (AWAY, None, True),
    ],
)
def test_what_the_label_says_goes_before_what_it_said(label, last, expected):
    def read():
        if isinstance(label, Exception):
            raise label
        return label

    assert is_layout_expected(read, last) is expected


def test_the_last_label_is_not_known_where_the_book_is_not(tmp_path):
    state = MigStateFile(tmp_path / "mig.json", "boot")
    assert last_layout_label(state) is None
    state.write(MigState(label=""))
    assert last_layout_label(state) == ""
    (tmp_path / "mig.json").write_text("{")
    assert last_layout_label(state) is None
    with pytest.raises(NodeError):
        state.read()
