"""``devices`` shows GPUs as they are once their layouts are applied, or says why they are not."""

import json
from pathlib import Path

import pytest
import yaml

from dra_driver.model.gpus import DeviceName, GpuUuid, PartitionKey
from dra_driver.model.health import Fault, HealthState, Problem
from dra_driver.model.mig_layouts import LayoutInstance, LayoutOutcome, LayoutState, MigState
from dra_driver.model.records import ClaimRecord, Holding
from dra_driver.node.cgroups.procfs import boot_id
from dra_driver.node.state.health_file import HealthFile
from dra_driver.node.state.known_gpus import KnownGpusFile
from dra_driver.node.state.ledger import Ledger
from dra_driver.node.state.mig_state import MigStateFile
from tests.builders import ref
from tests.cli.profiles import profiles
from tests.fakes.simulated import open_simulated

WHEN = "while no claim and no process uses them"
RESET = "; whether a board can be reset for that is seen then"


@pytest.fixture
def node(tmp_path):
    """An A100 and an H100, layouts for them, and the profiles that name those."""
    file = tmp_path / "node.yaml"
    products = ("A100-40-SXM", "H100-80-SXM")
    gpus = [{"product": name, "bus_id": f"0000:0{n}:00.0"} for n, name in enumerate(products)]
    file.write_text(yaml.safe_dump({"gpus": gpus}))
    sevenths = {"devices": [0], "mig-enabled": True, "mig-devices": {"1g.5gb": 7}}
    wrong = {"devices": [1], "mig-enabled": True, "mig-devices": {"1g.5gb": 7}}
    where = tmp_path / "profiles"
    where.mkdir()
    layouts = {"version": "v1", "mig-configs": {"sevenths": [sevenths], "both": [sevenths, wrong]}}
    (where / "layouts.yaml").write_text(yaml.safe_dump(layouts))
    for name in ("sevenths", "both", "all-balanced", "nothing"):
        profiles(where, **{f"of-{name}": [{"mig": {"layout": name}}]})
    return file


@pytest.fixture
def show(type_in, node, tmp_path):
    """``devices`` with the profile that names a layout."""

    def run(layout, *words):
        where = ("--sim", node, "--state-dir", tmp_path, "--profiles", tmp_path / "profiles")
        return type_in("devices", *where, "--profile", f"of-{layout}", *words).out

    return run


@pytest.fixture
def uuids(node, tmp_path):
    """Of the GPUs, by name."""
    with open_simulated(node, tmp_path / "other") as plugin:
        return {gpu.name: gpu.uuid for gpu in plugin.refresh().gpus}


@pytest.fixture
def hold(uuids, tmp_path):
    """Has the claim default/training hold a GPU."""
    claim = ref("training")
    ledger = Ledger(tmp_path / "claims", boot_id(Path("/")))
    return lambda name: ledger.write(
        ClaimRecord(claim, (Holding(claim, DeviceName(name), uuids[name]),))
    )


@pytest.fixture
def keep(tmp_path):
    """Writes down what the plugin knew of MIG."""
    return MigStateFile(tmp_path / "mig.json", boot_id(Path("/"))).write


def about(text, *words):
    return [line for line in text.splitlines() if line.startswith(words)]


def names(text):
    items = json.loads(text)["items"]
    return [d["name"] for item in items for d in item["spec"].get("devices", ())]


def test_what_a_layout_will_create_is_listed_and_drawn_and_the_rest_is_as_it_is(show):
    text = show("sevenths")

    (row,) = about(text, "gpu-0-mig-")
    assert row.startswith("gpu-0-mig-1g5gb-19-{0,1,2,3,4,5,6} ")
    assert row.endswith(" created by a layout")
    assert text.count("1g.5gb  to be created by its layout\n") == 7
    assert about(text, "gpu-0 ") == [line for line in about(text, "gpu-0 ") if "free of 8" in line]
    assert about(text, "gpu-1 ") == [line for line in about(text, "gpu-1 ") if "sliceable" in line]
    assert about(text, "shown as", "layout") == [
        f"shown as after layout sevenths: gpu-0; the plugin creates its partitions {WHEN}{RESET}"
    ]


def test_documents_have_exactly_these_partitions_and_invent_no_uuid(show):
    text = show("sevenths", "-o", "json")

    assert sorted(names(text)) == sorted(
        [*(f"gpu-0-mig-1g5gb-19-{n}" for n in range(7)), "gpu-0-mon", "gpu-1", "gpu-1-mon"]
    )
    (slice_,) = json.loads(text)["items"]
    for device in slice_["spec"]["devices"]:
        assert ("uuid" in device["attributes"]) is ("-mig-" not in device["name"])
        assert "consumesCounters" not in device


