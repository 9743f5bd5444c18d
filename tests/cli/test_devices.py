"""What a node would publish, as people and as programs read it."""

import json
import re
from collections import Counter
from importlib import resources
from pathlib import Path

import pytest
import yaml

from dra_driver.__main__ import node_opener
from dra_driver.cli.devices.resources import NodeResources
from dra_driver.cli.devices.run import devices
from dra_driver.kubeletplugin.slices.reconcile import Pool, SliceContent
from dra_driver.model.gpus import DeviceName, GpuUuid, PartitionKey, Topology
from dra_driver.model.health import Fault, HealthState, Problem
from dra_driver.model.mig_layouts import LayoutInstance, LayoutOutcome, LayoutState, MigState
from dra_driver.model.offer import Device, Exclusive, Fractional, Offer
from dra_driver.model.profiles import Profile
from dra_driver.model.records import ClaimRecord, Holding
from dra_driver.node.cgroups.procfs import boot_id
from dra_driver.node.state.health_file import HealthFile
from dra_driver.node.state.known_gpus import KnownGpusFile
from dra_driver.node.state.ledger import Ledger
from dra_driver.node.state.mig_state import MigStateFile
from dra_driver.node.state.profile_files import LastProfileFile
from dra_driver.settings import DevicesSettings
from tests.builders import MIB, gpu, ref
from tests.cli.profiles import profiles
from tests.fakes.pool_rules import validate_pool
from tests.fakes.simulated import h100, open_simulated
from tests.fakes.user import locked_out

BUNDLED = sorted(
    path.name.removesuffix(".yaml")
    for path in resources.files("dra_driver.sim").joinpath("nodes").iterdir()
)

GIB = 1024 * MIB
GPU_0 = GpuUuid("GPU-fc71e4ef-1f50-516d-843d-47ce7eaf2cf4")  # of h100x8


@pytest.fixture
def node(tmp_path):
    """A file of a node with these GPUs."""

    def write(*gpus):
        file = tmp_path / "node.yaml"
        file.write_text(yaml.safe_dump({"gpus": list(gpus)}))
        return file

    return write


@pytest.fixture
def show(type_in, tmp_path):
    """``devices`` of a simulated node, h100x8 unless another is named; *entries*: of a profile."""

    def run(*words, sim="h100x8", entries=()):
        if entries:
            where = profiles(tmp_path / "profiles", mine=list(entries))
            words = ("--profiles", where, "--profile", "mine", *words)
        return type_in("devices", "--sim", sim, *words)

    return run


@pytest.mark.parametrize("profile", ["default", "mig"])
@pytest.mark.parametrize("name", BUNDLED)
def test_every_bundled_node_prints_slices_that_an_api_server_takes(show, name, profile):
    answer = show("--node-name", "n1", "--profile", profile, "-o", "json", sim=name)

    document = json.loads(answer.out)
    assert (answer.code, document["apiVersion"], document["kind"]) == (0, "v1", "List")
    specs = [item["spec"] for item in document["items"]]
    assert all(item["kind"] == "ResourceSlice" for item in document["items"])
    assert {(s["driver"], s["nodeName"], s["pool"]["name"]) for s in specs} == {
        ("gpu.nvidia.com", "n1", "n1")
    }
    slices = [SliceContent(s.get("devices", ()), s.get("sharedCounters", ())) for s in specs]
    assert validate_pool(Pool("n1", tuple(slices)), "gpu.nvidia.com") == ()


def test_a_node_of_eight_gpus_prints_eight_devices_and_their_monitors_always_alike(show):
    answer = show("--node-name", "n1", "-o", "json")

    (slice_,) = json.loads(answer.out)["items"]
    assert [device["name"] for device in slice_["spec"]["devices"]] == [
        *(f"gpu-{minor}" for minor in range(8)),
        *(f"gpu-{minor}-mon" for minor in range(8)),
    ]
    assert show("--node-name", "n1", "-o", "json").out == answer.out


def test_yaml_says_the_same_as_json(show):
    words = ("--node-name", "n1", "-o")

    as_yaml, as_json = (show(*words, form, sim="mixed").out for form in ("yaml", "json"))

    assert yaml.safe_load(as_yaml) == json.loads(as_json)


