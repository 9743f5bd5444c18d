"""A directory stands for the host of a simulated node, and follows it."""

import ctypes
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dra_driver.base.errors import SettingsError
from dra_driver.node.driver.commands import Command, run_command
from dra_driver.node.driver.config import NodeConfig
from dra_driver.node.driver.pci import PciBus
from dra_driver.sim.host.directory import SimulatedHost, program_path
from dra_driver.sim.host.libraries import library_directory, shared_object
from dra_driver.sim.live_node import LiveNode
from dra_driver.sim.node_spec import node_file
from dra_driver.sim.parts import simulated_driver
from tests.fakes.shells import SHELLS
from tests.fakes.simulated import Node, h100, two_gpus

COMMON = ["nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools"]


@pytest.fixture
def node(tmp_path):
    node = Node(tmp_path, two_gpus())
    assert node.host
    return node


def device_nodes(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "dev").iterdir() if not path.is_file())


def everything(root: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.lstat().st_ino, path.lstat().st_mtime_ns)
        for path in root.rglob("*")
        if path.is_symlink() or not path.is_dir()
    }


def run(root: Path, tool: str, *arguments: str, shell: tuple[str, ...] | list[str] = ()):
    # Without a PATH for nvidia-smi: it needs no other program.
    environment = {"PATH": os.environ["PATH"]} if tool == "nvidia-modprobe" else {}
    return subprocess.run(
        [*shell, str(root / "usr/bin" / tool), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=30,
    )


def test_a_daemon_that_is_started_is_the_one_that_the_node_file_says_now(tmp_path):
    file = tmp_path / "node.yaml"
    text = node_file("h100x8").read_text()
    file.write_text(text)
    driver = simulated_driver(str(file), NodeConfig(), tmp_path / "host")
    file.write_text(f"{text}\nmps: dies\n")

    command = driver.placed(
        Command("/usr/bin/nvidia-cuda-mps-control", ("-d",), root=str(tmp_path / "host"))
    )

    assert "behaviour='dies'" in Path(command.program).read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may chroot")
def test_the_hosts_shell_runs_a_tool_for_a_container_that_has_none(node, tmp_path):
    (tmp_path / "host").symlink_to("/")
    command = Command("/usr/bin/nvidia-smi", ("-L",), root=str(node.root))
    placed = program_path(command, tmp_path / "host")
    assert placed.root == str(tmp_path / "host")
    assert run_command(placed, 10) == run_command(program_path(command), 10) != ""


def test_device_nodes_are_character_devices(node):
    names = ["nvidia0", "nvidia1", "nvidiactl", *COMMON]
    assert device_nodes(node.root) == sorted(names)
    assert all(stat.S_ISCHR((node.root / "dev" / name).stat().st_mode) for name in names)


def test_where_mknod_is_refused_device_nodes_are_still_character_devices(tmp_path):
    def refused(path: str, mode: int, device: int) -> None:
        raise PermissionError(1, "Operation not permitted", path)

    (tmp_path / "node.yaml").write_text("gpus: [{product: T4, bus_id: '0000:00:1e.0'}]")
    SimulatedHost(LiveNode(tmp_path / "node.yaml"), tmp_path / "root", refused)
    place = tmp_path / "root/dev/nvidia0"
    assert os.readlink(place) == "/dev/null"
    assert stat.S_ISCHR(place.stat().st_mode)


def test_device_numbers_are_those_of_the_driver(tmp_path):
    made = {}

    def note(path: str, mode: int, device: int) -> None:
        made[Path(path).name] = (os.major(device), os.minor(device))
        Path(path).touch()

    (tmp_path / "node.yaml").write_text("gpus: [{product: T4, bus_id: '0000:00:1e.0', minor: 3}]")
    SimulatedHost(LiveNode(tmp_path / "node.yaml"), tmp_path / "root", note)
    uvm = made["nvidia-uvm"][0]
    assert made == {
        "nvidia3": (195, 3),
        "nvidiactl": (195, 255),
        "nvidia-modeset": (195, 254),
        "nvidia-uvm": (uvm, 0),
        "nvidia-uvm-tools": (uvm, 1),
    }
    assert f"{uvm} nvidia-uvm\n" in (tmp_path / "root/proc/devices").read_text()


def test_doing_it_again_changes_nothing(node):
    before = everything(node.root)
    node.host.materialise(node.live.current())
    SimulatedHost(node.live, node.root)
    assert everything(node.root) == before


def test_no_link_leads_out_of_the_directory(node):
    for path in node.root.rglob("*"):
        if path.is_symlink():
            assert path.resolve(strict=True).is_relative_to(node.root.resolve()), path


def test_the_driver_tells_its_version_and_gpus(node):
    proc = node.root / "proc/driver/nvidia"
    assert "Kernel Module for x86_64  580.95.05  Release" in (proc / "version").read_text()
    text = (proc / "gpus/0000:43:00.0/information").read_text()
    assert f"GPU UUID: \t {node.live.current().gpus[1].uuid}\n" in text
    assert "Device Minor: \t 1\n" in text


def test_a_gpu_that_goes_takes_its_files_along_and_brings_them_back(node):
    before = everything(node.root).keys()
    node.change(gpu=0, present=False)
    node.live.current()
    gone = {path.removeprefix(str(node.root)) for path in before - everything(node.root).keys()}
    assert {"/dev/nvidia0", "/sys/bus/pci/devices/0000:1b:00.0"} <= gone
    assert all("0000:1b:00.0" in path or path == "/dev/nvidia0" for path in gone)
    node.change(gpu=0, present=True)
    node.live.current()
    assert everything(node.root).keys() == before


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"driver": "not-loaded"}, []),
        ({"driver": "no-library"}, []),
        ({"gpus": []}, ["nvidiactl", *COMMON]),
    ],
)
def test_device_nodes_follow_the_driver(node, change, names):
    node.change(**change)
    node.live.current()
    assert device_nodes(node.root) == sorted(names)