def test_a_reset_is_spoken_of_only_where_the_mode_changes(show, node, uuids, tmp_path):
    with open_simulated(node, tmp_path) as plugin:
        plugin.mig.reset_mode(uuids["gpu-0"], True)

    assert about(show("sevenths"), "shown as") == [
        f"shown as after layout sevenths: gpu-0; the plugin creates its partitions {WHEN}"
    ]


def test_gpus_with_one_layout_are_one_line(show):
    assert about(show("all-balanced"), "shown as") == [
        "shown as after layout all-balanced: gpu-0, gpu-1; "
        f"the plugin creates its partitions {WHEN}{RESET}"
    ]


@pytest.mark.parametrize("kind", ["of-all-balanced", "mig"])
def test_a_gpu_that_is_lost_is_shown_as_it_was(type_in, node, tmp_path, kind):
    with open_simulated(node, tmp_path / "other") as plugin:
        lost = plugin.refresh().gpus[0]  # the A100, which a reset would switch
    document = yaml.safe_load(node.read_text())
    document["gpus"][0]["fails"] = "GPU_IS_LOST"
    node.write_text(yaml.safe_dump(document))
    state = HealthState((Fault(lost.uuid, Problem.LOST),))
    HealthFile(tmp_path / "health.json", boot_id(Path("/"))).write(state)
    KnownGpusFile(tmp_path / "gpus.json", boot_id(Path("/"))).keep((lost,))
    where = () if kind == "mig" else ("--profiles", tmp_path / "profiles")

    text = type_in("devices", "--sim", node, "--state-dir", tmp_path, "--profile", kind, *where).out

    assert about(text, "gpu-0 ") and not about(text, "gpu-0-mig")
    assert about(text, "tainted: ")[0].startswith("tainted: gpu-0: gpu.nvidia.com/gpu-lost (")
    assert not [line for line in about(text, "shown as after") if "gpu-0" in line]


def test_a_layout_that_does_not_fit_leaves_its_gpu_and_says_why(show):
    text = show("both")

    assert "gpu-1" in names(show("both", "-o", "json"))
    assert about(text, "layout") == [
        "layout both on gpu-1: failed: gpu-1 (NVIDIA H100 80GB HBM3) has no profile 1g.5gb, which "
        "layout 'both' has; it has: 1g.10gb, 2g.20gb, 3g.40gb, 4g.40gb, 7g.80gb, 1g.10gb+me, "
        "1g.20gb"
    ]
    assert about(text, "shown as after layout both: gpu-0;")


LABEL = "label nvidia.com/mig.config of the Node, as its plugin read it last: "


def test_the_label_of_the_node_goes_before_the_layout_of_the_profile(show, keep):
    keep(MigState(label="sevenths"))

    text = show("all-balanced")

    assert about(text, "label", "shown as", "layout") == [
        f"{LABEL}sevenths; it goes before the profile",
        f"shown as after layout sevenths: gpu-0; the plugin creates its partitions {WHEN}{RESET}",
    ]
    assert names(show("all-balanced", "-o", "json")) == names(show("sevenths", "-o", "json"))


@pytest.mark.parametrize("label", ["all-disabled", "nothing"])
def test_gpus_of_which_the_label_says_something_get_no_partitions_for_claims(
    type_in, node, keep, tmp_path, label
):
    keep(MigState(label=label))
    where = ("devices", "--sim", node, "--state-dir", tmp_path, "--profile", "mig")

    device_names = names(type_in(*where, "-o", "json").out)

    assert sorted(device_names) == ["gpu-0", "gpu-0-mon", "gpu-1", "gpu-1-mon"]
    assert about(type_in(*where).out, "label") == [f"{LABEL}{label}; it goes before the profile"]


@pytest.mark.parametrize("label", [None, ""])
def test_where_no_label_is_known_the_profile_says(show, keep, label):
    keep(MigState(label=label))

    assert about(show("sevenths"), "label", "shown as") == [
        f"shown as after layout sevenths: gpu-0; the plugin creates its partitions {WHEN}{RESET}"
    ]


@pytest.mark.parametrize("theirs", [True, False])
def test_the_label_of_another_node_is_not_that_of_a_simulated_one(show, keep, uuids, theirs):
    gpu = GpuUuid("GPU-of-the-machine") if theirs else uuids["gpu-1"]
    done = LayoutOutcome("all-disabled", LayoutState.SUCCESS)
    keep(MigState(label="all-disabled", outcomes={gpu: done}))

    text = show("sevenths")

    assert bool(about(text, "label")) is not theirs
    assert bool(about(text, "shown as after layout sevenths: gpu-0;")) is theirs