def rows(answer, last="profile: "):
    """The cells of each line of the table, and the lines below it."""
    head, *lines = answer.out.splitlines()
    of_table = [line for line in lines if line.startswith("gpu-")]
    below = [line for line in lines if not line.startswith(("gpu-", last))]
    return [[c.strip() for c in re.split(r" {3,}", line)] for line in (head, *of_table)], below


def test_the_table_has_a_line_for_each_device_and_what_a_claim_can_have_of_it(show):
    (head, *lines), below = rows(show())

    assert head == [
        *("DEVICE", "PRODUCT", "SHAPE", "MEMORY", "DEFAULT", "LEAST", "STEP", "SHARES", "CORES"),
        "UUID",
    ]
    assert lines[0][:9] == [
        *("gpu-0", "NVIDIA H100 80GB HBM3", "sliceable", "79.6 GiB", "81559Mi", "1024Mi", "1Mi"),
        *("48", "100 %"),
    ]
    assert lines[8][:9] == [
        *("gpu-0-mon", "NVIDIA H100 80GB HBM3", "monitor (admin access)", "79.6 GiB"),
        *"-----",
    ]
    assert len(lines) == 16
    assert below == []


XID = Fault(GPU_0, Problem.XID, "79", since=1000000000.0)


def record_health(kubelet_dir, fault=XID, text=None):
    """As the plugin of the simulated node does; *text*: in its place."""
    path = kubelet_dir / "plugins/gpu.nvidia.com/state/health.json"
    HealthFile(path, boot_id(Path("/"))).write(HealthState((fault,)))
    if text is not None:
        path.write_text(text)


def test_devices_of_a_sick_gpu_have_the_taint_that_the_plugin_gave_them(show, tmp_path):
    record_health(tmp_path)

    _, below = rows(show("--kubelet-dir", tmp_path))

    (line,) = below
    assert line.startswith("tainted: gpu-0: gpu.nvidia.com/xid (NoSchedule): Xid 79: ")


def test_a_gpu_that_is_lost_is_shown_as_it_was_with_its_taint(show, node, tmp_path):
    with open_simulated(node(h100("1b"), h100("43")), tmp_path / "before") as well:
        lost = well.refresh().gpus[1]
    fallen = node(h100("1b"), h100("43", fails="GPU_IS_LOST"))
    record_health(tmp_path, Fault(lost.uuid, Problem.LOST, since=1000000000.0))
    path = tmp_path / "plugins/gpu.nvidia.com/state/gpus.json"
    KnownGpusFile(path, boot_id(Path("/"))).keep((lost,))

    lines, below = rows(show("--kubelet-dir", tmp_path, sim=fallen))

    assert [line[0] for line in lines[1:]] == ["gpu-0", "gpu-1", "gpu-0-mon", "gpu-1-mon"]
    assert below == [
        "tainted: gpu-1: gpu.nvidia.com/gpu-lost (NoSchedule): the GPU does not answer, since "
        "2001-09-09T01:46:40Z; reboot the node; if it happens again, have the GPU examined"
    ]


def test_slices_without_taints_lack_the_devices_of_a_sick_gpu(show, tmp_path):
    record_health(tmp_path)

    answer = show("--kubelet-dir", tmp_path, "--without", "taints")

    assert "\ngpu-0 " not in answer.out
    assert "\ngpu-1 " in f"\n{answer.out}"
    assert "not offered: GPU 0000:" in answer.out
    assert "Xid 79" in answer.out


def test_where_the_record_of_health_cannot_be_read_a_warning_says_so(tmp_path, caplog):
    settings = DevicesSettings.model_validate({"sim": "h100x8", "kubelet_dir": tmp_path})
    healthy = devices(settings, node_opener(settings, copy=True), "table")
    assert "counts as healthy" not in caplog.text
    record_health(tmp_path, text="{")

    assert devices(settings, node_opener(settings, copy=True), "table") == healthy
    assert "every GPU counts as healthy" in caplog.text


def test_a_wide_table_says_where_each_gpu_sits(show):
    (head, *lines), _ = rows(show("-o", "wide"))

    assert head[10:] == ["SHARED BY", "PCI BUS", "NUMA", "PCIE SWITCH", "NVLINK"]
    assert all(line[11].startswith("0000:") for line in lines)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"defaultStrategy": "MPS"}, "MPS, TimeSlicing"),
        ({"strategies": ["TimeSlicing"]}, "TimeSlicing"),
        ({"strategies": ["MPS"]}, "MPS"),
        ({"strategies": ["MPS", "TimeSlicing"]}, "TimeSlicing, MPS"),
        ({}, "TimeSlicing, MPS"),
    ],
    ids=str,
)
def test_a_wide_table_says_how_a_gpu_is_shared_by_default_first(show, entry, expected):
    (_, line, *_), _ = rows(show("-o", "wide", entries=[entry]))

    assert line[10] == expected