def test_another_driver_version_replaces_the_files_of_the_old_one(node):
    node.change(driver_version="590.48.01")
    node.live.current()
    libraries = node.root / library_directory()
    assert os.readlink(libraries / "libcuda.so.1") == "libcuda.so.590.48.01"
    assert [path.name for path in node.root.rglob("*580.95.05*")] == []


def test_a_gpu_of_a_virtual_machine_has_its_driver_and_no_device_node(node):
    node.change(gpu=0, driver="vfio-pci")
    node.live.current()
    gpu = PciBus(node.root / "sys").gpus()["0000:1b:00.0"]
    assert gpu.driver == "vfio-pci"
    assert "nvidia0" not in device_nodes(node.root)


def test_other_files_in_the_directory_stay(node):
    ours = [node.root / "etc/passwd", node.root / "usr/lib/mine.so", node.root / "dev/null"]
    for path in ours:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    node.change(driver="no-library")
    node.live.current()
    assert [path.read_text() for path in ours] == ["mine"] * 3


def test_a_directory_that_holds_something_else_is_refused_and_left_alone(tmp_path, node):
    (tmp_path / "home").mkdir()
    (tmp_path / "home/dev").write_text("precious")
    with pytest.raises(SettingsError, match=r"is not empty and no simulated host"):
        SimulatedHost(node.live, tmp_path / "home")
    assert (tmp_path / "home/dev").read_text() == "precious"


def test_a_link_that_leads_out_of_the_directory_is_not_followed(tmp_path, node):
    outside = tmp_path / "outside"
    outside.mkdir()
    shutil.rmtree(node.root / "usr/bin")
    (node.root / "usr/bin").symlink_to(outside)
    with pytest.raises(SettingsError, match="leads out of"):
        node.host.materialise(node.live.current())
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("marker", ["{", ""])
def test_a_marker_that_cannot_be_read_is_an_error(node, marker):
    (node.root / ".simulated-host.json").write_text(marker)
    with pytest.raises(SettingsError, match="no simulated host in"):
        node.host.materialise(node.live.current())


