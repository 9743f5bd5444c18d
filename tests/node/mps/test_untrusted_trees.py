"""A directory in which tenants write is emptied, whatever they put there, and nothing else is."""

import contextlib
import os
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dra_driver.base.errors import NodeError
from dra_driver.node.mps import mounts, untrusted_trees
from tests.fakes.daemon_host import needs_mounts

DEEP = 3000
SHORT = "/dev/shm" if os.access("/dev/shm", os.W_OK) else "/tmp"  # a tmpfs is quicker


@pytest.fixture
def place():
    with tempfile.TemporaryDirectory(dir=SHORT) as made:
        yield Path(made)
        subprocess.run(["rm", "-rf", f"{made}/top"], check=True)


def deep(directory: Path, depth: int = DEEP) -> None:
    """A tree that no path leads to the end of."""
    at = os.open(directory, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d" * 100, dir_fd=at)
        inside = os.open("d" * 100, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = inside
    os.close(os.open("end", os.O_CREAT, dir_fd=at))
    os.close(at)


def test_what_is_made_can_be_passed_whatever_the_umask_and_is_made_once(place):
    before = os.umask(0o077)
    try:
        for _ in range(2):
            untrusted_trees.make_directory(f"{place}/a/b/top")
    finally:
        os.umask(before)

    assert stat.S_IMODE(os.stat(place / "a/b/top").st_mode) == 0o755


@pytest.mark.parametrize(
    "act",
    [
        untrusted_trees.make_directory,
        untrusted_trees.empty_directory,
        untrusted_trees.remove_directory,
    ],
)
def test_a_link_in_place_of_a_directory_is_not_followed(place, act):
    (place / "target").mkdir(mode=0o700)
    (place / "target/precious").touch()
    (place / "top").symlink_to(place / "target")

    with pytest.raises(NotADirectoryError):
        act(str(place / "top"))

    assert (place / "target/precious").exists()
    assert stat.S_IMODE((place / "target").stat().st_mode) == 0o700


def test_everything_goes_whatever_it_is_and_links_lead_nowhere(place):
    target, top = place / "target", place / "top"
    (target / "inner").mkdir(parents=True)
    (target / "precious").touch()
    (top / "control").mkdir(parents=True)
    (top / "control/to").symlink_to(target)
    (top / "to").symlink_to(target)
    (top / "hard").hardlink_to(target / "precious")
    os.mkfifo(top / "fifo")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(f"{top}/socket")
    (top / "unreadable").mkdir(mode=0)
    (top / os.fsdecode(b"\xff\n")).touch()

    untrusted_trees.empty_directory(str(top))

    assert os.listdir(top) == []
    assert sorted(os.listdir(target)) == ["inner", "precious"]


def test_what_is_kept_is_the_same_directory_empty_and_can_be_passed(place):
    top = place / "top"
    kept = top / "gpu/c_1"
    kept.mkdir(parents=True)
    for made in (top, top / "gpu", top / "gpu/c_2", kept):
        (made / "control").mkdir(parents=True)
    inodes = [os.stat(path).st_ino for path in (top, top / "gpu", kept)]
    kept.chmod(0o1700)

    untrusted_trees.empty_directory(str(top), {("gpu",), ("gpu", "c_1"), ("gpu", "never")})

    paths = sorted(str(path.relative_to(top)) for path in top.rglob("*"))
    assert paths == ["gpu", "gpu/c_1"]
    assert [os.stat(path).st_ino for path in (top, top / "gpu", kept)] == inodes
    assert stat.S_IMODE(kept.stat().st_mode) == 0o1755


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_is_no_directory_is_not_kept(place, kind):
    top = place / "top"
    (place / "target").mkdir(mode=0o700)
    top.mkdir()
    if kind == "file":
        (top / "gpu").touch()
    else:
        (top / "gpu").symlink_to(place / "target")

    untrusted_trees.empty_directory(str(top), {("gpu",), ("gpu", "c_1")})

    assert os.listdir(top) == []
    assert stat.S_IMODE((place / "target").stat().st_mode) == 0o700


@pytest.mark.parametrize("act", [untrusted_trees.empty_directory, untrusted_trees.remove_directory])
def test_a_tree_as_deep_as_no_path_and_no_stack_goes(place, act):
    top = place / "top"
    top.mkdir()
    deep(top)

    act(str(top))

    assert not top.exists() or os.listdir(top) == []


def test_few_files_are_open_at_once_however_deep_it_is(place):
    (place / "top").mkdir()
    deep(place / "top", 200)
    program = (
        "import resource, sys; from dra_driver.node.mps import untrusted_trees\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))\n"
        "untrusted_trees.remove_directory(sys.argv[1])\n"
    )
    subprocess.run([sys.executable, "-c", program, place / "top"], check=True, timeout=20)

    assert not (place / "top").exists()


def test_what_is_not_there_is_removed_already(place):
    untrusted_trees.remove_directory(f"{place}/never")


names = st.sampled_from(["a", "b", "gpu", "c_1"])
paths = st.lists(names, min_size=1, max_size=4).map("/".join)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(paths), st.lists(paths), st.sets(st.lists(names, min_size=1, max_size=2).map(tuple))
)
def test_of_any_tree_exactly_the_directories_that_are_kept_stay(directories, files, keep):
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        for path in directories:
            os.makedirs(f"{made}/{path}", exist_ok=True)
        for path in files:
            with contextlib.suppress(OSError):
                Path(made, path).touch()
        prefixes = {path[:end] for path in keep for end in range(1, len(path) + 1)}
        expected = {path for path in prefixes if Path(made, *path).is_dir()}

        untrusted_trees.empty_directory(made, keep)

        assert {path.relative_to(made).parts for path in Path(made).rglob("*")} == expected


RACED = """
import os, sys
from dra_driver.node.mps import untrusted_trees
top, target = sys.argv[1:]

def swap(event, arguments):  # the moment before a directory is opened that was just seen
    if event == "open" and arguments[0] == "x" and not os.path.islink(top + "/x"):
        os.rename(top + "/x", top + "/y")
        os.symlink(target, top + "/x")

sys.addaudithook(swap)
untrusted_trees.empty_directory(top)
"""


def test_somebody_who_puts_a_link_in_place_of_a_directory_meanwhile_leads_nowhere(place):
    target, top = place / "target", place / "top"
    (target / "sub").mkdir(parents=True)
    (target / "sub/precious").touch()
    (target / "precious").touch()
    (top / "x/sub").mkdir(parents=True)

    subprocess.run([sys.executable, "-c", RACED, top, target], check=True, timeout=20)

    assert os.listdir(top) == []
    assert sorted(os.listdir(target)) == ["precious", "sub"]
    assert (target / "sub/precious").exists()


@needs_mounts
def test_what_is_mounted_in_there_is_left_alone(place):
    (place / "top/m").mkdir(parents=True)
    mounts.tmpfs(f"{place}/top/m", "size=1048576")
    (place / "top/m/precious").touch()
    try:
        with pytest.raises(NodeError, match=r"something is mounted in .*/top at m: unmount it"):
            untrusted_trees.empty_directory(f"{place}/top")
        assert (place / "top/m/precious").exists()
    finally:
        mounts.unmount(f"{place}/top/m")