@pytest.mark.parametrize(
    ("words", "device", "shown"),
    [
        pytest.param((), "gpu-0", ["20389Mi", "1024Mi", "1Mi", "4", "100 % (25 % each)"], id="one"),
        pytest.param(
            ("--without", "consumable-capacity"),
            "gpu-0-1",
            ["20389Mi", "-", "-", "1", "25 %"],
            id="many devices",
        ),
    ],
)
def test_replicas_by_mps_of_the_device_plugin_have_their_part_of_the_cores(
    type_in, tmp_path, words, device, shown
):
    file = tmp_path / "old.yaml"
    resources = [{"name": "nvidia.com/gpu", "replicas": 4}]
    file.write_text(yaml.safe_dump({"version": "v1", "sharing": {"mps": {"resources": resources}}}))
    more = ("--profiles", file, "--profile", "old", *words)

    (_, *lines), below = rows(type_in("devices", "--sim", "h100x8", *more))

    (line,) = (line for line in lines if line[0] == device)
    assert "4 replicas (MPS, 25 % of the cores each)" in line[2]
    assert line[4:9] == shown
    assert below == []


@pytest.mark.parametrize(
    ("entry", "shape", "note"),
    [
        pytest.param(
            {"defaultStrategy": "MPS", "replicas": 2},
            "2 replicas",
            "profile 'mine', spec.gpus[0]: the default strategy is MPS, and on gpu-0 processes "
            "take turns instead: MPS takes compute capability 7.0 and newer",
            id="they take turns",
        ),
        pytest.param(
            {"strategies": ["MPS"]},
            "exclusive",
            "not as the profile says: gpu-0: exclusive: profile 'mine', spec.gpus[0]: only MPS is "
            "allowed, and MPS takes compute capability 7.0 and newer; add TimeSlicing to "
            "strategies",
            id="there is no other way",
        ),
    ],
)
def test_a_board_that_mps_does_not_take_is_told(show, node, entry, shape, note):
    board = node({"product": "P4", "bus_id": "0000:1b:00.0"})

    (_, line, *_), below = rows(show("-o", "wide", sim=board, entries=[entry]))

    assert (line[2], line[8], line[10]) == (
        shape,
        "-",
        "-" if shape == "exclusive" else "TimeSlicing",
    )
    assert below == [note]


def test_the_table_names_every_gpu_that_is_not_offered_and_why(show, node):
    gpus = (h100("1b"), h100("43", driver="vfio-pci"), h100("52", fails="GPU_IS_LOST"))

    (_, *offered), unavailable = rows(show(sim=node(*gpus)))

    assert [line[0] for line in offered] == ["gpu-0", "gpu-0-mon"]
    assert [line.partition(": ")[0] for line in unavailable] == ["not offered"] * 2
    assert "0000:43:00.0: it is bound to vfio-pci" in unavailable[0]
    assert "0000:52:00.0: " in unavailable[1]
    assert "lost" in unavailable[1]


@pytest.mark.parametrize("words", [("none",), ("none", "--driver-root", "/nowhere")], ids=str)
def test_a_node_without_gpus_and_driver_says_so_and_what_to_check(type_in, words):
    answer = type_in("devices", "--sim", *words)

    nothing, driver, profile = answer.out.splitlines()
    assert (answer.code, nothing, profile) == (
        0,
        "this node has no GPU to offer",
        "profile: default",
    )
    assert driver.startswith("no driver: no complete NVIDIA driver")
    assert (": /nowhere does not exist" in driver) is (words[-1] == "/nowhere")
    assert "set --driver-root" in driver


def shapes(answer):
    (_, *lines), below = rows(answer)
    return {line[0]: line[2] for line in lines}, below


