"""The simulated nvidia-smi keeps intervals as a driver does, and refuses what the real one does."""

import doctest
import os
import subprocess
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from dra_driver.sim.host import directory
from dra_driver.sim.host.directory import SimulatedHost
from dra_driver.sim.live_node import LiveNode
from tests.fakes.shells import SHELLS
from tests.fakes.simulated import Node, h100, two_gpus

P4 = {"product": "P4", "bus_id": "0000:88:00.0"}
NOBODY = 65534


@pytest.fixture
def node(tmp_path):
    node = Node(tmp_path, two_gpus())
    assert node.host
    return node


def policy(root: Path, *arguments: str, shell=(), user: int | None = None):
    return subprocess.run(
        [*shell, str(root / "usr/bin/nvidia-smi"), "compute-policy", *arguments],
        capture_output=True,
        text=True,
        env={},  # it needs no other program
        timeout=30,
        user=user,
    )


def values(root: Path) -> list[str]:
    """What the list says of each GPU."""
    rows = [line.strip("| \n").split() for line in policy(root, "-l").stdout.splitlines()]
    return [row[-1] for row in rows if "Timeslice" in row]


def test_at_first_every_interval_is_the_default(node):
    assert policy(node.root, "-l").stdout.splitlines()[4:6] == [
        "|   0     Timeslice        Default    |",
        "|   1     Timeslice        Default    |",
    ]


@pytest.mark.parametrize("shell", SHELLS)
def test_an_interval_is_set_on_one_gpu_by_its_uuid_in_every_shell(node, shell):
    second = node.live.current().gpus[1].uuid
    done = policy(node.root, "-i", second, "--set-timeslice=2", shell=shell)
    assert (done.returncode, done.stderr) == (0, "")
    assert values(node.root) == ["Default", "Medium"]
    done = policy(node.root, "--list", f"--id={second}", shell=shell)
    assert [line for line in done.stdout.splitlines() if "Timeslice" in line] == [
        "|   1     Timeslice        Medium     |"
    ]


@pytest.mark.parametrize(
    ("number", "name"), list(enumerate(["Default", "Short", "Medium", "Long"]))
)
def test_without_a_gpu_the_interval_is_set_on_all(node, number, name):
    assert policy(node.root, "--set-timeslice", "1").returncode == 0
    assert policy(node.root, "--set-timeslice", str(number)).returncode == 0
    assert values(node.root) == [name, name]


def test_several_gpus_can_be_named(node):
    assert policy(node.root, "-i", "0,00000000:43:00.0", "--set-timeslice=3").returncode == 0
    assert values(node.root) == ["Long", "Long"]


def test_intervals_outlive_the_plugin(node):
    policy(node.root, "-i", "0", "--set-timeslice=1")
    SimulatedHost(LiveNode(node.file), node.root)
    assert values(node.root) == ["Short", "Default"]


@pytest.mark.parametrize(
    ("away", "back"),
    [
        ({"driver": "not-loaded"}, {"driver": "ready"}),
        ({"driver_version": "590.48.01"}, {"driver_version": "580.95.05"}),
    ],
    ids=["unloaded and loaded", "another version for a while"],
)
def test_intervals_are_forgotten_when_the_driver_is_loaded_anew(node, away, back):
    policy(node.root, "--set-timeslice=1")
    for change in (away, back):
        node.change(**change)
        node.live.current()
    assert values(node.root) == ["Default", "Default"]


def test_a_gpu_that_comes_back_has_forgotten_its_interval_and_the_others_have_not(node):
    policy(node.root, "--set-timeslice=1")
    for present in (False, True):
        node.change(gpu=0, present=present)
        node.live.current()
    assert values(node.root) == ["Default", "Short"]


@pytest.mark.parametrize("value", ["4", "-1", "10", "Short", ""])
def test_a_value_outside_the_four_is_refused(node, value):
    done = policy(node.root, f"--set-timeslice={value}")
    assert (done.returncode, f'Invalid timeslice value "{value}"' in done.stdout) == (2, True)
    assert values(node.root) == ["Default", "Default"]


@pytest.mark.parametrize("arguments", [["-l"], ["--set-timeslice=1"]])
def test_an_unknown_gpu_is_refused(node, arguments):
    done = policy(node.root, "-i", "GPU-00000000-0000-0000-0000-000000000000", *arguments)
    assert (done.returncode, done.stdout) == (6, "No devices were found\n")


