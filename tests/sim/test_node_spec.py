"""Node files are read strictly, and every problem is told with its place."""

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dra_driver.base.errors import SettingsError
from dra_driver.sim.live_node import LiveNode
from dra_driver.sim.node_spec import board_specs, bundled_nodes, node_file, read_node, serial
from tests.fakes.simulated import Document, h100, two_gpus

KNOWN = (
    "a100-40x1, a100x16, a100x8, a30x1, b200x8, h100x2-615, h100x2-mig, h100x8, h200x8, l40sx4, "
    "mixed, none, rtxpro6000x1, t4x1"
)


@pytest.fixture
def write(tmp_path):
    def write(document: Document | str):
        path = tmp_path / "odd.yaml"
        text = document if isinstance(document, str) else yaml.safe_dump(document)
        path.write_text(text)
        return path

    return write


def with_instance(profile, start, **more):
    """A GPU with this unmanaged instance."""
    return h100("1b", instances=[{"profile": profile, "start": start, **more}])


def problems(path) -> str:
    with pytest.raises(SettingsError) as caught:
        read_node(path)
    return str(caught.value).removeprefix(f"node file {path}: ")


def test_the_bundled_nodes_are_these():
    assert ", ".join(bundled_nodes()) == KNOWN


@pytest.mark.parametrize("name", bundled_nodes())
def test_every_bundled_node_can_be_read_and_is_called_by_its_name(name):
    assert read_node(node_file(name)).name == name


def test_an_unknown_node_is_refused_with_the_known_ones_and_the_nearest(tmp_path):
    with pytest.raises(SettingsError) as caught:
        node_file("h10x8")
    assert str(caught.value) == (
        f"no simulated node 'h10x8' (did you mean h100x8?): name a file, or one of {KNOWN}"
    )


def test_a_path_that_is_no_file_is_refused(tmp_path):
    with pytest.raises(SettingsError, match=r"^node file .*/gone\.yaml does not exist$"):
        node_file(str(tmp_path / "gone.yaml"))
    with pytest.raises(SettingsError, match=rf"^node file {tmp_path} is no file$"):
        node_file(str(tmp_path))


def test_a_node_can_be_given_as_a_file(write):
    path = write(two_gpus())
    assert node_file(str(path)) == path
    assert len(read_node(path).gpus) == 2


def test_an_empty_file_is_a_node_without_gpus(write):
    assert read_node(write("")).gpus == ()


def test_every_problem_is_told_at_once_with_its_place(write):
    gpus = [
        h100("1b", colour="green", numa_node=-2),
        {"product": "H1000", "bus_id": "1b:00.0"},
        {"product": "T4", "bus_id": "0000:43:00.0", "mig": True, "fails": "BROKEN"},
    ]
    message = problems(write({"cuda_version": 13.0, "driver": "off", "gpus": gpus}))
    for part in (
        "cuda_version: 13.0 should be a string; write it in quotes",
        "driver: 'off' should be 'ready', 'not-loaded' or 'no-library'",
        "gpus[0].colour: unknown field; remove it",
        "gpus[0].numa_node: -2 should be greater than or equal to -1",
        "gpus[1].product: no product 'H1000'; there are A100-40-SXM,",
        "gpus[1].bus_id: '1b:00.0' is not of this form: \"0000:1b:00.0\"",
        "gpus[2].fails: BROKEN: no NVML error; one is GPU_IS_LOST",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (
            {"gpus": [{"product": "T4", "bus_id": "0000:01:00.0", "mig": True}]},
            "T4 has no MIG mode",
        ),
        ({"gpus": [with_instance("2g.20gb", 1)]}, "instances: H100-80-SXM has no 2g.20gb at 1"),
        ({"gpus": [with_instance("2g.10gb", 0)]}, "instances: H100-80-SXM has no 2g.10gb at 0"),
        ({"gpus": [with_instance("2g.20gb", 0, compute=[2, 1])]}, "[2, 1] do not fit into 2g.20gb"),
        ({"gpus": [with_instance("4g.40gb", 0, compute=[3])]}, "[3] do not fit into 4g.40gb"),
        ({"gpus": [h100("1b"), h100("1b")]}, "bus_id: 0000:1b:00.0 is there more than once"),
        ({"gpus": [h100("1b")], "nvlink": [[0, 1]]}, "nvlink: [0, 1] are not two of the 1 GPUs"),
        ({"gpus": [h100("1b")], "nvlink": [[0, 0]]}, "nvlink: [0, 0] are not two of the 1 GPUs"),
        ("gpus:\n  - {product: T4, bus_id: 0000:10:20.0}\n", "write it in quotes"),
        (
            {"nvlink": [[0]]},
            "nvlink: write nvswitch, none, or a list of pairs of GPUs: [[0, 1], [2, 3]]",
        ),
        ({"gpus": [{"product": "T4"}]}, "gpus[0].bus_id: missing"),
        ("- a list", "expected fields"),
        ("{", "cannot be read"),
        ("name: ../x", "name: '../x' is not of this form: letters,"),
        ("gpus: " + "[" * 5000, "nested too deeply"),
        ("gpus: &a [*a]", "an alias stands for what it is in"),
        ("driver_version: " + "9" * 5000, "cannot be read"),
        (f"driver_version: '{'9' * 5000}.1'", "driver_version: '99999"),
        ("gpus: 0x" + "f" * 5000, "cannot be read"),
        ("gpus: .nan", "gpus: nan should be a valid array"),
        ("{[1]: 2}", "cannot be read"),
        ("2026-01-01: 2", "cannot be read"),
        ("a: 1\n---\nb: 2", "has 2 documents"),
        ({"gpus": [h100("1b", minor=2**40)]}, "minor: 1099511627776 should be less than"),
        ({"gpus": [h100("1b", numa_node=2**40)]}, "numa_node: 1099511627776 should be less than"),
        (
            {"gpus": [h100("1b", processes=[{"pid": 2**40, "memory_bytes": 2**70}])]},
            "processes[0].pid: 1099511627776 should be less than",
        ),
    ],
)
def test_a_node_that_cannot_be_is_refused(write, document, message):
    assert message in problems(write(document))