def test_a_profile_says_what_becomes_of_each_gpu(show):
    answer = show(
        entries=[
            {"select": {"index": [0]}, "fractions": "Never"},
            {"select": {"index": [1]}, "include": False},
            {"select": {"index": [2]}, "replicas": 4, "rename": True},
        ]
    )

    gpu_shapes, below = shapes(answer)
    assert (gpu_shapes["gpu-0"], gpu_shapes["gpu-2"]) == ("exclusive", "4 replicas (gpu-shared)")
    assert gpu_shapes["gpu-3"] == "sliceable"
    assert not {"gpu-1", "gpu-0-mon"} & gpu_shapes.keys()
    (left_out,) = below
    assert left_out.startswith("not offered: GPU ")
    assert "include: false" in left_out
    assert answer.out.splitlines()[-1] == "profile: mine"


def test_a_bundled_profile_needs_no_file(show):
    gpu_shapes, _ = shapes(show("--profile", "exclusive"))

    assert gpu_shapes == {f"gpu-{minor}": "exclusive" for minor in range(8)}


def test_fields_of_the_device_plugin_that_mean_nothing_here_are_told(type_in, tmp_path):
    file = tmp_path / "old.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "version": "v1",
                "flags": {"migStrategy": "none", "plugin": {"passDeviceSpecs": True}},
                "sharing": {
                    "timeSlicing": {"resources": [{"name": "nvidia.com/gpu", "replicas": 4}]}
                },
            }
        )
    )

    answer = type_in("devices", "--sim", "h100x8", "--profiles", file, "--profile", "old")

    gpu_shapes, below = shapes(answer)
    assert set(gpu_shapes.values()) == {"4 replicas", "monitor (admin access)"}
    assert below and all(line.startswith("profile old: ") for line in below)
    assert any("has no meaning here" in line for line in below)


def test_a_node_without_an_mps_agent_shares_nothing_by_mps(type_in):
    (_, line, *_), _ = rows(type_in("devices", "--sim", "t4x1", "--mps-socket", "", "-o", "wide"))

    assert (line[8], line[10]) == ("-", "TimeSlicing")


def test_an_unknown_profile_is_answered_with_the_known_ones(type_in, tmp_path):
    where = profiles(tmp_path, mine=[{}])

    answer = type_in("devices", "--sim", "h100x8", "--profiles", where, "--profile", "yours")

    assert (answer.code, answer.out) == (2, "")
    assert "'yours'" in answer.err
    assert all(name in answer.err for name in ("default", "exclusive", "mine"))


def test_profiles_that_were_not_asked_for_are_named(type_in, tmp_path):
    (tmp_path / "wrong.yaml").write_text("kind: Foo")
    answer = type_in("devices", "--sim=h100x8", f"--profiles={tmp_path / 'wrong.yaml'}")

    assert answer.out.endswith("\nprofile: default (--profile NAME shows another: wrong)\n")
    assert answer.code == 0


def test_a_wrong_profile_is_answered_with_the_field(show):
    answer = show(entries=[{"replicas": "many"}])

    assert answer.code == 2
    assert "spec.gpus[0].replicas" in answer.err
    assert answer.err.count("\n") == 1


@pytest.mark.parametrize(
    ("shape", "entry", "free", "kept"),
    [
        pytest.param(Exclusive(), {}, "sliceable", "exclusive", id="another shape"),
        pytest.param(
            Fractional(20 * GIB, GIB, MIB, shares=4, replicas=4),
            {"replicas": 4, "rename": True},
            "4 replicas (gpu-shared)",
            "4 replicas",
            id="another name alone",
        ),
    ],
)
def test_a_held_gpu_keeps_its_shape_and_the_change_that_waits_is_told(
    show, tmp_path, shape, entry, free, kept
):
    claim = ref("training")
    held = Holding(claim, DeviceName("gpu-0"), GPU_0, shape=shape)
    Ledger(tmp_path / "claims", boot_id(Path("/"))).write(ClaimRecord(claim, (held,)))

    gpu_shapes, below = shapes(show("--state-dir", tmp_path, entries=[entry]))

    assert (gpu_shapes["gpu-0"], gpu_shapes["gpu-1"]) == (kept, free)
    assert below == [f"pending: gpu-0 keeps its shape while a claim holds it, then: {free}"]


def test_what_cannot_be_published_as_the_profile_says_is_told(show):
    gpu_shapes, below = shapes(show(entries=[{"replicas": 2, "memory": {"step": "60Gi"}}]))

    assert gpu_shapes["gpu-0"] == "exclusive"
    assert below[0].startswith("not as the profile says: gpu-0: exclusive: ")