def test_a_gpu_before_volta_refuses_as_the_real_one_does(tmp_path):
    node = Node(tmp_path, {"gpus": [h100("1b"), P4]})
    assert node.host
    done = policy(node.root, "-i", "1", "--set-timeslice=0")
    assert done.returncode == 3
    assert done.stdout == (
        "Failed to set timeslice policy with value Default for GPU 1 : Not Supported\n"
        "Failed to set timeslice for requested devices : Not Supported\n"
    )
    assert values(node.root) == ["Default", "N/A"]


def test_of_several_gpus_those_that_can_are_set_and_the_whole_fails(tmp_path):
    node = Node(tmp_path, {"gpus": [h100("1b"), P4]})
    assert node.host
    assert policy(node.root, "--set-timeslice=1").returncode == 3
    assert values(node.root) == ["Short", "N/A"]


def test_a_node_file_can_have_a_board_refuse(node):
    node.change(gpu=0, fails={"compute-policy": "GPU_IS_LOST"})
    node.live.current()
    done = policy(node.root, "-i", "0", "--set-timeslice=1")
    assert (done.returncode, "for GPU 0 : GPU is lost" in done.stdout) == (15, True)
    assert policy(node.root, "-i", "0", "-l").returncode == 15
    assert policy(node.root, "-i", "1", "--set-timeslice=1").returncode == 0


def test_who_is_not_root_may_look_and_set_nothing():
    # Not below pytest's own directory, which nobody else may enter.
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        node = Node(Path(directory), two_gpus())
        assert node.host
        settings = next((node.root / "run/nvidia-simulated").iterdir())
        settings.chmod(0o555)
        somebody = NOBODY if os.geteuid() == 0 else None
        done = policy(node.root, "-i", "0", "--set-timeslice=1", user=somebody)
        assert done.returncode == 4
        assert "value Short for GPU 0 : Insufficient Permissions" in done.stdout
        assert policy(node.root, "-l", user=somebody).returncode == 0


@pytest.mark.parametrize("arguments", [["--reset"], ["-i"], ["--set-timeslice"]])
def test_what_compute_policy_does_not_know_is_refused(node, arguments):
    assert policy(node.root, *arguments).returncode == 2


@pytest.mark.parametrize("arguments", [[], ["-h"], ["-i", "0"]])
def test_without_an_order_it_says_how_it_is_used(node, arguments):
    done = policy(node.root, *arguments)
    assert (done.returncode, done.stdout.startswith("Usage: ")) == (0, True)


def test_without_a_driver_it_fails(node):
    for path in (node.root / "dev").glob("nvidia*"):
        path.unlink()
    assert policy(node.root, "-l").returncode == 9


@pytest.mark.parametrize("shell", SHELLS)
def test_the_xml_has_what_monitoring_reads(node, shell):
    node.change(
        gpu=0, processes=[{"pid": 41, "memory_bytes": 1 << 30}, {"pid": 7, "memory_bytes": 5 << 20}]
    )
    node.live.current()
    smi = str(node.root / "usr/bin/nvidia-smi")
    done = subprocess.run(
        [*shell, smi, "-q", "-x"], capture_output=True, text=True, env={}, timeout=30
    )
    document = ET.fromstring(done.stdout)
    first, second = document.findall("gpu")
    assert (document.findtext("attached_gpus"), second.get("id")) == ("2", "00000000:43:00.0")
    assert second.findtext("uuid") == node.live.current().gpus[1].uuid
    expected = {
        "product_name": "NVIDIA H100 80GB HBM3",
        "uuid": node.live.current().gpus[0].uuid,
        "pci/pci_bus_id": "00000000:1B:00.0",
        "fb_memory_usage/total": "81559 MiB",
        "fb_memory_usage/used": "1029 MiB",
        "fb_memory_usage/free": "80530 MiB",
        "compute_mode": "Default",
    }
    assert {path: first.findtext(path) for path in expected} == expected
    processes = [
        (process.findtext("pid"), process.findtext("type"), process.findtext("used_memory"))
        for process in first.findall("processes/process_info")
    ]
    assert processes == [("41", "C", "1024 MiB"), ("7", "C", "5 MiB")]
    assert second.find("processes") is not None
    assert second.findall("processes/process_info") == []


def test_a_query_can_ask_for_the_compute_capability(node):
    smi = [str(node.root / "usr/bin/nvidia-smi"), "--query-gpu=compute_cap,compute_mode"]
    done = subprocess.run(
        [*smi, "--format=csv"], capture_output=True, text=True, env={}, timeout=30
    )
    assert done.stdout.splitlines() == ["compute_cap, compute_mode", *["9.0, Default"] * 2]


def test_the_documentation_is_true():
    assert doctest.testmod(directory).failed == 0
