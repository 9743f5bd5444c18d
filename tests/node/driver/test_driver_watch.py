"""What is watched of the driver is looked at when it may have changed, and not otherwise."""

import mmap
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dra_driver.node.driver.root import DriverRoot
from dra_driver.node.driver.rootfs import FileSignatures, file_signature
from dra_driver.node.driver.watch import LOOK_SECONDS, DriverFilesWatch, watching
from tests.fakes.daemon_host import needs_mounts
from tests.fakes.driver import VERSION, install
from tests.fakes.elf import elf_library


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> Iterator[DriverFilesWatch]:
    files_watch = DriverFilesWatch(clock)
    yield files_watch
    files_watch.close()


def signatures_of(*paths: str) -> FileSignatures:
    return {path: file_signature(path) for path in paths}


def outdate(signatures: FileSignatures, path: str) -> None:
    """From here on whoever looks at *path* finds it changed."""
    signatures[path] = (0, 0, 0, 0, 0)


@pytest.fixture
def tool(tmp_path: Path) -> str:
    """A program among others that are none of the driver's."""
    (tmp_path / "nvidia-smi").touch()
    return str(tmp_path / "nvidia-smi")


def test_nothing_is_looked_at_while_nothing_happens(watch: DriverFilesWatch, tool: str) -> None:
    signatures = signatures_of(tool)
    assert watch.unchanged(signatures)
    outdate(signatures, tool)
    assert watch.unchanged(signatures)


def write_unnoticed(path: Path) -> None:
    """Of what is written through a mapping inotify(7) says nothing."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        content[0] = 1
        content.flush()


@pytest.mark.parametrize(
    ("name", "is_seen"), [("libcuda.so.580.95.05", True), ("libnvidia-ml.so.580.95.05", False)]
)
def test_only_libcuda_is_looked_at_each_time(
    watch: DriverFilesWatch, tmp_path: Path, name: str, is_seen: bool
) -> None:
    library = tmp_path / name
    library.write_bytes(b"0")
    os.utime(library, (1, 1))
    signatures = signatures_of(str(library))
    assert watch.unchanged(signatures)
    write_unnoticed(library)
    assert file_signature(str(library)) != signatures[str(library)]
    assert watch.unchanged(signatures) is not is_seen


def test_everything_is_looked_at_from_time_to_time(
    watch: DriverFilesWatch, clock: Clock, tool: str
) -> None:
    signatures = signatures_of(tool)
    assert watch.unchanged(signatures)
    outdate(signatures, tool)
    clock.now += LOOK_SECONDS - 1
    assert watch.unchanged(signatures)
    clock.now += 1
    assert not watch.unchanged(signatures)


def test_other_files_of_a_directory_are_no_reason_to_look(
    watch: DriverFilesWatch, tool: str
) -> None:
    signatures = signatures_of(tool)
    assert watch.unchanged(signatures)
    outdate(signatures, tool)
    Path(tool).with_name("htop").touch()
    assert watch.unchanged(signatures)


def test_of_a_listed_directory_every_file_is_a_reason_to_look(
    watch: DriverFilesWatch, tmp_path: Path
) -> None:
    signatures = signatures_of(f"{tmp_path}/")
    assert watch.unchanged(signatures)
    (tmp_path / "libcuda.so.1").touch()
    assert not watch.unchanged(signatures)


def test_what_was_not_there_is_seen_when_it_comes(watch: DriverFilesWatch, tmp_path: Path) -> None:
    signatures = signatures_of(f"{tmp_path}/socket")
    assert watch.unchanged(signatures)
    (tmp_path / "socket").touch()
    assert not watch.unchanged(signatures)


def test_a_directory_that_goes_is_seen(watch: DriverFilesWatch, tmp_path: Path) -> None:
    directory = tmp_path / "lib"
    directory.mkdir()
    (directory / "libcuda.so.1").touch()
    signatures = signatures_of(f"{directory}/libcuda.so.1")
    assert watch.unchanged(signatures)
    directory.rename(tmp_path / "old")
    assert not watch.unchanged(signatures)
    assert not watch.unchanged(signatures)


def test_a_change_is_seen_by_every_thread_that_asks_after_it(tmp_path: Path) -> None:
    install(tmp_path)
    driver = DriverRoot("/", tmp_path)
    library = tmp_path / f"usr/lib/x86_64-linux-gnu/libnvidia-cfg.so.{VERSION}"
    with watching(driver), ThreadPoolExecutor(4) as threads:
        for number in range(50):
            soname = f"libnvidia-cfg.so.{number}"
            library.write_bytes(elf_library(soname))
            answers = [threads.submit(driver.files) for _ in range(4)]
            for answer in answers:
                sonames = {found.soname for found in answer.result().libraries}
                assert soname in sonames


def test_where_no_more_files_can_be_open_it_is_looked_at_each_time(
    watch: DriverFilesWatch, clock: Clock, tool: str, caplog: pytest.LogCaptureFixture
) -> None:
    signatures = signatures_of(tool)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        assert watch.unchanged(signatures)
        assert watch.unchanged(signatures)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert caplog.messages == ["the driver's files cannot be watched: looking each time"]
    real = signatures[tool]
    outdate(signatures, tool)
    assert not watch.unchanged(signatures)
    signatures[tool] = real
    clock.now += LOOK_SECONDS  # now it is tried again
    assert watch.unchanged(signatures)
    outdate(signatures, tool)
    assert watch.unchanged(signatures)


def test_once_closed_it_holds_no_file_and_looks_each_time(tool: str) -> None:
    before = os.listdir("/proc/self/fd")
    watch = DriverFilesWatch()
    signatures = signatures_of(tool)
    assert watch.unchanged(signatures)
    assert len(os.listdir("/proc/self/fd")) == len(before) + 2
    watch.close()
    watch.close()
    assert watch.unchanged(signatures)
    assert os.listdir("/proc/self/fd") == before
    outdate(signatures, tool)
    assert not watch.unchanged(signatures)


_A_DRIVER_CONTAINER_GOES_AND_COMES = """
import subprocess, sys
from pathlib import Path
from dra_driver.base.errors import NodeError
from dra_driver.node.driver.root import DriverRoot
from dra_driver.node.driver.watch import watching

driver = DriverRoot("/", Path(sys.argv[1]))
with watching(driver):
    before = driver.files()
    assert driver.files() is before
    subprocess.run(["mount", "-t", "tmpfs", "none", sys.argv[1] + "/usr"], check=True)
    try:
        driver.files()
    except NodeError:
        print("gone")
    subprocess.run(["umount", sys.argv[1] + "/usr"], check=True)
    print("back" if driver.files() == before else "another")
"""


@needs_mounts
def test_a_mount_that_comes_and_goes_is_seen(tmp_path: Path) -> None:
    install(tmp_path)
    command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-c"]
    command += [_A_DRIVER_CONTAINER_GOES_AND_COMES, str(tmp_path)]
    root = Path(__file__).parents[3]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=root)
    assert (answer.stdout, answer.stderr) == ("gone\nback\n", "")
