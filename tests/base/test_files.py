"""Files are written whole, and calls to the disk that do not come back are known."""

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dra_driver.base.errors import NodeError
from dra_driver.base.files import (
    NotAFile,
    disk_call,
    disk_errors,
    hanging_disk_calls,
    read_file,
    removed_directory,
    write_atomically,
)


def bind_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.mark.parametrize(
    "make",
    [Path.mkdir, os.mkfifo, bind_socket, lambda path: path.symlink_to("/dev/zero")],
    ids=["a directory", "a FIFO", "a socket", "a device"],
)
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "x")

    with pytest.raises(NotAFile, match=r"it is no file; remove what stands in its place: '.*/x'"):
        read_file(tmp_path / "x")


def test_a_file_that_cannot_be_opened_says_why(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "x")

    (tmp_path / "x").write_bytes(b"content")
    assert read_file(tmp_path / "x") == b"content"


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "record"
    write_atomically(path, b"old")
    (tmp_path / ".record.tmp").symlink_to("/dev/full")

    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")

    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["record"]


@pytest.mark.parametrize("durable", [False, True])
def test_a_write_replaces_the_file_and_its_mode(tmp_path, durable):
    path = tmp_path / "record"
    path.write_text("old")

    write_atomically(path, b"new", mode=0o600, durable=durable)

    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", 0o600)


def test_a_temporary_file_may_be_elsewhere_on_the_file_system(tmp_path):
    (tmp_path / "aside").mkdir()
    (tmp_path / "aside" / "fresh").symlink_to("/dev/full")

    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "record", b"x", temporary=tmp_path / "aside" / "fresh")

    assert os.listdir(tmp_path / "aside") == []


def under_way(seconds: float = -1) -> str:
    """What is under way in this process, where other tests may have left something."""
    return hanging_disk_calls(seconds) or ""


def test_a_call_that_hangs_is_told_with_what_it_was_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "file")
    begun = threading.Event()

    def read() -> None:
        with disk_errors(f"read in {tmp_path}"):
            begun.set()
            (tmp_path / "file").read_bytes()

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    assert begun.wait(30)
    assert under_way().startswith("the disk does not answer: ")
    assert f"read in {tmp_path} (" in under_way()
    assert str(tmp_path) not in under_way(600)

    (tmp_path / "file").write_bytes(b"it goes on")
    thread.join(30)
    assert str(tmp_path) not in under_way()


def test_a_call_that_fails_is_over(tmp_path: Path) -> None:
    with pytest.raises(NodeError), disk_errors(f"read {tmp_path}"), disk_call(f"list {tmp_path}"):
        raise OSError("broken")
    assert str(tmp_path) not in under_way()


def test_directories_that_are_there_or_not_made_yet_are_fine(tmp_path):
    assert removed_directory([tmp_path, tmp_path / "later"]) is None


def test_a_directory_that_was_removed_and_made_anew_is_not_the_one_that_is_held(tmp_path):
    """What a container has mounted leads to the removed one, as an open directory does."""
    directory = tmp_path / "cdi"
    directory.mkdir()
    descriptor = os.open(directory, os.O_PATH)
    try:
        mounted = Path(f"/proc/self/fd/{descriptor}")
        assert removed_directory([mounted]) is None

        directory.rmdir()
        directory.mkdir()

        assert "was removed on the host" in str(removed_directory([tmp_path, mounted]))
        assert removed_directory([directory]) is None
    finally:
        os.close(descriptor)


def test_a_directory_that_cannot_be_looked_at_is_said(tmp_path):
    (tmp_path / "file").touch()

    assert "Not a directory" in str(removed_directory([tmp_path / "file/inside"]))


@pytest.mark.parametrize("size", [0, 1, 1 << 16, 3 << 20])
def test_a_file_is_read_whole(tmp_path, size):
    content = os.urandom(size)
    (tmp_path / "file").write_bytes(content)
    assert read_file(tmp_path / "file") == content


def test_a_file_of_the_kernel_which_has_no_size_is_read_whole():
    path = Path("/proc/self/maps")
    assert len(read_file(path).splitlines()) > 100
