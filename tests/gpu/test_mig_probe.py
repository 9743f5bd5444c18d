"""What is asked of real boards with a MIG mode is asked of simulated ones: it finds what it should,
and what is wrong with a board that differs is named."""

import ctypes
import subprocess
from dataclasses import replace

import pynvml
import pytest
import yaml

from dra_driver.sim.live_node import LiveNode
from dra_driver.sim.mig.geometry import board_geometry
from dra_driver.sim.mig.host_files import open_mig_states
from dra_driver.sim.node_spec import board_specs
from dra_driver.sim.nvml import SimulatedNvml
from tests.fakes.simulated import open_simulated
from tests.gpu import test_mig
from tests.gpu.mig_probe import NOT_THERE, SUCCESS, answers, differences, has_mode, machine, unread

PRODUCTS = [product for product, board in board_specs().items() if board.mig]
ONE = [{"profile": "1g.10gb", "start": 0}]
HALF = [*ONE, {"profile": "2g.20gb", "start": 2, "compute": []}]
IN_TWO = [*ONE, {"profile": "2g.20gb", "start": 2, "compute": [1, 1]}]


class Simulated:
    """A machine with one board, and its nvidia-smi."""

    def __init__(self, directory, product, **fields):
        self.directory = directory / "sim"
        self.file = directory / "node.yaml"
        gpu = {"product": product, "bus_id": "0000:1b:00.0", **fields}
        self.file.write_text(yaml.safe_dump({"gpus": [gpu]}))

    def __enter__(self):
        self._open = open_simulated(self.file, self.directory.parent)
        node = self._open.__enter__()
        mig = open_mig_states(self.directory, lambda: True)
        self._machine = machine(node, SimulatedNvml(LiveNode(self.file), mig=mig))
        return self._machine.__enter__()

    def __exit__(self, *raised):
        self._machine.__exit__(*raised)
        self._open.__exit__(*raised)

    def ask(self, *arguments):
        program = str(self.directory / "usr/bin/nvidia-smi")
        return subprocess.run(
            [program, *arguments], capture_output=True, text=True, env={}, timeout=30, check=True
        ).stdout


@pytest.fixture
def simulated(tmp_path):
    return lambda product="H200-141-SXM", **fields: Simulated(tmp_path, product, **fields)


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("is_on", [False, True])
def test_of_a_simulated_board_all_of_it_holds(simulated, product, is_on):
    with simulated(product, mig=is_on) as probed:
        test_mig.test_the_profiles_of_every_gpu_with_a_mig_mode_are_known(probed)
        test_mig.test_every_profile_lies_within_its_board(probed)
        lines: list[str] = []
        test_mig.test_the_simulation_partitions_the_board_as_its_driver_does(probed, lines.extend)
        assert lines == []
        test_mig.test_calls_that_list_instances_are_made_as_the_library_takes_them(
            probed, lines.extend
        )
        assert "nvmlDeviceGetGpuInstances" in lines[0]
        test_mig.test_a_scan_of_a_gpu_with_a_mig_mode_is_quick(probed)
        assert len(probed.gpus) == 1


@pytest.mark.parametrize("instances", [[], ONE, HALF, IN_TWO])
def test_instances_with_no_compute_instance_or_several_are_listed_as_they_are(simulated, instances):
    board = simulated("H100-80-SXM", mig=True, instances=instances)
    with board as probed:
        test_mig.test_instances_are_those_that_nvidia_smi_lists(probed, board.ask)


def test_an_instance_that_nvidia_smi_lists_and_we_do_not_is_seen(simulated):
    with simulated("H100-80-SXM", mig=True, instances=ONE) as probed, pytest.raises(AssertionError):
        test_mig.test_instances_are_those_that_nvidia_smi_lists(
            probed, lambda *arguments: "MIG-1 MIG-2"
        )


def test_a_board_without_a_mig_mode_is_none_of_them(simulated):
    with simulated("T4") as probed:
        assert probed.handles == {}
        assert unread(probed) == {}


@pytest.mark.parametrize("error", ["UNKNOWN", "NO_PERMISSION", "FUNCTION_NOT_FOUND"])
def test_a_board_of_which_nobody_can_tell_is_a_failure_and_not_left_out(simulated, error):
    board = simulated(fails={"nvmlDeviceGetMigMode": error})
    with pytest.raises(pynvml.NVMLError), board:
        pass