def test_every_library_can_be_loaded_and_is_called_what_its_link_says(node):
    libraries = sorted((node.root / library_directory()).glob("*.so*"))
    assert len(libraries) > 40
    program = "import ctypes, sys; [ctypes.CDLL(path) for path in sys.argv[1:]]"
    subprocess.run([sys.executable, "-c", program, *map(str, libraries)], check=True, timeout=30)


def test_a_library_can_be_preloaded(node):
    library = str(node.root / library_directory() / "libcuda.so.1")
    done = subprocess.run(
        ["/bin/true"], env={"LD_PRELOAD": library}, capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_library_is_found_by_its_soname_once_it_is_loaded(tmp_path):
    path = tmp_path / "file.so"
    path.write_bytes(shared_object("libsimulated-soname.so.7"))
    with pytest.raises(OSError, match="libsimulated-soname"):
        ctypes.CDLL("libsimulated-soname.so.7")
    ctypes.CDLL(str(path))
    ctypes.CDLL("libsimulated-soname.so.7")


@pytest.mark.parametrize("shell", SHELLS)
def test_nvidia_smi_lists_gpus_in_every_shell(node, shell):
    first, second = node.live.current().gpus
    assert run(node.root, "nvidia-smi", "-L", shell=shell).stdout == (
        f"GPU 0: NVIDIA H100 80GB HBM3 (UUID: {first.uuid})\n"
        f"GPU 1: NVIDIA H100 80GB HBM3 (UUID: {second.uuid})\n"
    )


def test_nvidia_smi_shows_the_gpus_whose_device_nodes_are_there(node):
    (node.root / "dev/nvidia0").unlink()
    second = node.live.current().gpus[1]
    expected = f"GPU 0: NVIDIA H100 80GB HBM3 (UUID: {second.uuid})\n"
    assert run(node.root, "nvidia-smi", "-L").stdout == expected


@pytest.mark.parametrize("shell", SHELLS)
def test_nvidia_smi_answers_queries(node, shell):
    fields = "--query-gpu=index,name,uuid,pci.bus_id,memory.total,driver_version"
    first, second = node.live.current().gpus
    rows = [
        f"0, NVIDIA H100 80GB HBM3, {first.uuid}, 00000000:1B:00.0, 81559 MiB, 580.95.05",
        f"1, NVIDIA H100 80GB HBM3, {second.uuid}, 00000000:43:00.0, 81559 MiB, 580.95.05",
    ]
    titles = "index, name, uuid, pci.bus_id, memory.total [MiB], driver_version"
    done = run(node.root, "nvidia-smi", fields, "--format=csv", shell=shell)
    assert done.stdout.splitlines() == [titles, *rows]
    done = run(node.root, "nvidia-smi", fields, "--format=csv,noheader", shell=shell)
    assert done.stdout.splitlines() == rows


@pytest.mark.parametrize("meant", ["1", "00000000:43:00.0", "uuid"])
def test_nvidia_smi_can_be_asked_about_one_gpu(node, meant):
    meant = node.live.current().gpus[1].uuid if meant == "uuid" else meant
    query = ["--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    assert run(node.root, "nvidia-smi", *query, "-i", meant).stdout == "81559\n"


def test_nvidia_smi_prints_a_table_whose_lines_are_all_as_wide(node):
    node.change(gpu=0, mig=True)
    node.live.current()
    lines = run(node.root, "nvidia-smi").stdout.splitlines()
    assert {len(line) for line in lines} == {len(lines[0])}
    assert "Driver Version: 580.95.05" in lines[1]
    assert sum("NVIDIA H100 80GB HBM3" in line for line in lines) == 2
    assert sum("Enabled" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--query-gpu=colour", "--format=csv"], 'Field "colour" is not a valid field to query.'),
        (["--query-gpu=name"], '"--format=" switch is missing'),
        (["--gpu-recover"], "Invalid combination of input arguments"),
        (["-q"], "use -q together with -x"),
    ],
)
def test_nvidia_smi_refuses_what_it_does_not_know(node, arguments, message):
    done = run(node.root, "nvidia-smi", *arguments)
    assert done.returncode == 2
    assert message in done.stdout


@pytest.mark.parametrize(
    ("removed", "code", "message"),
    [
        ("nvidia[0-9]", 6, "No devices were found"),
        ("nvidia*", 9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA"),
    ],
)
def test_nvidia_smi_without_a_gpu_fails_as_the_real_one_does(node, removed, code, message):
    for path in (node.root / "dev").glob(removed):
        path.unlink()
    done = run(node.root, "nvidia-smi", "-L")
    assert (done.returncode, message in done.stdout) == (code, True)


@pytest.mark.parametrize("shell", SHELLS)
def test_nvidia_modprobe_makes_missing_device_nodes(node, shell):
    before = device_nodes(node.root)
    for path in (node.root / "dev").iterdir():
        path.unlink()
    for arguments in (["-c", "0", "-c1", "-c=255"], ["-u", "-c", "0"], ["-m"]):
        assert run(node.root, "nvidia-modprobe", *arguments, shell=shell).returncode == 0
    assert device_nodes(node.root) == before
    assert stat.S_ISCHR((node.root / "dev/nvidia0").stat().st_mode)


def test_nvidia_modprobe_makes_no_node_of_unified_memory_unless_told_which(node):
    for path in (node.root / "dev").iterdir():
        path.unlink()
    assert run(node.root, "nvidia-modprobe", "-u").returncode == 0
    assert device_nodes(node.root) == []


@pytest.mark.parametrize("arguments", [["-c", "x"], ["--all"]])
def test_nvidia_modprobe_refuses_what_it_does_not_know(node, arguments):
    done = run(node.root, "nvidia-modprobe", *arguments)
    assert (done.returncode, arguments[-1] in done.stderr) == (1, True)


def test_nodes_that_nvidia_modprobe_made_stay_until_their_gpu_goes(tmp_path):
    node = Node(tmp_path, {"gpus": [h100("1b", device_nodes=False), h100("43")]})
    assert node.host
    assert "nvidia0" not in device_nodes(node.root)
    run(node.root, "nvidia-modprobe", "-c", "0")
    node.change(gpu=1, mig=True)
    node.live.current()
    assert "nvidia0" in device_nodes(node.root)
    node.change(gpu=0, present=False)
    node.live.current()
    assert "nvidia0" not in device_nodes(node.root)


def test_nvidia_modprobe_can_fail_or_be_missing(node):
    node.change(nvidia_modprobe="fails")
    node.live.current()
    (node.root / "dev/nvidia0").unlink()
    done = run(node.root, "nvidia-modprobe", "-c", "0")
    assert (done.returncode, "unable to create /dev/nvidia" in done.stderr) == (1, True)
    node.change(nvidia_modprobe="missing")
    node.live.current()
    assert not (node.root / "usr/bin/nvidia-modprobe").exists()


def test_other_tools_say_that_they_are_simulated(node):
    done = run(node.root, "nvidia-debugdump", "-l")
    assert done.returncode == 1
    assert done.stderr.startswith("nvidia-debugdump is simulated")


@pytest.mark.parametrize("level", ["0", "2"])
def test_a_tool_runs_python_as_the_process_that_wrote_it_does(level):
    """An image has bytecode of one level only: of another, all would be compiled at each start."""
    program = (
        "from dra_driver.sim.host.tools import driver_tools\n"
        "from dra_driver.sim.node_spec import node_file, read_node\n"
        "tools = driver_tools(read_node(node_file('h100x8')), {})\n"
        "for name in ('nvidia-smi', 'nvidia-cuda-mps-control'):\n"
        "    print(tools[f'usr/bin/{name}'])\n"
    )
    command = [sys.executable, "-c", program]
    environment = {"PATH": os.environ["PATH"], "PYTHONOPTIMIZE": level}
    written = subprocess.check_output(command, text=True, timeout=60, env=environment)
    assert written.count(f"PYTHONOPTIMIZE={level}") == 2