@pytest.mark.parametrize(
    ("without", "expected"),
    [
        pytest.param(["taints"], {"gpu-0": "sliceable", "gpu-1": "4 replicas"}, id="taints"),
        pytest.param(
            ["consumable-capacity"],
            {"gpu-0": "exclusive"} | {f"gpu-1-{n}": f"{n + 1} of 4 replicas" for n in range(4)},
            id="consumable capacity",
        ),
    ],
)
def test_what_an_api_server_would_get_that_lacks_a_feature(show, node, without, expected):
    two = node(h100("1b"), h100("43"))
    words = [word for feature in without for word in ("--without", feature)]

    answer = show(*words, sim=two, entries=[{"select": {"index": [1]}, "replicas": 4}])

    assert shapes(answer)[0] == expected


def test_another_drivers_name_is_published_under_that_name(type_in):
    words = ("--driver-name", "gpu.example.com", "--node-name", "n1", "-o", "json")
    answer = type_in("devices", "--sim", "t4x1", *words)

    (slice_,) = json.loads(answer.out)["items"]
    assert slice_["spec"]["driver"] == "gpu.example.com"


@pytest.mark.parametrize("form", ["table", "json"])
def test_a_ledger_that_may_not_be_read_counts_as_empty_and_a_warning_says_so(public, caplog, form):
    settings = DevicesSettings.model_validate({"sim": "h100x8", "kubelet_dir": public / "kubelet"})
    settings.kubelet_dir.mkdir()
    free = devices(settings, node_opener(settings, copy=True), form)
    assert "every GPU counts as free" not in caplog.text

    with locked_out(settings.kubelet_dir, 0o000):
        answer = devices(settings, node_opener(settings, copy=True), form)

    assert answer == free
    (warning,) = (line for line in caplog.messages if line.startswith("every GPU counts as free"))
    assert f"{settings.ledger_dir}" in warning and "; ask as root" in warning


def partitions_of(answer):
    return [
        device["name"]
        for item in json.loads(answer.out)["items"]
        for device in item["spec"].get("devices", ())
        if device["attributes"]["type"] == {"string": "mig"}
    ]


@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        pytest.param("a100-40x1", {"gpu-0": 14}, id="a100-40x1"),
        pytest.param("a100x8", {f"gpu-{minor}": 14 for minor in range(8)}, id="a100x8"),
        pytest.param("h100x8", {f"gpu-{minor}": 14 for minor in range(8)}, id="h100x8"),
        pytest.param("mixed", {f"gpu-{minor}": 14 for minor in (0, 1, 5)}, id="mixed"),
    ],
)
def test_the_bundled_profile_mig_lists_partitions_by_gpu_profile_and_first_unit(
    type_in, name, gpus
):
    answer = type_in("devices", "--sim", name, "--profile", "mig", "-o", "json")

    partitions = partitions_of(answer)
    assert all(re.fullmatch(r"gpu-\d+-mig-\d+g\d+gb-\d+-\d+", each) for each in partitions)
    assert Counter(each.partition("-mig-")[0] for each in partitions) == gpus


def test_the_bundled_profile_mig_draws_each_board_and_says_that_it_will_be_switched(type_in):
    lines = type_in("devices", "--sim", "a100-40x1", "--profile", "mig").out.splitlines()

    (drawn,) = (line for line in lines if line.startswith("gpu-0  NVIDIA A100"))
    assert drawn.endswith("8 free of 8")
    room = lines[lines.index(drawn) + 1]
    assert room.startswith("  ·  room for 7 x 1g.5gb or 3 x 2g.10gb or 2 x 3g.20gb or 1 x 4g.20gb")
    assert [line for line in lines if line.startswith("shown as after")] == [
        "shown as after their switch to MIG mode: gpu-0; the plugin switches them while no claim "
        "and no process uses them; whether a board can be reset for that is seen then"
    ]
    assert not any("keeps its shape" in line for line in lines)


def test_a_board_that_needs_no_reset_is_offered_whole_and_in_partitions(type_in):
    lines = type_in("devices", "--sim", "h100x2-mig", "--profile", "mig").out.splitlines()

    assert sum(line.startswith("gpu-0 ") for line in lines) == 2, "a row and a picture"
    assert not any("switch" in line for line in lines)
    assert any(line.endswith("or all of it") for line in lines)