def test_a_file_that_is_not_there_is_named(tmp_path):
    assert "No such file" in problems(tmp_path / "gone.yaml")


def test_uuids_and_serial_numbers_are_real_in_form_and_stay(write):
    first = read_node(write(two_gpus())).gpus
    assert [gpu.uuid for gpu in first] == [gpu.uuid for gpu in read_node(write(two_gpus())).gpus]
    assert len({gpu.uuid for gpu in first} | {serial(gpu) for gpu in first}) == 4
    assert all(len(serial(gpu)) == 13 and serial(gpu).isdecimal() for gpu in first)


def test_a_gpu_keeps_its_uuid_when_another_leaves_the_file(write):
    document = two_gpus()
    second = read_node(write(document)).gpus[1]
    del document["gpus"][0]
    assert read_node(write(document)).gpus[0].uuid == second.uuid


hexadecimal = st.integers(0, 255).map(lambda number: f"{number:02x}")
gpus = st.lists(
    st.builds(
        lambda product, bus, more: {"product": product, "bus_id": f"0000:{bus}:00.0", **more},
        st.sampled_from(sorted(board_specs())),
        hexadecimal,
        st.fixed_dictionaries(
            {},
            optional={
                "numa_node": st.integers(-1, 7),
                "present": st.booleans(),
                "hangs": st.booleans(),
                "driver": st.sampled_from(["nvidia", "vfio-pci", "nouveau", "none"]),
                "fails": st.sampled_from(["GPU_IS_LOST", {"nvmlDeviceGetName": "UNKNOWN"}]),
            },
        ),
    ),
    max_size=8,
    unique_by=lambda gpu: gpu["bus_id"],
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(gpus)
def test_every_sound_node_file_is_read_as_it_was_written(write, gpus):
    node = read_node(write({"gpus": gpus}))
    assert [gpu.bus_id for gpu in node.gpus] == [gpu["bus_id"] for gpu in gpus]
    assert [gpu.minor for gpu in node.gpus] == list(range(len(gpus)))
    assert len({gpu.uuid for gpu in node.gpus}) == len(gpus)
    for gpu in node.gpus:
        assert gpu.uuid
        prefix, *groups = gpu.uuid.split("-")
        assert (prefix, [len(group) for group in groups]) == ("GPU", [8, 4, 4, 4, 12])


def test_a_change_of_the_file_is_seen(write):
    live = LiveNode(write(two_gpus()))
    assert len(live.current().gpus) == 2
    write({"gpus": [h100("1b")]})
    assert len(live.current().gpus) == 1


def test_watchers_are_told_of_a_change_once_and_before_anybody_sees_it(write):
    live, notified = LiveNode(write(two_gpus())), []
    live.on_change(lambda node: notified.append(len(node.gpus)))
    live.current()
    write({"gpus": [h100("1b")]})
    live.current()
    live.current()
    assert notified == [1]


@pytest.mark.parametrize("broken", ["gpus: 7", "{", None])
def test_a_change_that_is_no_good_leaves_the_node_as_it_was(write, broken, caplog):
    path = write(two_gpus())
    live = LiveNode(path)
    if broken is None:
        path.unlink()
    else:
        write(broken)
    assert len(live.current().gpus) == 2
    assert len(live.current().gpus) == 2
    assert [record.message[:35] for record in caplog.records] == [
        "simulated node stays as it was: nod"
    ]
    write({"gpus": [h100("1b")]})
    assert len(live.current().gpus) == 1


def test_a_node_file_that_is_no_good_to_begin_with_is_refused(write):
    with pytest.raises(SettingsError):
        LiveNode(write("gpus: 7"))
