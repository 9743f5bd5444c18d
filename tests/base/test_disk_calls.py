"""Calls to the disk that do not come back."""

import os
import threading
from pathlib import Path

import pytest

from dra_driver.base.errors import NodeError
from dra_driver.base.files import disk_call, disk_errors, hanging_disk_calls


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