def test_without_a_profile_for_it_nothing_is_drawn(type_in):
    assert "free of" not in type_in("devices", "--sim", "a100x8").out


def test_without_counters_no_partition_is_offered_and_the_reason_is_told(type_in):
    words = ("devices", "--sim", "a100-40x1", "--profile", "mig", "--without", "counters")

    assert partitions_of(type_in(*words, "-o", "json")) == []
    out = type_in(*words).out
    assert "not as the profile says: gpu-0: sliceable" in out and "KEP-4815" in out


def test_a_partition_that_a_claim_holds_is_drawn_as_its_own(type_in, node, tmp_path):
    instances = [{"profile": "1g.5gb", "start": start} for start in (0, 1)]
    board = {"product": "A100-40-SXM", "bus_id": "0000:00:04.0", "mig": True}
    words = (
        "devices",
        "--sim",
        node({**board, "instances": instances}),
        "--state-dir",
        tmp_path,
        "--profile",
        "mig",
    )
    holding = Holding(
        ref("training"),
        DeviceName("gpu-0-mig-3g20gb-9-4"),
        gpu=parent(type_in(*words, "-o", "json")),
        partition=PartitionKey(9, 4, 4, 3),
        created_for_claims=True,
        offered=("1g.5gb", "3g.20gb"),
    )
    ledger = Ledger(tmp_path / "claims", boot_id(Path("/")))
    ledger.write(ClaimRecord(ref("training"), (holding,)))
    assert holding.gpu is not None
    waits = LayoutOutcome("all-1g.5gb", LayoutState.PENDING, "claim default/training holds it")
    mig_state = MigStateFile(tmp_path / "mig.json", boot_id(Path("/")))
    mig_state.write(
        MigState(
            {holding.gpu: (LayoutInstance(PartitionKey(19, 1, 1, 1)),)},
            outcomes={holding.gpu: waits},
        )
    )

    lines = type_in(*words).out.splitlines()

    at = next(i for i, line in enumerate(lines) if line.endswith("2 free of 8"))
    assert re.search(r"\[(a+)│(b+)│(·+)│(·+)│(C+)\]", lines[at])
    assert [line[:13] for line in lines[at + 1 : at + 3]] == ["  a  1g.5gb  ", "  b  1g.5gb  "]
    assert [line.rpartition("  ")[2] for line in lines[at + 1 : at + 3]] == [
        "not made by this driver",
        "made by a layout",
    ]
    assert lines[at + 3] == "  C  3g.20gb  default/training  not created yet"
    assert lines[at + 4] == "  ·  room for 2 x 1g.5gb"
    assert "layout all-1g.5gb on gpu-0: pending: claim default/training holds it" in lines


def test_a_state_of_layouts_that_cannot_be_read_is_a_warning(tmp_path, caplog):
    settings = DevicesSettings.model_validate({"sim": "a100-40x1", "state_dir": tmp_path})
    (tmp_path / "mig.json").write_text("[]")

    assert devices(settings, node_opener(settings, copy=True), "table").endswith("profile: default")

    (warning,) = (line for line in caplog.messages if line.startswith("what layouts made counts"))
    assert str(tmp_path / "mig.json") in warning


def parent(answer):
    """The UUID of the one GPU that has partitions."""
    (uuid,) = {
        GpuUuid(device["attributes"]["parentUUID"]["string"])
        for item in json.loads(answer.out)["items"]
        for device in item["spec"].get("devices", ())
        if "parentUUID" in device["attributes"]
    }
    return uuid


@pytest.mark.parametrize("is_removed", [True, False])
def test_what_the_plugin_created_on_a_simulated_gpu_is_seen_by_others(
    show, node, tmp_path, is_removed
):
    file = node({"product": "H100-80-SXM", "bus_id": "0000:04:00.0"})
    key = PartitionKey(19, 6, 1, 1)
    with open_simulated(file, tmp_path) as plugin:
        uuid = plugin.refresh().gpus[0].uuid
        plugin.mig.set_mode(uuid, True)
        created = plugin.mig.create(uuid, key)
        if is_removed:
            plugin.mig.remove(uuid, key)
    before = sorted(path for path in (tmp_path / "sim").rglob("*"))

    text = show("--state-dir", tmp_path, sim=file).out

    assert (created.uuid in text) is not is_removed
    assert sorted(path for path in (tmp_path / "sim").rglob("*")) == before