def test_a_layout_that_there_is_not_names_those_that_there_are(show):
    text = show("nothing")

    (line,) = about(text, "layout")
    assert line.startswith("layout: there is no layout 'nothing'; there are: all-1g.10gb, ")
    assert line.endswith(" both, sevenths")
    assert about(text, "shown as") == []


def test_a_gpu_that_a_claim_holds_keeps_its_look_and_says_what_it_waits_for(show, hold):
    hold("gpu-0")

    text = show("all-balanced")

    assert about(text, "layout") == [
        "layout all-balanced on gpu-0: pending: claims hold it until their pods end: "
        "default/training (gpu-0)"
    ]
    assert about(text, "shown as") == [
        f"shown as after layout all-balanced: gpu-1; the plugin creates its partitions {WHEN}"
    ]


@pytest.mark.parametrize(
    ("state", "then"),
    [
        pytest.param(MigState(label="all-balanced"), "as layout all-balanced says", id="a layout"),
        pytest.param(
            MigState(label="sevenths"), "sliceable and partitions created for", id="no layout"
        ),
    ],
)
def test_what_becomes_of_a_held_gpu_is_said_by_its_layout_else_by_the_profile(
    type_in, node, keep, hold, tmp_path, state, then
):
    hold("gpu-1")
    keep(state)
    where = ("--sim", node, "--state-dir", tmp_path, "--profiles", tmp_path / "profiles")

    text = type_in("devices", *where, "--profile", "mig").out

    (line,) = about(text, "pending")
    start = f"pending: gpu-1 keeps its shape while a claim holds it, then: {then}"
    assert line.startswith(start)


FAILED = LayoutOutcome("sevenths", LayoutState.FAILED, "MIG mode cannot be turned on: no reset")


def test_a_layout_that_failed_says_nothing_of_what_becomes_of_a_held_gpu(show, keep, hold, uuids):
    hold("gpu-0")
    keep(MigState(outcomes={uuids["gpu-0"]: FAILED}))

    assert about(show("sevenths"), "pending") == [
        "pending: gpu-0 keeps its shape while a claim holds it, then: sliceable"
    ]


def test_what_a_running_plugin_could_not_do_is_not_shown_as_done(show, keep, uuids):
    keep(MigState(outcomes={uuids["gpu-0"]: FAILED}))

    assert about(show("sevenths"), "layout", "shown as") == [
        "layout sevenths on gpu-0: failed: MIG mode cannot be turned on: no reset"
    ]
    assert "gpu-0" in names(show("sevenths", "-o", "json"))


def test_a_problem_that_the_plugin_has_too_is_told_once(show, keep):
    before = about(show("nothing"), "layout: ")
    keep(MigState(problem=before[0].removeprefix("layout: ")))

    assert about(show("nothing"), "layout: ") == before


def test_a_layout_that_is_applied_changes_nothing(show, node, keep, uuids, tmp_path):
    uuid, keys = uuids["gpu-0"], [PartitionKey(19, n, 1, 1) for n in range(7)]
    with open_simulated(node, tmp_path) as plugin:
        plugin.mig.reset_mode(uuid, True)
        created = [plugin.mig.create(uuid, key) for key in keys]
    made = tuple(LayoutInstance(instance.key, instance.gi, instance.uuid) for instance in created)
    done = LayoutOutcome("sevenths", LayoutState.SUCCESS)
    keep(MigState({uuid: made}, outcomes={uuid: done}))

    text = show("sevenths")

    assert all(instance.uuid in text for instance in created)
    assert "created by a layout" not in text
    assert about(text, "layout", "shown as") == ["layout sevenths on gpu-0: success"]


def test_a_board_that_the_plugin_cannot_switch_is_shown_whole_with_its_words(
    type_in, node, keep, uuids, tmp_path
):
    why = "MIG mode of gpu-0 could not be turned on: it was not reset"
    keep(MigState(mode_problems={uuids["gpu-0"]: why}))
    words = ("devices", "--sim", node, "--state-dir", tmp_path, "--profile", "mig")

    text = type_in(*words).out

    assert about(text, "gpu-0: ") == [f"gpu-0: {why}"]
    assert about(text, "shown as") == []
    assert about(text, "not as the profile says: gpu-0: ")
    device_names = names(type_in(*words, "-o", "json").out)
    assert "gpu-0" in device_names and not any(
        name.startswith("gpu-0-mig") for name in device_names
    )
    assert any(name.startswith("gpu-1-mig") for name in device_names)
