"""Device files: found where the driver has them, made where they are missing."""

import doctest
import os
from itertools import pairwise
from pathlib import Path

import pytest

from dra_driver.base.errors import NodeError, TimedOut
from dra_driver.model.driver_files import DeviceFile
from dra_driver.node.driver import device_nodes
from dra_driver.node.driver.commands import Command, run_command
from dra_driver.node.driver.device_nodes import DeviceNodes, device_number, modprobe_arguments
from dra_driver.node.driver.root import DriverRoot
from tests.fakes.driver import install, make_system, program

CONTAINER = "run/nvidia/driver"
UVM_MAJOR = 511


class Kernel:
    """Device files in memory, and an nvidia-modprobe that makes them as the real one does.

    The real one, given ``-u``, takes ``-c`` for a minor number of nvidia-uvm.
    """

    def __init__(self, host: Path, gpus: int = 2, modeset: bool = True) -> None:
        self.host = str(host)
        self.gpus = gpus
        self.modeset = modeset
        self.files: dict[str, tuple[int, int]] = {}
        self.runs: list[Command] = []

    def add(self, root: str, name: str, major: int, minor: int) -> None:
        self.files[f"{root.rstrip('/')}/dev/{name}"] = (major, minor)

    def have_all(self, root: str) -> None:
        for args in (("-c", "0", "-c", "1", "-c", "255"), ("-u", "-c", "0"), ("-m",)):
            self.run(Command("nvidia-modprobe", args, root), 1)
        self.runs.clear()

    def number(self, path: str) -> tuple[int, int] | None:
        return self.files.get(path)

    def run(self, command: Command, timeout_seconds: float) -> str:
        assert timeout_seconds > 0 and command.program.endswith("nvidia-modprobe")
        self.runs.append(command)
        minors = [int(n) for flag, n in pairwise(command.args) if flag == "-c"]
        if "-m" in command.args:
            if not self.modeset:
                raise NodeError("nvidia-modprobe -m failed with code 1: it said nothing")
            self.add(command.root, "nvidia-modeset", 195, 254)
        elif "-u" in command.args:
            self.add(command.root, "nvidia-uvm", UVM_MAJOR, minors[0])
            self.add(command.root, "nvidia-uvm-tools", UVM_MAJOR, minors[0] + 1)
        else:
            for minor in minors:
                if minor == 255:
                    self.add(command.root, "nvidiactl", 195, 255)
                elif minor < self.gpus:
                    self.add(command.root, f"nvidia{minor}", 195, minor)
        return ""


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """A host without a driver of its own."""
    return tmp_path


@pytest.fixture
def host(empty: Path) -> Path:
    """A host with a driver."""
    install(empty)
    return empty


@pytest.fixture
def kernel(empty: Path) -> Kernel:
    return Kernel(empty)


def nodes(host: Path, kernel: Kernel) -> DeviceNodes:
    return DeviceNodes(DriverRoot(None, host), kernel.run, kernel.number)


def test_device_files_that_are_there_are_described_and_nothing_runs(
    host: Path, kernel: Kernel
) -> None:
    kernel.have_all(str(host))
    files = nodes(host, kernel).files([1])
    assert files.gpus == {1: DeviceFile("/dev/nvidia1", "/dev/nvidia1", 195, 1)}
    assert files.common == (
        DeviceFile("/dev/nvidia-modeset", "/dev/nvidia-modeset", 195, 254),
        DeviceFile("/dev/nvidia-uvm", "/dev/nvidia-uvm", UVM_MAJOR, 0),
        DeviceFile("/dev/nvidia-uvm-tools", "/dev/nvidia-uvm-tools", UVM_MAJOR, 1),
        DeviceFile("/dev/nvidiactl", "/dev/nvidiactl", 195, 255),
    )
    assert kernel.runs == []


def test_the_order_and_number_of_the_asked_minors_do_not_matter(host: Path, kernel: Kernel) -> None:
    kernel.have_all(str(host))
    files = nodes(host, kernel)
    assert list(files.files([1, 0, 1]).gpus) == [0, 1]
    assert files.files([1, 0, 1]) == files.files([0, 1])


def test_missing_files_are_made_on_the_host(host: Path, kernel: Kernel) -> None:
    files = nodes(host, kernel).files([0, 1])
    assert sorted(files.gpus) == [0, 1]
    assert [command.argv for command in kernel.runs] == [
        ("chroot", str(host), "/usr/bin/nvidia-modprobe", *args)
        for args in (("-c", "0", "-c", "1", "-c", "255"), ("-u", "-c", "0"), ("-m",))
    ]


def test_only_what_is_missing_is_made(host: Path, kernel: Kernel) -> None:
    kernel.have_all(str(host))
    del kernel.files[f"{host}/dev/nvidia1"]
    nodes(host, kernel).files([0, 1])
    assert [command.args for command in kernel.runs] == [("-c", "1")]


def test_a_server_without_modeset_is_served_without_it(host: Path) -> None:
    kernel = Kernel(host, modeset=False)
    files = nodes(host, kernel).files([0])
    assert "/dev/nvidia-modeset" not in {file.host_path for file in files.common}
    kernel.runs.clear()
    nodes(host, kernel).files([0])
    assert kernel.runs == []  # it is not tried again for every claim