@pytest.mark.parametrize(
    ("error", "why"),
    [
        ("UNKNOWN", "NVML refuses to list its profiles: Unknown Error"),
        ("NOT_SUPPORTED", "NVML says of every kind of partition that the board has none"),
    ],
)
def test_a_board_of_which_we_read_nothing_says_why(simulated, error, why):
    names = ("nvmlDeviceGetGpuInstanceProfileInfo", "nvmlDeviceGetGpuInstanceProfileInfoV")
    with simulated(fails=dict.fromkeys(names, error)) as probed:
        assert list(unread(probed).values()) == [why]
        with pytest.raises(AssertionError):
            test_mig.test_the_profiles_of_every_gpu_with_a_mig_mode_are_known(probed)


def test_arguments_that_the_library_does_not_take_are_no_refusal(simulated):
    class Strict(SimulatedNvml):
        def nvmlDeviceGetGpuInstances(self, *arguments):  # noqa: N802 - NVML's name
            raise ctypes.ArgumentError("argument 3: expected a pointer")

    board = simulated()
    with board as probed:
        functions = Strict(LiveNode(board.file))
        functions.nvmlInit()
        handle = functions.nvmlDeviceGetHandleByIndex(0)
        with pytest.raises(ctypes.ArgumentError):
            answers(functions, handle, [19])
        assert probed.gpus


def test_what_the_calls_answer_follows_the_mode(simulated):
    for is_on, expected in ((False, NOT_THERE), (True, (SUCCESS,))):
        with simulated(mig=is_on) as probed:
            (handle,) = probed.handles.values()
            codes = answers(probed.functions, handle, [19])
            assert codes["nvmlDeviceGetGpuInstances 19"] in expected
            assert codes["nvmlComputeInstanceGetInfo_v2"] in NOT_THERE
            assert len(codes) == 5


def test_a_mode_is_one_or_none(simulated):
    for product, expected in (("H200-141-SXM", True), ("T4", False)):
        board = simulated(product)
        functions = SimulatedNvml(LiveNode(board.file))
        functions.nvmlInit()
        assert has_mode(functions, functions.nvmlDeviceGetHandleByIndex(0)) == expected


def table(product):
    geometry = board_geometry(product)
    assert geometry is not None
    return geometry.profiles


A30 = table("A30")


def changed(profiles, name, **fields):
    return [replace(profile, **fields) if profile.name == name else profile for profile in profiles]


@pytest.mark.parametrize(
    ("product", "profiles", "where", "line"),
    [
        ("A30", changed(A30, "1g.6gb", id=99), "wrong", "1g.6gb, id: 99, in the simulation 14"),
        ("A30", changed(A30, "2g.12gb", most=1), "wrong", "2g.12gb, most: 1, in the simulation 2"),
        ("A30", changed(A30, "2g.12gb", slices=1), "wrong", "2g.12gb, slices: 1, in the"),
        ("A30", changed(A30, "4g.24gb", engines=A30[0].engines), "wrong", "4g.24gb, copy: 1, in"),
        ("A30", changed(A30, "1g.6gb", memory_bytes=1 << 30), "rest", "1g.6gb, memory_mib: 1024"),
        ("A30", A30[1:], "wrong", "1g.6gb: the board has none"),
        (
            "A30",
            [profile for profile in A30 if profile.is_plain],
            "rest",
            "1g.6gb+me: the board has none",
        ),
        ("A30", [*A30, replace(A30[0], name="9g.1gb")], "rest", "9g.1gb: the simulation has none"),
    ],
)
def test_what_differs_is_named_and_what_was_only_assumed_is_no_failure(
    product, profiles, where, line
):
    compared = differences(board_specs()[product].name, profiles)

    assert any(difference.startswith(line) for difference in getattr(compared, where)), compared


def test_ids_that_were_assumed_are_told_and_no_more():
    product = "GH200-96"
    profiles = table(product)

    compared = differences(
        board_specs()[product].name, [replace(profile, id=profile.id + 50) for profile in profiles]
    )

    assert compared is not None
    assert compared.wrong == []
    assert len(compared.rest) == len(profiles)


def test_what_was_guessed_is_told_like_what_was_assumed():
    guessed = [
        replace(profile, id=61) if profile.name == "2g.12gb+me" else profile for profile in A30
    ]
    compared = differences(board_specs()["A30"].name, guessed)
    assert compared is not None
    assert compared.wrong == []
    assert [difference.partition(",")[0] for difference in compared.rest] == ["2g.12gb+me"]


def test_a_board_that_the_simulation_does_not_have_is_not_compared():
    assert differences("NVIDIA of tomorrow", A30) is None
