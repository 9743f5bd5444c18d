"""On a GPU that a layout may govern no partitions are created for claims, from the first moment on
and whatever fails; where no layout is desired, no outage keeps partitions back."""

import pytest

from dra_driver.base.errors import Forbidden, NodeError, SettingsError, Unreachable
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.mig_layouts import LayoutState, MigLayout, MigLayoutEntry, MigState
from dra_driver.model.offer import EXCLUSIVE, ApiFeatures
from dra_driver.model.profiles import DEFAULT_PROFILE
from dra_driver.model.records import Holding
from dra_driver.node.state.mig_state import MigStateFile
from dra_driver.plan.offer.devices import build_offer
from dra_driver.plugin.mig.start import last_state
from dra_driver.plugin.publish.profiles import EffectiveProfile, is_layout_expected
from tests.builders import ref
from tests.fakes.boards import HOPPER, Board, Boards, part
from tests.plugin.mig.reconciler import Scene, profile

AWAY = Unreachable("no answer")


def labelled(directory, *boards, label="mine", **mig):
    """A label names a layout, where the profile has partitions created for claims."""
    scene = Scene(Boards(*boards), directory, profile=profile(dynamic=True, **mig), label=label)
    scene.layouts["mine"] = MigLayout("mine", (MigLayoutEntry(False),))
    return scene


@pytest.fixture
def board():
    return Board(HOPPER)


@pytest.fixture
def scene(board, tmp_path):
    return labelled(tmp_path, board)


@pytest.fixture
def boards():
    return Board(HOPPER), Board(HOPPER, 1)


def offered(scene, holdings=None):
    profile = scene.governed.profile()
    return build_offer(scene.boards.refresh(), profile, ApiFeatures(), holdings or {})


def partitioned(scene):
    """The names of the GPUs of which partitions are offered."""
    return {device.gpu.name for device in offered(scene).devices if device.created_for_claims}


@pytest.mark.parametrize("was_known", [True, False])
def test_a_layout_that_is_not_known_governs_all_gpus_that_it_may_be_meant_for(scene, was_known):
    if was_known:
        scene.look()
    del scene.layouts["mine"]  # a typing error, or its file cannot be read for a moment

    state = scene.look()

    assert not partitioned(scene)
    assert state.state is LayoutState.FAILED
    assert state.problem.endswith(
        "; no partitions are created for claims meanwhile on the GPUs that it may be meant for"
    )


def test_before_the_first_look_the_label_alone_counts(scene):
    assert not partitioned(scene)

    scene.label = ""
    assert partitioned(scene)
    scene.look()
    assert partitioned(scene)


def test_a_label_that_was_never_read_may_name_a_layout(scene):
    scene.label = AWAY
    scene.look()

    assert not partitioned(scene)
    assert "once it is known whether the node's label nvidia.com/mig.config names a layout" in str(
        offered(scene).warnings
    )
    scene.label = ""
    assert partitioned(scene)


@pytest.mark.parametrize("boot", ["boot", "next"])
def test_while_the_label_cannot_be_read_it_is_as_it_was_last(scene, boot):
    scene.look()
    scene.label, scene.boot = AWAY, boot
    scene.start().look()
    assert not partitioned(scene)

    scene.apply("")
    scene.label = Forbidden("nodes cannot be watched")
    for _ in range(2):
        scene.start().look()
        assert partitioned(scene)


def test_a_label_that_was_read_is_recorded_and_governs_before_anything_is_changed(tmp_path, boards):
    scene = labelled(tmp_path, *boards, label="")
    scene.look()
    scene.label, facts = "all-1g.10gb", set()
    scene.boards.step = lambda call: facts.add(
        (
            last_state(scene.state_file).label,
            scene.governed.profile().entries[0].rules.mig.dynamic,
        )
    )

    scene.look()

    assert facts == {("all-1g.10gb", False)}


def test_a_state_file_that_cannot_be_read_changes_nothing_of_it(scene, tmp_path):
    (tmp_path / "mig.json").symlink_to("mig.json")  # to itself
    scene.reconciler.look()
    assert not partitioned(scene)
    assert scene.states == [LayoutState.FAILED]

    scene.label = AWAY
    scene.start().reconciler.look()
    assert not partitioned(scene)


@pytest.mark.parametrize("label", ["mine", "all-1g.10gb"])
def test_gpus_whose_driver_was_not_ready_at_the_first_look_are_governed(tmp_path, boards, label):
    scene = labelled(tmp_path, *boards, label=label)
    scene.boards.gone = set(scene.boards.boards)
    scene.look()

    scene.boards.gone = set()

    assert {device.gpu.name for device in offered(scene).devices} == {"gpu-0", "gpu-1"}
    assert not partitioned(scene)


def test_a_gpu_that_was_away_at_the_last_look_is_governed_until_the_next(tmp_path, boards):
    scene = labelled(tmp_path, *boards)
    entry = MigLayoutEntry(False, gpus=frozenset({boards[0].uuid}))
    scene.layouts["mine"] = MigLayout("mine", (entry,))

    for away in boards:
        scene.boards.gone = {away.uuid}
        scene.boards.refresh()
        scene.look()
        scene.boards.gone = set()
        assert partitioned(scene) <= {"gpu-1"} - {away.gpu.name}
        scene.boards.refresh()
        scene.look()
        assert partitioned(scene) == {"gpu-1"}
        assert offered(scene).warnings == ()


def test_where_no_layout_is_desired_gpus_that_come_have_partitions_at_once(scene, board):
    scene.boards.gone = {board.uuid}
    scene.apply("")

    scene.boards.gone = set()

    assert partitioned(scene)


def test_a_gpu_that_the_profile_has_a_layout_for_is_governed_when_it_comes(tmp_path, boards):
    scene = labelled(tmp_path, *boards, label="", layout="all-disabled")
    scene.boards.gone = {GpuUuid("GPU-0")}
    scene.look()

    scene.boards.gone = set()

    assert not partitioned(scene)


def test_a_process_that_does_not_get_the_lease_knows_it_too(scene):
    scene.lease_taken = True
    scene.look()

    assert scene.state_file.read() == MigState()
    assert not partitioned(scene)


def test_a_device_that_a_claim_holds_stays_offered_as_it_was(scene, board):
    scene.label, key = "", part(HOPPER, "1g.10gb", 0)
    before = offered(scene)
    device = next(device for device in before.devices if device.key == key)
    holding = Holding(
        ref(),
        device.name,
        gpu=board.uuid,
        partition=key,
        created_for_claims=True,
        offered=device.offered,
    )
    board.on, board.instances = True, {key: True}
    scene.label = AWAY
    scene.start()

    after = offered(scene, {board.uuid: (holding,)})

    assert [device.name for device in after.devices] == [device.name for device in before.devices]
    assert before.by_name["gpu-0"].shape is not EXCLUSIVE


def test_a_change_of_the_governed_gpus_is_told():
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


def test_a_profile_that_cannot_be_used_offers_nothing():
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
def test_the_label_now_goes_before_the_label_of_the_last_process(label, last, expected):
    def read():
        if isinstance(label, Exception):
            raise label
        return label

    assert is_layout_expected(read, last) is expected


def test_the_last_label_is_not_known_where_the_state_file_is_not(tmp_path):
    state = MigStateFile(tmp_path / "mig.json", "boot")
    assert last_state(state).label is None
    state.write(MigState(label=""))
    assert last_state(state).label == ""
    (tmp_path / "mig.json").write_text("{")
    assert last_state(state).label is None
    with pytest.raises(NodeError):
        state.read()