def test_boards_whose_library_has_no_mig_say_why_they_cannot_be_partitioned(show, node, tmp_path):
    board = h100("1b") | {"fails": {"nvmlDeviceGetMigMode": "FUNCTION_NOT_FOUND"}}

    answer = show("--profile", "mig", "--state-dir", tmp_path, sim=node(board))

    assert (
        "has no effect on gpu-0, which cannot be partitioned: the NVML library of this driver "
        "lacks functions for MIG; install a newer driver\n"
    ) in answer.out
    assert "\ngpu-0 " in answer.out, "whole, it is offered all the same"


def test_a_revision_that_the_plugin_has_in_force_is_named(show, tmp_path):
    LastProfileFile(tmp_path / "profile.json").keep(Profile("mine", revision="mine-1"))

    lines = show("--state-dir", tmp_path).out.splitlines()
    assert lines[-1] == "the plugin has NodeProfile mine, revision mine-1, in force"
    LastProfileFile(tmp_path / "profile.json").keep(Profile("mine"))
    assert "in force" not in show("--state-dir", tmp_path).out


# Without DRA.

REPLICAS = {"replicas": 4, "rename": True}


def test_without_dra_the_resources_of_the_device_plugin_api_are_shown(show):
    lines = show("--without", "dra", sim="h100x8", entries=[REPLICAS]).out.splitlines()

    assert [re.split(" {3,}", line) for line in lines[:2]] == [
        ["RESOURCE", "DEVICES", "HEALTHY", "SHAPE", "MEMORY OF EACH", "OF"],
        [
            *("nvidia.com/gpu.shared", "32", "32", "4 replicas (gpu-shared)", "19.9 GiB"),
            "gpu-0, gpu-1, gpu-2, gpu-3, gpu-4 and 3 more",
        ],
    ]
    assert lines[2] == "profile: mine"


def test_gpus_of_one_resource_that_are_not_alike_have_lines_of_their_own(show):
    entries = [{"select": {"index": [0]}, "replicas": 4}, {"fractions": "Never"}]

    lines = show("--without", "dra", sim="h100x8", entries=entries).out.splitlines()

    assert [re.split(" {3,}", line)[:4] for line in lines[1:3]] == [
        ["nvidia.com/gpu", "7", "7", "exclusive"],
        ["nvidia.com/gpu", "4", "4", "4 replicas"],
    ]


def test_less_than_a_gib_of_memory_is_shown_in_mib(show):
    lines = show("--without", "dra", sim="h100x8", entries=[{"replicas": 100}]).out.splitlines()

    assert re.split(" {3,}", lines[1])[3:5] == ["100 replicas", "815 MiB"]


def test_a_sick_gpu_is_not_healthy_there(type_in, tmp_path):
    state = HealthState((Fault(GPU_0, Problem.XID, "79"),))
    HealthFile(tmp_path / "health.json", boot_id(Path("/"))).write(state)
    words = ("devices", "--sim", "h100x8", "--state-dir", tmp_path, "--without", "dra")

    answer = type_in(*words)
    document = json.loads(type_in(*words, "-o", "json").out)

    assert re.split(" {3,}", answer.out.splitlines()[1])[:3] == ["nvidia.com/gpu", "8", "7"]
    (resource,) = document["resources"]
    assert resource["name"] == "nvidia.com/gpu"
    assert [each for each in resource["devices"] if each["health"] == "Unhealthy"] == [
        {"ID": GPU_0, "health": "Unhealthy", "topology": {"nodes": [{"ID": 0}]}}
    ]


def test_what_is_not_listed_is_told_and_a_node_with_nothing_says_so(show):
    lines = show("--without", "dra", "--extended-resource-name", "", sim="t4x1").out.splitlines()

    assert lines == [
        "this node has no GPU to offer",
        "not listed: gpu-0: nobody can ask for it, because --extended-resource-name is empty",
        "profile: default",
    ]


def test_where_nothing_is_known_of_memory_and_numa_nothing_is_said():
    unknown = Offer((Device(gpu(0, memory_bytes=None, topology=Topology())),))
    listed = NodeResources(unknown, DevicesSettings.model_validate({}))

    (table,) = listed.tables()

    assert re.split(" {3,}", table.splitlines()[1])[4] == "?"
    (resource,) = listed.document()["resources"]
    assert resource["devices"] == [{"ID": gpu(0).uuid, "health": "Healthy"}]