def test_a_driver_container_with_its_own_dev_is_taken_at_its_word(
    empty: Path, kernel: Kernel
) -> None:
    root = install(empty / CONTAINER)
    kernel.have_all(str(empty))
    kernel.have_all(str(root))
    files = nodes(empty, kernel).files([0])
    assert files.gpus == {0: DeviceFile(f"/{CONTAINER}/dev/nvidia0", "/dev/nvidia0", 195, 0)}


def test_a_driver_container_makes_its_missing_files_itself(empty: Path, kernel: Kernel) -> None:
    root = install(empty / CONTAINER)
    kernel.have_all(str(root))
    del kernel.files[f"{root}/dev/nvidia0"]
    nodes(empty, kernel).files([0])
    assert kernel.runs == [
        Command("/usr/bin/nvidia-modprobe", ("-c", "0"), str(root), "/usr/lib/x86_64-linux-gnu")
    ]


def test_a_driver_container_that_shares_the_dev_of_the_host_uses_that(
    empty: Path, kernel: Kernel
) -> None:
    install(empty / CONTAINER)
    kernel.have_all(str(empty))
    assert nodes(empty, kernel).files([0]).gpus[0].host_path == "/dev/nvidia0"


def test_where_no_file_exists_yet_a_driver_container_gets_them(empty: Path, kernel: Kernel) -> None:
    make_system(install(empty / CONTAINER))
    assert nodes(empty, kernel).files([0]).gpus[0].host_path == f"/{CONTAINER}/dev/nvidia0"


def test_a_bare_prefix_uses_the_hosts_dev(empty: Path, kernel: Kernel) -> None:
    prefix = "usr/local/nvidia"
    install(empty / prefix, directory="lib64", tools="bin")
    assert nodes(empty, kernel).files([0]).gpus[0].host_path == "/dev/nvidia0"
    assert kernel.runs[0] == Command(
        f"/{prefix}/bin/nvidia-modprobe", ("-c", "0", "-c", "255"), str(empty), f"/{prefix}/lib64"
    )


def test_a_gpu_that_is_not_there_is_named(host: Path, kernel: Kernel) -> None:
    with pytest.raises(NodeError) as e:
        nodes(host, kernel).files([0, 7])
    assert str(e.value) == (
        "device files are missing and were not made: /dev/nvidia7 (nvidia-modprobe reported "
        "success); is the kernel module loaded (modprobe nvidia nvidia-uvm), and is the GPU there "
        "(nvidia-smi -L)?"
    )


def test_why_nvidia_modprobe_failed_is_said(host: Path, kernel: Kernel) -> None:
    def refuse(command: Command, timeout_seconds: float) -> str:
        raise NodeError("nvidia-modprobe failed with code 1: no module")

    with pytest.raises(NodeError, match=r"/dev/nvidia0, /dev/nvidiactl, .*code 1: no module"):
        DeviceNodes(DriverRoot(None, host), refuse, kernel.number).files([0])


def test_a_driver_without_nvidia_modprobe_serves_as_long_as_all_files_are_there(
    host: Path, kernel: Kernel
) -> None:
    (host / "usr/bin/nvidia-modprobe").unlink()
    kernel.have_all(str(host))
    assert nodes(host, kernel).files([0]).gpus
    with pytest.raises(NodeError, match=r"/dev/nvidia7 \(the driver in / has no nvidia-modprobe"):
        nodes(host, kernel).files([7])


def test_nvidia_modprobe_does_not_take_for_ever(host: Path, kernel: Kernel) -> None:
    program(host / "usr/bin/nvidia-modprobe", "sleep 60")

    def on_the_host(command: Command, timeout_seconds: float) -> str:
        return run_command(Command(f"{host}{command.program}", command.args), timeout_seconds / 50)

    with pytest.raises(TimedOut, match="nvidia-modprobe -c 0 -c 255 was still running after"):
        DeviceNodes(DriverRoot(None, host), on_the_host, kernel.number).files([0])


@pytest.mark.parametrize(
    ("missing", "runs"),
    [
        pytest.param([], (), id="nothing"),
        pytest.param(["nvidia10", "nvidia2"], (("-c", "2", "-c", "10"),), id="GPUs by number"),
        pytest.param(["nvidiactl"], (("-c", "255"),), id="the control device"),
        pytest.param(["nvidia-uvm"], (("-u", "-c", "0"),), id="unified memory on its own"),
    ],
)
def test_nvidia_modprobe_is_asked_for(
    missing: list[str], runs: tuple[tuple[str, ...], ...]
) -> None:
    assert modprobe_arguments(missing) == runs


def test_a_character_device_is_told_by_its_numbers() -> None:
    assert device_number("/dev/null") == (1, 3)


def test_other_files_are_no_devices(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/null")
    for name in ("file", "fifo", "link", "nothing", "file/below"):
        assert device_number(str(tmp_path / name)) is None


def test_the_examples_in_the_docs_hold() -> None:
    assert doctest.testmod(device_nodes).failed == 0
