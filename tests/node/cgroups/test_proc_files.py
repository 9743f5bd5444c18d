"""Of other processes little is read, however much they have to say."""

import doctest
import os
import subprocess
from pathlib import Path
from uuid import uuid4

import pytest

from dra_driver.node.cgroups import procfs
from dra_driver.node.cgroups.processes import ContainerProcesses
from dra_driver.node.cgroups.procfs import device_number_of, nul_separated, read_proc_file
from dra_driver.node.mps.processes import DaemonProcesses

KIB = 1024
TOKEN = uuid4().hex  # of this run alone: the processes of the whole machine are looked at


def test_the_examples_are_true():
    assert doctest.testmod(procfs).failed == 0


@pytest.mark.parametrize(
    ("file", "most"), [("cmdline", 4 * KIB), ("environ", 64 * KIB), ("stat", 64 * KIB)]
)
def test_no_more_is_read_of_a_file_than_it_needs(tmp_path, file, most):
    (tmp_path / "7").mkdir()
    with open(tmp_path / "7" / file, "wb") as large:
        large.truncate(1 << 40)  # whoever reads it all has no memory left

    assert len(read_proc_file(tmp_path, 7, file)) == most


def test_an_entry_that_was_truncated_is_none():
    file = b"A=1\0" * (16 * KIB - 1) + b"B=2\0"
    assert nul_separated(file, "environ")[-1] == b"B=2"
    truncated = (b"A=1\0" * (16 * KIB - 1) + b"TOKEN=longer\0")[: 64 * KIB]
    assert set(nul_separated(truncated, "environ")) == {b"A=1"}
    assert nul_separated(b"A=1\0B=2", "environ") == [b"A=1", b"B=2"]


@pytest.fixture
def started():
    """Processes that stay, with an environment."""
    children = []

    def start(**environment):
        child = subprocess.Popen(
            ["/bin/sh", "-c", "echo; read never"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert child.stdout
        child.stdout.readline()
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.communicate()


def test_a_variable_that_is_not_within_the_first_64_kib_is_not_set(started):
    token = {"DRA_DRIVER_MPS_TOKEN": TOKEN}
    before = started(**token, LARGE="x" * 100 * KIB)
    started(LARGE="x" * 100 * KIB, **token)

    assert [process.pid for process in DaemonProcesses().of(TOKEN)] == [before.pid]


def test_a_device_is_known_by_its_number_and_a_file_has_none(tmp_path):
    descriptor = os.open("/dev/null", os.O_RDONLY)
    (tmp_path / "link").symlink_to("/dev/null")
    (tmp_path / "null").touch()
    try:
        for path in ("/dev/null", str(tmp_path / "link"), f"/proc/self/fd/{descriptor}"):
            assert device_number_of(path) == (1, 3)
    finally:
        os.close(descriptor)
    for path in (str(tmp_path / "null"), str(tmp_path), str(tmp_path / "none")):
        assert device_number_of(path) is None


def test_what_the_kernel_writes_of_a_process_is_read_whole():
    own = Path("/proc/self/cgroup").read_bytes()
    assert read_proc_file("/proc", "self", "cgroup") == own
    assert ContainerProcesses().now() > 0
